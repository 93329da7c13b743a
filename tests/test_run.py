"""The run folder: places, fingerprints, whole files, stages that resume, provenance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from mtptrain import __version__, run
from mtptrain.run import StageFolder, atomic_write, fingerprint
from mtptrain.types import UserError


@dataclass(frozen=True)
class Setting:
    """A stage's settings."""

    size: float
    path: Path


@dataclass(frozen=True)
class OtherSetting:
    """Another kind of settings with the same fields."""

    size: float
    path: Path


def test_recipes_are_the_packaged_ones_or_else_the_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel's own recipes folder wins; without one, the folder beside the package is used."""
    monkeypatch.setattr(run, "__file__", str(tmp_path / "mtptrain" / "run.py"))
    assert run.recipes_dir() == tmp_path / "recipes"
    (tmp_path / "mtptrain" / "recipes").mkdir(parents=True)
    assert run.recipes_dir() == tmp_path / "mtptrain" / "recipes"


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MTPTRAIN_CACHE wins over XDG_CACHE_HOME, which wins over the platform's folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MTPTRAIN_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert run.cache_dir() == tmp_path / ".cache" / "mtptrain"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert run.cache_dir() == tmp_path / "xdg" / "mtptrain"
    monkeypatch.setenv("MTPTRAIN_CACHE", "~/own")
    assert run.cache_dir() == tmp_path / "own"


def test_a_prompts_file_is_found_here_or_among_the_recipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path is tried as given, then in the recipes folder; neither is the user's fault."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "recipes_dir", lambda: tmp_path / "recipes")
    atomic_write(tmp_path / "recipes" / "prompts" / "a.jsonl", "{}")
    assert run.data_file("prompts/a.jsonl", "data.path").parent == tmp_path / "recipes" / "prompts"
    atomic_write(tmp_path / "prompts" / "a.jsonl", "{}")
    assert run.data_file("prompts/a.jsonl", "data.path") == Path("prompts/a.jsonl")
    with pytest.raises(UserError, match=r"^data\.path=b\.jsonl: no such file"):
        run.data_file("b.jsonl", "data.path")


def test_a_fingerprint_is_the_same_in_every_process() -> None:
    """The fingerprint of the same parts never changes, whatever hash seed the process has."""
    parts = 'Path("a") / "b", {"y": 1, "x": [True, None, 0.5]}, "text"'
    code = "from pathlib import Path; from mtptrain.run import fingerprint"
    command = [sys.executable, "-c", f"{code}; print(fingerprint({parts}), end='')"]
    outputs = {
        subprocess.check_output(command, env=os.environ | {"PYTHONHASHSEED": seed}, text=True)
        for seed in ("1", "2")
    }
    assert outputs == {fingerprint(Path("a") / "b", {"x": [True, None, 0.5], "y": 1}, "text")}


def test_a_fingerprint_tells_settings_apart_and_spellings_not() -> None:
    """Other values, kinds or order differ; 1 and 1.0, tuple and list, config and mapping do not."""
    base = fingerprint(Setting(1.0, Path("a")))
    assert base == fingerprint(Setting(1, Path("a")))
    assert fingerprint((1, 2)) == fingerprint([1, 2])
    assert fingerprint({"a": 1}) == fingerprint(OmegaConf.create({"a": 1}))
    others = [
        fingerprint(Setting(1.5, Path("a"))),
        fingerprint(Setting(1.0, Path("b"))),
        fingerprint(OtherSetting(1.0, Path("a"))),
        fingerprint("a", "b"),
        fingerprint("b", "a"),
        fingerprint(["a", "b"]),
        fingerprint(1),
        fingerprint(True),
        fingerprint("1"),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_a_fingerprint_of_something_without_a_fixed_text_is_refused() -> None:
    """Objects whose text holds an address would change the fingerprint from run to run."""
    with pytest.raises(TypeError, match="no fingerprint of a object"):
        fingerprint({"key": object()})


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short before the rename, the old file is untouched; done, nothing else is left."""
    path = tmp_path / "deep" / "a.json"
    atomic_write(path, "old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="disk"):
        patch.setattr(run.os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk")))
        atomic_write(path, "new")
    assert path.read_text() == "old"
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert [item.name for item in path.parent.iterdir()] == ["a.json"]


def test_a_stage_is_complete_only_after_its_last_write(tmp_path: Path) -> None:
    """Begun is not complete; complete is so for its own fingerprint and keeps its summary."""
    stage = StageFolder(tmp_path / "prepare")
    assert not stage.is_complete("one") and not stage.path.exists()
    assert stage.begin("one") is False
    assert not stage.is_complete("one")
    stage.complete("one", tokens=7, target="tiny")
    record = StageFolder(tmp_path / "prepare").record()
    assert record is not None and record.summary == {"tokens": 7, "target": "tiny"}
    assert record.seconds >= 0
    assert stage.is_complete("one") and not stage.is_complete("two")


def test_a_stage_cut_short_resumes_its_own_work_only(tmp_path: Path) -> None:
    """The same fingerprint finds its unfinished files; another one finds an empty folder."""
    stage = StageFolder(tmp_path)
    stage.begin("one")
    atomic_write(tmp_path / "shards" / "0.bin", b"half")
    assert StageFolder(tmp_path).begin("one") is True
    assert (tmp_path / "shards" / "0.bin").exists()
    assert StageFolder(tmp_path).begin("two") is False
    assert [path.name for path in tmp_path.iterdir()] == ["started.json"]


def test_other_settings_empty_a_finished_stage_and_say_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Finished work of another fingerprint makes way, with a line in the log."""
    stage = StageFolder(tmp_path)
    stage.begin("one")
    atomic_write(tmp_path / "head.bin", b"whole")
    stage.complete("one")
    with caplog.at_level("INFO", logger="mtptrain"):
        StageFolder(tmp_path).begin("two")
    assert "the settings have changed" in caplog.text
    assert stage.record() is None and not (tmp_path / "head.bin").exists()


@pytest.mark.parametrize("last", ["stage.json", "shard.bin"])
def test_a_kill_while_emptying_leaves_an_owned_folder_that_is_not_whole(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file the kill comes after, the next run neither trusts nor refuses the folder."""
    stage = StageFolder(tmp_path)
    stage.begin("one")
    atomic_write(tmp_path / "shard.bin", b"x")
    stage.complete("one")
    unlink = Path.unlink

    def die_after(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if path.name == last:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", die_after)
        stage.begin("two")
    assert not stage.is_complete("one") and not stage.is_complete("two")
    assert stage.begin("two") is False
    assert [path.name for path in tmp_path.iterdir()] == ["started.json"]


def test_a_folder_of_someone_elses_is_never_emptied(tmp_path: Path) -> None:
    """A stage's folder that holds files of unknown origin is refused and left as it is."""
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"thesis\.txt.*run_dir="):
        StageFolder(tmp_path).begin("one")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_torn_or_foreign_stage_json_is_not_complete(tmp_path: Path) -> None:
    """A stage.json that is not whole JSON, or not an object, says nothing."""
    for text in ("", '{"fingerprint": "on', "[]"):
        (tmp_path / "stage.json").write_text(text)
        assert not StageFolder(tmp_path).is_complete("one")


def test_a_stage_cannot_complete_what_it_has_not_begun(tmp_path: Path) -> None:
    """complete() under another fingerprint than begin()'s is a fault of ours."""
    stage = StageFolder(tmp_path)
    stage.begin("one")
    with pytest.raises(AssertionError):
        stage.complete("two")


def test_provenance_is_read_from_the_machine() -> None:
    """Versions, hardware, recipe, seed and times are there, and the whole is plain JSON."""
    config = OmegaConf.create({"recipe": "tiny", "seed": 7})
    found = run.provenance(config, {"train": 1.5})
    assert set(found.versions) == {"mtptrain", "python", "torch", "transformers", "lightning"}
    assert found.versions["mtptrain"] == __version__
    assert " cores, " in found.hardware and " GiB, " in found.hardware
    assert (found.recipe, found.seeds, found.times) == ("tiny", {"seed": 7}, {"train": 1.5})
    assert json.dumps(run.asdict(found))


def test_the_commit_says_when_tracked_files_were_changed(tmp_path: Path) -> None:
    """The commit's hash, `-dirty` once a tracked file differs, `unknown` outside a checkout."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    assert run._commit(tmp_path) == "unknown"
    (tmp_path / "a.txt").write_text("1")
    for words in (["init", "-q"], ["add", "a.txt"], ["commit", "-qm", "one"]):
        subprocess.run([*git, *words], check=True, capture_output=True)
    clean = run._commit(tmp_path)
    assert len(clean) == 40
    (tmp_path / "untracked.txt").write_text("1")
    assert run._commit(tmp_path) == clean
    (tmp_path / "a.txt").write_text("2")
    assert run._commit(tmp_path) == f"{clean}-dirty"


def test_the_saved_recipe_is_resolved(tmp_path: Path) -> None:
    """recipe.yaml holds values, not references."""
    config = OmegaConf.create({"recipe": "tiny", "run_dir": "runs/${recipe}"})
    assert OmegaConf.load(run.save_resolved(config, tmp_path)).run_dir == "runs/tiny"


def test_too_little_disk_space_names_the_bytes(tmp_path: Path) -> None:
    """Enough is silent, also for a folder that is not there yet; too little is a UserError."""
    run.check_disk_space(tmp_path / "not" / "yet", 1, "the store")
    with pytest.raises(UserError, match=r"^the store needs about 1,000,000,000,000,000,000 bytes"):
        run.check_disk_space(tmp_path, 10**18, "the store")

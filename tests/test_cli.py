"""The command line: what it runs, what it prints, and how it fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import DictConfig

import mtptrain
from mtptrain.cli import main
from mtptrain.compose import compose_config, group_choices
from mtptrain.run import VERBS, recipes_dir
from mtptrain.types import UserError


class FakePipeline(ModuleType):
    """Stands in for mtptrain.pipeline: keeps its calls, raises what it is told to."""

    def __init__(self) -> None:
        super().__init__("mtptrain.pipeline")
        self.calls: list[tuple[str, DictConfig]] = []
        self.failure: BaseException | None = None

    def run(self, verb: str, config: DictConfig) -> None:
        self.calls.append((verb, config))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def pipeline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakePipeline:
    fake = FakePipeline()
    monkeypatch.setitem(sys.modules, "mtptrain.pipeline", fake)
    monkeypatch.setattr(mtptrain, "pipeline", fake, raising=False)
    monkeypatch.delenv("MTPTRAIN_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    return fake


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stands on stderr, which must be one line of ours."""
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and text.startswith("mtptrain: "), text
    return text.removeprefix("mtptrain: ").strip()


def write_recipe(folder: Path, name: str, text: str) -> str:
    """A recipe of the user's own in `folder`; returns the flag that makes it known."""
    file = folder / "recipe" / f"{name}.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{text}")
    return f"--config-dir={folder}"


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_reaches_the_pipeline_with_its_config(verb: str, pipeline: FakePipeline) -> None:
    """Each verb calls the pipeline once, with the composed config and without Hydra's node."""
    assert main([verb, *(["data"] if verb == "inspect" else [])]) == 0
    [(called, config)] = pipeline.calls
    assert called == verb
    assert (config.recipe, config.run_dir, config.batch_size) == ("smollm2", "runs/smollm2", 128)
    assert "hydra" not in config


def test_the_keys_that_scripts_rely_on_compose(pipeline: FakePipeline) -> None:
    """The command that scripts give composes, and its values arrive."""
    words = (
        "recipe=smollm2 draft=mtp loss=kl run_dir=out target.path=some/folder data.path=a.jsonl "
        "data.eval_path=b.jsonl num_draft_tokens=3 temperature=1 batch_size=16 seed=7"
    )
    assert main(["fit", *words.split()]) == 0
    config = pipeline.calls[0][1]
    assert config.target.path == "some/folder"
    assert (config.data.path, config.data.eval_path) == ("a.jsonl", "b.jsonl")
    assert (config.num_draft_tokens, config.temperature) == (3, 1)
    assert (config.run_dir, config.batch_size, config.seed) == ("out", 16, 7)


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_base(
    pipeline: FakePipeline, tmp_path: Path
) -> None:
    """Keys and group choices alike: command line over recipe over base."""
    text = "defaults:\n  - override /loss: tv\nrecipe: own\nseed: 5\nbatch_size: 32\n"
    flag = write_recipe(tmp_path / "mine", "own", text)
    assert main(["fit", flag, "recipe=own", "seed=6"]) == 0
    assert main(["fit", flag, "recipe=own", "loss=lk"]) == 0
    first, second = (config for _, config in pipeline.calls)
    assert (first.seed, first.batch_size, first.num_draft_tokens) == (6, 32, 4)
    assert (first.loss._target_, second.loss._target_) == (
        "mtptrain.losses.tv.TV",
        "mtptrain.losses.lk.LK",
    )
    assert first.run_dir == "runs/own"


@pytest.mark.parametrize("recipe", group_choices([recipes_dir()])["recipe"])
def test_every_recipe_composes(recipe: str, pipeline: FakePipeline) -> None:
    """Every recipe that is shipped passes the checks."""
    assert main(["fit", f"recipe={recipe}"]) == 0


def test_a_sweep_runs_each_value_in_a_folder_of_its_own(pipeline: FakePipeline) -> None:
    """-m calls the pipeline for each value, and no job writes into another's run folder."""
    assert main(["train", "-m", "seed=1,2", "loss=kl,tv", "batch_size=4"]) == 0
    assert [config.seed for _, config in pipeline.calls] == [1, 1, 2, 2]
    assert {config.batch_size for _, config in pipeline.calls} == {4}
    folders = [config.run_dir for _, config in pipeline.calls]
    assert folders[0] == "runs/smollm2/loss=kl,seed=1" and len(set(folders)) == 4


def test_a_single_run_leaves_no_file_of_hydras(pipeline: FakePipeline, tmp_path: Path) -> None:
    """Hydra writes nothing, and gives back what it was lent: sys.argv and its variable."""
    argv = list(sys.argv)
    assert main(["fit", "run_dir=out"]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert sys.argv == argv and "HYDRA_FULL_ERROR" not in os.environ


def test_cfg_shows_the_config_and_runs_nothing(
    pipeline: FakePipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """--cfg job prints the composed config as YAML."""
    assert main(["fit", "--cfg", "job", "seed=3"]) == 0
    assert "seed: 3" in capsys.readouterr().out and not pipeline.calls


@pytest.mark.parametrize("argv", [[], ["--help"], ["fit", "--help"]])
def test_help_is_read_from_the_recipes(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Help names every verb and recipe and the common keys with their composed defaults."""
    assert main(argv) == 0
    text = capsys.readouterr().out
    for verb in VERBS:
        assert f"\n  {verb} " in text
    for recipe in group_choices([recipes_dir()])["recipe"]:
        assert f"recipe={recipe} " in text
    config = compose_config("fit")
    for key in ("run_dir", "num_draft_tokens", "temperature", "batch_size", "seed"):
        assert f" {key}={config[key]} " in text
    assert f" target.path={config.target.path} " in text


def test_inspect_cache_prints_what_the_store_says_of_itself(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The path goes to the store's own description, and no recipe is composed."""
    store = ModuleType("hidden_state_cache.inspect")
    store.describe = lambda path: f"a store at {path!r}"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hidden_state_cache.inspect", store)
    assert main(["inspect", "cache", "some/store"]) == 0
    assert capsys.readouterr().out == f"a store at {Path('some/store')!r}\n"
    assert not pipeline.calls


def test_help_imports_no_torch() -> None:
    """Help and version answer without waiting for torch."""
    code = "import sys; from mtptrain.cli import main; main([]); main(['--version'])"
    command = [sys.executable, "-c", f"{code}; sys.exit('torch' in sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert mtptrain.__version__ in done.stdout


MISTAKES = {
    "fti": "unknown verb 'fti': did you mean fit?",
    "recipe=smollm2": "unknown verb 'recipe=smollm2': the verb comes first",
    "fit recipe=smolm2": "unknown recipe 'smolm2': did you mean smollm2",
    "fit loss=kll": "unknown loss 'kll': did you mean kl?",
    "fit loss=nothing": "(loss= takes confidence, cross_entropy, d_pace, dspark, eagle",
    "fit -m loss=kl,lkk": "unknown loss 'lkk': did you mean lk",
    "fit losss=kl": "unknown key 'losss' in losss=kl: did you mean loss",
    "fit data.pth=x": "unknown key 'data.pth' in data.pth=x: did you mean data.path",
    "fit eval_path=x": "unknown key 'eval_path' in eval_path=x: did you mean data.eval_path?",
    "fit frobnicate=1": "unknown key 'frobnicate' in frobnicate=1; `mtptrain --help` lists the keys",
    "fit batch_size=abc": "batch_size must be a whole number (its default is 128), not 'abc'",
    "fit batch_size=1.5": "batch_size must be a whole number",
    "fit batch_size=true": "batch_size must be a whole number",
    "fit temperature=null": "temperature must be a number (its default is 0.0), not null",
    "fit -m seed=1,x": "seed must be a whole number (its default is 0), not 'x'",
    "fit data.path=[a]": "data.path must be text",
    "fit data=x": "data must be a mapping",
    "fit batch_size": "cannot read 'batch_size': write key=value",
    "fit data.path=a{b": "cannot read 'data.path=a{b'",
    "fit seed=1,2": "seed=1,2 gives several values: add -m",
    "fit +seed=1": "the recipe does not compose",
    "fit ~nothing": "the recipe does not compose",
    "fit seed=${sed}": "the recipe does not compose",
    "fit run_dir=???": "run_dir is not set: add run_dir=... to the command",
    "inspect": "inspect is asked for nothing: write `mtptrain inspect data recipe=NAME` or",
    "inspect dta": "inspect is asked for 'dta': did you mean data?",
    "inspect recipe=smollm2": "inspect is asked for 'recipe=smollm2': write",
    "inspect cache": "inspect cache takes one PATH, a store's folder, not 0",
    "inspect cache a b": "inspect cache takes one PATH, a store's folder, not 2",
    "inspect data losss=kl": "unknown key 'losss' in losss=kl: did you mean loss",
    "fit --frob": "unrecognized arguments: --frob",
    "fit --cfg jobs": "argument --cfg: invalid choice: 'jobs'",
    "fit -m --cfg job": "not allowed with argument",
    "fit --config-dir nowhere": "--config-dir nowhere: no such folder",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_line_and_exit_2(
    command: str, pipeline: FakePipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every mistake on the command line is one line that names it; nothing runs; exit code 2."""
    assert main(command.split()) == 2
    assert MISTAKES[command] in only_line(capsys)
    assert not pipeline.calls


def test_a_dotted_key_is_suggested_by_its_last_word(
    pipeline: FakePipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """lesson.homwork_pages suggests lesson.homework_pages, and so does homework_pages alone."""
    flag = write_recipe(tmp_path / "mine", "own", "recipe: own\nlesson:\n  homework_pages: 2\n")
    for word in ("lesson.homwork_pages=1", "homework_pages=1"):
        assert main(["train", flag, "recipe=own", word]) == 2
        assert "did you mean lesson.homework_pages?" in only_line(capsys)
    assert main(["train", "train.leaning_rate=1"]) == 2
    assert "did you mean train.learning_rate" in only_line(capsys)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("seed: 1\n", "recipe/own.yaml lacks the line `recipe: own`: add it"),
        ("recipe: smollm2\n", "recipe/own.yaml lacks the line `recipe: own`: add it"),
        ("recipe: own\n  seed: [\n", "the recipe does not compose"),
        ("defaults:\n  - override /loss: klx\nrecipe: own\n", "the recipe does not compose"),
    ],
)
def test_a_recipe_file_with_a_fault_is_named_in_one_line(
    text: str, line: str, pipeline: FakePipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A recipe of the user's own that cannot be used is a mistake like any other."""
    flag = write_recipe(tmp_path / "mine", "own", text)
    assert main(["fit", flag, "recipe=own"]) == 2
    assert line in only_line(capsys)


def test_faults_of_input_found_on_the_way_are_one_line_and_exit_2(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """UserError, the store's StoreError, a full disk, a forbidden folder: one line, exit code 2."""
    store = ModuleType("hidden_state_cache")
    store.StoreError = type("StoreError", (ValueError,), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hidden_state_cache", store)
    full = OSError(errno.ENOSPC, "No space left on device", "x.bin")
    faults = {
        UserError("row 3 of a.jsonl\nhas no text"): "row 3 of a.jsonl has no text",
        store.StoreError("manifest names another target"): "manifest names another target",
        full: "no disk space left for x.bin: free",
        RuntimeError("write: No space left on device"): "no disk space left: free",
        PermissionError(errno.EACCES, "Permission denied", "x"): "x: Permission denied: allow it",
    }
    for fault, line in faults.items():
        pipeline.failure = fault
        assert main(["fit"]) == 2
        assert line in only_line(capsys)


def test_our_own_faults_are_one_line_with_their_place_and_exit_1(
    pipeline: FakePipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any other exception: its type, first line, place, and how to see the trace; exit code 1."""
    pipeline.failure = KeyError("rows")
    assert main(["fit"]) == 1
    line = only_line(capsys)
    assert line.startswith("internal error: KeyError: 'rows' (in mtptrain/cli.py:")
    assert line.endswith("set MTPTRAIN_DEBUG=1 for the trace")


def test_debug_shows_the_trace(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """MTPTRAIN_DEBUG=1 prints the trace before the line."""
    monkeypatch.setenv("MTPTRAIN_DEBUG", "1")
    pipeline.failure = RuntimeError("boom")
    assert main(["fit"]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert any(line.startswith("Traceback") for line in lines)
    assert lines[-1].startswith("mtptrain: internal error: RuntimeError: boom (in ")


def lightning_stop() -> SystemExit:
    """What Lightning makes of Ctrl-C while it trains."""
    stop = SystemExit(1)
    stop.__context__ = KeyboardInterrupt()
    return stop


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), lightning_stop()])
def test_ctrl_c_is_one_line_and_exit_130(
    stop: BaseException, pipeline: FakePipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, also where Lightning has caught it, says how to resume; exit code 130."""
    pipeline.failure = stop
    assert main(["fit"]) == 130
    assert only_line(capsys) == "interrupted: run the same command again to resume"


def test_a_failing_job_stops_its_sweep(
    pipeline: FakePipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first job of a sweep that fails ends it with its own exit code."""
    pipeline.failure = UserError("no prompts")
    assert main(["fit", "-m", "seed=1,2"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "mtptrain: no prompts"
    assert len(pipeline.calls) == 1

"""compare on the tiny target: one store, one budget, several drafts, one table; run again, nothing is done again."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtptrain import pipeline
from mtptrain.cli import main
from mtptrain.compose import compose_config
from mtptrain.overrides import check
from mtptrain.pipeline.contenders import contenders
from mtptrain.session import Session
from mtptrain.types import UserError
from mtptrain.validate.compare import Comparison, load_comparison

WORDS = [
    "drafts=[mtp,eagle3,deep]",
    "compare.steps=12",
    "compare.batch_sizes=[1,3]",
    "compare.speed_prompts=3",
    '+compare.own.deep=["draft=mtp","draft.depth=2","draft.taps=[final]","train.learning_rate=1e-3"]',
    "num_draft_tokens=2",
    "data.limit=12",
    "data.eval_limit=6",
    "data.max_turns=1",
    "draft.draft_vocab_size=0",
    "prepare.max_new_tokens=16",
    "train.batch_tokens=256",
    "train.held_out=3",
    "train.curve_points=2",
    "train.unroll_steps=2",
    "train.scored_tokens=0",
    "validate.max_new_tokens=16",
    "validate.sampled_prompts=0",
    "runtime.kv_tokens=16384",
]


@pytest.fixture(scope="module")
def words(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The command, with a target and folders of its own."""
    folder = tmp_path_factory.mktemp("compare")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MTPTRAIN_CACHE", str(folder / "cache"))
        yield [*WORDS, f"target.path={tiny_folder}", f"run_dir={folder / 'run'}"]


@pytest.fixture(scope="module")
def folder(words: list[str]) -> Path:
    """The run folder after the command."""
    assert main(["compare", *words]) == 0
    return Path(compose_config("compare", words).run_dir)


@pytest.fixture(scope="module")
def comparison(folder: Path) -> Comparison:
    return load_comparison(folder / "compare.json")


def test_every_draft_is_measured_alike(comparison: Comparison) -> None:
    """As many steps and prompts for each, lossless, with cost at both batch sizes and a curve over time."""
    assert [d.name for d in comparison.drafts] == ["mtp", "eagle3", "deep"]
    assert [d.draft for d in comparison.drafts] == ["mtp", "eagle3", "mtp"]
    assert comparison.prompts == 6
    for d in comparison.drafts:
        assert (
            d.training is not None
            and d.training.steps == d.training.budget.steps == 12
            and d.training.tokens_per_s > 0
        )
        assert len(d.training.curve) == 2
        assert d.lossless is not None and d.lossless.mismatches == 0
        assert d.acceptance_length.value is not None and d.acceptance_length.value >= 1
        assert [s.batch_size for s in d.cost.speed] == [1, 3]
        assert all(s.speedup > 0 and s.draft_cost > 0 for s in d.cost.speed)
    mtp, _, deep = (d.cost for d in comparison.drafts)
    assert deep.parameters > 1.5 * mtp.parameters
    row = 2 * 2 * 16 * 4  # keys and values, KV heads, head dimension, bytes of fp32
    assert (mtp.cache_bytes_per_token, deep.cache_bytes_per_token) == (row, 2 * row)


def test_all_read_one_store(folder: Path) -> None:
    """The answers are written once and captured once, with the taps of every draft; each run's own recipe says so."""
    cache = Path(os.environ["MTPTRAIN_CACHE"])
    assert len(list((cache / "answers").iterdir())) == len(list((cache / "stores").iterdir())) == 1
    manifest = json.loads(next((cache / "stores").glob("*/features/manifest.json")).read_text())
    taps = {tap["name"] for tap in manifest["identity"]["taps"]}
    assert taps >= {"layer.0", "layer.1", "layer.2", "layer.3", "final"}
    for name in ("mtp", "eagle3", "deep"):
        assert (folder / "compare" / name / "recipe.yaml").exists()
        assert (folder / "compare" / name / "report.json").exists()


def test_a_draft_has_its_own_settings(folder: Path) -> None:
    """What `compare.own` says is laid over what all have, and only for the draft that it names."""
    from omegaconf import OmegaConf

    mtp, deep = (OmegaConf.load(folder / "compare" / n / "recipe.yaml") for n in ("mtp", "deep"))
    assert (mtp.draft.depth, deep.draft.depth) == (1, 2)
    assert mtp.train.learning_rate != deep.train.learning_rate == 1e-3
    assert mtp.train.max_steps == deep.train.max_steps == 12
    assert "compare" not in mtp and "drafts" not in mtp


def test_run_again_nothing_is_done_again(
    folder: Path, words: list[str], comparison: Comparison
) -> None:
    """The same command leaves every stage of the runs as it is; one draft more, with a tap of its own, does what is
    its own and has the other figures beside it."""
    more = '+compare.own.more=["draft=medusa","draft.taps=[final_prenorm]","draft.num_heads=2"]'
    records = (folder / "compare").rglob("stage.json")
    before = {path: path.stat().st_mtime_ns for path in records}
    assert len(before) == 9
    for extra in ([], ["drafts=[mtp,eagle3,deep,more]", more]):
        pipeline.run("compare", compose_config("compare", [*words, *extra]))
        assert {path: path.stat().st_mtime_ns for path in before} == before
        again = load_comparison(folder / "compare.json")
        assert again.drafts[:3] == comparison.drafts and len(again.drafts) == 3 + bool(extra)


SAMPLED = [
    *WORDS,
    "drafts=[tree,mtp,block,lookup]",
    "draft.taps=[final]",
    '+compare.own.tree=["draft=mtp","tree.kind=static"]',
    '+compare.own.block=["draft=dflash","draft.block_size=3","train.max_steps=6"]',
    '+compare.own.lookup=["draft=mtp","draft.depth=2"]',
    "temperature=1",
    "compare.batch_sizes=[3]",
]


def test_a_tree_and_a_block_stand_beside_a_chain_above_greedy(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with figures of its own, and nothing held against greedy answers. A tree takes the head of the chain that
    has the same, which is trained once and keeps its own card. A name that is given to a lookup later has nothing
    of the head that it was."""
    monkeypatch.setenv("MTPTRAIN_CACHE", str(tmp_path / "cache"))
    where = [f"target.path={tiny_folder}", f"run_dir={tmp_path / 'run'}"]
    assert main(["compare", *SAMPLED, *where, "drafts=[mtp,block,lookup]"]) == 0
    cards = {path: path.read_text() for path in tmp_path.glob("run/compare/*/draft/README.md")}
    again = [*SAMPLED, *where, '+compare.own.lookup=["draft=ngram"]']
    again.remove('+compare.own.lookup=["draft=mtp","draft.depth=2"]')
    assert main(["compare", *again]) == 0
    tree, mtp, block, lookup = load_comparison(tmp_path / "run" / "compare.json").drafts
    for d in (tree, mtp, block, lookup):
        assert d.sampling.temperature == 1 and d.lossless is None
        assert d.tokens_per_step is not None and d.tokens_per_step >= 1
        assert d.tokens_per_step_ci95 is not None
    assert [d.sampling.tree for d in (tree, mtp, block)] == ["static", None, None]
    assert tree.simulated_acceptance_length is None and mtp.simulated_acceptance_length is not None
    assert tree.training == mtp.training and not (tmp_path / "run/compare/tree/draft").exists()
    assert block.draft == "dflash" and block.training is not None
    assert (block.training.budget.steps, block.training.steps) == (6, 6)
    assert lookup.draft == "ngram" and lookup.training is None
    assert len(cards) == 3 and {path: path.read_text() for path in cards} == cards


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("drafts=[mtp,egale3]", r"drafts names 'egale3', which is no draft: did you mean eagle"),
        ("+compare.own.nosuch=[train.epochs]", "compare.own names 'nosuch', which is no draft"),
    ],
)
def test_a_draft_that_is_none_is_refused_at_once(word: str, message: str) -> None:
    """In one line, before anything runs."""
    with pytest.raises(UserError, match=message):
        check("compare", [word])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("train.epcohs=3", "unknown key 'train.epcohs' in train.epcohs=3: did you mean train.epochs"),
        ("train.epochs=abc", "train.epochs must be a whole number"),
        ("train.epochs=0", "train.epochs=0 must lie in 1 to"),
        ("draft.head.taps=final", "draft.head.taps must be a list"),
        ("loss=klx", "unknown loss 'klx': did you mean kl"),
        ("draft@draft.head=egale3", "unknown draft 'egale3'"),
        ("train.epochs", "cannot read 'train.epochs'"),
    ],
)  # fmt: skip
def test_what_a_draft_alone_is_given_is_checked_as_a_command_is(word: str, message: str) -> None:
    """Names, kinds and ranges, before anything runs; the line names the draft."""
    own = f"+compare.own.both=['draft=hybrid','{word}']"
    with pytest.raises(UserError, match=f"compare.own.both: {message}"):
        check("compare", ["drafts=[mtp,both]", own])


def test_a_part_of_a_draft_may_be_chosen_for_it_alone(words: list[str]) -> None:
    """In the words of a command line: another head for a hybrid, and what that head has of its own."""
    own = '+compare.own.both=["draft=hybrid","draft@draft.head=medusa","draft.head.num_heads=2"]'
    chosen = [*words, "drafts=[mtp,both]", own]
    check("compare", chosen)
    both = contenders(Session(compose_config("compare", chosen), recording=False))["both"]
    assert both.draft_config.kind == "hybrid of suffix and medusa"
    assert both.config.draft.head.num_heads == 2


def test_no_draft_runs_before_all_are_known_to_be_sound(words: list[str], tmp_path: Path) -> None:
    """The last one's fault is said first, with its name."""
    for word, message in {
        "draft.num_heads=1": "draft last: num_draft_tokens=2 does not fit this draft; use 1 to 1",
        "draft.num_heads=0": "draft last: draft.num_heads=0 must lie in 1 to 64",
        "draft.num_heads=3": "draft last: train.unroll_steps=2 leaves 1 of the draft's 3 steps",
    }.items():
        own = f'+compare.own.last=["draft=medusa","{word}"]'
        chosen = [*words, "drafts=[ngram,last]", own, f"run_dir={tmp_path}"]
        with pytest.raises(UserError, match=message):
            pipeline.run("compare", compose_config("compare", chosen))
        assert not (tmp_path / "compare").exists()


def test_every_mechanism_is_trained_as_its_authors_do(tiny_folder: Path, tmp_path: Path) -> None:
    """Each comes with what its training needs: alone, the settings of the command would leave some of it untrained."""
    names = ("mtp", "eagle3", "eagle", "medusa", "dflash", "dspark", "peagle", "hybrid", "suffix")
    where = [f"target.path={tiny_folder}", f"run_dir={tmp_path}"]
    config = compose_config("compare", [f"drafts=[{','.join(names)}]", *where])
    runs = {name: run.config for name, run in contenders(Session(config, False)).items()}
    shared = config.train
    assert runs["mtp"].train == runs["hybrid"].train == shared
    for name in ("medusa", "dflash", "dspark", "peagle", "eagle3"):
        assert (runs[name].train.unroll_steps, runs[name].train.unroll_from) == (4, 0)
    for name in ("dflash", "dspark"):
        assert runs[name].train.step_decay == pytest.approx(math.exp(-1 / 4), abs=0.005)
    assert (runs["peagle"].train.step_decay, runs["peagle"].train.depth_keep) == (1, 0.8)
    assert (runs["eagle"].train.unroll_steps, runs["eagle"].train.feature_noise) == (1, 0.1)
    assert set(runs["eagle"].loss.weights) == {"smooth_l1", "kl"}
    assert runs["dspark"].loss.weights.confidence == 1
    assert all(runs[name].loss == config.loss for name in names if name not in ("eagle", "dspark"))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("drafts=[mtp,mtp]", "must name one draft or more, each once"),
        ("drafts=[]", "must name one draft or more"),
        ("compare.minutes=-1", "compare.minutes=-1 must be more than 0"),
        ("compare.batch_sizes=[8,0]", r"compare.batch_sizes=\(8, 0\) must be at least 1"),
        ('+compare.own.mtp=["data.limit=3"]', "compare.own.mtp sets data.limit, which all drafts"),
    ],
)
def test_what_cannot_be_compared_is_refused(word: str, message: str, words: list[str]) -> None:
    """A draft twice, none, or one with data of its own."""
    with pytest.raises(UserError, match=message):
        pipeline.run("compare", compose_config("compare", [*words, word]))

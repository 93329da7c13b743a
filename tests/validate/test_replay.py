"""The replay of draft and target, and the report of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import Chat
from mtptrain.drafts.base import Draft, DraftConfig
from mtptrain.drafts.dspark import DSparkConfig
from mtptrain.drafts.hybrid import HybridConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.drafts.suffix import SuffixConfig
from mtptrain.run import Provenance
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.runtime.tree import TreeShape
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Conversation, Request, Turn, UserError
from mtptrain.validate.replay import NOT_LOSSLESS, ReplaySettings, compare, replay
from mtptrain.validate.report import Report, load_report, write_report

CHAIN = TreeShape()
HEAD = MTPConfig()


def _origin() -> Provenance:
    return Provenance("c0ffee", {}, "a machine", "tiny", {"seed": 0}, {})


@pytest.fixture(scope="module")
def run(
    tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend, fit_head: Callable[..., Draft]
) -> Callable[..., Report]:
    """Replays four conversations, one of them with two turns."""
    turns = [[Turn("user", text)] for text in ("Tell me th", "How can you t", "Sum up", "Why is")]
    turns[1].append(Turn("user", "And then?"))
    rows = [Conversation(f"c{i}", "qa" if i % 2 else "code", tuple(t)) for i, t in enumerate(turns)]

    shape, sure = [CHAIN], [0.0]

    def engine(
        max_batch: int,
        draft: Draft | None = None,
        num_draft_tokens: int = 0,
        capture_taps: tuple[str, ...] = (),
    ) -> Engine:
        limits = EngineLimits(
            max_batch, num_draft_tokens=num_draft_tokens, tree=shape[0], min_confidence=sure[0]
        )
        return Engine(tiny_target, backend, limits, tiny_chat.eos_ids, draft, capture_taps)

    def make(
        temperature: float = 0.0,
        batch_size: int = 3,
        sampled_prompts: int = 1000,
        tree: TreeShape = CHAIN,
        config: DraftConfig = HEAD,
        min_confidence: float = 0.0,
        **options: Any,
    ) -> Report:
        shape[0], sure[0] = tree, min_confidence
        head = config.trained()
        return replay(
            tiny_target,
            config.around(None if head is None else fit_head(head), tiny_target),
            tiny_chat,
            rows,
            engine,
            backend,
            ReplaySettings(24, sampled_prompts, **options),
            num_draft_tokens=3,
            temperature=temperature,
            batch_size=batch_size,
            seed=0,
            target_name="tiny",
            draft_name=config.kind,
            origin=_origin,
        )

    return make


def test_a_greedy_report_is_lossless_and_whole(run: Callable[..., Report], tmp_path: Path) -> None:
    """Five answers, both turns of the second conversation among them: no token differs from the target's own,
    and simulation, prompt lookup, T=1 and speed stand beside the measured value."""
    report = run()
    assert report.counts.prompts == 5
    assert report.lossless is not None and report.lossless.mismatches == 0
    assert report.lossless.checked_tokens == report.counts.tokens > 20
    value = report.acceptance_length.value
    assert value is not None and 1.1 < value <= 4
    assert report.simulated_acceptance_length == pytest.approx(value, rel=0.1)
    assert set(report.acceptance_length.by_category) == {"qa", "code"}
    assert report.sampling.temperature == 0 and report.sampling.batch_size == 3
    assert report.sampled is not None and report.sampled.sampling.temperature == 1
    assert report.speed is not None and report.speed.speculative_tokens_per_s > 0
    write_report(report, tmp_path)
    assert load_report(tmp_path / "report.json") == report


def test_a_tree_is_named_and_counted_as_one(run: Callable[..., Report]) -> None:
    """The report names the tree, greedy and at T=1; its depth is D, a path is what is accepted, and nodes are
    what is proposed; no token is lost, and more are accepted than of the chain."""
    report, chain = run(tree=TreeShape("dynamic", 12, 4)), run()
    assert report.sampling.tree == "dynamic, 12 nodes, top 4" and chain.sampling.tree is None
    assert report.sampled is not None and report.sampled.sampling.tree == report.sampling.tree
    assert report.lossless is not None and report.lossless.mismatches == 0
    value, of_chain = report.acceptance_length.value, chain.acceptance_length.value
    assert value is not None and of_chain is not None and of_chain < value <= 4
    assert len(report.accepted_histogram) == 4
    assert report.acceptance_rate == pytest.approx((value - 1) / 12)
    assert report.simulated_acceptance_length is None  # which is a chain's


def test_a_chain_that_is_cut_has_no_simulated_length(run: Callable[..., Report]) -> None:
    """The walk goes over whole chains, so beside a replay of shorter ones its figure would say nothing."""
    config = DSparkConfig(taps=("layer.1",), num_layers=1, block_size=3, markov_rank=4)
    cut, whole = (run(config=config, sampled_prompts=0, min_confidence=m) for m in (0.3, 0.0))
    assert cut.acceptance_rate != whole.acceptance_rate  # untrained, it gives each token a half
    assert whole.simulated_acceptance_length is not None
    assert cut.simulated_acceptance_length is None


def test_acceptance_does_not_depend_on_the_batch(run: Callable[..., Report]) -> None:
    """One request at a time or all at once, the counts are the same, greedy and at T=1."""
    one, all_at_once = run(batch_size=1), run(batch_size=8)
    for a, b in ((one, all_at_once), (one.sampled, all_at_once.sampled)):
        assert a is not None and b is not None
        assert a.acceptance_length == b.acceptance_length
        assert a.accepted_histogram == b.accepted_histogram


def test_a_sampled_report_claims_nothing_of_losslessness(run: Callable[..., Report]) -> None:
    """At T=1 answers may differ from the greedy ones, so nothing is compared, and T=1 is run once."""
    report = run(temperature=1.0)
    assert report.lossless is None and report.sampled is None
    assert run(sampled_prompts=0).sampled is None


def test_options_of_sampling_reach_target_and_draft(run: Callable[..., Report]) -> None:
    """A top-k of one leaves the best token at any temperature: draft and target then do what they do at T=0;
    the report says how it was drawn."""
    greedy = run(sampled_prompts=0)
    for options in ({"top_k": 1}, {"min_p": 1.0}, {"top_k": 1, "block_verify": True}):
        report = run(temperature=1.0, **options)
        assert report.accepted_histogram == greedy.accepted_histogram
        how = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "block_verify": False} | options
        assert {name: getattr(report.sampling, name) for name in how} == how


def test_typical_acceptance_is_marked_as_not_lossless(run: Callable[..., Report]) -> None:
    """A warning and the setting say so wherever something was drawn; what was drawn is compared with nothing, and
    the greedy figures beside it are still lossless."""
    typical, exact = run(temperature=1.0, typical_threshold=0.09), run(temperature=1.0)
    assert typical.lossless is None and not typical.sampling.lossless and exact.sampling.lossless
    assert [NOT_LOSSLESS in r.warnings for r in (typical, exact)] == [True, False]
    values = [r.acceptance_length.value for r in (typical, exact)]
    assert values[0] is not None and values[1] is not None and values[0] > values[1]
    greedy = run(typical_threshold=0.09)
    assert greedy.lossless is not None and greedy.lossless.mismatches == 0
    assert greedy.sampled is not None and not greedy.sampled.sampling.lossless
    assert NOT_LOSSLESS in greedy.warnings
    assert NOT_LOSSLESS not in run(typical_threshold=0.09, sampled_prompts=0).warnings


@pytest.mark.parametrize(
    "config",
    [NgramConfig(), SuffixConfig(), HybridConfig(SuffixConfig(), MTPConfig(), 1.0)],
    ids=lambda c: c.kind,
)
def test_drafts_that_are_no_heads_are_reported_on(
    run: Callable[..., Report], config: DraftConfig
) -> None:
    """Lossless at T=0, run at T=1 too, beside both lookups; simulated is what a head alone is."""
    report = run(config=config)
    assert report.draft == config.kind and report.simulated_acceptance_length is None
    assert report.lossless is not None and report.lossless.mismatches == 0
    assert report.sampled is not None
    known = report.baselines
    assert known.ngram is not None and known.suffix is not None
    if isinstance(config, NgramConfig):
        assert report.tokens_per_step == known.ngram.tokens_per_step


def test_a_part_of_the_prompts_is_sampled(run: Callable[..., Report]) -> None:
    """Two of five are replayed at T=1; all are at T=0."""
    report = run(sampled_prompts=2)
    assert report.sampled is not None
    assert (report.counts.prompts, report.sampled.counts.prompts) == (5, 2)


def test_a_batch_of_nobody_is_the_users_error(run: Callable[..., Report]) -> None:
    """The message names the key."""
    with pytest.raises(UserError, match="batch_size=0 must be at least 1"):
        run(batch_size=0)


@pytest.mark.parametrize(
    ("other", "mismatches"),
    [((1, 2, 3), 0), ((1, 9, 3), 1), ((1, 2), 1), ((1, 2, 3, 4), 1), ((), 3)],
)
def test_every_token_out_of_place_is_a_mismatch(other: tuple[int, ...], mismatches: int) -> None:
    """Tokens that differ, are missing or are too many count one each."""
    request = Request("a", "all", (7,))
    plain = Completion(request, (1, 2, 3), (), 2, "length")
    found = compare([plain], [replace(plain, output_ids=other)])
    assert (found.checked_tokens, found.mismatches) == (3, mismatches)

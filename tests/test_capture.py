"""Answers to features: on the way of decoding and by a pass of its own, checked before they are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hidden_state_cache import FeatureStore, FeatureWriter
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.capture import CaptureSettings, ShardSink, capture_missing, capture_pass, identity
from mtptrain.chat import Chat
from mtptrain.prepare import Answer, completion_answer
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Sample, UserError

TAPS = ("layer.1", "layer.2", "final_prenorm", "final")
SETTINGS = CaptureSettings("fp32", 200, False)


@pytest.fixture
def sink(tiny_target: Target, tiny_chat: Chat, tmp_path: Path) -> ShardSink:
    whose = identity(tiny_target, tiny_chat, TAPS, "f00d", "d0")
    return ShardSink(FeatureWriter(tmp_path, whose, "fp32"), tiny_target, TAPS, True)


def _written(completions: Sequence[Completion], chat: Chat) -> list[Answer]:
    return [completion_answer(c, chat) for c in completions]


def test_identity_says_where_each_tap_is_taken(tiny_target: Target, tiny_chat: Chat) -> None:
    """Layer and side of the norm by tap, with what tokenizer, template and target were."""
    found = identity(tiny_target, tiny_chat, TAPS, "f00d", "d0")
    assert [(t.name, t.layer, t.norm, t.width) for t in found.taps] == [
        ("layer.1", 1, "pre", 64),
        ("layer.2", 2, "pre", 64),
        ("final_prenorm", None, "pre", 64),
        ("final", None, "post", 64),
    ]
    assert found.thinking == tiny_chat.thinking == "strip"
    assert (found.norm_kind, found.target_fingerprint) == ("LlamaRMSNorm", "f00d")
    assert (found.tokenizer_hash, found.template_hash) == (
        tiny_chat.tokenizer_hash,
        tiny_chat.template_hash,
    )


def test_both_ways_store_the_same(
    sink: ShardSink,
    tiny_target: Target,
    tiny_chat: Chat,
    backend: AttentionBackend,
    answers: list[Completion],
    tmp_path: Path,
) -> None:
    """Features taken while answering and those of the separate pass are alike to rounding; samples, order and
    masks are the same."""
    written = _written(answers[:6], tiny_chat)
    sink.from_completions(0, answers[:4], written[:4])
    sink.from_completions(1, answers[4:6], written[4:])
    sink.writer.finish()
    way = FeatureStore.open(tmp_path)
    other = ShardSink(
        FeatureWriter(tmp_path / "pass", way.identity, "fp32"), tiny_target, TAPS, True
    )
    capture_missing(other, backend, [written[:4], written[4:]], SETTINGS)
    other.writer.finish()
    for a, b in zip(way, FeatureStore.open(tmp_path / "pass", way.identity), strict=True):
        assert (a.id, a.category) == (b.id, b.category)
        assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.loss_mask, b.loss_mask)
        torch.testing.assert_close(a.features, b.features, atol=1e-4, rtol=1e-4)


def test_only_missing_shards_are_captured(
    sink: ShardSink,
    tiny_chat: Chat,
    backend: AttentionBackend,
    answers: list[Completion],
    tmp_path: Path,
) -> None:
    """What prepare has captured on the way is left as it is."""
    written = _written(answers[:4], tiny_chat)
    sink.from_completions(1, answers[2:4], written[2:])
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.glob("shard-0-1.*")}
    capture_missing(sink, backend, [written[:2], written[2:]], SETTINGS)
    assert sink.writer.completed() == {0, 1} and len(before) == 2
    after = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in tmp_path.glob("shard-0-1.*")}
    assert after == before


def test_answers_of_another_target_stop_the_run(
    sink: ShardSink, tiny_chat: Chat, backend: AttentionBackend, answers: list[Completion]
) -> None:
    """Where more than rounding of the target's own greedy tokens differ from the answers, nothing is stored."""
    foreign = [
        replace(a, output_ids=tuple((t + 7) % 512 for t in a.output_ids))
        for a in _written(answers[:2], tiny_chat)
    ]
    with pytest.raises(
        UserError, match="shard 0: the target's greedy token differs from its answer"
    ):
        capture_missing(sink, backend, [foreign], SETTINGS)
    assert not sink.writer.completed()


def test_sampled_answers_are_not_held_against_the_argmax(
    sink: ShardSink, tiny_chat: Chat, backend: AttentionBackend, answers: list[Completion]
) -> None:
    """At a temperature above 0 an answer need not follow the best token."""
    foreign = [
        replace(a, output_ids=tuple((t + 7) % 512 for t in a.output_ids))
        for a in _written(answers[:2], tiny_chat)
    ]
    sink.greedy_answers = False
    capture_missing(sink, backend, [foreign], SETTINGS)
    assert sink.writer.completed() == {0}


def test_a_row_a_token_and_no_infinities(
    sink: ShardSink, tiny_chat: Chat, answers: list[Completion]
) -> None:
    """A sample with too few rows, or a value that is not finite, is never stored."""
    assert answers[0].features is not None
    sample = _written(answers[:1], tiny_chat)[0].sample()
    with pytest.raises(RuntimeError, match=f"sample {sample.id}: .* feature rows for"):
        sink.write(0, [(sample, answers[0].features[:-1])])
    broken = answers[0].features.clone()
    broken[3, 5] = float("nan")
    with pytest.raises(UserError, match="1 of 1 samples hold values that are not finite"):
        sink.write(0, [(sample, broken)])
    assert not sink.writer.completed()


def test_one_broken_sample_of_many_is_left_out_by_name(
    sink: ShardSink, answers: list[Completion], caplog: pytest.LogCaptureFixture
) -> None:
    """The shard keeps the others; the log names what it lacks."""
    assert answers[0].features is not None
    sample = Sample("fine", "", torch.arange(4), torch.ones(4).bool())
    rows = [(replace(sample, id=f"fine{i}"), answers[0].features[:4]) for i in range(120)]
    rows[7] = (replace(sample, id="odd"), torch.full_like(rows[7][1], float("inf")))
    sink.greedy_answers = False
    with caplog.at_level("WARNING", "mtptrain"):
        sink.write(0, rows)
    assert "['odd']" in caplog.text
    assert sink.writer.finish().samples == 119


def test_features_that_depend_on_their_company_stop_the_run(
    sink: ShardSink, tiny_chat: Chat, backend: AttentionBackend, answers: list[Completion]
) -> None:
    """A document alone gives the rows that it gave in a batch; rows of another do not pass."""
    sink.backend = backend
    written = _written(answers[:2], tiny_chat)
    sink.from_completions(0, answers[:2], written)
    sample, features = written[0].sample(), answers[0].features
    assert features is not None
    with pytest.raises(RuntimeError, match="the attention backend mixes documents"):
        sink.write(1, [(sample, features + 0.01 * features.roll(1, 0))])


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_the_pass_does_not_depend_on_its_packs(
    max_tokens: int, tiny_target: Target, backend: AttentionBackend
) -> None:
    """One document a forward, a few, or all: the same rows in the same order."""
    torch.manual_seed(0)
    lens = (5, 17, 30, 2, 45)
    samples = [
        Sample(str(i), "", torch.randint(2, 512, (n,)), torch.ones(n).bool())
        for i, n in enumerate(lens)
    ]
    got = list(capture_pass(tiny_target, backend, ("layer.2", "final"), samples, max_tokens))
    assert [s.id for s, _ in got] == ["0", "1", "2", "3", "4"]
    alone = [
        list(capture_pass(tiny_target, backend, ("layer.2", "final"), [s], 1))[0] for s in samples
    ]
    for (_, a), (_, b) in zip(got, alone, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)

"""Answers in, features into the store; either on the way during prepare or by a pass of its own.

The separate pass runs whole documents, packed, through the target once. Both ways check every shard: a row
a token, finite values, the target's own greedy choice recomputed from the stored `final` feature, and one
document alone against its rows from the batch. A disagreement above rounding stops the run, because a head
fitted to such rows would fail only in serving; a few samples that are not finite are left out by name. It
gives up storing logits: they are recomputed from `final` with the frozen head.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hidden_state_cache import FeatureWriter, RowDtype, StoredSample, StoreIdentity, TapSpec
from mtptrain import __version__
from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.chat import Chat
from mtptrain.prepare import Answer
from mtptrain.progress import progress
from mtptrain.targets.base import Target, tap_layer
from mtptrain.types import Completion, Sample, UserError

log = logging.getLogger("mtptrain")
MAX_DISAGREEMENT = 0.02  # of checked rows: rounding to bf16 flips near-ties, nothing more
CHECKED_ROWS = 256  # per shard
MAX_BROKEN = 0.01  # of a shard's samples: more than a few that are not finite are no accident
MAX_DISTANCE = 1e-3  # of a document alone from its rows in a batch, relative
MAX_DISTANCE_16_BITS = 0.1


@dataclass(frozen=True)
class CaptureSettings:
    """How features are stored; from `capture:` in the recipe."""

    dtype: RowDtype
    max_tokens: int  # packed rows of one forward of the separate pass
    during_prepare: bool
    taps: tuple[str, ...] = ()  # stored beside those that the draft reads, for other drafts
    verify: bool = True  # compare every stored byte with its checksum before training


def identity(
    target: Target, chat: Chat, taps: Sequence[str], fingerprint: str, dataset: str
) -> StoreIdentity:
    """What the store says of itself (design §5.2)."""
    specs = tuple(
        TapSpec(tap, tap_layer(tap), "post" if tap == "final" else "pre", target.hidden_size)
        for tap in taps
    )
    norm = type(target.decoder.norm).__name__
    return StoreIdentity(
        target.config.name_or_path or target.path,
        str(getattr(target.config, "_commit_hash", None)),
        fingerprint,
        chat.tokenizer_hash,
        chat.template_hash,
        chat.thinking,
        norm,
        target.norm_eps,
        dataset,
        specs,
        __version__,
    )


class ShardSink:
    """Takes a shard's samples and features, checks them and writes them."""

    def __init__(
        self,
        writer: FeatureWriter,
        target: Target,
        taps: tuple[str, ...],
        greedy_answers: bool,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.writer, self.target, self.taps = writer, target, taps
        self.backend = backend  # runs a document alone, to compare; None: nothing is compared
        self.greedy_answers = greedy_answers  # sampled or given answers need not follow the argmax

    def from_completions(
        self, index: int, completions: Sequence[Completion], answers: Sequence[Answer]
    ) -> None:
        """Features taken on the way of decoding."""
        rows = []
        for completion, answer in zip(completions, answers, strict=True):
            assert completion.features is not None, "the engine was asked to capture"
            rows.append((answer.sample(), completion.features))
        self.write(index, rows)

    def write(self, index: int, rows: Sequence[tuple[Sample, Tensor]]) -> None:
        for sample, features in rows:
            if len(features) != len(sample.input_ids):
                raise RuntimeError(
                    f"sample {sample.id}: {len(features)} feature rows for {len(sample.input_ids)} tokens"
                )
        rows = self._finite(index, rows)
        stored = [
            StoredSample(s.id, s.category, s.input_ids, s.loss_mask, features)
            for s, features in rows
        ]
        if self.greedy_answers:
            self._check_greedy(index, rows)
        if self.backend is not None and rows:
            self._check_alone(index, *rows[0], self.backend)
        self.writer.write_shard(index, stored)

    def _finite(
        self, index: int, rows: Sequence[tuple[Sample, Tensor]]
    ) -> Sequence[tuple[Sample, Tensor]]:
        """The samples that are finite; the others are named, and too many are an error."""
        broken = [sample.id for sample, x in rows if not bool(torch.isfinite(x).all())]
        if not broken:
            return rows
        named = (
            f"{len(broken)} of {len(rows)} samples hold values that are not finite: {broken[:5]}"
        )
        if len(broken) > MAX_BROKEN * len(rows):
            raise UserError(
                f"shard {index}: {named}; run the target in a wider dtype (target.dtype=float32)"
            )
        log.warning("shard %d: %s; they are left out", index, named)
        return [(sample, x) for sample, x in rows if sample.id not in broken]

    def _check_alone(
        self, index: int, sample: Sample, features: Tensor, backend: AttentionBackend
    ) -> None:
        """The rows of a document do not depend on its company."""
        ((_, alone),) = capture_pass(self.target, backend, self.taps, [sample], len(features))
        wide = self.target.head_weight.dtype == torch.float32
        most = MAX_DISTANCE if wide else MAX_DISTANCE_16_BITS
        distance = float((alone - features).norm() / alone.norm())
        if not distance <= most:
            raise RuntimeError(
                f"shard {index}, sample {sample.id}: features taken in a batch are {distance:.2g} away from "
                f"those of the document alone (at most {most:g}); the attention backend mixes documents"
            )

    def _check_greedy(self, index: int, rows: Sequence[tuple[Sample, Tensor]]) -> None:
        """argmax(W g_t) against the token that the target wrote next, on a sample of answer rows."""
        at = self.taps.index("final") * self.target.hidden_size
        final, follows = [], []
        for sample, features in rows:
            mine = sample.loss_mask[1:]
            final.append(features[:-1, at : at + self.target.hidden_size][mine])
            follows.append(sample.input_ids[1:][mine])
        step = max(1, sum(map(len, follows)) // CHECKED_ROWS)
        states, tokens = torch.cat(final)[::step], torch.cat(follows)[::step]
        wrong = int((self.target.greedy(states.to(self.target.device)).cpu() != tokens).sum())
        if wrong > MAX_DISAGREEMENT * len(tokens):
            raise UserError(
                f"shard {index}: the target's greedy token differs from its answer in {wrong} of {len(tokens)} "
                "checked rows; the answers were written by another target or template: prepare them again"
            )


def capture_pass(
    target: Target,
    backend: AttentionBackend,
    taps: tuple[str, ...],
    samples: Sequence[Sample],
    max_tokens: int,
) -> Iterator[tuple[Sample, Tensor]]:
    """Runs whole documents, packed to at most `max_tokens` rows a forward; yields features [T, W] in order."""
    for batch in _packs(samples, max_tokens):
        lens = [len(s.input_ids) for s in batch]
        ids = torch.cat([s.input_ids for s in batch]).to(target.device)
        positions = torch.cat([torch.arange(n) for n in lens]).to(target.device)
        out = target.forward(ids, positions, ForwardContext.packed(backend, lens), taps)
        yield from zip(batch, out.features.cpu().split(lens), strict=True)


def _packs(samples: Sequence[Sample], max_tokens: int) -> Iterator[list[Sample]]:
    pack: list[Sample] = []
    rows = 0
    for sample in samples:
        if pack and rows + len(sample.input_ids) > max_tokens:
            yield pack
            pack, rows = [], 0
        pack.append(sample)
        rows += len(sample.input_ids)
    if pack:
        yield pack


def capture_missing(
    sink: ShardSink,
    backend: AttentionBackend,
    shards: Sequence[Sequence[Answer]],
    settings: CaptureSettings,
) -> None:
    """The separate pass: writes every shard that the store does not hold yet."""
    done = sink.writer.completed()
    tokens = [sum(len(a.prompt_ids) + len(a.output_ids) for a in shard) for shard in shards]
    before = sum(n for k, n in enumerate(tokens) if k in done)
    with progress("capture", sum(tokens), unit="tokens", done=before) as bar:
        for k, shard in enumerate(shards):
            if k in done or not shard:  # none of its rows could be learnt from
                continue
            rows = []
            samples = [answer.sample() for answer in shard]
            for sample, features in capture_pass(
                sink.target, backend, sink.taps, samples, settings.max_tokens
            ):
                rows.append((sample, features))
                bar.advance(len(features))
            sink.write(k, rows)

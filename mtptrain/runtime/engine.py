"""The engine: requests in, completions out, draft and target in lock-step.

One loop: admit, then either a prefill step or a decode step. With a draft, a decode step lets the draft
refill its pages with true features and propose, runs one verify pass of the target, and rolls back by
length: what was not accepted is overwritten by the next rows. Of a token tree the accepted path is first moved
to where a chain's rows lie. Without a draft it is plain batched decoding, the reference that speculation must
equal. It gives up streaming: a completion is handed over when it is whole.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft, Proposal
from mtptrain.runtime.drawing import Drawing
from mtptrain.runtime.model_runner import ModelRunner
from mtptrain.runtime.sampler import draw, probabilities, uniforms
from mtptrain.runtime.scheduler import EngineLimits, Scheduler, Sequence
from mtptrain.runtime.tree import Tree
from mtptrain.runtime.tree_draft import propose_tree
from mtptrain.runtime.verdicts import VerifiedRows
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Request, SamplingParams, UserError, VerifyPass

OnFinish = Callable[[Completion], None]


@dataclass
class EngineTimes:
    """Wall seconds of an engine's work so far, and the tokens its decode steps kept."""

    prefill_s: float = 0.0
    decode_s: float = 0.0  # draft included
    draft_s: float = 0.0
    decoded_tokens: int = 0
    decode_steps: int = 0


def check_draft(draft: Draft, limits: EngineLimits) -> None:
    """Raises UserError where the draft cannot propose what is asked."""
    asked, most = limits.num_draft_tokens, draft.max_draft_tokens
    if not 1 <= asked <= (most or 1 << 30):
        raise UserError(
            f"num_draft_tokens={asked} does not fit this draft; use 1 to {most or 'any number'}"
        )
    limits.tree.require(draft.config)
    require_confidence(draft.says_confidence, limits)


def require_confidence(says_confidence: bool, limits: EngineLimits) -> None:
    """Raises UserError where chains are to end by a confidence that the draft does not say."""
    if limits.min_confidence and not says_confidence:
        raise UserError(
            f"min_confidence={limits.min_confidence:g} needs a draft that says how sure it is; use draft=dspark "
            "or min_confidence=0"
        )


class Engine:
    """Decodes batches of requests with a target and, if given, a draft."""

    def __init__(
        self,
        target: Target,
        backend: AttentionBackend,
        limits: EngineLimits,
        eos_ids: frozenset[int],
        draft: Draft | None = None,
        capture_taps: tuple[str, ...] = (),
    ) -> None:
        if draft is not None and capture_taps:
            raise ValueError("features are captured in plain decoding only")
        if draft is not None:
            check_draft(draft, limits)
        self.target, self.draft, self.limits, self.eos_ids = target, draft, limits, eos_ids
        self.capture = bool(capture_taps)
        self.runner = ModelRunner(
            target, draft, backend, limits, draft.taps if draft else capture_taps
        )
        self.times = EngineTimes()

    def generate(
        self, requests: Seq[Request], params: SamplingParams, on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """Completions in the order of the requests. `on_finish` hears of each as it ends."""
        if self.draft is not None:
            self.limits.tree.require_verification(params)
        share = self.draft is None or self.draft.shares_prefix
        scheduler = Scheduler(requests, params, self.limits, share)
        done: dict[int, Completion] = {}
        while scheduler.waiting or scheduler.running:
            scheduler.admit()
            for sequence in self._step(scheduler):
                completion = sequence.completion()
                scheduler.finish(sequence)
                if self.draft is not None:
                    self.draft.finish(completion, self.runner.common)
                done[sequence.place] = completion
                if on_finish is not None:
                    on_finish(completion)
        return [done[i] for i in range(len(requests))]

    def _step(self, scheduler: Scheduler) -> list[Sequence]:
        """One prefill or decode step; returns the sequences that are over."""
        start = perf_counter()
        chunks = scheduler.prefill_chunks()
        if chunks:
            self._prefill(scheduler, chunks)
            self.times.prefill_s += perf_counter() - start
        else:
            self._decode(scheduler)
            self.times.decode_s += perf_counter() - start
            self.times.decode_steps += 1
        over = [s for s in scheduler.running if s.finish_reason]
        if self.capture:  # the last token has no feature before it has been read
            over = [s for s in over if s.kv_len == len(s.token_ids)]
        return over

    # ---- prefill ------------------------------------------------------------------------------------------

    def _prefill(self, scheduler: Scheduler, chunks: list[tuple[Sequence, int]]) -> None:
        sequences, lens = [s for s, _ in chunks], [n for _, n in chunks]
        rows = [s.token_ids[s.kv_len : s.kv_len + n] for s, n in chunks]
        for sequence, n in chunks:
            scheduler.grow(sequence, sequence.kv_len + n)
        out = self.runner.run_target(sequences, rows)
        self._advance(sequences, lens, out.features.split(lens))
        self._refill(sequences)
        ends = torch.cumsum(torch.tensor(lens), 0) - 1
        first = [(s, end) for s, end in zip(sequences, ends.tolist(), strict=True) if s.prefilled]
        if first:
            tokens = self._next_tokens([s for s, _ in first], out.final[[end for _, end in first]])
            for (sequence, _), token in zip(first, tokens, strict=True):
                scheduler.publish(sequence)
                sequence.append([token], self.eos_ids)

    def _advance(self, sequences: Seq[Sequence], rows: Seq[int], features: Seq[Tensor]) -> None:
        for sequence, n in zip(sequences, rows, strict=True):
            sequence.kv_len += n
        self.runner.store_features(sequences, features, self.capture)

    def _refill(self, sequences: Seq[Sequence]) -> None:
        """Lets the draft read every prompt row whose next token is known."""
        if self.draft is None:
            return
        ready = [(s, min(s.kv_len, len(s.token_ids) - 1) - s.draft_len) for s in sequences]
        ready = [(s, n) for s, n in ready if n > 0]
        if ready:
            lens = [n for _, n in ready]
            self.draft.refill(self.runner.true_rows([s for s, _ in ready], lens))
            for sequence, n in ready:
                sequence.draft_len += n
                sequence.pending = [torch.cat(sequence.pending)[n:]]

    # ---- decode -------------------------------------------------------------------------------------------

    def _decode(self, scheduler: Scheduler) -> None:
        sequences = scheduler.running
        for sequence in sequences:
            scheduler.grow(sequence, len(sequence.token_ids) + self.limits.draft_rows)
        proposal = self._propose(sequences)
        rows = [[s.token_ids[-1], *c] for s, c in zip(sequences, proposal.token_ids, strict=True)]
        trees = None
        if proposal.parents is not None:
            trees = [Tree(*x) for x in zip(proposal.token_ids, proposal.parents, strict=True)]
        out = self.runner.run_target(sequences, rows, trees)
        verified = VerifiedRows(self.target, sequences, proposal, trees, out.final)
        verdicts = verified.verdicts()
        paths = [path for path, _ in verdicts]
        if trees is not None:
            self.runner.keep_paths(sequences, paths)
        features = [_along(*x) for x in zip(out.features.split(verified.lens), paths, strict=True)]
        self._advance(sequences, [len(path) + 1 for path in paths], features)
        for sequence, proposed, verdict in zip(
            sequences, proposal.token_ids, verdicts, strict=True
        ):
            self._emit(sequence, proposed, *verdict)

    def _emit(
        self, sequence: Sequence, proposed: tuple[int, ...], path: Seq[int], token: int
    ) -> None:
        if sequence.finish_reason:  # only its last feature was missing
            return
        kept = sequence.append([*(proposed[i] for i in path), token], self.eos_ids)
        sequence.decode_steps += 1
        self.times.decoded_tokens += kept
        if proposed:
            sequence.passes.append(VerifyPass(len(proposed), len(path), kept))

    def _propose(self, sequences: Seq[Sequence]) -> Proposal:
        if self.draft is None:
            return Proposal(((),) * len(sequences))
        start = perf_counter()
        lens = [s.kv_len - s.draft_len for s in sequences]
        rows = self.runner.true_rows(sequences, lens)
        depth, tree = self.limits.num_draft_tokens, self.limits.tree
        drawing = Drawing(sequences[0].params, [s.generator for s in sequences])
        if tree.kind is None:
            proposal = self.draft.propose(rows, depth, drawing)
            proposal = proposal.cut(self.limits.min_confidence)
        else:
            drawn = tree.drawn and drawing.params.temperature > 0
            proposal = propose_tree(self.draft, rows, tree, depth, drawing if drawn else None)
        for sequence in sequences:
            sequence.draft_len, sequence.pending = sequence.kv_len, []
        self.times.draft_s += perf_counter() - start
        return proposal

    def _next_tokens(self, sequences: Seq[Sequence], final: Tensor) -> list[int]:
        params = sequences[0].params
        if params.temperature == 0:
            return self.target.greedy(final).tolist()
        probs = probabilities(self.target.logits(final), params)
        return draw(probs, uniforms([s.generator for s in sequences])).tolist()


def _along(rows: Tensor, path: Seq[int]) -> Tensor:
    """The first row, and those of the accepted path behind it."""
    if isinstance(path, range):  # a chain: rows as they lie
        return rows[: len(path) + 1]
    return rows[[0, *(node + 1 for node in path)]]

"""Who runs next: continuous batching with chunked prefill, over reserved pages.

Prompts are prefilled before anyone decodes (a full decode batch is what pays), in chunks of at most
`max_prefill_tokens` rows over all sequences; every other step decodes all running sequences. A step is
either prefill or decode, so speculation sees decode-only batches. A sequence is admitted when the pages it
can need at most are free, so nothing is ever preempted. It gives up latency: a long prompt delays decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from mtptrain.runtime.kv_pages import PageBook
from mtptrain.runtime.sampler import generator
from mtptrain.runtime.tree import TreeShape
from mtptrain.types import Completion, Request, SamplingParams, UserError, VerifyPass


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the runtime; every number is rows or pages of one engine."""

    max_batch: int = 64
    max_prefill_tokens: int = 1024
    page_size: int = 16
    num_pages: int = 4096
    num_draft_tokens: int = 0
    tree: TreeShape = TreeShape()
    min_confidence: float = 0.0  # below which chance of a whole chain no more of it is proposed

    @property
    def draft_rows(self) -> int:
        """Rows behind a sequence's tokens that a proposal needs at most."""
        return self.tree.most_rows(self.num_draft_tokens) if self.num_draft_tokens else 0


@dataclass(eq=False)
class Sequence:
    """A request under way. Rows below `kv_len` have keys in the target's pages; below `draft_len` in the draft's."""

    request: Request
    place: int  # number in the request list
    params: SamplingParams
    token_ids: list[int]
    generator: torch.Generator
    pages: list[int] = field(default_factory=list)
    reserved: int = 0
    kv_len: int = 0
    draft_len: int = 0
    pending: list[Tensor] = field(default_factory=list)  # features of rows draft_len..kv_len
    kept: list[Tensor] = field(
        default_factory=list
    )  # features of all rows, where capture asks for them
    memory: dict[str, Any] = field(default_factory=dict)
    passes: list[VerifyPass] = field(default_factory=list)
    decode_steps: int = 0
    finish_reason: Literal["eos", "length"] | None = None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def prefilled(self) -> bool:
        return self.kv_len >= self.num_prompt

    def append(self, tokens: Seq[int], eos_ids: frozenset[int]) -> int:
        """Adds emitted tokens up to the answer's end; returns how many were kept."""
        for n, token in enumerate(tokens, 1):
            self.token_ids.append(token)
            if token in eos_ids and not self.params.ignore_eos:
                self.finish_reason = "eos"
            elif len(self.token_ids) - self.num_prompt >= self.params.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason:
                return n
        return len(tokens)

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            self.request,
            tuple(self.token_ids[self.num_prompt :]),
            tuple(self.passes),
            self.decode_steps,
            self.finish_reason,
            torch.cat(self.kept) if self.kept else None,
        )


class Scheduler:
    """Holds the waiting and the running sequences and their pages."""

    def __init__(
        self,
        requests: Seq[Request],
        params: SamplingParams,
        limits: EngineLimits,
        share_prefix: bool,
    ) -> None:
        self.limits, self.share_prefix = limits, share_prefix
        self.book = PageBook(limits.num_pages, limits.page_size)
        self.page_features: dict[
            int, Tensor
        ] = {}  # of published pages, where capture asks for them
        self.waiting = deque(
            Sequence(r, i, params, list(r.prompt_ids), generator(params.seed, i))
            for i, r in enumerate(requests)
        )
        self.running: list[Sequence] = []
        for sequence in self.waiting:
            self._check_fits(sequence)

    def admit(self) -> None:
        """Moves waiting sequences into the batch while there is room and there are pages."""
        while self.waiting and len(self.running) < self.limits.max_batch:
            needed = self._most_pages(self.waiting[0])
            if needed > self.book.available - sum(s.reserved for s in self.running):
                return
            self.waiting[0].reserved = needed
            self.running.append(self.waiting.popleft())

    def _check_fits(self, sequence: Sequence) -> None:
        """Before anything runs: the prompt may be the last of thousands."""
        needed = self._most_pages(sequence)
        if needed > self.limits.num_pages:
            raise UserError(
                f"prompt {sequence.request.id} of {sequence.num_prompt} tokens needs {needed} KV pages and the "
                f"pool has {self.limits.num_pages}; shorten it or raise runtime.kv_tokens"
            )

    def _most_pages(self, sequence: Sequence) -> int:
        rows = sequence.num_prompt + sequence.params.max_new_tokens + self.limits.draft_rows + 1
        return -(-rows // self.limits.page_size)

    def _share(self, sequence: Sequence) -> None:
        """Takes over the pages of its prompt that lie there by now."""
        sequence.pages = self.book.shared_prefix(sequence.request.prompt_ids)
        sequence.kv_len = sequence.draft_len = len(sequence.pages) * self.limits.page_size
        sequence.kept = [self.page_features[p] for p in sequence.pages if p in self.page_features]
        sequence.reserved -= len(sequence.pages)

    def prefill_chunks(self) -> list[tuple[Sequence, int]]:
        """(sequence, rows to run) of the next prefill step, in order of arrival; empty: decode.

        A prompt looks for shared pages only when its turn comes: those before it have published theirs.
        """
        chunks, budget = [], self.limits.max_prefill_tokens
        for sequence in self.running:
            if budget and self.share_prefix and not sequence.pages:
                self._share(sequence)
            rows = min(sequence.num_prompt - sequence.kv_len, budget)
            if rows > 0:
                chunks.append((sequence, rows))
                budget -= rows
        return chunks

    def grow(self, sequence: Sequence, num_rows: int) -> None:
        """Makes sure the sequence's pages hold `num_rows` rows."""
        missing = -(-num_rows // self.limits.page_size) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.book.allocate(missing)
            sequence.reserved -= missing

    def publish(self, sequence: Sequence) -> None:
        """Offers a finished prompt's full pages, and their captured features, to later prompts."""
        if not self.share_prefix:
            return
        new = self.book.publish(sequence.request.prompt_ids, sequence.pages)
        if sequence.kept:
            rows = torch.cat(sequence.kept)
            size = self.limits.page_size
            for page in new:
                at = sequence.pages.index(page) * size
                self.page_features[page] = rows[at : at + size].clone()

    def finish(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.book.release(sequence.pages)
        sequence.pages, sequence.reserved = [], 0

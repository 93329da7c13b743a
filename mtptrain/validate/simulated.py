"""The exact greedy walk over stored answers: what a draft would accept, without decoding.

On the target's own greedy answers a verify pass accepts a drafted token iff it is the stored one, and a
later step is reached only through right tokens; so the teacher-forced unroll tells every pass exactly. Only
the last pass of an answer differs from a replay: what would be accepted past the stored end is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft, Drawn, Pages, TrueRows
from mtptrain.layers.product import product
from mtptrain.types import Completion, DraftBatch, Request, VerifyPass

HEAD_ROWS = 1024  # rows of draft logits at a time
NO_PAGES = cast(Pages, None)  # a lookup asks for none


def pack(documents: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> DraftBatch:
    """One batch of (input_ids [T], features [T, W], final [T, H], loss_mask [T]) documents."""
    ids, features, final, mask = (torch.cat(parts) for parts in zip(*documents, strict=True))
    lens = torch.tensor([0, *(len(d[0]) for d in documents)])
    return DraftBatch(ids, features, final, mask, lens.cumsum(0))


@torch.no_grad()
def accepted_runs(
    draft: Draft, batch: DraftBatch, num_draft_tokens: int, backend: AttentionBackend
) -> Tensor:
    """How many drafted tokens would be accepted from each row, [T] int64."""
    run = torch.zeros_like(batch.input_ids)
    steps = draft.unroll(batch, num_draft_tokens, batch.loss_mask, backend)
    for j, step in enumerate(steps):
        right = _best(draft, step.states) == batch.input_ids[step.label_rows]
        row = step.label_rows - 2 - j
        run[row] += right & (run[row] == j)
    return run


def _best(draft: Draft, states: Tensor) -> Tensor:
    """Greedy target ids, [R, H] -> [R]."""
    best = [product(part, draft.head_rows()).argmax(-1) for part in states.split(HEAD_ROWS)]
    index = torch.cat(best) if best else torch.empty(0, dtype=torch.long)
    return index if draft.vocab is None else draft.vocab.to(index.device)[index]


Propose = Callable[[int], tuple[int, int]]  # index of the newest token -> (proposed, accepted)


def walk(request: Request, output_ids: tuple[int, ...], propose: Propose) -> Completion:
    """Walks an answer pass by pass; the first token comes from prefill."""
    newest, last = len(request.prompt_ids), len(request.prompt_ids) + len(output_ids) - 1
    passes, steps = [], 0
    while newest < last:
        proposed, accepted = propose(newest)
        emitted = min(accepted + 1, last - newest)
        steps += 1
        newest += emitted
        if proposed:
            passes.append(VerifyPass(proposed, accepted, emitted))
    return Completion(request, output_ids, tuple(passes), steps, "length")


def simulate(
    draft: Draft,
    completions: Sequence[Completion],
    num_draft_tokens: int,
    backend: AttentionBackend,
) -> Iterator[Completion]:
    """The walk of a learned draft over plain greedy completions with features of its taps and `final` last."""
    for completion in completions:
        request, features = completion.request, completion.features
        assert features is not None, "the plain run captures features"
        ids = torch.tensor(request.prompt_ids + completion.output_ids)
        mask = torch.arange(len(ids)) >= len(request.prompt_ids)
        batch = pack([(ids, features, features[:, :0], mask)])
        run = accepted_runs(draft, batch, num_draft_tokens, backend).tolist()
        yield walk(
            request,
            completion.output_ids,
            lambda newest, run=run: (num_draft_tokens, run[newest - 1]),
        )


def simulate_lookup(
    draft: Draft, completions: Sequence[Completion], num_draft_tokens: int
) -> Iterator[Completion]:
    """The walk of a draft that reads tokens only, through answers given one after another: it proposes as it
    does at serving, and hears of each answer that has ended."""
    common, nothing = dict[str, Any](), torch.empty(0, 0)
    for completion in completions:
        ids, memory = [*completion.request.prompt_ids, *completion.output_ids], dict[str, Any]()

        def propose(
            newest: int, ids: list[int] = ids, memory: dict[str, Any] = memory
        ) -> tuple[int, int]:
            known = ids[: newest + 1]
            rows = TrueRows((known,), (0,), (0,), nothing, NO_PAGES, (memory,), common)
            (chain,) = draft.propose(rows, num_draft_tokens, _no_draw).token_ids
            right = takewhile(lambda x: x[0] == x[1], zip(chain, ids[newest + 1 :], strict=False))
            return len(chain), sum(1 for _ in right)

        done = walk(completion.request, completion.output_ids, propose)
        draft.finish(done, common)
        yield done


def _no_draw(logits: Tensor, among: Sequence[int] | None = None) -> Drawn:
    raise AssertionError("a lookup's tokens are certain")

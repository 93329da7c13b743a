"""What heads share that draft token by token: the unroll of training, and refill and drawing over pages.

Row t reads the feature of token t and Emb(x_{t+1}), sits at RoPE position t, and gives a state; at unrolled
step j it reads Emb(x_{t+1+j}) and the state it gave before, at position t + j (design 5.1). One network may
serve all steps: its later steps see the step-0 keys of true features and the own row's later keys. Or each
step has a network of its own (`depth` of them), with its own pages and plain causal attention.
A mechanism says what the first state is (`first_state`), how a state goes on (`advance`), and what of a
state is scored (`scored`). The runtime grows token trees from `start` and `step`, where one network serves
all steps. It gives up width: tokens are drafted one after another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext, UnrollCache
from mtptrain.drafts.base.continuation import AutoregressiveConfig
from mtptrain.drafts.base.head import Head, proposal_of
from mtptrain.drafts.base.proposal import Draw, Proposal
from mtptrain.drafts.base.rows import TrueRows
from mtptrain.drafts.base.step_rows import StepRows
from mtptrain.drafts.base.supervision import (
    UnrollStep,
    answer_chain,
    per_document,
    rows_from_first,
    tokens_ahead,
)
from mtptrain.layers.product import product
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch


class AutoregressiveHead(Head):
    """See the file's opening."""

    def __init__(
        self,
        config: AutoregressiveConfig,
        target: Target,
        depth: int = 1,
        own_head: bool = False,
    ) -> None:
        """`depth` networks, one a step; 1: the only one serves all steps. `own_head`: see `Head`."""
        super().__init__(config, target, own_head)
        self.depth = self.num_kv_layers = depth
        self.max_draft_tokens = None if depth == 1 else depth
        self.shares_prefix = depth == 1

    @abstractmethod
    def first_state(self, features: Tensor) -> Tensor:
        """The state of rows that have true features, [T, W] to [T, H]."""

    @abstractmethod
    def advance(self, step: int, rows: StepRows) -> Tensor:
        """Each row's next state, [T, H], from what it reads at this step."""

    def _run(
        self, step: int, ids: Tensor, state: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        embedding = self.target.embed(ids)
        rotary = self.target.position_embeddings(embedding, positions)
        return self.advance(step, StepRows(embedding, state, rotary, ctx))

    # ---- training ---------------------------------------------------------------------------------------

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        chain = answer_chain(batch, steps, supervised)
        lens = torch.diff(batch.cu_seqlens)
        row = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        position = row - torch.repeat_interleave(batch.cu_seqlens[:-1], lens)
        unroll = self._unroll_shared if self.depth == 1 else self._unroll_modules
        yield from unroll(batch, chain, position, tuple(lens.tolist()), backend)

    def _unroll_shared(
        self,
        batch: DraftBatch,
        chain: Tensor,
        position: Tensor,
        lens: tuple[int, ...],
        backend: AttentionBackend,
    ) -> Iterator[UnrollStep]:
        rows = (chain[1] if len(chain) > 1 else chain[0] & False).nonzero().squeeze(1)
        cache = UnrollCache(rows, per_document(rows, batch.cu_seqlens))
        states, place = self._first_states(batch, chain[0], position, cache, backend)
        first = chain[0].nonzero().squeeze(1)
        yield UnrollStep(self.scored(states[place[first]]), first + 1, first + 2)
        states, cache.mode = states[place[rows]], "extend"
        ctx = ForwardContext(backend, lens, unroll=cache)
        for j in range(1, len(chain)):
            keep = chain[j][rows]
            if not bool(keep.all()):
                rows, states = rows[keep], states[keep]
                cache.narrow(keep, per_document(rows, batch.cu_seqlens))
            if len(rows):  # else every answer of the batch has ended
                ids = batch.input_ids[rows + 1 + j]
                states = self._run(j, ids, states, position[rows] + j, ctx)
            yield UnrollStep(self.scored(states), rows + 1 + j, rows + 2 + j)

    def _first_states(
        self,
        batch: DraftBatch,
        supervised: Tensor,
        position: Tensor,
        cache: UnrollCache,
        backend: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """Step 0: the states of each document's rows from its first supervised one on, and where each packed row
        stands among them, [T]. Those before, a prompt's, leave their keys: nothing else of them is ever read."""
        run = rows_from_first(supervised, batch.cu_seqlens)

        def states(which: Tensor, keys_only: bool) -> Tensor:
            lens = per_document(which.nonzero().squeeze(1), batch.cu_seqlens)
            ctx = ForwardContext(backend, lens, unroll=cache, keys_only=keys_only)
            ids, state = (
                tokens_ahead(batch.input_ids, 1)[which],
                self.first_state(batch.features[which]),
            )
            return self._run(0, ids, state, position[which], ctx)

        if not bool(run.all()):
            states(~run, keys_only=True)
        return states(run, keys_only=False), run.cumsum(0) - 1

    def _unroll_modules(
        self,
        batch: DraftBatch,
        chain: Tensor,
        position: Tensor,
        lens: tuple[int, ...],
        backend: AttentionBackend,
    ) -> Iterator[UnrollStep]:
        ctx = ForwardContext.packed(backend, lens)
        states = self.first_state(batch.features)
        for j in range(min(len(chain), self.depth)):
            states = self._run(j, tokens_ahead(batch.input_ids, 1 + j), states, position + j, ctx)
            rows = chain[j].nonzero().squeeze(1)
            yield UnrollStep(self.scored(states[rows]), rows + 1 + j, rows + 2 + j)

    # ---- serving ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def refill(self, rows: TrueRows) -> None:
        starts, outputs = self._features(rows)
        for j in range(self.depth):
            if j:  # row t of module j needs x_{t+1+j}: its newest row waits for a token
                starts, outputs = self._behind_waiting(rows, j, starts, outputs)
                outputs = [x[:-1] for x in outputs]
            outputs = self._run_rows(rows, j, rows.token_ids, starts, outputs)

    @torch.inference_mode()
    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        ids = tuple(list(x) for x in rows.token_ids)
        starts, outputs = self._features(rows)
        drawn = []
        for j in range(num_draft_tokens):
            if j and self.depth == 1:  # the shared module goes on behind the true rows
                starts = [a + n for a, n in zip(rows.first_rows, rows.lens, strict=True)]
                starts, outputs = [a + j - 1 for a in starts], [x[-1:] for x in outputs]
            elif j:
                starts, outputs = self._behind_waiting(rows, j, starts, outputs)
            outputs = self._run_rows(rows, j, ids, starts, outputs)
            states = self.scored(torch.stack([x[-1] for x in outputs]))
            drawn.append(draw(product(states, self.head_rows())))
            for sequence, token in zip(ids, self.target_ids(drawn[-1].token), strict=True):
                sequence.append(token)
        chains = [x[len(y) :] for x, y in zip(ids, rows.token_ids, strict=True)]
        return proposal_of(chains, drawn, self)

    @torch.inference_mode()
    def start(self, rows: TrueRows) -> Tensor:
        outputs = self._run_rows(rows, 0, rows.token_ids, *self._features(rows))
        return torch.stack([x[-1] for x in outputs])

    @torch.inference_mode()
    def step(self, ids: Tensor, states: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        return self._run(1, ids, states, positions, ctx)

    def _features(self, rows: TrueRows) -> tuple[list[int], list[Tensor]]:
        return list(rows.first_rows), list(self.first_state(rows.features).split(list(rows.lens)))

    def _run_rows(
        self,
        rows: TrueRows,
        step: int,
        ids: tuple[list[int], ...],
        places: list[int],
        states: list[Tensor],
    ) -> list[Tensor]:
        """Runs one module over each sequence's rows; `places` are the page rows of their first ones.

        A place p reads token p + 1 (shared module) or p + 1 + step (module `step` of several): both are
        the token that follows the one the row's state has already seen.
        """
        lens = [len(x) for x in states]
        if not any(lens):  # a prompt's first rows: every state still waits for its token
            return states
        ahead = 1 if self.depth == 1 else 1 + step
        shift = ahead - 1
        tokens = [
            t
            for x, p, n in zip(ids, places, lens, strict=True)
            for t in x[p + ahead : p + ahead + n]
        ]
        positions = [p + shift + i for p, n in zip(places, lens, strict=True) for i in range(n)]
        on = rows.features.device
        ctx = rows.pages.context(places, lens)
        token, position = torch.tensor(tokens, device=on), torch.tensor(positions, device=on)
        return list(self._run(step, token, torch.cat(states), position, ctx).split(lens))

    def _behind_waiting(
        self, rows: TrueRows, step: int, starts: list[int], outputs: list[Tensor]
    ) -> tuple[list[int], list[Tensor]]:
        """Inputs of module `step`: the one state of module step-1 that waited for its token, then the new ones.

        With n true rows, module j is true up to row n-1-j, module j-1 up to n-j: that row's state waits.
        """
        waiting, joined, key = [], [], f"module{step}"
        for i, (first, n, memory) in enumerate(
            zip(rows.first_rows, rows.lens, rows.memories, strict=True)
        ):
            kept = memory.get(key, outputs[i][:0])
            row = first + n - step - starts[i]
            waiting.append(starts[i] - len(kept))
            joined.append(torch.cat([kept, outputs[i]]))
            if row >= 0:
                memory[key] = outputs[i][row : row + 1].clone()
        return waiting, joined

"""MTP: one decoder layer of the target's own kind that reads a feature and the next token's embedding.

Row t normalises Emb(x_{t+1}) and the feature of token t (RMSNorm each), joins them in the order
[embedding ; feature] through `fc` (2H -> H), runs one layer, and normalises again before the frozen
`lm_head`; the normed state is fed back for the next token (DeepSeek-V3 MTP, arXiv 2412.19437, and
EAGLE-3.1, arXiv 2605.09992). `norms=none` is the EAGLE-1 layout (arXiv 2401.15077: no input norm, none
before the head, `fc` with bias), kept for the ablation. `depth=1` shares one module over all steps
(FastMTP, arXiv 2509.18362); `depth=K` has K modules, each with pages of its own.
It gives up width: one layer a step, so depth of thought is the target's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext, UnrollCache
from mtptrain.drafts.base import (
    Draft,
    Draw,
    HeadConfig,
    Proposal,
    TrueRows,
    UnrollStep,
    answer_chain,
)
from mtptrain.targets.base import Target, tap_layer
from mtptrain.types import DraftBatch, UserError

MAX_DEPTH = 64  # a folder that claims more would have us build it before its weights are compared


@dataclass(frozen=True)
class MTPConfig(HeadConfig):
    """Choices of an MTP head."""

    norms: Literal["restored", "none"] = "restored"
    depth: int = 1
    init_layer: int | None = None  # decoder layer to start from; None: see `first_layer`
    embedding_scale: float = 0.0  # how much of the identity `fc` starts with on the embedding

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norms not in ("restored", "none"):
            raise UserError(f"draft.norms={self.norms} is unknown; use restored or none")
        if not 1 <= self.depth <= MAX_DEPTH:
            raise UserError(
                f"draft.depth={self.depth} is too small or too large; use 1 (shared) or the number of modules, "
                f"at most {MAX_DEPTH}"
            )

    @property
    def grows_trees(self) -> bool:
        return self.depth == 1

    def build(self, target: Target) -> MTP:
        return MTP(self, target)

    def first_layer(self, num_layers: int) -> int:
        """The layer to start from: unless asked otherwise, the one behind the last tap, so that the head
        begins as the target's own continuation; layer 0 where none follows."""
        if self.init_layer is not None:
            if not 0 <= self.init_layer < num_layers:
                raise UserError(
                    f"draft.init_layer={self.init_layer} must lie in 0 to {num_layers - 1}, the target's layers"
                )
            return self.init_layer
        return self.next_layer(num_layers) or 0

    def next_layer(self, num_layers: int) -> int | None:
        """The layer behind the last tap; None behind the last layer and the final norm."""
        tapped = tap_layer(self.taps[-1])
        return None if tapped is None or tapped + 1 >= num_layers else tapped + 1


class MTPModule(nn.Module):
    """Norms, `fc`, decoder layer and output norm of one step; [T, H] states in, [T, H] states out."""

    def __init__(self, config: MTPConfig, target: Target, pool_layer: int) -> None:
        super().__init__()
        hidden = target.hidden_size
        restored = config.norms == "restored"
        self.enorm = nn.RMSNorm(hidden, eps=target.norm_eps) if restored else nn.Identity()
        self.hnorm = nn.RMSNorm(hidden, eps=target.norm_eps) if restored else nn.Identity()
        self.fc = nn.Linear(2 * hidden, hidden, bias=not restored)
        self.layer = target.new_decoder_layer(config.first_layer(target.num_layers), pool_layer)
        self.norm = target.new_norm() if restored else nn.Identity()
        if not restored:
            self.layer.input_layernorm = nn.Identity()
        self._start_from_identity(hidden, config.embedding_scale)

    def _start_from_identity(self, hidden: int, embedding_scale: float) -> None:
        """`fc` passes the feature through, so that the head starts as the target's own layer on its own state."""
        with torch.no_grad():
            self.fc.weight[:, :hidden] = embedding_scale * torch.eye(hidden)
            self.fc.weight[:, hidden:] = torch.eye(hidden)
            if self.fc.bias is not None:
                self.fc.bias.zero_()

    def forward(
        self,
        embedding: Tensor,
        state: Tensor,
        rotary: tuple[Tensor, Tensor],
        ctx: ForwardContext,
    ) -> Tensor:
        x = self.fc(torch.cat([self.enorm(embedding), self.hnorm(state)], -1))
        out = self.layer(x[None], position_embeddings=rotary, ctx=ctx)
        return self.norm((out[0] if isinstance(out, tuple) else out)[0])


class MTP(Draft):
    """See the file's opening. The frozen tables are held outside the state dict: they are never saved."""

    def __init__(self, config: MTPConfig, target: Target) -> None:
        super().__init__()
        self.config: MTPConfig = config
        self.taps = config.taps
        self.num_kv_layers = config.depth
        self.max_draft_tokens = None if config.depth == 1 else config.depth
        self.shares_prefix = config.depth == 1
        self._shared = (target,)  # a tuple hides the frozen target from the module's parameters
        hidden, taps = target.hidden_size, len(config.taps)
        self.steps = nn.ModuleList(
            MTPModule(config, target, target.num_layers + k) for k in range(config.depth)
        )
        self.tap_norms = nn.ModuleList(
            nn.RMSNorm(hidden, eps=target.norm_eps) for _ in config.taps if taps > 1
        )
        self.fuse = _fuse_layer(config, hidden) if taps > 1 else nn.Identity()
        self.vocab = torch.tensor(config.draft_vocab) if config.draft_vocab else None
        weight = target.head_weight
        self._head_rows = (weight if self.vocab is None else weight[self.vocab.to(weight.device)],)

    @property
    def target(self) -> Target:
        return self._shared[0]

    def head_rows(self) -> Tensor:
        return self._head_rows[0]

    @torch.no_grad()
    def calibrate(self, features: Tensor) -> None:
        """Where the head goes on with the layer behind its last tap, `hnorm` keeps the size of that tap: the
        layer's own outputs are small or large only beside it."""
        layers = self.target.num_layers
        if self.config.first_layer(layers) != self.config.next_layer(layers):
            return
        last = features[:, -self.target.hidden_size :].float()
        size = last.pow(2).mean(-1).sqrt().median()  # the first token's is off the scale
        for module in self.steps:
            if isinstance(module, MTPModule) and isinstance(module.hnorm, nn.RMSNorm):
                module.hnorm.weight.fill_(size)

    def _state(self, features: Tensor) -> Tensor:  # [T, W] -> [T, H]
        if not len(self.tap_norms):
            return features
        parts = features.split(self.target.hidden_size, -1)
        return self.fuse(torch.cat([n(p) for n, p in zip(self.tap_norms, parts, strict=True)], -1))

    def _module(self, step: int) -> MTPModule:
        module = self.steps[min(step, len(self.steps) - 1)]
        assert isinstance(module, MTPModule)
        return module

    def _run(
        self, step: int, ids: Tensor, state: Tensor, positions: Tensor, ctx: ForwardContext
    ) -> Tensor:
        embedding = self.target.embed(ids)
        rotary = self.target.position_embeddings(embedding, positions)
        return self._module(step)(embedding, state, rotary, ctx)

    # ---- training ---------------------------------------------------------------------------------------

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        chain = answer_chain(batch, steps, supervised)
        lens = torch.diff(batch.cu_seqlens)
        row = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        position = row - torch.repeat_interleave(batch.cu_seqlens[:-1], lens)
        unroll = self._unroll_shared if self.config.depth == 1 else self._unroll_modules
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
        cache = UnrollCache(rows, _per_document(rows, batch.cu_seqlens))
        ctx = ForwardContext(backend, lens, unroll=cache)
        states = self._run(
            0, _ahead(batch.input_ids, 1), self._state(batch.features), position, ctx
        )
        first = chain[0].nonzero().squeeze(1)
        yield UnrollStep(states[first], first + 1, first + 2)
        states, cache.mode = states[rows], "extend"
        for j in range(1, len(chain)):
            keep = chain[j][rows]
            if not bool(keep.all()):
                rows, states = rows[keep], states[keep]
                cache.narrow(keep, _per_document(rows, batch.cu_seqlens))
            if len(rows):  # else every answer of the batch has ended
                ids = batch.input_ids[rows + 1 + j]
                states = self._run(j, ids, states, position[rows] + j, ctx)
            yield UnrollStep(states, rows + 1 + j, rows + 2 + j)

    def _unroll_modules(
        self,
        batch: DraftBatch,
        chain: Tensor,
        position: Tensor,
        lens: tuple[int, ...],
        backend: AttentionBackend,
    ) -> Iterator[UnrollStep]:
        ctx = ForwardContext.packed(backend, lens)
        states = self._state(batch.features)
        for j in range(min(len(chain), self.config.depth)):
            states = self._run(j, _ahead(batch.input_ids, 1 + j), states, position + j, ctx)
            rows = chain[j].nonzero().squeeze(1)
            yield UnrollStep(states[rows], rows + 1 + j, rows + 2 + j)

    # ---- serving ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def refill(self, rows: TrueRows) -> None:
        starts, outputs = self._features(rows)
        for j in range(self.config.depth):
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
            if j and self.config.depth == 1:  # the shared module goes on behind the true rows
                starts = [a + n for a, n in zip(rows.first_rows, rows.lens, strict=True)]
                starts, outputs = [a + j - 1 for a in starts], [x[-1:] for x in outputs]
            elif j:
                starts, outputs = self._behind_waiting(rows, j, starts, outputs)
            outputs = self._run_rows(rows, j, ids, starts, outputs)
            states = torch.stack([x[-1] for x in outputs])
            drawn.append(draw(F.linear(states, self.head_rows())))
            token = drawn[-1].token
            for sequence, x in zip(
                ids,
                (token if self.vocab is None else self.vocab[token.cpu()]).tolist(),
                strict=True,
            ):
                sequence.append(x)
        chains = tuple(tuple(x[len(y) :]) for x, y in zip(ids, rows.token_ids, strict=True))
        probs = [d.probs for d in drawn if d.probs is not None]
        return Proposal(chains, torch.stack(probs, 1) if probs else None, self.vocab)

    @torch.inference_mode()
    def start(self, rows: TrueRows) -> Tensor:
        outputs = self._run_rows(rows, 0, rows.token_ids, *self._features(rows))
        return torch.stack([x[-1] for x in outputs])

    @torch.inference_mode()
    def step(self, ids: Tensor, states: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        return self._run(1, ids, states, positions, ctx)

    def _features(self, rows: TrueRows) -> tuple[list[int], list[Tensor]]:
        return list(rows.first_rows), list(self._state(rows.features).split(list(rows.lens)))

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
        ahead = 1 if self.config.depth == 1 else 1 + step
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


def _ahead(input_ids: Tensor, offset: int) -> Tensor:
    """Token t + offset for each packed row; the last rows, never supervised, read token 0."""
    return torch.cat([input_ids[offset:], input_ids.new_zeros(min(offset, len(input_ids)))])


def _per_document(rows: Tensor, cu_seqlens: Tensor) -> tuple[int, ...]:
    """How many of the ascending packed `rows` lie in each document."""
    return tuple(torch.diff(torch.searchsorted(rows, cu_seqlens)).tolist())


def _fuse_layer(config: MTPConfig, hidden: int) -> nn.Linear:
    """Joins several taps into one state; starts as the identity on the last one."""
    fuse = nn.Linear(len(config.taps) * hidden, hidden, bias=False)
    with torch.no_grad():
        fuse.weight.zero_()
        fuse.weight[:, -hidden:] = torch.eye(hidden)
    return fuse

"""P-EAGLE: EAGLE-3's inputs, and all tokens of a chain guessed in one forward.

Row t begins as in EAGLE-3: its taps, joined by `fc`, are the state, Emb(x_{t+1}) stands beside it, and the first
layer reads both (see `base.beside`); more layers of the usual width follow. Its chain goes on without waiting for
a token: depth d >= 1 has one learned vector in place of the taps, `mask_hidden`, which goes through the same `fc`,
and the embedding of one mask token, and sits at position t + d. It sees the true rows up to t and its own chain up
to itself, so a proposal is one causal forward over the new true rows and the masks behind the last one (P-EAGLE,
arXiv 2602.01469, which trains 8 depths of all rows the same: train.step_decay=1, and draws which rows go how
deep: train.depth_keep=0.8). It starts as the target's own layers behind the last tap, `mask_hidden` as the median
of the features. It gives up the paper's own embedding and head, and one forward in training: the masks run depth
by depth, as many rows altogether, so that chains may end where they like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext, UnrollCache
from mtptrain.drafts.base import (
    Draw,
    Head,
    Proposal,
    TrueRows,
    UnrollStep,
    answer_chain,
    proposal_of,
    rows_from_first,
)
from mtptrain.drafts.base.beside import read_both
from mtptrain.drafts.base.continuation import ParallelConfig, fuse_layer
from mtptrain.drafts.base.step_rows import input_norm, leave_keys, states_of
from mtptrain.drafts.base.supervision import per_document, tokens_ahead
from mtptrain.layers.product import product
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch


@dataclass(frozen=True)
class PEagleConfig(ParallelConfig):
    """Choices of a P-EAGLE head."""

    embedding_scale: float = (
        0.0  # how much of the first layer's weights the embedding's half starts with
    )

    @property
    def independent_places(self) -> bool:
        return True

    def build(self, target: Target) -> PEagle:
        return PEagle(self, target)


@dataclass(frozen=True, eq=False)
class Inputs:
    """What T rows read."""

    state: Tensor  # [T, H] features or masks, joined by `fc`
    embedding: Tensor  # [T, H] of each row's next token or mask, as it is read
    positions: Tensor  # [T]


class PEagle(Head):
    """See the file's opening."""

    config: PEagleConfig
    least_unroll_steps = 2  # one alone would leave `mask_hidden` at its start

    def __init__(self, config: PEagleConfig, target: Target) -> None:
        super().__init__(config, target)
        config.require_mask_token(target.vocab_size)
        first, count = config.first_layer(target.num_layers), target.num_layers
        layers = [target.new_decoder_layer(first + i, count + i) for i in range(config.num_layers)]
        read_both(layers[0].self_attn, config.embedding_scale)
        self.fc = fuse_layer(len(config.taps), target.hidden_size)
        self.mask_hidden = nn.Parameter(torch.randn(len(config.taps) * target.hidden_size))
        self.embedding_norm = nn.RMSNorm(target.hidden_size, eps=target.norm_eps)
        self.layers = nn.ModuleList(layers)
        self.norm = target.new_norm()
        self.num_kv_layers = config.num_layers

    @torch.no_grad()
    def calibrate(self, features: Tensor) -> None:
        """A mask begins as a feature of the middle: the first token's, off the scale, moves no median."""
        self.mask_hidden.copy_(features.float().median(0).values)

    def reads_ahead(self, step: int) -> int:
        return 1

    # ---- both sides ---------------------------------------------------------------------------------------

    def _true(self, features: Tensor, ids: Tensor, positions: Tensor) -> Inputs:
        embedding = self.embedding_norm(self.target.embed(ids))
        return Inputs(self.fc(features), embedding, positions)

    def _masks(self, positions: Tensor) -> Inputs:
        token = torch.tensor([self.config.mask_token_id], device=positions.device)
        one = self._true(self.mask_hidden[None], token, positions[:0])
        n = len(positions)
        return Inputs(one.state.expand(n, -1), one.embedding.expand(n, -1), positions)

    def _run(self, rows: Inputs, contexts: Sequence[ForwardContext]) -> Tensor:
        """States [T, H] behind the first layers, as many as there are contexts."""
        x = rows.state
        rotary = self.target.position_embeddings(x, rows.positions)
        for i, ctx in enumerate(contexts):
            x = self._layer(i, x, rows.embedding, rotary, ctx)
        return x

    def _layer(
        self,
        index: int,
        x: Tensor,
        embedding: Tensor,
        rotary: tuple[Tensor, Tensor],
        ctx: ForwardContext,
    ) -> Tensor:
        layer, beside = self.layers[index], embedding[None] if index == 0 else None
        if ctx.keys_only:
            leave_keys(layer, input_norm(layer)(x), rotary, ctx, beside)
            return x
        more = {} if beside is None else {"beside": beside}
        return states_of(layer(x[None], position_embeddings=rotary, ctx=ctx, **more))

    # ---- training -----------------------------------------------------------------------------------------

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        chain = answer_chain(batch, steps, supervised)
        lens = torch.diff(batch.cu_seqlens)
        row = torch.arange(len(batch.input_ids), device=lens.device)
        position = row - torch.repeat_interleave(batch.cu_seqlens[:-1], lens)
        rows = (chain[1] if steps > 1 else chain[0] & False).nonzero().squeeze(1)
        held = per_document(rows, batch.cu_seqlens)
        caches = [UnrollCache(rows, held) for _ in self.layers]
        states = self._true_states(batch, chain[0], position, caches, backend)
        yield UnrollStep(states, (first := chain[0].nonzero().squeeze(1)) + 1, first + 2)
        for cache in caches:
            cache.mode = "extend"
        contexts = [ForwardContext(backend, tuple(lens.tolist()), unroll=c) for c in caches]
        for j in range(1, steps):
            keep = chain[j][rows]
            if not bool(keep.all()):
                rows = rows[keep]
                for cache in caches:
                    cache.narrow(keep, per_document(rows, batch.cu_seqlens))
            states = self._run(self._masks(position[rows] + j), contexts if len(rows) else ())
            yield UnrollStep(self.norm(states), rows + 1 + j, rows + 2 + j)

    def _true_states(
        self,
        batch: DraftBatch,
        supervised: Tensor,
        position: Tensor,
        caches: Sequence[UnrollCache],
        backend: AttentionBackend,
    ) -> Tensor:
        """What the supervised true rows score, [R, H]; all rows leave their keys in every layer. Those before the
        first supervised one of their document, a prompt's, leave no more than keys in the last one."""
        rows = self._true(batch.features, tokens_ahead(batch.input_ids, 1), position)
        lens = tuple(torch.diff(batch.cu_seqlens).tolist())
        x = self._run(rows, [ForwardContext(backend, lens, unroll=c) for c in caches[:-1]])
        run = rows_from_first(supervised, batch.cu_seqlens)
        for which, keys_only in ((~run, True), (run, False)):
            if not bool(which.any()):
                continue
            some = per_document(which.nonzero().squeeze(1), batch.cu_seqlens)
            ctx = ForwardContext(backend, some, unroll=caches[-1], keys_only=keys_only)
            rotary = self.target.position_embeddings(x, position[which])
            out = self._layer(len(caches) - 1, x[which], rows.embedding[which], rotary, ctx)
        return self.norm(out[supervised[run]])

    # ---- serving ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def refill(self, rows: TrueRows) -> None:
        full = rows.pages.context(rows.first_rows, rows.lens)
        last = rows.pages.keys_only(rows.first_rows, rows.lens)
        self._run(self._true_rows(rows), [full] * (len(self.layers) - 1) + [last])

    @torch.inference_mode()
    def place_logits(self, rows: TrueRows, num_draft_tokens: int) -> Tensor:
        """The true rows of each sequence and the masks behind its last one, in one forward."""
        true, masks = self._true_rows(rows), num_draft_tokens - 1
        ends = [a + n for a, n in zip(rows.first_rows, rows.lens, strict=True)]
        behind = torch.tensor(ends, device=rows.features.device)[:, None]
        behind = behind + torch.arange(masks, device=behind.device)
        lens = [n + masks for n in rows.lens]
        ctx = rows.pages.context(rows.first_rows, lens)
        joined = _interleaved(true, self._masks(behind.flatten()), rows.lens, masks)
        states = self._run(joined, [ctx] * len(self.layers)).split(lens)
        last = torch.stack([x[-num_draft_tokens:] for x in states])
        return product(self.norm(last), self.head_rows())

    @torch.inference_mode()
    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        drawn = [draw(x) for x in self.place_logits(rows, num_draft_tokens).unbind(1)]
        chains = zip(*(self.target_ids(d.token) for d in drawn), strict=True)
        return proposal_of(list(chains), drawn, self)

    def _true_rows(self, rows: TrueRows) -> Inputs:
        spans = [range(a, a + n) for a, n in zip(rows.first_rows, rows.lens, strict=True)]
        ids = [x[t + 1] for x, span in zip(rows.token_ids, spans, strict=True) for t in span]
        places, on = [t for span in spans for t in span], rows.features.device
        return self._true(
            rows.features, torch.tensor(ids, device=on), torch.tensor(places, device=on)
        )


def _interleaved(true: Inputs, masks: Inputs, lens: Sequence[int], width: int) -> Inputs:
    """Behind each sequence's true rows its `width` masks."""

    def join(a: Tensor, b: Tensor) -> Tensor:
        theirs = b.split([width] * len(lens))
        parts = zip(a.split(list(lens)), theirs, strict=True)
        return torch.cat([x for pair in parts for x in pair])

    return Inputs(
        join(true.state, masks.state),
        join(true.embedding, masks.embedding),
        join(true.positions, masks.positions),
    )

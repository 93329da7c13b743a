"""What heads share that draft a whole block in one forward: context as keys and values, a block that asks.

The taps of token t, joined by `fc` and normed, are its context: every layer makes keys and values of it and
nothing else, so a row asks nothing and is never updated (block diffusion: DFlash, arXiv 2602.06036). The block
of row t begins with Emb(x_{t+1}), its anchor, whose own features no server knows yet, and goes on with the
embedding of one token that stands for those to come. It sits at positions t + 1, t + 2, ...; each of its slots
sees the context of the rows up to t and its whole block, later slots included.
A mechanism says which slot guesses first (`first_slot`), and what the token before adds to a guess. Layers are
the target's own, those behind the last tap where there are enough; `fc` starts as that tap, normed as the first
layer norms its input. A shorter proposal asks a shorter block, as the serving engines do.
It gives up a layer's query and output maps on context rows: they run, and nobody reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext, UnrollCache
from mtptrain.drafts.base.continuation import ParallelConfig, fuse_layer
from mtptrain.drafts.base.head import Head, proposal_of
from mtptrain.drafts.base.proposal import Draw, Drawn, Proposal
from mtptrain.drafts.base.rows import TrueRows
from mtptrain.drafts.base.step_rows import input_norm, leave_keys, states_of
from mtptrain.drafts.base.supervision import UnrollStep, answer_chain
from mtptrain.layers.product import product
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch, UserError

MOST = 64  # slots of a block: a folder that claims more was made by nobody


@dataclass(frozen=True)
class BlockConfig(ParallelConfig):
    """What a block head chooses."""

    block_size: int = 5  # slots, the anchor's included

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.block_size <= MOST:
            raise UserError(f"draft.block_size={self.block_size} must lie in 2 to {MOST}")


class BlockHead(Head):
    """See the file's opening."""

    first_slot: ClassVar[int]  # the slot that guesses the token behind the anchor
    concat_order = ("feature",)  # of a context row; a block's rows read an embedding and no feature
    position_rule = "the context of row t sits at position t, its block from t + 1 on"

    def __init__(self, config: BlockConfig, target: Target) -> None:
        super().__init__(config, target)
        config.require_mask_token(target.vocab_size)
        first, count = config.first_layer(target.num_layers), target.num_layers
        layers = [target.new_decoder_layer(first + i, count + i) for i in range(config.num_layers)]
        self.fc = fuse_layer(len(config.taps), target.hidden_size)
        self.context_norm = copy.deepcopy(input_norm(layers[0]))
        self.layers = nn.ModuleList(layers)
        self.norm = target.new_norm()
        self.num_kv_layers = config.num_layers
        self.max_draft_tokens = config.block_size - self.first_slot

    # ---- what a mechanism adds ----------------------------------------------------------------------------

    def step_of(self, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor | None]:
        """What `head_rows` score of the states [..., H] behind the tokens `previous` [...], and, where it says so,
        the logit of the chance that each next token holds, [...]."""
        return states, None

    def correction(self, previous: Tensor) -> Tensor | None:
        """What the tokens before, [B], add to the logits of their next ones, [B, Vd]; None: nothing."""
        return None

    # ---- both sides ---------------------------------------------------------------------------------------

    def _write(
        self, features: Tensor, positions: Tensor, contexts: Sequence[ForwardContext]
    ) -> None:
        """Leaves every layer's keys and values of T context rows; one context a layer, all `keys_only`."""
        context = self.context_norm(self.fc(features))
        rotary = self.target.position_embeddings(context, positions)
        for layer, ctx in zip(self.layers, contexts, strict=True):
            leave_keys(layer, context, rotary, ctx)

    def _read(
        self, anchors: Tensor, positions: Tensor, steps: int, contexts: Sequence[ForwardContext]
    ) -> Tensor:
        """The states that guess the next `steps` tokens behind each anchor, [R, steps, H]; its tokens [R] and
        their positions [R]."""
        width = steps + self.first_slot
        ids = anchors.new_full((len(anchors), width), self.config.mask_token_id)
        ids[:, 0] = anchors
        at = positions[:, None] + torch.arange(width, device=positions.device)
        x = self.target.embed(ids.flatten())
        rotary = self.target.position_embeddings(x, at.flatten())
        for layer, ctx in zip(self.layers if len(anchors) else (), contexts, strict=False):
            x = states_of(layer(x[None], position_embeddings=rotary, ctx=ctx))
        return self.norm(x).unflatten(0, (-1, width))[:, self.first_slot :]

    def _everything(self, steps: int) -> Tensor:
        """What each slot of a block sees of it."""
        width = steps + self.first_slot
        return torch.ones(width, width, dtype=torch.bool)

    # ---- training -----------------------------------------------------------------------------------------

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        most = self.max_draft_tokens
        assert most is not None
        chain = answer_chain(batch, min(steps, most), supervised)
        rows = chain[0].nonzero().squeeze(1)
        states = self._train_blocks(batch, rows, len(chain), backend)
        for j, alive in enumerate(chain):
            mine = alive[rows]
            previous = rows[mine] + 1 + j
            scored, confidence = self.step_of(states[mine, j], batch.input_ids[previous])
            yield UnrollStep(scored, previous, previous + 1, confidence)

    def _train_blocks(
        self, batch: DraftBatch, rows: Tensor, steps: int, backend: AttentionBackend
    ) -> Tensor:
        """States of the blocks of the packed `rows` [R] over the context of all rows, [R, steps, H]."""
        lens = torch.diff(batch.cu_seqlens)
        document = torch.repeat_interleave(lens)
        position = torch.arange(len(document), device=lens.device) - batch.cu_seqlens[document]
        per_document = tuple(torch.bincount(document[rows], minlength=len(lens)).tolist())
        caches = [
            UnrollCache(rows, per_document, seen=self._everything(steps)) for _ in self.layers
        ]
        lengths = tuple(lens.tolist())
        writing = [ForwardContext(backend, lengths, unroll=c, keys_only=True) for c in caches]
        self._write(batch.features, position, writing)
        for cache in caches:
            cache.mode = "extend"
        reading = [ForwardContext(backend, lengths, unroll=c) for c in caches]
        return self._read(batch.input_ids[rows + 1], position[rows] + 1, steps, reading)

    # ---- serving ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def refill(self, rows: TrueRows) -> None:
        places = [a + i for a, n in zip(rows.first_rows, rows.lens, strict=True) for i in range(n)]
        ctx = rows.pages.keys_only(rows.first_rows, rows.lens)
        positions = torch.tensor(places, device=rows.features.device)
        self._write(rows.features, positions, [ctx] * len(self.layers))

    def guess(self, rows: TrueRows, num_draft_tokens: int) -> tuple[Tensor, Tensor]:
        """Refills pages with the true rows and runs one block each: the states that guess its tokens, [B, D, H],
        and the newest tokens, which they stand behind, [B]."""
        self.refill(rows)
        on = rows.features.device
        behind = [a + n for a, n in zip(rows.first_rows, rows.lens, strict=True)]
        newest = torch.tensor([x[a] for x, a in zip(rows.token_ids, behind, strict=True)]).to(on)
        tails = [self._everything(num_draft_tokens)] * len(behind)
        ctx = rows.pages.context(behind, [len(x) for x in tails], tails)
        where, contexts = torch.tensor(behind, device=on), [ctx] * len(self.layers)
        return self._read(newest, where, num_draft_tokens, contexts), newest

    @torch.inference_mode()
    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        states, newest = self.guess(rows, num_draft_tokens)
        drawn, said = list[Drawn](), [newest]
        for logits in product(states, self.frozen_rows()).unbind(1):
            added = self.correction(said[-1])
            drawn.append(draw(logits if added is None else logits + added))
            said.append(torch.tensor(self.target_ids(drawn[-1].token), device=newest.device))
        proposal = proposal_of(torch.stack(said[1:], 1).tolist(), drawn, self)
        _, sure = self.step_of(states, torch.stack(said[:-1], 1))
        return proposal if sure is None else replace(proposal, confidence=sure.float().sigmoid())

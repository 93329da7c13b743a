"""Draft model: a small causal language model of its own proposes, as in the first papers of speculative decoding.

The classic pair: of one family and one tokenizer, a model of 1B parameters drafts for one of 70B (arXiv 2211.17192,
2302.01318). It reads tokens and nothing of the target: its own embedding, layers and head, and keys and values of
its own shape in the pages that target and draft share. Row t of its pages is token t. A proposal first runs what
it has not read yet, up to the newest token, then one drafted token after another, each drawn from the law of the
logits behind the one before. It is loaded as targets are, from any folder or hub id, and must know what the target
says by the same numbers (`same_tokens`); its vocabulary may be longer or shorter. Or it is the target's own first
`num_layers` layers, where there is no small model.

Training distils the target's answers into all of it (DistillSpec, arXiv 2310.08461). It reads no features, so one
plain forward has every unrolled step: what step j of row t gives is what the model says behind token t + 1 + j,
and the first step alone teaches all rows (`train.unroll_steps=1`). A model that has learnt already asks for small
steps (`train.learning_rate=3e-4`). It gives up a folder that stands alone: what was trained is laid over the model
that `path` names, whose shape is read there.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.drafts.base import (
    Draft,
    Draw,
    Drawn,
    Head,
    HeadConfig,
    Proposal,
    TrueRows,
    UnrollStep,
    answer_chain,
    proposal_of,
    trained_copy,
)
from mtptrain.drafts.base.same_tokens import require_same_tokens
from mtptrain.layers.gated_mlp import fuse_gated_mlps
from mtptrain.layers.packed_linear import pack_linears
from mtptrain.layers.product import product
from mtptrain.run import cache_dir
from mtptrain.targets.base import Target
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.targets.gguf import resolve
from mtptrain.types import DraftBatch, UserError


@dataclass(frozen=True)
class DraftModelConfig(HeadConfig):
    """Which model drafts, a folder, a hub id or a package, as for a target; and how much of it."""

    path: str = ""  # empty: the target itself
    num_layers: int | None = None  # so many of its first layers; None: all
    distill: bool = True  # False: it drafts as it is

    def trained(self) -> HeadConfig | None:
        return self if self.distill else None

    @cached_property
    def folder(self) -> Path:
        """Raises UserError where there is no such model."""
        try:
            return resolve(self.path, cache_dir(), require_chat_template=False)
        except UserError as error:
            raise _of_the_draft(error) from None

    def weights_key(self) -> str:
        return target_fingerprint(self.folder) if self.path else ""

    @property
    def grows_trees(self) -> bool:
        return True

    def build(self, target: Target) -> DraftModel:
        return DraftModel(self, target, self._model(target))

    def around(self, trained: Draft | None, target: Target) -> Draft:
        draft = self.build(target) if trained is None else trained
        assert isinstance(draft, DraftModel)
        return draft.laid_out(target.head_weight.dtype)

    def _model(self, target: Target) -> Target:
        """What it starts from. Raises UserError where that is none, or none of the target's tokens."""
        if not self.path:
            if self.num_layers is None:
                raise UserError(
                    "draft=draft_model needs draft.path=, the folder or hub id of a small causal LM of the target's "
                    "family, or draft.num_layers=, so many of the target's own first layers"
                )
            return target
        dtype, on = str(target.head_weight.dtype).removeprefix("torch."), str(target.device)
        try:
            if on == "meta":
                model = Target.outline(self.folder)
            else:
                model = Target.load(self.folder, dtype, on)
        except UserError as error:
            raise _of_the_draft(error) from None
        require_same_tokens(self.path, self.folder, target)
        return model


class DraftModel(Head):
    """See the file's opening."""

    concat_order = ("token",)
    reads_embedding = False  # but its own
    position_rule = "row t is token t and sits at position t"
    says_features = False
    start_rows = 1  # the newest token's

    def __init__(self, config: DraftModelConfig, target: Target, model: Target) -> None:
        """`model` is copied: the part of it that drafts."""
        known = len(model.head_weight)
        vocab = _sayable(config.draft_vocab, known, target.vocab_size)
        super().__init__(replace(config, draft_vocab=vocab), target)
        self.decoder: Any = _first_layers(model, config.num_layers)
        if model.head_weight is not model.embedding.weight:
            self.lm_head = trained_copy(self._own_rows(model.head_weight))
        if config.distill:
            self.float()
        self.train(config.distill).requires_grad_(config.distill)
        self.num_kv_layers, self.kv_shape = len(self.decoder.layers), model.kv_shape()
        for i, layer in enumerate(self.decoder.layers):
            layer.self_attn.layer_idx = target.num_layers + i

    def laid_out(self, dtype: torch.dtype) -> DraftModel:
        """Frozen, in the target's dtype, and with its matrices laid out for inference, as a target's are."""
        for p in self.eval().requires_grad_(False).parameters():
            p.data = p.data.to(dtype)  # parameters only: RoPE's frequencies stay in fp32
        pack_linears(self.decoder.layers)
        fuse_gated_mlps(self.decoder.layers)
        return self

    def own_head(self) -> Tensor:
        if self.lm_head is not None:
            return self.lm_head.weight
        return self._own_rows(self._embedding.weight)  # tied

    def _own_rows(self, weight: Tensor) -> Tensor:
        """Of all its rows those of the target's tokens that it says."""
        if self.vocab is None:
            return weight[: len(self.frozen_rows())]
        return weight[self.vocab.to(weight.device)]

    def tables(self) -> list[Tensor]:
        head = [] if self.lm_head is None else [self.lm_head.weight]
        return [self._embedding.weight, *head]

    @property
    def _embedding(self) -> Any:
        return self.decoder.get_input_embeddings()

    def _states(self, ids: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """What is said behind each of T packed tokens, [T, H]. A token that it has no row for is read as its last."""
        known = self._embedding.num_embeddings
        out = self.decoder(
            input_ids=ids.clamp(max=known - 1)[None],
            position_ids=positions[None],
            use_cache=False,
            ctx=ctx,
        )
        return out.last_hidden_state[0]

    # ---- training ---------------------------------------------------------------------------------------

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        lens = torch.diff(batch.cu_seqlens)
        row = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
        position = row - torch.repeat_interleave(batch.cu_seqlens[:-1], lens)
        ctx = ForwardContext.packed(backend, lens.tolist())
        states = self._states(batch.input_ids, position, ctx)
        for j, drafts in enumerate(answer_chain(batch, steps, supervised)):
            newest = drafts.nonzero().squeeze(1) + 1 + j  # the last token that each row has read
            yield UnrollStep(states[newest], newest, newest + 1)

    # ---- serving ----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def refill(self, rows: TrueRows) -> None:
        spans = zip(rows.token_ids, rows.first_rows, rows.lens, strict=True)
        self._run(rows, rows.first_rows, [x[a : a + n] for x, a, n in spans])

    @torch.inference_mode()
    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        firsts, unread, head = rows.first_rows, _unread(rows), self.own_head()
        drawn, said = list[Drawn](), list[list[int]]()
        for _ in range(num_draft_tokens):
            drawn.append(draw(product(self._run(rows, firsts, unread), head)))
            said.append(self.target_ids(drawn[-1].token))
            firsts = [a + len(x) for a, x in zip(firsts, unread, strict=True)]
            unread = [[token] for token in said[-1]]
        return proposal_of(list(zip(*said, strict=True)), drawn, self)

    @torch.inference_mode()
    def start(self, rows: TrueRows) -> Tensor:
        return self._run(rows, rows.first_rows, _unread(rows))

    @torch.inference_mode()
    def step(self, ids: Tensor, states: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        return self._states(ids, positions, ctx)

    def _run(self, rows: TrueRows, firsts: Sequence[int], ids: Sequence[Sequence[int]]) -> Tensor:
        """Reads tokens of each sequence from row `firsts` on; the state behind each one's last, [B, H]."""
        lens, on = [len(x) for x in ids], self._embedding.weight.device
        places = [a + i for a, n in zip(firsts, lens, strict=True) for i in range(n)]
        states = self._states(
            torch.tensor([token for x in ids for token in x], device=on),
            torch.tensor(places, device=on),
            rows.pages.context(firsts, lens),
        )
        return states[torch.tensor(lens, device=on).cumsum(0) - 1]


def _unread(rows: TrueRows) -> list[list[int]]:
    """Of each sequence the tokens of its true rows, and the newest one."""
    spans = zip(rows.token_ids, rows.first_rows, rows.lens, strict=True)
    return [x[a : a + n + 1] for x, a, n in spans]


def _first_layers(model: Target, count: int | None) -> Any:
    """A copy of the model's decoder with so many of its layers, all where that is None; others are not copied."""
    layers = model.decoder.layers
    if count is not None and not 1 <= count <= len(layers):
        raise UserError(
            f"draft.num_layers={count} must lie in 1 to {len(layers)}, its model's layers"
        )
    some = nn.ModuleList(copy.deepcopy(layer) for layer in layers[:count])
    return copy.deepcopy(model.decoder, {id(layers): some})


def _of_the_draft(error: UserError) -> UserError:
    """A target's fault as that of the draft, which is loaded the same way."""
    return UserError(str(error).replace("target.path", "draft.path"))


def _sayable(ids: Sequence[int], known: int, vocab_size: int) -> tuple[int, ...]:
    """The target ids that it says, of those asked for or of all: what it has no row for is left out. Empty: all."""
    kept = tuple(i for i in ids or range(vocab_size) if i < known)
    return () if len(kept) == vocab_size else kept

"""Draft model: a small causal language model of its own proposes, as in the first papers of speculative decoding.

The classic pair: of one family and one tokenizer, a model of 1B parameters drafts for one of 70B (arXiv 2211.17192,
2302.01318). It reads tokens and nothing of the target: its own embedding, layers and head, and keys and values of
its own shape in the pages that target and draft share. Row t of its pages is token t. A proposal first runs what
it has not read yet, up to the newest token, then one drafted token after another, each drawn from the law of the
logits behind the one before. It is loaded as targets are, from any folder or hub id, and must know the target's
tokens by the same numbers. It gives up training (heads cost less, and are trained here), and token trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from mtptrain.drafts.base import Draft, DraftConfig, Draw, Drawn, Proposal, TrueRows, proposal_of
from mtptrain.run import cache_dir
from mtptrain.targets.base import Target
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.targets.gguf import resolve
from mtptrain.types import UserError


@dataclass(frozen=True)
class DraftModelConfig(DraftConfig):
    """Which model drafts: a folder, a hub id or a package, as for a target."""

    path: str = ""

    @cached_property
    def folder(self) -> Path:
        """Raises UserError where there is no such model."""
        if not self.path:
            raise UserError(
                "draft=draft_model needs draft.path=, the folder or hub id of a small causal LM of the target's family"
            )
        try:
            return resolve(self.path, cache_dir(), require_chat_template=False)
        except UserError as error:
            raise _of_the_draft(error) from None

    def weights_key(self) -> str:
        return target_fingerprint(self.folder)

    def build(self, target: Target) -> DraftModel:
        return DraftModel(self, target)


class DraftModel(Draft):
    """See the file's opening."""

    concat_order = ("embedding",)
    position_rule = "row t is token t and sits at position t"

    def __init__(self, config: DraftModelConfig, target: Target) -> None:
        super().__init__()
        self.config: DraftModelConfig = config
        dtype = str(target.head_weight.dtype).removeprefix("torch.")
        try:
            model = Target.load(config.folder, dtype, str(target.device))
        except UserError as error:
            raise _of_the_draft(error) from None
        if model.vocab_size != target.vocab_size:
            raise UserError(
                f"draft.path={config.path} has a vocabulary of {model.vocab_size} and the target one of "
                f"{target.vocab_size}; use a model of the target's family"
            )
        _require_same_tokens(config, target)
        self._own = (model,)  # a tuple hides the frozen network from the module's parameters
        self.num_kv_layers, self.kv_shape = model.num_layers, model.kv_shape()
        for i, layer in enumerate(model.decoder.layers):
            layer.self_attn.layer_idx = target.num_layers + i

    @property
    def model(self) -> Target:
        return self._own[0]

    @torch.inference_mode()
    def refill(self, rows: TrueRows) -> None:
        spans = zip(rows.token_ids, rows.first_rows, rows.lens, strict=True)
        self._run(rows, rows.first_rows, [x[a : a + n] for x, a, n in spans])

    @torch.inference_mode()
    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        ends = [a + n + 1 for a, n in zip(rows.first_rows, rows.lens, strict=True)]
        firsts = rows.first_rows
        spans = zip(rows.token_ids, firsts, ends, strict=True)
        unread = [x[a:end] for x, a, end in spans]  # the newest token with them
        drawn, said = list[Drawn](), list[list[int]]()
        for _ in range(num_draft_tokens):
            drawn.append(draw(self.model.logits(self._run(rows, firsts, unread))))
            said.append(drawn[-1].token.tolist())
            firsts = [a + len(x) for a, x in zip(firsts, unread, strict=True)]
            unread = [[token] for token in said[-1]]
        return proposal_of(list(zip(*said, strict=True)), drawn, self)

    def _run(self, rows: TrueRows, firsts: Sequence[int], ids: Sequence[Sequence[int]]) -> Tensor:
        """Reads tokens of each sequence from row `firsts` on; the state behind each one's last, [B, H]."""
        lens, on = [len(x) for x in ids], self.model.device
        places = [a + i for a, n in zip(firsts, lens, strict=True) for i in range(n)]
        out = self.model.forward(
            torch.tensor([token for x in ids for token in x], device=on),
            torch.tensor(places, device=on),
            rows.pages.context(firsts, lens),
            (),
        )
        return out.final[torch.tensor(lens, device=on).cumsum(0) - 1]


def _of_the_draft(error: UserError) -> UserError:
    """A target's fault as that of the draft, which is loaded the same way."""
    return UserError(str(error).replace("target.path", "draft.path"))


def _require_same_tokens(config: DraftModelConfig, target: Target) -> None:
    """Raises UserError where a token of one tokenizer has another number, or none, in the other; a target that is
    in memory has none to compare."""
    if not Path(target.path).is_dir():
        return
    mine, theirs = _tokens(config.folder), _tokens(Path(target.path))
    if mine == theirs:
        return
    token = min(k for k in {**mine, **theirs} if mine.get(k) != theirs.get(k))
    raise UserError(
        f"draft.path={config.path} has another tokenizer than the target: {token[:40]!r} is token {mine.get(token)} "
        f"there and {theirs.get(token)} here; use a model of the target's family"
    )


def _tokens(folder: Path) -> dict[str, int]:
    try:
        return AutoTokenizer.from_pretrained(folder).get_vocab()
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded ({reason}); draft=draft_model needs those of both models"
        ) from None

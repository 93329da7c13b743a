"""Values that cross rooms, and the one legend of shape letters.

Every value handed from one room to another is a frozen dataclass defined here, so that a reader finds
each contract once. Nothing here computes; a type that only one room uses stays in that room.

Shape letters, trailing tensors as comments: B sequences, T tokens (packed, all sequences of a batch in
one row), D draft tokens, H hidden, V vocabulary, L taps, N query heads, G query heads per KV head,
R supervised rows, W feature width (the widths of all taps together), P pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor


class UserError(ValueError):
    """A fault of the user's input: one line that says what is wrong, where, and what to do (exit code 2)."""


Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class ToolCall:
    """A call that an assistant turn makes."""

    name: str
    arguments: str  # JSON text of an object
    id: str | None = None


@dataclass(frozen=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str
    reasoning: str | None = None  # what an assistant turn thought before its content
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None  # which call a tool turn answers
    name: str | None = None  # of the tool that answers


@dataclass(frozen=True)
class Conversation:
    """One row of a prompts file. Assistant turns that the target is to write are absent."""

    id: str
    category: str
    turns: tuple[Turn, ...]
    tools: str | None = None  # JSON text of the list of tools that the template is given


@dataclass(frozen=True)
class Sample:
    """A tokenised conversation with its answer, ready to be captured or trained on."""

    id: str
    category: str
    input_ids: Tensor  # [T] int64
    loss_mask: Tensor  # [T] bool, True where the target itself would generate the token


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; identical for target and draft. temperature 0 is greedy.

    `block_verify`: drafted tokens are accepted as a block rather than one by one, see `runtime.verify`; it
    changes how many are accepted and not the law of what is said. `typical_threshold` above 0 accepts what is
    typical instead, see `runtime.typical`, and does change it.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    max_new_tokens: int = 96
    seed: int = 0
    ignore_eos: bool = False
    min_p: float = 0.0  # 0 keeps all; else a token needs this share of the best one's probability
    block_verify: bool = False
    typical_threshold: float = 0.0  # 0: off
    typical_alpha: float = 0.3

    @property
    def lossless(self) -> bool:
        """Whether what is said follows the target's law, whatever is drafted."""
        return self.temperature == 0 or self.typical_threshold == 0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(f"temperature={self.temperature} must not be negative; 0 is greedy")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie above 0 and at most at 1")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} must lie in 0 to 1")
        if not (0 <= self.typical_threshold <= 1 and 0 < self.typical_alpha < 1):
            raise UserError(
                f"typical_threshold={self.typical_threshold} must lie in 0 to 1 and "
                f"typical_alpha={self.typical_alpha} between 0 and 1"
            )
        if self.typical_threshold and self.block_verify:
            raise UserError(
                "block_verify=true and typical_threshold above 0 are two ways to accept tokens; choose one"
            )
        if self.top_k < 0 or self.max_new_tokens < 1:
            raise UserError(
                f"top_k={self.top_k} must be at least 0 and max_new_tokens={self.max_new_tokens} at least 1"
            )


@dataclass(frozen=True)
class Request:
    """One prompt for the runtime."""

    id: str
    category: str
    prompt_ids: tuple[int, ...]


@dataclass(frozen=True)
class VerifyPass:
    """One target forward over a proposal: `accepted` of `proposed` drafted tokens (of a token tree: of all its
    nodes) held; it emitted accepted + 1 tokens, of which `emitted` were kept (fewer only where the answer ended
    inside the pass)."""

    proposed: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class Completion:
    """What the runtime returns for a Request.

    `passes` holds the verify passes in order (decode steps without a proposal are not among them);
    `decode_steps` counts every decode step after prefill, with or without a proposal; the first output
    token comes from prefill and belongs to no decode step.
    """

    request: Request
    output_ids: tuple[int, ...]
    passes: tuple[VerifyPass, ...]
    decode_steps: int
    finish_reason: Literal["eos", "length"]
    features: Tensor | None = None  # [T, W] of prompt + output, where the caller asked for them


@dataclass(frozen=True)
class DraftBatch:
    """Packed documents for training a draft. Rows are tokens; documents never see each other."""

    input_ids: Tensor  # [T] int64
    features: Tensor  # [T, W] float32, the taps in the order of the draft's contract
    final: Tensor  # [T, H] float32, output of the target's final norm (the teacher's state)
    loss_mask: Tensor  # [T] bool
    cu_seqlens: Tensor  # [B + 1] int64, document borders
    depths: Tensor | None = None  # [T] int64, how many tokens each row drafts; None: all it can

    def to(self, device: torch.device) -> DraftBatch:
        held = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return replace(self, **{name: x.to(device) for name, x in held.items() if x is not None})

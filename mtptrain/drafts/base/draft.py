"""What every draft is to the trainer and to the runtime; see the package's opening."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.drafts.base.proposal import Draw, Proposal
from mtptrain.drafts.base.rows import TrueRows
from mtptrain.drafts.base.supervision import UnrollStep, answer_chain
from mtptrain.targets.base import Target
from mtptrain.types import Completion, DraftBatch


class DraftConfig(ABC):
    """A frozen dataclass of a mechanism's choices, built by Hydra from the recipe of the same name."""

    @property
    def kind(self) -> str:
        """The mechanism, as reports name it: its file on the shelf."""
        return type(self).__module__.rpartition(".")[2]

    def trained(self) -> DraftConfig | None:
        """What of the draft is trained, as it is trained alone; None: nothing."""
        return None

    def around(self, trained: Draft | None, target: Target) -> Draft:
        """The draft that serves, around its trained part."""
        return self.build(target) if trained is None else trained

    def weights_key(self) -> str:
        """Names the weights that it reads from elsewhere; empty: none. A report is made anew where they change."""
        return ""

    @property
    def grows_trees(self) -> bool:
        """Whether its draft has `start` and `step`, from which the runtime grows token trees."""
        return False

    @property
    def independent_places(self) -> bool:
        """Whether its draft has `place_logits`: the law of a drafted place does not depend on what is drafted
        before it, and the runtime finds the best token tree at once."""
        return False

    @abstractmethod
    def build(self, target: Target) -> Draft:
        """A draft for this target; weights start as the mechanism prescribes."""


class Draft(nn.Module):
    """Base of every draft. `taps` names the features it reads, `num_kv_layers` its layers in the pool."""

    config: Any  # the DraftConfig it was built from; each mechanism has its own class
    taps: tuple[str, ...] = ()
    num_kv_layers: int = 0
    kv_shape: tuple[int, int] | None = (
        None  # (KV heads, head dimension) of these; None: the target's
    )
    start_rows: int = (
        0  # rows of its own that `start` leaves behind the true ones, where drafted ones follow
    )
    max_draft_tokens: int | None = None  # None: any length
    least_unroll_steps: int = 1  # fewer in training would leave a part of it at its start
    shares_prefix: bool = (
        True  # pages of a common prefix suffice; False where memories matter as well
    )
    vocab: Tensor | None = None  # [Vd] target ids, ascending
    concat_order: tuple[str, ...] = ("embedding", "feature")  # what a row reads, side by side
    reads_embedding: bool = True  # of the target, anywhere
    position_rule: str = "row t at unrolled step j sits at position t + j"
    says_features: bool = True  # its states are like the target's, and may be held against them
    says_confidence: bool = (
        False  # its unrolled steps and proposals guess how likely each token holds
    )

    def unroll(
        self, batch: DraftBatch, steps: int, supervised: Tensor, backend: AttentionBackend
    ) -> Iterator[UnrollStep]:
        """Yields each unrolled step's supervised rows (design §5.1).

        `supervised` [T] is m at the first step; later steps are trained on answer rows only
        (`batch.loss_mask`), which are the rows that a server unrolls.
        """
        raise NotImplementedError(f"{type(self).__name__} is not trained")

    def label_rows(self, batch: DraftBatch, steps: int, supervised: Tensor) -> list[Tensor]:
        """The `label_rows` of each step that `unroll` would yield, found without running anything.

        Those of an autoregressive head; `batch` needs no features.
        """
        chain = answer_chain(batch, min(steps, self.max_draft_tokens or steps), supervised)
        return [rows.nonzero().squeeze(1) + 2 + j for j, rows in enumerate(chain)]

    def reads_ahead(self, step: int) -> int:
        """How many tokens behind its own feature a row has read at an unrolled step; 0: nothing but features.

        That of an autoregressive head, which reads every token before the one it drafts.
        """
        return 1 + step

    def calibrate(self, features: Tensor) -> None:
        """Adapts the untrained start to some real features [R, W]; called once, before training."""

    def refill(self, rows: TrueRows) -> None:
        """Fills pages during prefill, for rows that do not draft yet."""

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        """Refills pages with the true rows, then drafts from each sequence's last row."""
        raise NotImplementedError

    def start(self, rows: TrueRows) -> Tensor:
        """Refills pages with the true rows; the state of each sequence's last one, [B, H]."""
        raise NotImplementedError

    def step(self, ids: Tensor, states: Tensor, positions: Tensor, ctx: ForwardContext) -> Tensor:
        """One drafted row each: reads token `ids` [T] behind the state that proposed it; states [T, H] to [T, H]."""
        raise NotImplementedError

    def place_logits(self, rows: TrueRows, num_draft_tokens: int) -> Tensor:
        """Refills pages with the true rows; the logits of each drafted place, [B, D, Vd], whatever is drafted before
        it: those that `propose` draws from."""
        raise NotImplementedError

    def scored(self, state: Tensor) -> Tensor:
        """What the rows of `head_rows` score of a state of `start` or `step`, [..., H] to [..., H]."""
        return state

    def finish(self, completion: Completion, common: dict[str, Any]) -> None:
        """Hears of a sequence that has ended; `common` is that of `TrueRows`.

        What is learnt here may change later proposals, and so which tokens are drafted, with the order in
        which sequences end; greedy output and the law of sampled output stay the target's.
        """

    def frozen_rows(self) -> Tensor:
        """[Vd, H] the target's rows of `lm_head` for the tokens that this draft can say."""
        raise NotImplementedError

    def own_head(self) -> Tensor | None:
        """[Vd, H] trained rows in place of the frozen ones, of the width of its own states; None: it scores with the
        target's."""
        return None

    def beside_head(self) -> Tensor | None:
        """[Vd, r] trained columns beside those rows, which score the last r entries of states of H + r; None:
        states have H."""
        return None

    def head_rows(self) -> Tensor:
        """[Vd, W] the rows that score this draft's states."""
        own, beside = self.own_head(), self.beside_head()
        rows = self.frozen_rows() if own is None else own
        return rows if beside is None else torch.cat([rows, beside], -1)

    def tables(self) -> list[Tensor]:
        """Trained tensors with a row for each token: to an optimiser they are no matrices."""
        own = self.own_head()
        return [] if own is None else [own]

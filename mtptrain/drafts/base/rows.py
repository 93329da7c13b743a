"""What a draft is given at serving: rows with true features, over pages that it shares with the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from mtptrain.attention_backends.base import ForwardContext


class Pages(Protocol):
    """The draft's layers of the shared KV pool, for the sequences of one step."""

    def context(
        self, first_rows: Sequence[int], lens: Sequence[int], tails: Sequence[Tensor] | None = None
    ) -> ForwardContext:
        """A context for rows first..first + len - 1 of each sequence; what lies above is overwritten.
        `tails` says what each row of a token tree sees, as in `PagedBatch`."""
        ...

    def keys_only(self, first_rows: Sequence[int], lens: Sequence[int]) -> ForwardContext:
        """The same for rows that leave their keys and values and ask nothing."""
        ...


@dataclass(frozen=True, eq=False)
class SomePages:
    """The pages of `places` among the `count` sequences of a step."""

    pages: Pages
    places: tuple[int, ...]
    count: int

    def context(
        self, first_rows: Sequence[int], lens: Sequence[int], tails: Sequence[Tensor] | None = None
    ) -> ForwardContext:
        return self.pages.context(*self._among_all(first_rows, lens), tails)

    def keys_only(self, first_rows: Sequence[int], lens: Sequence[int]) -> ForwardContext:
        return self.pages.keys_only(*self._among_all(first_rows, lens))

    def _among_all(
        self, first_rows: Sequence[int], lens: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        first, rows = [0] * self.count, [0] * self.count
        for place, a, n in zip(self.places, first_rows, lens, strict=True):
            first[place], rows[place] = a, n
        return first, rows


@dataclass(frozen=True, eq=False)
class TrueRows:
    """Rows whose true target features are known, for B sequences packed one after another.

    Row t of a sequence stands for token t: it holds the features of token t, and its next token
    `token_ids[t + 1]` is known. After a verify pass these are the accepted rows; the last one drafts.
    """

    token_ids: tuple[list[int], ...]  # per sequence, every token so far
    first_rows: tuple[int, ...]
    lens: tuple[int, ...]
    features: Tensor  # [T, W]
    pages: Pages
    memories: tuple[dict[str, Any], ...]  # per sequence, what the draft itself keeps between steps
    common: dict[str, Any] = field(default_factory=dict)  # kept over all sequences of one engine

    def some(self, places: Sequence[int]) -> TrueRows:
        """The rows of some of the sequences, ascending."""
        parts = self.features.split(list(self.lens))
        return replace(
            self,
            token_ids=tuple(self.token_ids[i] for i in places),
            first_rows=tuple(self.first_rows[i] for i in places),
            lens=tuple(self.lens[i] for i in places),
            features=torch.cat([self.features[:0], *(parts[i] for i in places)]),
            pages=SomePages(self.pages, tuple(places), len(self.lens)),
            memories=tuple(self.memories[i] for i in places),
        )

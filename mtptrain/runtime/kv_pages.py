"""One pool of KV pages for target and draft, and the book that says whose each page is.

A page holds `page_size` rows of every layer, the draft's layers included, so one page table per sequence
serves both. Full pages of a prompt are published under their tokens and shared by later prompts that begin
the same way; the key holds one token more than the page, because the draft's row t has read token t + 1.
Low pages are handed out first, which keeps the pool dense for attention. It gives up preemption: the
scheduler reserves the pages that a sequence can need at most.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import count

import numpy as np
import torch
from torch import Tensor

Key = tuple[int, tuple[int, ...]]  # parent node, tokens of the page and one more


class KVPool:
    """Keys and values of every layer, [P, heads, page_size, head_dim] each."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        shapes: Sequence[tuple[int, int]],  # (KV heads, head dimension) per layer
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        def layer(heads: int, dim: int) -> Tensor:
            return _zeros((num_pages, heads, page_size, dim), dtype, torch.device(device))

        self.page_size = page_size
        self.keys = [layer(*shape) for shape in shapes]
        self.values = [layer(*shape) for shape in shapes]

    def move(self, source: Tensor, goal: Tensor, num_layers: int) -> None:
        """Copies rows between slots (page * page_size + offset, [n] each) in the first layers; all are read
        before any is written."""
        size = self.page_size
        for pool in (*self.keys[:num_layers], *self.values[:num_layers]):
            pool[goal // size, :, goal % size] = pool[source // size, :, source % size]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros. On a CPU the system clears each piece of memory when it is first touched, so the part of a pool
    that no sequence needs costs nothing; torch.zeros would write all of it at the start."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return (
        torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
        .view(dtype)
        .view(shape)
    )


class PageBook:
    """Which pages are free, shared or published. Pages are integers; no tensor is touched here."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self._free = list(range(num_pages))  # ascending, hence a heap
        self._users = [0] * num_pages
        self._node_of: dict[int, tuple[Key, int]] = {}  # published page -> its key and node
        self._page_of: dict[Key, int] = {}
        self._idle: dict[int, None] = {}  # published, unused, oldest first
        self._next_node = count(1)  # 0 is the root

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    def allocate(self, num_pages: int) -> list[int]:
        """Pages for one sequence; the caller has made sure of `available`."""
        return [self._take() for _ in range(num_pages)]

    def _take(self) -> int:
        if not self._free:
            self._evict(next(iter(self._idle)))
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def _evict(self, page: int) -> None:
        key, _ = self._node_of.pop(page)
        del self._page_of[key], self._idle[page]
        heapq.heappush(self._free, page)

    def release(self, pages: Sequence[int]) -> None:
        """Pages of one sequence, in its order; the deepest is idle first, for without its parents it is lost."""
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                if page in self._node_of:
                    self._idle[page] = None
                else:
                    heapq.heappush(self._free, page)

    def shared_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Published pages that hold the beginning of this prompt; the caller becomes a user of each."""
        pages, node = [], 0
        for key_tokens in self._page_keys(token_ids):
            page = self._page_of.get((node, key_tokens))
            if page is None:
                break
            self._users[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
            node = self._node_of[page][1]
        return pages

    def publish(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[int]:
        """Offers the full pages of a computed prompt to later ones; returns those that are new."""
        new, node = [], 0
        for page, key_tokens in zip(pages, self._page_keys(token_ids), strict=False):
            key = (node, key_tokens)
            if key not in self._page_of:
                if page in self._node_of:  # published under a parent that was evicted since
                    break
                self._page_of[key] = page
                self._node_of[page] = (key, next(self._next_node))
                new.append(page)
            node = self._node_of[self._page_of[key]][1]
        return new

    def _page_keys(self, token_ids: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.page_size
        return [
            tuple(token_ids[start : start + size + 1])
            for start in range(0, len(token_ids) - size, size)
        ]

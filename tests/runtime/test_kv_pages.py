"""The book of pages: dealing, sharing, publishing, eviction."""

from __future__ import annotations

import random

import torch

from mtptrain.runtime.kv_pages import KVPool, PageBook

SIZE = 4


def test_pool_holds_a_page_for_every_layer() -> None:
    """Layers may differ in heads and dimension; all have the same number of pages and rows."""
    pool = KVPool(5, SIZE, [(2, 8), (1, 16)], torch.bfloat16)
    assert [x.shape for x in pool.keys] == [(5, 2, SIZE, 8), (5, 1, SIZE, 16)]
    assert pool.values[1].shape == (5, 1, SIZE, 16) and pool.values[1].dtype == torch.bfloat16


def test_rows_move_in_the_first_layers_and_all_are_read_before_any_is_written() -> None:
    """A chain of moves, each into the row that the next one leaves, over pages in any order; later layers, the
    draft's, and other rows stay."""
    pool = KVPool(5, SIZE, [(2, 8)] * 3)
    for x in (*pool.keys, *pool.values):
        x.normal_()
    before = [x.clone() for x in (*pool.keys, *pool.values)]
    source, goal = torch.tensor([9, 2, 15]), torch.tensor([8, 9, 2])
    pool.move(source, goal, 2)
    for i, (x, old) in enumerate(zip((*pool.keys, *pool.values), before, strict=True)):
        rows, expected = (y.transpose(1, 2).reshape(-1, 2, 8) for y in (x, old))
        if i % 3 < 2:
            expected = expected.clone()
            expected[8], expected[9], expected[2] = (y.clone() for y in expected[[9, 2, 15]])
        assert torch.equal(rows, expected)


def test_low_pages_come_first_and_released_ones_again() -> None:
    """The pool stays dense: the lowest free page is dealt, whatever the order of release."""
    book = PageBook(4, SIZE)
    assert book.allocate(3) == [0, 1, 2]
    book.release([1])
    book.release([0])
    assert book.available == 3
    assert book.allocate(3) == [0, 1, 3]
    assert book.available == 0


def test_a_prompt_shares_the_full_pages_it_begins_with() -> None:
    """A later prompt becomes a user of the pages its tokens begin with, up to the first difference."""
    book = PageBook(8, SIZE)
    tokens = list(range(13))
    pages = book.allocate(4)
    assert book.publish(tokens, pages) == pages[:3]
    assert book.shared_prefix(tokens) == pages[:3]
    assert book.shared_prefix([*range(9), 99, 99]) == pages[:2]
    assert book.shared_prefix([1, *range(1, 13)]) == []


def test_sharing_needs_one_token_more_than_the_page() -> None:
    """The draft's last row of a page has read the next token: a prompt that ends with the page, or goes on
    differently, does not share it."""
    book = PageBook(4, SIZE)
    pages = book.allocate(1)
    assert book.publish([1, 2, 3, 4], pages) == []
    assert book.publish([1, 2, 3, 4, 5], pages) == pages
    assert book.shared_prefix([1, 2, 3, 4]) == []
    assert book.shared_prefix([1, 2, 3, 4, 6]) == []
    assert book.shared_prefix([1, 2, 3, 4, 5, 6]) == pages


def test_publishing_twice_keeps_the_first_page() -> None:
    """Two prompts that were computed side by side publish one chain; pages behind a common beginning hang
    on it, and the second one's own copy goes back to the free ones."""
    book = PageBook(8, SIZE)
    a, b = list(range(9)), [*range(5), 50, 51, 52, 53]
    mine, other = book.allocate(2), book.allocate(2)
    assert book.publish(a, mine) == mine
    assert book.publish(a, mine) == []
    assert book.publish(b, other) == other[1:]
    assert book.shared_prefix(b) == [mine[0], other[1]]
    book.release([mine[0], other[1]])
    book.release(other)
    assert book.allocate(1) == other[:1]


def test_a_page_in_use_is_never_evicted() -> None:
    """Only published pages without users make room, oldest first, and only when nothing is free."""
    book = PageBook(3, SIZE)
    first, second = book.allocate(1), book.allocate(1)
    book.publish([1, 1, 1, 1, 1], first)
    book.publish([2, 2, 2, 2, 2], second)
    book.release(first)
    assert book.available == 2
    assert book.allocate(1) == [2] and book.allocate(1) == first
    assert book.available == 0
    assert book.shared_prefix([1, 1, 1, 1, 1]) == []
    assert book.shared_prefix([2, 2, 2, 2, 2]) == second


def test_sharing_an_idle_page_saves_it_from_eviction() -> None:
    """A page that is taken up again is a used page."""
    book = PageBook(2, SIZE)
    (page,) = book.allocate(1)
    book.publish([1] * 5, [page])
    book.release([page])
    assert book.shared_prefix([1] * 5) == [page]
    assert book.available == 1


def test_the_end_of_a_chain_is_evicted_before_its_beginning() -> None:
    """Pages are found from the root, so the deepest one of a released prompt goes first."""
    book = PageBook(3, SIZE)
    tokens = list(range(13))
    pages = book.allocate(3)
    book.publish(tokens, pages)
    book.release(pages)
    assert book.allocate(1) == pages[2:]
    assert book.shared_prefix(tokens) == pages[:2]


def test_a_page_whose_parent_was_evicted_is_not_published_again() -> None:
    """Its old key is unreachable; it stays a page like any other and is freed in the end."""
    book = PageBook(4, SIZE)
    tokens = list(range(9))
    parent, child = book.allocate(2)
    book.publish(tokens, [parent, child])
    book.release([parent])
    book.allocate(2)
    assert book.allocate(1) == [parent]
    assert book.publish(tokens, [parent, child]) == [parent]
    assert book.shared_prefix(tokens) == [parent]


def test_nothing_is_lost_in_a_thousand_random_moves() -> None:
    """Whatever the order of sharing, publishing, releasing and evicting, every page is free or used at last,
    and a shared chain always holds the tokens it is asked for."""
    draw = random.Random(0)
    book, holders, held = PageBook(24, SIZE), [], dict[int, tuple[int, ...]]()
    for _ in range(1000):
        if holders and (draw.random() < 0.4 or book.available < 6):
            book.release(holders.pop(draw.randrange(len(holders))))
            continue
        tokens = [draw.randrange(2) for _ in range(draw.randrange(1, 20))]
        pages = book.shared_prefix(tokens)
        for i, page in enumerate(pages):
            assert held[page] == tuple(tokens[: (i + 1) * SIZE + 1])
        pages += book.allocate(-(-len(tokens) // SIZE) - len(pages))
        for page in book.publish(tokens, pages):
            held[page] = tuple(tokens[: (pages.index(page) + 1) * SIZE + 1])
        holders.append(pages)
    for pages in holders:
        book.release(pages)
    assert book.available == 24 and sorted(book.allocate(24)) == list(range(24))

"""Which rows of a batch draft: some of each document, drawn anew for each batch of the plan."""

from __future__ import annotations

import pytest
import torch

from mtptrain.drafts.base import answer_chain
from mtptrain.train.anchors import Anchors
from mtptrain.types import DraftBatch

MASKS = ([0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1], [0, 0, 0], [1, 1, 1, 1, 1], [0, 1, 1])


@pytest.fixture
def batch() -> DraftBatch:
    """Four documents; the second has no answer, the last one a single supervised row."""
    mask = torch.tensor([bool(m) for document in MASKS for m in document])
    borders = torch.tensor([0, *(len(document) for document in MASKS)]).cumsum(0)
    nothing = torch.zeros(len(mask), 0)
    return DraftBatch(torch.arange(len(mask)), nothing, nothing, mask, borders)


def _could(everywhere: bool) -> list[list[int]]:
    """The packed rows of each document that are supervised at the first step: a slow, obvious loop."""
    found, start = [], 0
    for mask in MASKS:
        rows = range(len(mask) - 2)
        found.append([start + t for t in rows if everywhere or (mask[t + 1] and mask[t + 2])])
        start += len(mask)
    return found


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_each_document_has_its_share_of_supervised_rows(
    everywhere: bool, most: int, batch: DraftBatch
) -> None:
    """Without replacement, all of them where there are no more than asked for, and every one in its turn."""
    seen: list[set[int]] = [set() for _ in MASKS]
    for number in range(60):
        drawn = Anchors(most, everywhere, seed=1).of(batch, number)
        assert drawn.depths is not None
        rows = drawn.depths.nonzero().squeeze(1).tolist()
        for could, mine in zip(_could(everywhere), seen, strict=True):
            now = set(rows) & set(could)
            assert len(now) == min(most, len(could))
            mine |= now
        assert len(rows) == sum(min(most, len(could)) for could in _could(everywhere))
    assert [sorted(x) for x in seen] == _could(everywhere)


def test_a_drawn_row_drafts_as_far_as_its_answer_goes_and_no_other_does(batch: DraftBatch) -> None:
    """What the draft is asked for is the supervised chain of the drawn rows alone."""
    drawn = Anchors(2, seed=5).of(batch, 3)
    assert drawn.depths is not None
    whole = answer_chain(batch, 3, batch.loss_mask)
    assert torch.equal(answer_chain(drawn, 3, batch.loss_mask), whole & (drawn.depths > 0))


@pytest.mark.parametrize("most", [0, 40])
@pytest.mark.parametrize(("keep", "least"), [(0.8, 0.2), (0.5, 0.0), (0.3, 0.5)])
def test_each_depth_keeps_its_share_of_rows_that_came_so_far(
    keep: float, least: float, most: int
) -> None:
    """Of n rows of a document that draft, those at places i/n below max(keep ** d, least) draft more than d tokens:
    a nested share, counted by a slow, obvious loop; and which rows these are is drawn anew."""
    lens = (100, 23, 3)
    mask, borders = torch.ones(sum(lens), dtype=torch.bool), torch.tensor([0, *lens]).cumsum(0)
    nothing = torch.zeros(len(mask), 0)
    batch = DraftBatch(torch.arange(len(mask)), nothing, nothing, mask, borders)
    deepest = set[tuple[int, ...]]()
    for number in range(6):
        depths = Anchors(most, seed=2, keep=keep, least=least).of(batch, number).depths
        assert depths is not None
        for mine, length in zip(depths.split(lens), lens, strict=True):
            rows = min(length - 2, most or length)
            for d in range(9):
                share = 1.0 if d == 0 else max(keep**d, least)
                assert int((mine > d).sum()) == sum(i < share * rows for i in range(rows))
        deepest.add(tuple((depths > 3).nonzero().squeeze(1).tolist()))
    assert len(deepest) == 6


def test_what_is_drawn_is_a_function_of_seed_and_number(batch: DraftBatch) -> None:
    """So that a resumed run and every rank draw the same; 0 leaves the batch as it is."""

    def rows(seed: int, number: int) -> list[int]:
        depths = Anchors(2, seed=seed).of(batch, number).depths
        assert depths is not None
        return depths.tolist()

    assert rows(1, 7) == rows(1, 7)
    assert len({tuple(rows(1, n)) for n in range(9)}) > 3
    assert len({tuple(rows(s, 7)) for s in range(9)}) > 3
    assert Anchors().of(batch, 7) is batch


def test_a_batch_moves_with_its_depths(batch: DraftBatch) -> None:
    """Where there are none, none arrive."""
    on = torch.device("cpu")
    assert batch.to(on).depths is None
    drawn = Anchors(2).of(batch, 0)
    assert drawn.to(on).depths is not None

"""Rows that are token ids with their loss mask: what other trainers' prepare steps write.

They pass the template by, so that nothing here can tell whether they fit the target: the caller compares
ids with its vocabulary. It gives up masks in any other form (labels of -100, spans).
"""

from __future__ import annotations

import torch

from mtptrain.datasets.base import BadRow, DropRow
from mtptrain.types import Sample

REMEDY = "write input_ids and loss_mask as lists of whole numbers, equally long"


def is_tokenised(row: dict[str, object]) -> bool:
    return row.get("input_ids") is not None


def tokenised_sample(row: dict[str, object], name: str, category: str) -> Sample:
    """The row as a sample. Raises BadRow, or DropRow where nothing is supervised."""
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list) or len(ids) != len(mask):
        raise BadRow("has input_ids without a loss_mask of the same length", REMEDY)
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise BadRow("has input_ids that are no token ids", REMEDY)
    if not all(m in (0, 1) for m in mask):  # true and false as well
        raise BadRow("has a loss_mask of other values than 0 and 1", REMEDY)
    if not any(mask):
        raise DropRow("no token of its loss_mask is supervised")
    return Sample(name, category, torch.tensor(ids), torch.tensor(mask, dtype=torch.bool))

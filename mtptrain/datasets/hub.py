"""Rows of a data set on the hub, streamed: owner/name, with /config and :split behind it where needed.

`datasets` does the work and is imported here only. Nothing is stored; a second pass streams again. What
goes wrong on the way (no network, no such set, a set that needs consent) is one line for the user. It
gives up data sets that are code: `datasets` no longer runs them, and neither do we.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mtptrain.datasets.base import RawRow
from mtptrain.types import UserError

NAME = re.compile(r"(?P<set>\w[\w.-]*/\w[\w.-]*)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")


def is_hub_name(text: str) -> bool:
    """Whether it can name a data set on the hub."""
    return NAME.fullmatch(text) is not None


def hub_rows(name: str) -> Iterator[RawRow]:
    """Rows of the set's split (train where none is named). Raises UserError."""
    parts = NAME.fullmatch(name)
    assert parts, "the caller has asked is_hub_name"
    from datasets import load_dataset

    split = parts["split"] or "train"
    try:
        rows = load_dataset(parts["set"], parts["config"], split=split, streaming=True)
        for number, value in enumerate(rows, 1):
            yield RawRow(name, "row", number, value)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{name} is no file here and cannot be read from the hub ({reason}); "
            f"correct the path, or name a data set as owner/name/config:split"
        ) from None

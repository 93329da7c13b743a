"""SPEED-Bench rows that are not filled in are refused, and no other row is."""

from __future__ import annotations

import pytest

from mtptrain.datasets.base import BadRow
from mtptrain.datasets.speed_bench import refuse_placeholders

KEYS = {"category": "writing", "sub_category": "x", "source": "s", "src_id": 1}


@pytest.mark.parametrize(
    "row",
    [
        {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]},
        {"turns": ["Hi", "Sum up: {article}"]},
        {"messages": [{"role": "user", "content": "Sum up: {article}"}]},
    ],
)
def test_a_placeholder_is_refused(row: dict[str, object]) -> None:
    """In any turn, of either form."""
    with pytest.raises(BadRow, match="placeholder"):
        refuse_placeholders(KEYS | row)


def test_other_rows_pass() -> None:
    """A filled-in row, and a row of another set that speaks of an {article}."""
    refuse_placeholders(KEYS | {"turns": ["Sum up: It rained."]})
    refuse_placeholders({"turns": ["Write a template with {article} in it."]})

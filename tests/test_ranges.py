"""Numbers that no run can mean are refused before it starts."""

from __future__ import annotations

import pytest

from mtptrain.compose import compose_config, flat_keys
from mtptrain.overrides import check
from mtptrain.ranges import RANGES, check_ranges
from mtptrain.types import UserError


def test_every_key_of_the_table_is_a_key_of_the_recipes() -> None:
    """A key that was renamed does not lose its range; some are those of one draft alone."""
    drafts = ([], ["draft=hybrid"])
    assert set(RANGES) <= {k for words in drafts for k in flat_keys(compose_config("fit", words))}


@pytest.mark.parametrize(
    "word",
    [
        "batch_size=0",
        "seed=-1",
        "prepare.top_p=1.1",
        "validate.top_k=-1",
        "validate.top_p=0",
        "validate.min_p=1.5",
        "train.learning_rate=nan",
        "train.clip=inf",
        "runtime.page_size=-16",
        "data.max_turns=0",
        "num_draft_tokens=100000000000000000000",
    ],
)
def test_a_number_outside_its_range_is_one_line(word: str) -> None:
    """The key, the value and the range are named."""
    with pytest.raises(UserError, match=f"^{word.split('=')[0]}=.* must lie in") as caught:
        check("fit", [word])
    assert "\n" not in str(caught.value)


def test_no_number_is_no_matter_of_ranges() -> None:
    """null means all, and other kinds are refused elsewhere."""
    check_ranges({"data.limit": None, "seed": True, "batch_size": "${num_draft_tokens}"})

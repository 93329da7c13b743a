"""JSON becomes a dataclass only where every field is what the dataclass says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from hidden_state_cache.decode import decode, shown


@dataclass(frozen=True)
class Inner:
    name: str
    size: int | None


@dataclass(frozen=True)
class Outer:
    kind: Literal["a", "b"]
    share: float
    flag: bool
    inner: tuple[Inner, ...]
    more: dict[str, object]
    names: dict[str, str]


GOOD: dict[str, Any] = {
    "kind": "a",
    "share": 1,
    "flag": True,
    "inner": [{"name": "x", "size": None}, {"name": "y", "size": 3}],
    "more": {"k": [1]},
    "names": {},
}


def test_what_fits_is_taken_as_it_is() -> None:
    """Nested objects, lists, optional and literal fields arrive; a whole number may stand for a float."""
    inner = (Inner("x", None), Inner("y", 3))
    assert decode(Outer, GOOD) == Outer("a", 1, True, inner, {"k": [1]}, {})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"kind": "c"}, "kind"),
        ({"kind": ["a"]}, "kind"),
        ({"share": True}, "share"),
        ({"share": float("nan")}, "share"),
        ({"share": "1"}, "share"),
        ({"flag": 1}, "flag"),
        ({"inner": {}}, "inner"),
        ({"inner": [{"name": "x", "size": 1.0}]}, r"inner\[0\].size"),
        ({"inner": [{"name": "x"}]}, r"inner\[0\] has missing or unknown fields \['size'\]"),
        ({"inner": [3]}, r"inner\[0\] is no object"),
        ({"names": {"a\nb": 1}}, r"names\['a\\nb'\] cannot be 1"),
        ({"other": 1}, r"unknown fields \['other'\]"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], named: str) -> None:
    """A field of another kind, missing or unknown is refused by its own name, however deep."""
    with pytest.raises(ValueError, match=named):
        decode(Outer, GOOD | change)


def test_a_long_value_is_cut_in_a_message() -> None:
    """A message does not grow with what it complains about."""
    assert len(shown("x" * 10**6)) < 400 and len(shown(["y" * 10**6] * 100)) < 3000

"""Which of a run's processes this one is."""

from __future__ import annotations

import pytest

from mtptrain.launch import ALONE, Ranks
from mtptrain.types import UserError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _told(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in zip(NAMES, values, strict=False):
        monkeypatch.setenv(name, value)


def test_without_a_launcher_a_run_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    _told(monkeypatch)
    assert Ranks.of_environment() == ALONE == Ranks(0, 1, 1)


def test_a_rank_is_what_torchrun_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fifth of eight processes, four on each machine."""
    _told(monkeypatch, "5", "8", "4")
    assert Ranks.of_environment() == Ranks(5, 8, 4)


@pytest.mark.parametrize(
    "values", [("0",), ("x", "2", "2"), ("2", "2", "2"), ("0", "3", "2"), ("0", "2", "0")]
)
def test_numbers_that_do_not_fit_are_the_users_error(
    values: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that names them."""
    _told(monkeypatch, *values)
    with pytest.raises(UserError, match="RANK.*torchrun") as caught:
        Ranks.of_environment()
    assert "\n" not in str(caught.value)

"""Names of hub data sets, and what is said without a network."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from mtptrain.datasets.hub import hub_rows, is_hub_name
from mtptrain.types import UserError


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("HuggingFaceH4/ultrachat_200k", True),
        ("HuggingFaceH4/ultrachat_200k:train_sft", True),
        ("nvidia/Llama-Nemotron-Post-Training-Dataset/SFT:chat", True),
        ("gsm8k", False),
        ("./folder/set", False),
        ("/absolute/set", False),
        ("a/b/c/d", False),
        ("a b/c", False),
        ("", False),
    ],
)
def test_names_of_data_sets(name: str, is_one: bool) -> None:
    """owner/name, with /config and :split behind it."""
    assert is_hub_name(name) is is_one


def test_no_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE is set for all tests."""
    with pytest.raises(
        UserError, match="^nobody/nothing:test is no file here and cannot"
    ) as caught:
        next(hub_rows("nobody/nothing:test"))
    assert "\n" not in str(caught.value)


def test_rows_come_as_they_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and split are passed on; train is the split where none is named."""
    calls: list[tuple[object, ...]] = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool):
        calls.append((name, config, split, streaming))
        return iter([{"prompt": "a"}, {"prompt": "b"}])

    fake = ModuleType("datasets")
    fake.load_dataset = load_dataset  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert [row.place for row in hub_rows("a/b/c:d")] == ["a/b/c:d row 1", "a/b/c:d row 2"]
    assert [row.value for row in hub_rows("a/b")] == [{"prompt": "a"}, {"prompt": "b"}]
    assert calls == [("a/b", "c", "d", True), ("a/b", None, "train", True)]

"""What two tokenizers may differ in, so that the model of one drafts for that of the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mtptrain.drafts.base.same_tokens import clash
from mtptrain.types import UserError

Folder = Callable[..., Path]


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Folder:
    """A copy of the tiny target's tokenizer with added tokens, and its template with `spoken` behind it."""

    def made(name: str, *added: str, spoken: str = "") -> Path:
        tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
        tokenizer.add_tokens(list(added))
        tokenizer.chat_template += spoken
        tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / name

    return made


def test_added_tokens_that_only_one_has_are_no_matter(folder: Folder) -> None:
    """In either direction."""
    few, more = folder("few", "<a>"), folder("more", "<a>", "<b>")
    assert clash(few, more) is None and clash(more, few) is None


def test_a_name_for_what_the_target_never_says_is_no_matter(folder: Folder) -> None:
    """A reserved token of the target's may be another in the draft, even one that its template has."""
    reserved, named = folder("reserved", "<r0>", "<r1>"), folder("named", "<r0>", "<eom>")
    spoken = folder("spoken", "<r0>", "<eom>", spoken="<eom>")
    assert clash(named, reserved) is None and clash(spoken, reserved) is None


def test_a_number_that_the_target_says_must_mean_the_same(folder: Folder) -> None:
    """An added token that its template writes is one."""
    reserved, spoken = folder("reserved", "<r>"), folder("spoken", "<eom>", spoken="<eom>")
    assert clash(reserved, spoken) == "token 512 is '<r>' there and '<eom>' here"


def test_a_token_that_the_target_says_must_have_the_same_number(folder: Folder) -> None:
    """Though nothing else has it."""
    few = folder("few", "<eom>", spoken="<eom>")
    more = folder("more", "<r>", "<eom>", spoken="<eom>")
    assert clash(more, few) == "token 512 is '<r>' there and '<eom>' here"
    assert clash(few, more) == "'<eom>' is token 512 there and 513 here"


def test_real_tokenizers_of_other_families_are_told_apart(
    real_tokenizer: Callable[[str], Path],
) -> None:
    """And each is its own."""
    llama, qwen = real_tokenizer("llama3_1"), real_tokenizer("qwen3")
    assert clash(llama, llama) is None and clash(qwen, qwen) is None
    assert " there and " in (clash(qwen, llama) or "")


def test_what_is_no_tokenizer_is_named(folder: Folder, tmp_path: Path) -> None:
    """One line."""
    with pytest.raises(UserError, match="^the tokenizer in .* cannot be loaded") as caught:
        clash(tmp_path / "nothing", folder("few"))
    assert "\n" not in str(caught.value)

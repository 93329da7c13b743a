"""Template to token ids, and what ends an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mtptrain.chat import Chat
from mtptrain.types import Turn, UserError


def test_a_prompt_ends_where_the_answer_begins(tiny_chat: Chat) -> None:
    """The whole conversation is rendered by the tokenizer's template, with its default system prompt."""
    turns = [Turn("user", "Hi"), Turn("assistant", "Hello."), Turn("user", "And?")]
    text = tiny_chat.tokenizer.decode(list(tiny_chat.prompt_ids(turns)))
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_ids_are_plain_integers(tiny_chat: Chat) -> None:
    """What goes into JSON and tensors is a tuple of int."""
    ids = tiny_chat.prompt_ids([Turn("system", "Be brief."), Turn("user", "Hi")])
    assert isinstance(ids, tuple) and {type(i) for i in ids} == {int}


def test_an_answers_text_has_no_special_tokens(tiny_chat: Chat) -> None:
    """What the next turn's prompt quotes is what a user saw."""
    ids = tiny_chat.tokenizer.encode("Yes, né.<|im_end|>")
    assert tiny_chat.text(ids) == "Yes, né."


def test_end_tokens_are_those_of_the_generation_config(tiny_folder: Path, tmp_path: Path) -> None:
    """Servers stop at every token that generation_config.json names; without the file, at the tokenizer's."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 9]}))
    assert Chat.load(folder).eos_ids == {1, 9}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert Chat.load(folder).eos_ids == {9}
    (folder / "generation_config.json").unlink()
    assert Chat.load(folder).eos_ids == {1}


def test_hashes_follow_template_and_tokenizer(tiny_folder: Path, tmp_path: Path) -> None:
    """The same folder hashes alike in every process; another template changes its own hash only."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    before = Chat.load(folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "{# other #}")
    after = Chat.load(folder)
    assert before.tokenizer_hash == after.tokenizer_hash
    assert before.template_hash != after.template_hash
    assert before.template_hash == Chat.load(tiny_folder).template_hash


def test_folders_without_tokenizer_or_template_are_refused(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """One line says what is missing."""
    with pytest.raises(UserError, match="no usable tokenizer"):
        Chat.load(tmp_path)
    folder = tmp_path / "target"
    shutil.copytree(tiny_folder, folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="has no chat template; add chat_template.jinja"):
        Chat.load(folder)

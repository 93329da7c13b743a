"""Template to token ids, and what ends an answer."""

from __future__ import annotations

import copy
import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

from mtptrain.chat import CUT, CUT_AWAY, TOO_LONG, Chat
from mtptrain.template import Thinking, thinking_mode
from mtptrain.types import Conversation, Turn, UserError

THINKING: tuple[Thinking, ...] = ("on", "off", "strip")


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


def test_a_prompt_that_the_template_refuses_is_told_beforehand(tiny_chat: Chat) -> None:
    """A row that cannot be rendered costs itself, with a reason; rendered all the same, it is an error."""
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    )
    tokenizer = copy.deepcopy(tiny_chat.tokenizer)
    tokenizer.chat_template = source + str(tokenizer.chat_template)
    chat = Chat(tokenizer, tiny_chat.eos_ids)
    good = Conversation("a", "qa", (Turn("user", "Hi"), Turn("user", "So?")))
    bad = Conversation("b", "qa", (Turn("system", "Be brief."), Turn("user", "Hi")))
    assert chat.refusal(good) is None
    assert chat.refusal(bad) == "the template refuses: no system turn"
    with pytest.raises(
        UserError, match="a prompt cannot be rendered: .*no system turn; leave its row out"
    ):
        chat.prompt_ids(bad.turns)


def test_a_prompt_is_too_long_with_all_its_answers(tiny_chat: Chat) -> None:
    """Each question's answer counts at full length; a length that just suffices is accepted."""
    one = Conversation("a", "qa", (Turn("user", "Hi"),))
    two = Conversation("b", "qa", (Turn("user", "Hi"), Turn("user", "So?")))
    long = len(tiny_chat.prompt_ids(one.turns))
    assert tiny_chat.refusal(one, 10, long + 10) is None
    assert tiny_chat.refusal(one, 10, long + 9) == TOO_LONG
    whole = len(tiny_chat.prompt_ids((two.turns[0], Turn("assistant", "."), two.turns[1])))
    assert tiny_chat.refusal(two, 10, whole + 20) is None
    assert tiny_chat.refusal(two, 10, whole + 19) == TOO_LONG


def test_a_long_sample_is_cut_at_its_end(tiny_chat: Chat) -> None:
    """Its first tokens stay; without a supervised one among them it is left out; both are counted."""
    row = Conversation("a", "qa", (Turn("user", "Hi"), Turn("assistant", "Well, yes.")))
    [whole] = tiny_chat.sample(row)
    size, first = len(whole.input_ids), int(whole.loss_mask.float().argmax())
    for longest, kept in ((size, size), (size - 1, size - 1), (first + 1, first + 1), (first, 0)):
        counts = Counter[str]()
        for given in (row, whole):
            samples = list(tiny_chat.samples([given], counts, longest))
            assert [len(s.input_ids) for s in samples] == ([kept] if kept else [])
            for sample in samples:
                assert torch.equal(sample.input_ids, whole.input_ids[:kept])
                assert torch.equal(sample.loss_mask, whole.loss_mask[:kept])
        reason = CUT if kept else CUT_AWAY
        assert counts == (Counter() if kept == size else Counter({reason: 2}))


@pytest.mark.parametrize("turns", [(), (Turn("user", "Hi"), Turn("assistant", "Yes."))])
def test_the_variable_of_thinking_is_set_only_where_it_was_asked_for(
    turns: tuple[Turn, ...], tiny_chat: Chat
) -> None:
    """`strip` is the template's own default; on and off set what templates read."""
    tokenizer = copy.deepcopy(tiny_chat.tokenizer)
    tokenizer.chat_template = (
        "{{ 'unset' if enable_thinking is undefined else enable_thinking }} {{ thinking }}"
    )
    seen = {
        mode: Chat(tokenizer, frozenset(), mode).text(
            Chat(tokenizer, frozenset(), mode).prompt_ids([*turns, Turn("user", "a")])
        )
        for mode in THINKING
    }
    assert seen == {"on": "True True", "off": "False False", "strip": "unset "}


def test_thinking_is_read_as_yaml_writes_it() -> None:
    """A bare on or off in a recipe is a boolean to YAML; anything else is refused with the choices."""
    assert [thinking_mode(value) for value in (True, False, "on", "off", "strip")] == [
        *("on", "off", "on", "off", "strip"),
    ]
    for value in ("maybe", None, 1):
        with pytest.raises(UserError, match=f"data.thinking={value} must be on, off or strip"):
            thinking_mode(value)

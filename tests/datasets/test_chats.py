"""Every known chat layout as turns: which key holds what, and what a turn carries beside its text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mtptrain.datasets.base import BadRow, DataSettings, DropRow
from mtptrain.datasets.chats import READ_AS_ASSISTANT, chat_turns, tools_text
from mtptrain.types import ToolCall, Turn

SETTINGS = DataSettings()
HI, HELLO, AND = Turn("user", "Hi"), Turn("assistant", "Hello"), Turn("user", "And?")
SYSTEM = Turn("system", "Be brief.")


def turns(row: dict[str, Any], settings: DataSettings = SETTINGS) -> list[Turn]:
    return chat_turns(row, settings, set())


def said(*messages: dict[str, Any]) -> list[Turn]:
    return turns({"messages": list(messages)})


def chat(role: str, text: str, human: str, gpt: str) -> list[dict[str, str]]:
    return [{role: human, text: "Hi"}, {role: gpt, text: "Hello"}, {role: human, text: "And?"}]


OPENAI = chat("role", "content", "user", "assistant")
LAYOUTS: dict[str, tuple[dict[str, Any], list[Turn]]] = {
    "ShareGPT": (
        {"id": "x_0", "conversations": chat("from", "value", "human", "gpt")},
        [HI, HELLO, AND],
    ),
    "ShareGPT with other names": (
        {"conversations": chat("from", "value", "user", "bing"), "markdown": None},
        [HI, HELLO, AND],
    ),
    "UltraChat 200k": ({"prompt": "Hi", "prompt_id": "p", "messages": OPENAI}, [HI, HELLO, AND]),
    "UltraChat raw": ({"id": "0", "data": ["Hi", "Hello", "And?"]}, [HI, HELLO, AND]),
    "PerfectBlend": (
        {"conversations": chat("from", "value", "human", "gpt"), "source": "s"},
        [HI, HELLO, AND],
    ),
    "regenerated": ({"id": 1, "conversations": OPENAI}, [HI, HELLO, AND]),
    "Magpie": ({"uuid": "u", "instruction": "Hi", "response": "Hello"}, [HI, HELLO]),
    "Magpie with both": (
        {"instruction": "Hi", "conversations": chat("from", "value", "human", "gpt")},
        [HI, HELLO, AND],
    ),
    "Llama-Nemotron": (
        {
            "input": [{"role": "user", "content": "Hi"}],
            "output": "Hello",
            "system_prompt": "Be brief.",
        },
        [SYSTEM, HI, HELLO],
    ),
    "Nemotron v1": (
        {"uuid": "u", "category": "chat", "reasoning": "off", "messages": OPENAI},
        [HI, HELLO, AND],
    ),
    "nebius": (
        {"conversation": OPENAI[:1], "generated_message": {"role": None, "content": "Hello"}},
        [HI, HELLO],
    ),
    "alpaca": (
        {"instruction": "Hi", "input": "And?", "output": "Hello"},
        [Turn("user", "Hi\n\nAnd?"), HELLO],
    ),
    "alpaca without input": ({"instruction": "Hi", "input": "", "output": "Hello"}, [HI, HELLO]),
    "dolly": (
        {"instruction": "Hi", "context": "And?", "response": "Hello"},
        [Turn("user", "Hi\n\nAnd?"), HELLO],
    ),
    "gsm8k": ({"question": "Hi", "answer": "Hello"}, [HI, HELLO]),
    "hendrycks_math": ({"problem": "Hi", "solution": "Hello", "answer": "5"}, [HI, HELLO]),
    "hermes": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "tool", "value": "21 C"},
            ],
            "tools": "[]",
        },
        [SYSTEM, HI, Turn("tool", "21 C")],
    ),
    "lmsys-chat-1m": ({"conversation_id": "c", "conversation": OPENAI}, [HI, HELLO, AND]),
    "MT-bench": ({"question_id": 81, "turns": ["Hi", "And?"], "reference": ["x"]}, [HI, AND]),
    "prompt": ({"prompt": "Hi"}, [HI]),
    "prompt and completion": ({"prompt": "Hi", "completion": "Hello"}, [HI, HELLO]),
    "prompt as messages": ({"prompt": OPENAI}, [HI, HELLO, AND]),
    "a table with empty columns": (
        {"messages": None, "conversations": [{"role": "user", "content": None, "value": "Hi"}]},
        [HI],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_read(name: str) -> None:
    """The same turns, whatever the keys are called."""
    row, expected = LAYOUTS[name]
    assert turns(row) == expected


ROLES = {
    "user": ("user", "human", "prompter", "User"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "GPT"),
    "system": ("system", "developer"),
    "tool": ("tool", "function", "observation", "function_response", "tool_response"),
}


@pytest.mark.parametrize(("role", "name"), [(r, n) for r, names in ROLES.items() for n in names])
def test_every_name_of_a_role_is_known(role: str, name: str) -> None:
    """Upper case does not matter."""
    assert said({"role": name, "content": "x"})[0].role == role


def test_an_unknown_role_drops_the_row_or_is_the_assistant() -> None:
    """As data.unknown_role says; the second is recorded as a change."""
    row = {"messages": [{"role": "narrator", "content": "x"}]}
    with pytest.raises(DropRow):
        turns(row)
    changes: set[str] = set()
    read = chat_turns(row, DataSettings(unknown_role="assistant"), changes)
    assert read == [Turn("assistant", "x")] and changes == {READ_AS_ASSISTANT}


def test_an_empty_text_is_not_passed_over() -> None:
    """The key that is there decides, not the one that says something."""
    assert said({"role": "user", "content": "", "value": "x"}) == [Turn("user", "")]


def test_parts_of_text_are_joined() -> None:
    """As serving engines join them; plain strings among them as well."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert said({"role": "user", "content": parts}) == [Turn("user", "a\nb\nc")]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}]},
        {"image": {"bytes": "x"}, "prompt": "Hi"},
        {"images": ["x"], "messages": OPENAI},
    ],
)
def test_images_and_sound_drop_the_row(row: dict[str, Any]) -> None:
    """A head sees text only; a row without its image is another question."""
    with pytest.raises(DropRow, match="images"):
        turns(row)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"messages": [*OPENAI, {"role": "user", "content": 3}]}, "in messages[3].content but int"),
    "null": ({"conversations": [{"from": "human", "value": None}]}, "in conversations[0].value but null"),
    "an object": ({"turns": [{"role": "user", "content": {}}]}, "in turns[0].content but dict"),
    "a part that is a number": ({"turns": [{"role": "user", "content": [3]}]}, "in turns[0].content but int"),
    "a turn that is a number": ({"turns": ["Hi", 3]}, "in turns[1] but int"),
    "a prompt that is a number": ({"prompt": 3}, "in prompt but int"),
    "a context that is a number": ({"instruction": "Hi", "context": 3}, "in context but int"),
    "no role": ({"messages": [{"content": "Hi"}]}, "has a turn without a role"),
    "a role that is a list": ({"messages": [{"role": [], "content": "Hi"}]}, "without a role"),
    "nothing": ({"id": 1}, "has no text for the user's turn"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_what_is_no_text_is_named_with_its_key(name: str) -> None:
    """Key, index and kind."""
    row, message = FAULTS[name]
    with pytest.raises(BadRow) as caught:
        turns(row)
    assert message in caught.value.line("f line 1")


CALL = ToolCall("weather", '{"city": "Bern"}', "c1")
OBJECT = {"name": "weather", "arguments": {"city": "Bern"}}
TEXT = {"name": "weather", "arguments": '{"city": "Bern"}'}
BARE = ToolCall("weather", '{"city": "Bern"}')
CALLS: dict[str, tuple[dict[str, Any], tuple[ToolCall, ...]]] = {
    "OpenAI": ({"tool_calls": [{"id": "c1", "type": "function", "function": TEXT}]}, (CALL,)),
    "arguments as an object": ({"tool_calls": [{"id": "c1", "function": OBJECT}]}, (CALL,)),
    "JSON text": ({"tool_calls": json.dumps([{"id": "c1", "function": TEXT}])}, (CALL,)),
    "without function": ({"tool_calls": [OBJECT]}, (BARE,)),
    "function_call": ({"function_call": TEXT}, (BARE,)),
    "no arguments": ({"tool_calls": [{"name": "now", "arguments": ""}]}, (ToolCall("now", "{}"),)),
    "null": ({"tool_calls": None}, ()),
    "none": ({"tool_calls": []}, ()),
    "blank text": ({"tool_calls": ""}, ()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_read_in_every_form(name: str) -> None:
    """Arguments end as JSON text of an object; content may be null beside a call."""
    keys, expected = CALLS[name]
    (turn,) = said({"role": "assistant", "content": None} | keys)
    assert turn == Turn("assistant", "", tool_calls=expected)
    assert said({"role": "assistant"} | keys) == [turn]


def test_a_function_call_turn_is_an_assistant_that_calls() -> None:
    """ShareGPT's form: the call is the turn's text."""
    row = {"conversations": [{"from": "function_call", "value": json.dumps(OBJECT)}]}
    assert turns(row) == [Turn("assistant", "", tool_calls=(BARE,))]


@pytest.mark.parametrize(
    "calls",
    ["[{", [3], [{"arguments": {}}], [{"name": "f", "arguments": "[1]"}], [{"name": "f", "arguments": 3}],
     [{"name": "f", "arguments": "{"}], "[[[]]]"],
)  # fmt: skip
def test_a_call_that_is_none_is_a_bad_row(calls: object) -> None:
    """No name, no object, no JSON."""
    with pytest.raises(BadRow, match="tool call") as caught:
        said({"role": "assistant", "content": "", "tool_calls": calls})
    assert "tool call" in caught.value.line("f line 1")


def test_a_tool_turn_keeps_whom_it_answers() -> None:
    """tool_call_id and name; an empty result is one."""
    item = {"role": "tool", "content": "", "tool_call_id": "c1", "name": "weather"}
    assert said(item) == [Turn("tool", "", None, (), "c1", "weather")]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_are_a_list_or_its_text(tools: object) -> None:
    """Either ends as the same JSON text."""
    assert tools_text({"tools": tools}) == '[{"name": "f"}]'


@pytest.mark.parametrize("tools", [None, [], "", "  ", "[]", "null"])
def test_no_tools_are_none(tools: object) -> None:
    """However their absence is written."""
    assert tools_text({"tools": tools}) is None


@pytest.mark.parametrize("tools", ["search, browse", {"name": "f"}, [3], 7])
def test_tools_of_another_form_are_a_bad_row(tools: object) -> None:
    """A template would fail on them, or print them as they are."""
    with pytest.raises(BadRow) as caught:
        tools_text({"tools": tools})
    assert "tools" in caught.value.line("f line 1")


THOUGHTS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "reasoning_content": ({"reasoning_content": "hm", "content": "a"}, "hm", "a"),
    "thinking": ({"thinking": "hm", "content": "a"}, "hm", "a"),
    "think in the text": ({"content": "<think>\nhm\n</think>\n\na"}, "hm", "a"),
    "an empty think": ({"content": "<think>\n\n</think>\n\na"}, None, "a"),
    "a think that never ends": ({"content": "<think>\nhm"}, "hm", ""),
    "a think in the middle": ({"content": "Write <think> first."}, None, "Write <think> first."),
    "nothing thought": ({"reasoning_content": "", "content": "a"}, None, "a"),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_what_was_thought_is_kept_beside_the_answer(name: str) -> None:
    """A field of its own, or `<think>` at the beginning of the text."""
    keys, reasoning, content = THOUGHTS[name]
    assert said({"role": "assistant"} | keys) == [Turn("assistant", content, reasoning)]

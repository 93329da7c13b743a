"""Chat layouts: a row that lists its turns, or that asks and answers in fields of their own, as turns.

One reader for all, since the layouts differ in names only: which key holds the list, the role and the
text. A key is chosen by whether it is there, never by whether it is true: an empty text stays one. What
a turn calls, thinks and answers is kept beside its text. Nothing is put in order here (`data.arrange`
does). It gives up everything but text: a row with images or sound is dropped.
"""

from __future__ import annotations

import json

from mtptrain.datasets.base import BadRow, DataSettings, DropRow, no_text, parse_json
from mtptrain.types import Role, ToolCall, Turn

LISTS = ("messages", "conversations", "conversation", "turns", "data", "input", "prompt")
QUESTIONS = ("instruction", "prompt", "question", "problem")
CONTEXTS = ("input", "context")  # what an instruction is about
ANSWERS = ("output", "response", "solution", "answer", "completion")
REASONING = ("reasoning_content", "thinking", "reasoning")
ROLES: dict[object, Role] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    **dict.fromkeys(("function_response", "tool_response"), "tool"),
    "function_call": "assistant",
}
NOT_TEXT = "it holds images, sound or other content than text"
UNKNOWN_ROLE = "a role that is not known"
READ_AS_ASSISTANT = "a role that is not known: read as assistant"
IN_CALL = " in a tool call"
CALL_REMEDY = 'write a call as {"name": "...", "arguments": {...}}'
Item = dict[str, object]


def chat_turns(row: Item, settings: DataSettings, changes: set[str]) -> list[Turn]:
    """The row's turns as they stand. Raises BadRow or DropRow; adds to `changes` what was not taken as is."""
    if row.get("image") or row.get("images"):
        raise DropRow(NOT_TEXT)
    turns = None
    for key in LISTS:
        if type(items := row.get(key)) is list:
            turns = _listed(row, key, items, settings, changes)
            break
    turns = _asked(row) if turns is None else turns
    system = row.get("system_prompt", row.get("system"))
    if isinstance(system, str) and system.strip() and turns and turns[0].role != "system":
        turns.insert(0, Turn("system", system))
    return turns


def has_text(row: Item) -> bool:
    """Whether the row has any of the keys that a conversation is read from."""
    return any(row.get(key) is not None for key in (*LISTS, *QUESTIONS))


def tools_text(row: Item) -> str | None:
    """The tools that the row's template is given, as JSON text of a list; None without any."""
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = parse_json(tools, " in its tools") if tools.strip() else None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow("has tools that are no list of objects", "write tools as a JSON list")
    return _json_text(tools)


def _listed(
    row: Item, key: str, items: list[object], settings: DataSettings, changes: set[str]
) -> list[Turn]:
    if key == "data":
        items = _by_turns(items)
    turns = [_turn(item, key, i, settings, changes) for i, item in enumerate(items)]
    answer = row.get("generated_message") if key == "conversation" else None
    if isinstance(answer, dict):
        turns.append(
            _turn(answer | {"role": "assistant"}, "generated_message", 0, settings, changes)
        )
    if key == "input" and isinstance(answer := row.get("output"), str):
        turns.append(_assistant({}, answer))
    return turns


def _by_turns(items: list[object]) -> list[object]:
    """UltraChat as it was first published: texts, the user's first."""
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": item} if isinstance(item, str) else item
        for i, item in enumerate(items)
    ]


def _asked(row: Item) -> list[Turn]:
    """A question, what it is about, and the answer where the row has one."""
    key = next((key for key in QUESTIONS if row.get(key) is not None), None)
    if key is None:
        raise no_text()
    texts = [_text(row[key], key)]
    if key == "instruction":
        texts += [_text(row[k], k) for k in CONTEXTS if row.get(k) is not None]
    turns = [Turn("user", "\n\n".join(text for text in texts if text.strip()))]
    answer = _first_text(row, ANSWERS)
    return turns if answer is None else [*turns, _assistant({}, answer)]


def _first_text(row: Item, keys: tuple[str, ...]) -> str | None:
    for key in keys:
        if isinstance(text := row.get(key), str):
            return text
    return None


def _turn(item: object, key: str, at: int, settings: DataSettings, changes: set[str]) -> Turn:
    if isinstance(item, str):
        return Turn("user", item)
    if not isinstance(item, dict):
        raise _no_text_in(f"{key}[{at}]", item)
    name = item.get("role")
    name = item.get("from") if name is None else name
    role = ROLES.get(name) if type(name) is str else None
    role = role or _unusual_role(name, settings, changes)
    content, text_key = item.get("content"), "content"
    if content is None and "value" in item:  # null in a table's column is not there
        content, text_key = item["value"], "value"
    if content is None and role in ("assistant", "tool"):
        content = ""
    if type(content) is not str:
        content = _text(content, f"{key}[{at}].{text_key}")
    if role == "assistant":
        return _assistant(item, content, is_call=name == "function_call")
    if role == "tool":
        call, tool = _maybe(item.get("tool_call_id")), _maybe(item.get("name"))
        return Turn(role, content, None, (), call, tool)
    return Turn(role, content)


def _unusual_role(name: object, settings: DataSettings, changes: set[str]) -> Role:
    if not isinstance(name, str):
        raise BadRow("has a turn without a role", "write role and content into every turn")
    role = ROLES.get(name.strip().lower())
    if role is None and settings.unknown_role == "drop":
        raise DropRow(UNKNOWN_ROLE)
    if role is None:
        changes.add(READ_AS_ASSISTANT)
    return role or "assistant"


def _text(content: object, where: str) -> str:
    """A text, or the texts of a list of parts, joined as serving engines join them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _no_text_in(where, content)
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    kinds = {part.get("type", "text") == "text" for part in content if isinstance(part, dict)}
    if False in kinds:
        raise DropRow(NOT_TEXT)
    for text in texts:
        if not isinstance(text, str):
            raise _no_text_in(where, text)
    return "\n".join(map(str, texts))


def _no_text_in(where: str, value: object) -> BadRow:
    kind = "null" if value is None else type(value).__name__
    return BadRow("has no text", "write a string there", f"in {where} but {kind}")


def _assistant(item: Item, content: str, is_call: bool = False) -> Turn:
    calls, reasoning = (), None
    if len(item) > 2 or not content:  # more than a role and a text
        calls = _calls(item.get("tool_calls"))
        if (call := item.get("function_call")) is not None:
            calls += (_call(call),)
        reasoning = _maybe(_first_text(item, REASONING))
    if is_call:
        calls, content = (*calls, _call(content)), ""
    if reasoning is None and "<think>" in content:
        reasoning, content = _split_reasoning(content)
    return Turn("assistant", content, reasoning, calls)


def _split_reasoning(content: str) -> tuple[str | None, str]:
    """`<think>` at an answer's start, cut as Qwen3's template cuts it; one that never ends leaves no answer."""
    text = content.lstrip()
    if not text.startswith("<think>"):
        return None, content
    thought, _, answer = text.removeprefix("<think>").partition("</think>")
    return _maybe(thought.strip("\n")), answer.lstrip("\n")


def _calls(value: object) -> tuple[ToolCall, ...]:
    if isinstance(value, str):
        value = parse_json(value, IN_CALL) if value.strip() else None
    if value is None:
        return ()
    calls = value if isinstance(value, list) else [value]
    return tuple(_call(call) for call in calls)


def _call(value: object) -> ToolCall:
    """A call in OpenAI's form, with or without `function` around it, or as JSON text."""
    value = parse_json(value, IN_CALL) if isinstance(value, str) else value
    inner = value.get("function", value) if isinstance(value, dict) else None
    name = inner.get("name") if isinstance(inner, dict) else None
    if not isinstance(value, dict) or not isinstance(inner, dict) or not isinstance(name, str):
        raise BadRow("has a tool call without a name", CALL_REMEDY)
    arguments = inner.get("arguments")
    given = (
        parse_json(arguments, IN_CALL) if isinstance(arguments, str) and arguments else arguments
    )
    if given in (None, ""):
        given = {}
    if not isinstance(given, dict):
        raise BadRow("has a tool call whose arguments are no object", CALL_REMEDY)
    text = arguments if isinstance(arguments, str) and arguments else _json_text(given)
    return ToolCall(name, text, _maybe(value.get("id")))


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _maybe(value: object) -> str | None:
    """A text that says something; None for an empty one, and for null."""
    return value if isinstance(value, str) and value.strip() else None

"""A target's chat template as a function: turns in, text out, and what the template can say.

Servers render with the tokenizer's own Jinja template, so this does too, in transformers' own sandbox but
past `apply_chat_template`: that drops `content: None`, which DeepSeek-V3's template asks for, and copies
every message anew for each of a conversation's many renderings. What a template knows (a generation prompt,
reasoning, tools, how a call is written) is found by rendering a small probe, once, because templates are
programs: reading one tells less than running it. A template that refuses a conversation, by its own
exception or by failing, raises `Refused` with the reason. It gives up named templates other than the
default and `tool_use`, and images.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal, cast

import jinja2
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import (
    _compile_jinja_template,  # pyright: ignore[reportPrivateUsage]
    render_jinja_template,
)

from mtptrain.types import ToolCall, Turn, UserError

Thinking = Literal["on", "off", "strip"]
Message = dict[str, Any]  # as templates read it: role, content, tool_calls, reasoning_content, ...
Tools = list[dict[str, Any]] | None
REASONING = ("reasoning_content", "thinking")  # the usual name, and gpt-oss's
MARK = re.compile(
    r"\{%[-+]?\s*generation\s*[-+]?%\}"
)  # of a template's source, as transformers asks


class Refused(Exception):
    """Why a conversation cannot be rendered as it stands: a few words, the same for all its kind."""


def thinking_mode(value: object) -> Thinking:
    """`data.thinking` as written; YAML reads a bare on or off as a boolean."""
    mode = ("off", "on")[value] if isinstance(value, bool) else value
    if mode not in ("on", "off", "strip"):
        raise UserError(f"data.thinking={value} must be on, off or strip")
    return cast(Thinking, mode)


@dataclass(frozen=True)
class CallForm:
    """How a template wants an assistant turn that calls tools."""

    empty_content: str | None  # what stands for no text beside the calls
    arguments_as_text: bool
    beside_text: bool  # it renders a text and calls in one turn


class Template:
    """The chat template of one tokenizer, with one way of thinking."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, thinking: Thinking) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking
        self._variables: dict[str, Any] = dict(tokenizer.special_tokens_map)
        if thinking != "strip":  # Qwen3 and most others read the one name, DeepSeek-V3.1 the other
            self._variables |= dict.fromkeys(("enable_thinking", "thinking"), thinking == "on")

    def messages(self, turns: Sequence[Turn]) -> list[Message]:
        """Turns as the template reads them. Raises Refused where it cannot say what they hold."""
        return [self._message(turn) for turn in turns]

    def tools(self, text: str | None) -> Tools:
        """The tools of a conversation. Raises Refused where they are no JSON list of objects."""
        tools = _json(text, "tools") if text else None
        if tools and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
            raise Refused("the tools are not a list of JSON objects")
        return cast(Tools, tools) or None

    def render(self, messages: list[Message], tools: Tools, generation_prompt: bool) -> str:
        """The text, ending where an answer begins if asked so. Raises Refused."""
        with _refusals():
            return self._compiled[bool(tools)].render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generation_prompt,
                **self._variables,
            )

    def render_marked(
        self, messages: list[Message], tools: Tools
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text and the characters between the template's generation marks. Raises Refused."""
        with _refusals():
            texts, spans = render_jinja_template(
                conversations=cast(Any, [messages]),
                tools=cast(Any, tools),
                chat_template=self._source(bool(tools)),
                return_assistant_tokens_mask=True,
                **self._variables,
            )
        return texts[0], cast(list[tuple[int, int]], spans[0])

    def _source(self, with_tools: bool) -> str:
        return self.tokenizer.get_chat_template(None, [TOOL] if with_tools else None)

    @cached_property
    def _compiled(self) -> tuple[jinja2.Template, ...]:
        """Without tools and with: some tokenizers have a template for each."""
        sources = (self._source(with_tools) for with_tools in (False, True))
        return tuple(cast(jinja2.Template, _compile_jinja_template(s)) for s in sources)

    def _message(self, turn: Turn) -> Message:
        message: Message = {"role": turn.role, "content": turn.content}
        if turn.reasoning and self.thinking == "on":
            if self.knows_reasoning:
                message |= dict.fromkeys(REASONING, turn.reasoning)
            else:
                message["content"] = f"<think>\n{turn.reasoning}\n</think>\n\n{turn.content}"
        if turn.tool_calls:
            self._add_calls(message, turn.tool_calls)
        named = {"tool_call_id": turn.tool_call_id, "name": turn.name}
        return message | {key: value for key, value in named.items() if value is not None}

    def _add_calls(self, message: Message, calls: Sequence[ToolCall]) -> None:
        form = self.call_form
        if form is None:
            raise Refused("the template does not render tool calls")
        if message["content"] and not form.beside_text:
            raise Refused("the template renders no text beside tool calls")
        message["content"] = message["content"] or form.empty_content
        message["tool_calls"] = [_call(call, form.arguments_as_text) for call in calls]

    # ---- what the template knows, found by rendering ---------------------------------------------------

    @cached_property
    def has_marks(self) -> bool:
        template = self.tokenizer.chat_template
        return any(
            map(MARK.search, template.values() if isinstance(template, dict) else [template])
        )

    @cached_property
    def has_generation_prompt(self) -> bool:
        """Whether asking for an answer adds anything to the text."""
        try:
            return self.render(ASK, None, True) != self.render(ASK, None, False)
        except Refused:
            return True

    @cached_property
    def tail(self) -> str | None:
        """What follows the content of a last answer, the same for every content; None: unknown."""
        texts = [self._probe({"role": "assistant", "content": word})[::-1] for word in WORDS]
        return os.path.commonprefix(texts)[::-1] if all(texts) else None

    @cached_property
    def knows_reasoning(self) -> bool:
        answer = {"role": "assistant", "content": WORDS[0]} | dict.fromkeys(REASONING, WORDS[1])
        return WORDS[1] in self._probe(answer)

    @cached_property
    def knows_tools(self) -> bool:
        try:
            return TOOL["function"]["name"] in self.render(ASK, [TOOL], True)
        except Refused:
            return False

    @cached_property
    def call_form(self) -> CallForm | None:
        """The first way of writing a call that comes out whole; None where no way does."""
        for as_text, empty in product((False, True), ("", None)):
            calls = [_call(CALL, as_text)]
            if _says_call(
                self._probe({"role": "assistant", "content": empty, "tool_calls": calls})
            ):
                both = {"role": "assistant", "content": WORDS[0], "tool_calls": calls}
                text = self._probe(both)
                return CallForm(empty, as_text, _says_call(text) and WORDS[0] in text)
        return None

    def _probe(self, answer: Message) -> str:
        """The rendering of a small chat that ends with `answer`; empty where it is refused."""
        try:
            return self.render([*ASK, answer], [TOOL] if "tool_calls" in answer else None, False)
        except Refused:
            return ""


ASK: list[Message] = [{"role": "user", "content": "?"}]
WORDS = ("qzxwa", "jvkqb")  # in no template; they share neither first nor last letter
CALL = ToolCall("qzxw_name", '{"qzxw_key": "qzxw_value"}', "qzxw12345")  # Mistral: nine letters
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "qzxw_name",
        "description": "?",
        "parameters": {"type": "object", "properties": {"qzxw_key": {"type": "string"}}},
    },
}


@contextmanager
def _refusals() -> Iterator[None]:
    """A template is a program of others: whatever it raises is its refusal."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise Refused(f"the template refuses: {first[:100]}") from None


def _call(call: ToolCall, as_text: bool) -> Message:
    arguments = call.arguments if as_text else _json(call.arguments, "arguments of a tool call")
    call_id = {} if call.id is None else {"id": call.id}
    return {**call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _says_call(text: str) -> bool:
    """Name and value were written by the answer: a list of tools has no value."""
    return "qzxw_name" in text and "qzxw_value" in text


def _json(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(f"the {what} are not JSON") from None

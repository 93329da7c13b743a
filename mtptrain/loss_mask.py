"""Which tokens of a conversation the target itself would write: spans of its template, then tokens.

An answer begins where the prompt's rendering ends and stops with the first end token, since a server asks
and stops there. Where the template marks its answers (`{% generation %}`) the marks are the spans; else each
answer's span is the difference of two renderings, P_k up to it and F_k with it. The whole text is tokenised
once, and token offsets turn characters into tokens; a token that a border cuts is not supervised. An answer
whose P_k or F_k is no beginning of the whole text (Qwen3 drops earlier thoughts) is a sample of its own, from
F_k: that is what a server would have shown. No text is searched, no prefix is tokenised again. It gives up
answers that do not continue their own prompt, and counts them.
"""

from __future__ import annotations

import os.path
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

from mtptrain.template import WORDS, Message, Refused, Template, Tools
from mtptrain.types import Conversation, Sample, UserError

# what may befall a conversation, an answer or a border; each is counted
NO_ANSWER = "rows left out: no answer"
NOT_A_CONTINUATION = "answers left out: they do not continue their own prompt's rendering"
NO_QUESTION = "answers left out: nothing stands before them"
OWN_SAMPLE = "answers made samples of their own: later turns change how they are rendered"
NO_END = "answers without an end token: their content is supervised, their end is not"
ENDLESS = "answers left out: the template shows no end of them"
CUT_TOKEN = "answers whose first token begins in the prompt: that token is not supervised"
NO_TOKENS = "samples left out: no supervised token"
UNSAID_TOOLS = "rows kept although the template does not render their tools"


@dataclass(frozen=True)
class Span:
    """An answer in its text, in characters."""

    start: int
    content_stop: int  # where its content ends
    stop: int  # where its turn ends, end token included


@dataclass(frozen=True)
class Rendered:
    """A text to tokenise, with its answers."""

    id: str
    category: str
    text: str
    spans: tuple[Span, ...]


def render(template: Template, row: Conversation, counts: Counter[str]) -> list[Rendered]:
    """The conversation's text up to its last answer, and a text for each answer that needs its own."""
    try:
        return _render(template, row, counts)
    except Refused as refusal:
        counts[f"rows left out: {refusal}"] += 1
        return []


def _render(template: Template, row: Conversation, counts: Counter[str]) -> list[Rendered]:
    answers = [i for i, turn in enumerate(row.turns) if turn.role == "assistant"]
    if not answers:
        raise Refused("no answer")
    messages = template.messages(row.turns[: answers[-1] + 1])
    tools = template.tools(row.tools)
    if tools and not template.knows_tools:
        counts[UNSAID_TOOLS] += 1
    if template.has_marks:
        text, marks = template.render_marked(messages, tools)
        return [Rendered(row.id, row.category, text, tuple(Span(a, b, b) for a, b in marks))]
    return _by_difference(template, row, messages, tools, answers, counts)


def _by_difference(
    template: Template,
    row: Conversation,
    messages: list[Message],
    tools: Tools,
    answers: list[int],
    counts: Counter[str],
) -> list[Rendered]:
    whole = template.render(messages, tools, False)
    shared: list[Span] = []
    alone: list[Rendered] = []
    for number, k in enumerate(answers):
        last = k == len(messages) - 1
        text = whole if last else template.render(messages[: k + 1], tools, False)  # F_k
        span = _span(template, messages[: k + 1], tools, text, counts)
        if span is None:
            continue
        if whole.startswith(text):
            shared.append(span)
        else:
            counts[OWN_SAMPLE] += 1
            alone.append(Rendered(f"{row.id}#{number}", row.category, text, (span,)))
    together = [Rendered(row.id, row.category, whole, tuple(shared))] if shared else []
    return alone + together


def _span(
    template: Template, messages: list[Message], tools: Tools, text: str, counts: Counter[str]
) -> Span | None:
    """Where the last message stands in `text`; None, and counted, where that cannot be said."""
    if len(messages) == 1:
        counts[NO_QUESTION] += 1
        return None
    prompt = template.render(messages[:-1], tools, True)  # P_k
    if not text.startswith(prompt):
        counts[NOT_A_CONTINUATION] += 1
        return None
    start, tail = len(prompt), template.tail
    if not template.has_generation_prompt:
        start += _header(template, messages, tools, text, start)
    content_stop = start if tail is None or not text.endswith(tail) else len(text) - len(tail)
    return Span(start, max(start, content_stop), len(text))


def _header(
    template: Template, messages: list[Message], tools: Tools, text: str, start: int
) -> int:
    """Characters before the content that a template without a generation prompt writes itself.

    They are what the answer shares with another one of other content. White space alone is no
    header: Mistral's answer follows `[/INST]` at once, and its space is a part of its first token.
    """
    own = str(messages[-1]["content"] or "").lstrip()
    other = next(word for word in WORDS if not own.startswith(word[0]))
    stand_in = template.render(
        [*messages[:-1], {"role": "assistant", "content": other}], tools, False
    )
    shared = os.path.commonprefix([text[start:], stand_in[start:]])
    return len(shared) if shared.strip() else 0


def tokenise(
    tokenizer: PreTrainedTokenizerBase,
    rendered: Sequence[Rendered],
    eos_ids: frozenset[int],
    counts: Counter[str],
) -> Iterator[Sample]:
    """Each text as a masked sample, all tokenised in one call; those with an empty mask are counted."""
    if not rendered:
        return
    batch = tokenizer(
        [one.text for one in rendered],
        add_special_tokens=False,  # the template has written them
        return_attention_mask=False,
        verbose=False,
    )
    if batch.encodings is None:
        raise UserError(
            "the target's tokenizer tells no offsets; put its tokenizer.json in its folder"
        )
    texts = zip(rendered, batch.encodings, batch["input_ids"], strict=True)
    for one, encoding, ids in texts:
        mask = np.zeros(len(ids), dtype=bool)
        for span in one.spans:
            first, stop = _tokens(encoding, ids, span, eos_ids, counts)
            mask[first:stop] = True
        if mask.any():
            row = torch.from_numpy(np.array(ids))  # several times faster than torch.tensor
            yield Sample(one.id, one.category, row, torch.from_numpy(mask))
        else:
            counts[NO_TOKENS] += 1


def _tokens(
    encoding: Encoding, ids: list[int], span: Span, eos_ids: frozenset[int], counts: Counter[str]
) -> tuple[int, int]:
    """The span's tokens, up to its first end token; to the end of its content where it has none."""
    first = first_inside(encoding, span.start)
    stop = first_outside(encoding, span.stop)
    if first > 0 and _chars(encoding, first - 1)[1] > span.start:
        counts[CUT_TOKEN] += 1
    if span.stop == span.content_stop:  # marks may leave the end token out
        stop += stop < len(ids) and ids[stop] in eos_ids
    written = ids[first:stop]
    ends = [written.index(eos) for eos in eos_ids if eos in written]
    if ends:
        return first, first + min(ends) + 1
    counts[NO_END if span.content_stop > span.start else ENDLESS] += 1
    return first, first_outside(encoding, span.content_stop)


# ---- characters to tokens -------------------------------------------------------------------------------
# A token begins at `min(its start, the end before it)`: some tokenizers leave a leading space out of the
# offsets, and the bytes of one character share its offset.


def first_inside(encoding: Encoding, char: int) -> int:
    """The first token all of whose characters stand at `char` or later."""
    before = -1
    for place in range(char - 1, -1, -1):
        if (found := encoding.char_to_token(place)) is not None:
            before = found
            break
    end = _chars(encoding, before)[1] if before >= 0 else 0
    for token in range(before + 1, len(encoding)):
        start, stop = _chars(encoding, token)
        if min(start, end) >= char:
            return token
        end = stop
    return len(encoding)


def first_outside(encoding: Encoding, char: int) -> int:
    """The first token any of whose characters stand at `char` or later."""
    token, length = len(encoding), _chars(encoding, len(encoding) - 1)[1]
    for place in range(char, length):
        if (found := encoding.char_to_token(place)) is not None:
            token = found
            break
    while token > 0 and _chars(encoding, token - 1)[1] > char:
        token -= 1
    return token


def _chars(encoding: Encoding, token: int) -> tuple[int, int]:
    return cast(
        tuple[int, int], encoding.token_to_chars(token)
    )  # None only for a token added behind

"""Samples for the eye: `mtptrain inspect data` prints three of them with what is supervised marked.

It shows what training will read: the given answers, or those that the target has written already; before
`prepare` has run, the rows with whatever answers they hold, else the prompts alone. Supervised tokens are
green on a terminal and in [brackets] elsewhere; the middle of a long stretch is left out. Everything is
tokenised and counted, though only three samples are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby

import torch

from mtptrain.chat import Chat
from mtptrain.datasets.base import evenly
from mtptrain.given import count_sample, lines
from mtptrain.types import Conversation, Sample

SHOWN = 3
HEAD, TAIL = 160, 80  # tokens of a long stretch that are shown


def describe(samples: Sequence[Sample], chat: Chat, counts: Counter[str], colour: bool) -> str:
    """Three samples spread evenly over all, then what was counted."""
    shown = [
        f"── {sample.id} ({sample.category}), {len(sample.input_ids)} tokens, "
        f"{int(sample.loss_mask.sum())} supervised\n{mark(sample, chat, colour)}\n"
        for sample in evenly(samples, SHOWN)
    ]
    return "\n".join([*shown, *lines(counts)])


def counted(samples: Sequence[Sample], counts: Counter[str]) -> Counter[str]:
    for sample in samples:
        count_sample(sample, counts)
    return counts


def unanswered(rows: Sequence[Conversation], chat: Chat) -> list[Sample]:
    """The rows' first prompts, as samples in which nothing is supervised."""
    return [_prompt(row, chat) for row in rows]


def _prompt(row: Conversation, chat: Chat) -> Sample:
    first = next((i for i, turn in enumerate(row.turns) if turn.role == "user"), 0)
    ids = torch.tensor(chat.prompt_ids(row.turns[: first + 1], row.tools))
    return Sample(row.id, row.category, ids, torch.zeros(len(ids), dtype=torch.bool))


def mark(sample: Sample, chat: Chat, colour: bool) -> str:
    """The sample's text, its supervised stretches between marks."""
    before, after = ("\x1b[32m", "\x1b[0m") if colour else ("[", "]")
    return "".join(
        f"{before}{text}{after}" if supervised else text
        for text, supervised in _stretches(sample, chat)
    )


def _stretches(sample: Sample, chat: Chat) -> Iterator[tuple[str, bool]]:
    pairs = zip(sample.input_ids.tolist(), sample.loss_mask.tolist(), strict=True)
    for supervised, group in groupby(pairs, key=lambda pair: pair[1]):
        ids = [token for token, _ in group]
        yield _text(ids, chat), bool(supervised)


def _text(ids: list[int], chat: Chat) -> str:
    if len(ids) <= HEAD + TAIL:
        text = str(chat.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
        return text.replace("\x1b", "␛")  # text of others gives this terminal no orders
    left_out = len(ids) - HEAD - TAIL
    return f"{_text(ids[:HEAD], chat)} … {left_out:,} tokens … {_text(ids[-TAIL:], chat)}"

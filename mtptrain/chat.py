"""Template to token ids: what the target reads before it answers, and what it would write itself.

Prompts are rendered by the tokenizer's own chat template and tokenised as a server does, from the whole
conversation at once; a conversation with given answers becomes samples whose masks come from the offsets of
those tokens (`loss_mask.py`). One setting, `thinking`, says how the template is asked to reason: `on`, `off`,
or `strip` (the template's own default, without the reasoning that answers came with).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from mtptrain.loss_mask import render, tokenise
from mtptrain.template import Refused, Template, Thinking
from mtptrain.types import Conversation, Sample, Turn, UserError

CHUNK = 256  # conversations tokenised in one call
TOO_LONG = "longer, with its answers, than data.max_tokens or than the target has positions"
CUT = "samples cut at data.max_tokens, or at the target's positions"
CUT_AWAY = "samples left out: no supervised token before they are cut at data.max_tokens"


class Chat:
    """A target's tokenizer with its chat template."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_ids: frozenset[int],
        thinking: Thinking = "strip",
    ) -> None:
        self.tokenizer, self.eos_ids, self.thinking = tokenizer, eos_ids, thinking
        if not tokenizer.chat_template:
            raise UserError(
                "the target's tokenizer has no chat template; add chat_template.jinja to its folder"
            )
        self.template = Template(tokenizer, thinking)

    @classmethod
    def load(cls, folder: Path, thinking: Thinking = "strip") -> Chat:
        """Reads the tokenizer in a target folder. Raises UserError where there is none."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"target.path={folder} has no usable tokenizer ({reason}); put tokenizer.json beside config.json"
            ) from None
        return cls(tokenizer, _eos_ids(folder, tokenizer), thinking)

    def prompt_ids(self, turns: Sequence[Turn], tools: str | None = None) -> tuple[int, ...]:
        """Token ids of the conversation, ending where the assistant's next answer begins.

        Raises UserError where the template refuses; `refusal` tells beforehand.
        """
        try:
            return tuple(self._rendered_ids(turns, tools))
        except Refused as refusal:
            raise UserError(f"a prompt cannot be rendered: {refusal}; leave its row out") from None

    def _rendered_ids(self, turns: Sequence[Turn], tools: str | None) -> list[int]:
        messages = self.template.messages(turns)
        text = self.template.render(messages, self.template.tools(tools), True)
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def refusal(
        self, row: Conversation, max_new_tokens: int = 0, max_tokens: int | None = None
    ) -> str | None:
        """Why the row cannot be answered, if so: the template refuses its last prompt, or that prompt with
        all its answers at `max_new_tokens` each is longer than `max_tokens`."""
        turns: list[Turn] = []
        questions = 0
        for turn in row.turns:
            if turn.role == "user" and questions:
                turns.append(Turn("assistant", "."))  # a word for each answer before it
            questions += turn.role == "user"
            turns.append(turn)
        try:
            tokens = len(self._rendered_ids(turns, row.tools))
        except Refused as refusal:
            return str(refusal)
        whole = tokens + questions * max_new_tokens
        return TOO_LONG if max_tokens is not None and whole > max_tokens else None

    def sample(self, row: Conversation, counts: Counter[str] | None = None) -> list[Sample]:
        """The conversation with its given answers as one sample, or as more (see `samples`)."""
        return list(self.samples([row], Counter() if counts is None else counts))

    def samples(
        self,
        rows: Iterable[Conversation | Sample],
        counts: Counter[str],
        max_tokens: int | None = None,
    ) -> Iterator[Sample]:
        """Conversations with their given answers, tokenised, the answers' tokens marked; samples as they are.

        An answer that later turns render otherwise is a sample of its own; one of more than
        `max_tokens` is cut at its end. `counts` is told, by reason, what was left out and what was
        made otherwise.
        """
        for sample in self._whole_samples(rows, counts):
            if (kept := _cut(sample, max_tokens, counts)) is not None:
                yield kept

    def _whole_samples(
        self, rows: Iterable[Conversation | Sample], counts: Counter[str]
    ) -> Iterator[Sample]:
        rest = iter(rows)
        while chunk := list(islice(rest, CHUNK)):
            yield from (row for row in chunk if isinstance(row, Sample))
            asked = [row for row in chunk if isinstance(row, Conversation)]
            rendered = [text for row in asked for text in render(self.template, row, counts)]
            yield from tokenise(self.tokenizer, rendered, self.eos_ids, counts)

    def text(self, ids: Sequence[int]) -> str:
        """The answer as a user sees it, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def template_hash(self) -> str:
        return _hash(self.tokenizer.chat_template)

    @property
    def tokenizer_hash(self) -> str:
        return _hash(self.tokenizer.get_vocab())


def _cut(sample: Sample, max_tokens: int | None, counts: Counter[str]) -> Sample | None:
    """The sample's first tokens; None where nothing supervised is among them."""
    if max_tokens is None or len(sample.input_ids) <= max_tokens:
        return sample
    ids, mask = sample.input_ids[:max_tokens], sample.loss_mask[:max_tokens]
    counts[CUT if mask.any() else CUT_AWAY] += 1
    return replace(sample, input_ids=ids, loss_mask=mask) if mask.any() else None


def _eos_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End tokens of the generation config (as servers read it), else the tokenizer's."""
    try:
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    except OSError:
        eos = None
    eos = tokenizer.eos_token_id if eos is None else eos
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return frozenset(int(i) for i in ids)


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

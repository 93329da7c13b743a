"""Template to token ids: what the target reads before it answers, and what it would write itself.

Prompts are rendered by the tokenizer's own chat template and tokenised as a server does, from the whole
conversation at once; a conversation with given answers becomes samples whose masks come from the offsets of
those tokens (`loss_mask.py`). One setting, `thinking`, says how the template is asked to reason: `on`, `off`,
or `strip` (the template's own default, without the reasoning that answers came with).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from mtptrain.loss_mask import render, tokenise
from mtptrain.template import Refused, Template, Thinking
from mtptrain.types import Conversation, Sample, Turn, UserError

log = logging.getLogger("mtptrain")
CHUNK = 256  # conversations tokenised in one call


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

        Raises UserError where the template refuses; `accepted` tells beforehand.
        """
        try:
            text = self.template.render(
                self.template.messages(turns), self.template.tools(tools), True
            )
        except Refused as refusal:
            raise UserError(f"a prompt cannot be rendered: {refusal}; leave its row out") from None
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def accepted(self, rows: Sequence[Conversation], name: str) -> list[Conversation]:
        """The rows whose prompts the template renders; the others are logged, by reason.

        Raises UserError where none is left.
        """
        refused = Counter[str]()
        kept = [
            row for row in rows if not (reason := self._refusal(row)) or refused.update([reason])
        ]
        for reason, count in refused.items():
            log.warning("%s: %d of %d rows left out: %s", name, count, len(rows), reason)
        if rows and not kept:
            raise UserError(
                f"{name}: no row can be rendered ({next(iter(refused))}); give other rows"
            )
        return kept

    def _refusal(self, row: Conversation) -> str | None:
        """Why the last prompt cannot be rendered, with a word for each answer before it."""
        turns: list[Turn] = []
        for turn in row.turns:
            if turn.role == "user" and any(t.role == "user" for t in turns):
                turns.append(Turn("assistant", "."))
            turns.append(turn)
        try:
            self.template.render(
                self.template.messages(turns), self.template.tools(row.tools), True
            )
        except Refused as refusal:
            return str(refusal)
        return None

    def sample(self, row: Conversation, counts: Counter[str] | None = None) -> list[Sample]:
        """The conversation with its given answers as one sample, or as more (see `samples`)."""
        return list(self.samples([row], Counter() if counts is None else counts))

    def samples(
        self, rows: Iterable[Conversation | Sample], counts: Counter[str]
    ) -> Iterator[Sample]:
        """Conversations with their given answers, tokenised, the answers' tokens marked; samples as they are.

        An answer that later turns render otherwise is a sample of its own. `counts` is told, by
        reason, what was left out and what was made otherwise.
        """
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

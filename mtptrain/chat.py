"""Template to token ids: what the target reads before it answers, and which tokens end its answer.

Prompts are rendered by the tokenizer's own chat template and tokenised as a server does, from the whole
conversation at once; an answer's mask is then a matter of lengths, never of searching text. It gives up
tools and reasoning modes for now: messages are plain text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from mtptrain.types import Turn, UserError


class Chat:
    """A target's tokenizer with its chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_ids: frozenset[int]) -> None:
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.template = tokenizer.chat_template
        if not self.template:
            raise UserError(
                "the target's tokenizer has no chat template; add chat_template.jinja to its folder"
            )

    @classmethod
    def load(cls, folder: Path) -> Chat:
        """Reads the tokenizer in a target folder. Raises UserError where there is none."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"target.path={folder} has no usable tokenizer ({reason}); put tokenizer.json beside config.json"
            ) from None
        return cls(tokenizer, _eos_ids(folder, tokenizer))

    def prompt_ids(self, turns: Sequence[Turn]) -> tuple[int, ...]:
        """Token ids of the conversation, ending where the assistant's next answer begins."""
        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        ids = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return tuple(int(i) for i in ids)  # pyright: ignore[reportArgumentType]

    def text(self, ids: Sequence[int]) -> str:
        """The answer as a user sees it, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    @property
    def template_hash(self) -> str:
        return _hash(self.template)

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

"""Whether two tokenizers mean the same by the numbers that a target says, so that another model can draft for it.

Models of one family often differ where nothing is said: one embedding is padded further, one tokenizer has added
tokens that the other lacks, or has given a reserved one a name. That costs at most a drafted token where such a one
occurs. A fault is a number with two meanings, or a token with two numbers, among those that the target says: its
vocabulary, and of its added tokens those that its chat template, its beginning or its end name. It gives up merges:
two equal vocabularies may still cut a text in two ways, and here the target cuts it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mtptrain.targets.base import Target
from mtptrain.types import UserError


def require_same_tokens(named: str, folder: Path, target: Target) -> None:
    """Raises UserError where what the target says is something else to the draft in `folder`, which the user has
    `named` so; a target that is in memory has no tokenizer to compare."""
    if not Path(target.path).is_dir():
        return
    if (what := clash(folder, Path(target.path))) is not None:
        raise UserError(
            f"draft.path={named} has another tokenizer than the target: {what}; use a model of the target's family"
        )


def clash(draft: Path, target: Path) -> str | None:
    """What the tokenizers of two folders differ in, in words; None: nothing that matters. Raises UserError where
    one cannot be loaded."""
    mine, theirs = _loaded(draft).get_vocab(), _loaded(target)
    silent = _silent(theirs)
    said = {token: i for token, i in theirs.get_vocab().items() if i not in silent}
    names = {i: token for token, i in mine.items()}
    for token, i in sorted(said.items(), key=lambda x: x[1]):
        if names.get(i, token) != token:
            return f"token {i} is {names[i][:40]!r} there and {token[:40]!r} here"
        if mine.get(token, i) != i:
            return f"{token[:40]!r} is token {mine[token]} there and {i} here"
    return None


def _silent(tokenizer: Any) -> set[int]:
    """Added tokens that nothing is known to say."""
    spoken = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token}"
    added = tokenizer.added_tokens_decoder.items()
    return {i for i, token in added if token.content not in spoken}


def _loaded(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the tokenizer in {folder} cannot be loaded ({reason}); draft=draft_model needs those of both models"
        ) from None

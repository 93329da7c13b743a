"""What a command is given: its config in sections, the target, and the rows to train and to measure on.

Rows are read, and those that cannot be used counted in the run folder, when they are first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import Chat
from mtptrain.data.prompts import evaluation_prompts, training_answers, training_prompts
from mtptrain.data.reader import Accept
from mtptrain.datasets.base import DataSettings, DropRow
from mtptrain.parts import TargetParts
from mtptrain.prepare import PrepareSettings
from mtptrain.targets.base import Target, max_positions
from mtptrain.types import Conversation, Sample


@dataclass
class Inputs:
    """See the file's opening."""

    config: DictConfig
    recording: bool = True  # False: this command only looks, and writes nothing

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def seed(self) -> int:
        return int(self.config.seed)

    @cached_property
    def parts(self) -> TargetParts:
        return TargetParts(self.config)

    @property
    def folder(self) -> Path:
        return self.parts.folder

    @property
    def target_fingerprint(self) -> str:
        return self.parts.fingerprint

    @property
    def chat(self) -> Chat:
        return self.parts.chat

    @property
    def target(self) -> Target:
        return self.parts.target

    @property
    def backend(self) -> AttentionBackend:
        return self.parts.backend

    def settings(self, kind: type, key: str) -> Any:
        """A section of the config as its frozen dataclass."""
        return kind(**OmegaConf.to_container(self.config[key], resolve=True))  # pyright: ignore

    # ---- data ----------------------------------------------------------------------------------------------

    @cached_property
    def data(self) -> DataSettings:
        return self.settings(DataSettings, "data")

    @cached_property
    def _held_out(self) -> list[Conversation]:
        """What no training row may share text with."""
        return [] if self.data.overlap == "allow" else self.eval_prompts

    @cached_property
    def prompts(self) -> list[Conversation]:
        """What the target answers for training."""
        answer = int(self.config.prepare.max_new_tokens)
        accept = self._answerable(answer, self.max_tokens)
        return training_prompts(self.data, self._held_out, self._record("data.json"), accept)

    @cached_property
    def rows(self) -> list[Conversation | Sample]:
        """What is trained on where the data gives the answers."""
        return training_answers(self.data, self._held_out, self._record("data.json"))

    @cached_property
    def eval_prompts(self) -> list[Conversation]:
        answer = int(self.config.validate.max_new_tokens)
        accept = self._answerable(answer, max_positions(self.folder))
        return evaluation_prompts(self.data, self._record("eval_data.json"), accept)

    @cached_property
    def max_tokens(self) -> int | None:
        """Of a sample that is trained on: what `data.max_tokens` says, and no more than the target's positions."""
        limits = (self.data.max_tokens, max_positions(self.folder))
        return min((limit for limit in limits if limit is not None), default=None)

    def _answerable(self, max_new_tokens: int, max_tokens: int | None) -> Accept:
        def accept(row: Conversation) -> None:
            if (reason := self.chat.refusal(row, max_new_tokens, max_tokens)) is not None:
                raise DropRow(reason)

        return accept

    def _record(self, name: str) -> Path | None:
        return self.run_dir / name if self.recording else None

    @property
    def answers_given(self) -> bool:
        return self.settings(PrepareSettings, "prepare").answers == "given"

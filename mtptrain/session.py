"""What the stages of one command share: its parts, its folders, and the fingerprints that name them.

Each part is made when first asked for, so a command that finds everything complete loads no weights. A key
covers all that a stage's result depends on; stages in the cache are named by it, those in the run folder
compare it. It gives up several targets in one command.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hidden_state_cache import StoreIdentity
from mtptrain import __version__
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.capture import CaptureSettings, identity
from mtptrain.chat import Chat
from mtptrain.data.prompts import evaluation_prompts, training_answers, training_prompts
from mtptrain.data.reader import Accept
from mtptrain.datasets.base import DataSettings, DropRow
from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.given import given_answer
from mtptrain.lock import only_writer
from mtptrain.prepare import PrepareSettings
from mtptrain.run import StageFolder, cache_dir, fingerprint
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.runtime.tree import TreeShape
from mtptrain.targets.base import Target, layer_count, max_positions, place_taps
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.targets.gguf import resolve
from mtptrain.template import thinking_mode
from mtptrain.train.module import TrainSettings
from mtptrain.types import Conversation, Sample, UserError


@dataclass
class Session:
    """See the file's opening."""

    config: DictConfig
    locks: ExitStack = field(default_factory=ExitStack)  # on the folders that this command writes
    held: set[Path] = field(default_factory=set)
    recording: bool = True  # False: this command only looks, and writes nothing
    times: dict[str, float] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return Path(self.config.run_dir)

    @property
    def seed(self) -> int:
        return int(self.config.seed)

    @cached_property
    def folder(self) -> Path:
        return resolve(str(self.config.target.path), cache_dir())

    @cached_property
    def target_fingerprint(self) -> str:
        return target_fingerprint(self.folder)

    @cached_property
    def chat(self) -> Chat:
        return Chat.load(self.folder, thinking_mode(self.config.data.thinking))

    @cached_property
    def target(self) -> Target:
        device = str(self.config.target.device)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Target.load(self.folder, str(self.config.target.dtype), device)

    @cached_property
    def backend(self) -> AttentionBackend:
        return instantiate(self.config.attention_backend)

    @cached_property
    def draft_config(self) -> HeadConfig:
        config = instantiate(self.config.draft)
        if not isinstance(config, HeadConfig):
            raise UserError(
                "draft= names no head that is trained by itself; choose one, such as draft=mtp"
            )
        self.tree.require(config)
        return replace(config, taps=place_taps(config.taps, layer_count(self.folder)))

    @property
    def taps(self) -> tuple[str, ...]:
        """What is captured: the draft's taps, and `final` for the target's own distribution."""
        mine = self.draft_config.taps
        return mine if "final" in mine else (*mine, "final")

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

    # ---- settings and engines ------------------------------------------------------------------------------

    def settings(self, kind: type, key: str) -> Any:
        """A section of the config as its frozen dataclass."""
        return kind(**OmegaConf.to_container(self.config[key], resolve=True))  # pyright: ignore

    @cached_property
    def tree(self) -> TreeShape:
        return self.settings(TreeShape, "tree")

    def limits(self, max_batch: int, num_draft_tokens: int = 0) -> EngineLimits:
        runtime = self.config.runtime
        pages = -(-int(runtime.kv_tokens) // int(runtime.page_size))
        return EngineLimits(
            max_batch,
            int(runtime.max_prefill_tokens),
            int(runtime.page_size),
            pages,
            num_draft_tokens,
            self.tree,
        )

    def engine(
        self,
        max_batch: int,
        draft: Draft | None = None,
        num_draft_tokens: int = 0,
        capture_taps: tuple[str, ...] = (),
    ) -> Engine:
        limits = self.limits(max_batch, num_draft_tokens)
        return Engine(self.target, self.backend, limits, self.chat.eos_ids, draft, capture_taps)

    # ---- fingerprints: everything that a stage's result depends on ---------------------------------------

    @cached_property
    def answers_key(self) -> str:
        rows = self.rows if self.answers_given else self.prompts
        known = [given_answer(row) if isinstance(row, Sample) else row for row in rows]
        parts = (self.target_fingerprint, known, self.settings(PrepareSettings, "prepare"))
        longest = self.max_tokens if self.answers_given else None  # prompts are themselves known
        how = (self.chat.thinking, self.seed, str(self.config.target.dtype), longest)
        return fingerprint("answers", __version__, *parts, *how)

    @cached_property
    def store_key(self) -> str:
        capture = self.settings(CaptureSettings, "capture")
        return fingerprint("store", self.answers_key, self.taps, capture.dtype)

    @cached_property
    def train_key(self) -> str:
        settings = self.settings(TrainSettings, "train")
        parts = (self.draft_config, type(self.draft_config).__name__, self.config.loss, settings)
        return fingerprint(
            "train", self.store_key, *parts, self.seed, int(self.config.num_draft_tokens)
        )

    @cached_property
    def validate_key(self) -> str:
        c = self.config
        parts = (self.eval_prompts, c.num_draft_tokens, c.temperature, c.batch_size, c.validate)
        return fingerprint("validate", self.train_key, *parts, self.tree)

    def store_identity(self) -> StoreIdentity:
        key = self.answers_key[:16]
        return identity(self.target, self.chat, self.taps, self.target_fingerprint, key)

    # ---- folders -------------------------------------------------------------------------------------------

    def hold(self, folder: Path) -> None:
        """Keeps other processes from writing in `folder` until this command ends."""
        if folder not in self.held:
            self.locks.enter_context(only_writer(folder))
            self.held.add(folder)

    @property
    def answers_stage(self) -> StageFolder:
        return StageFolder(cache_dir() / "answers" / self.answers_key[:16])

    @property
    def store_stage(self) -> StageFolder:
        return StageFolder(cache_dir() / "stores" / self.store_key[:16])

    @property
    def store_folder(self) -> Path:
        return self.store_stage.path / "features"

    @property
    def train_stage(self) -> StageFolder:
        return StageFolder(self.run_dir / "train")

    @property
    def draft_folder(self) -> Path:
        return self.run_dir / "draft"

"""What the stages of one command share: inputs, engines, folders, and the fingerprints that name them.

Each part is made when first asked for, so a command that finds everything complete loads no weights. A key
covers all that a stage's result depends on; stages in the cache are named by it, those in the run folder
compare it. It gives up several targets in one command.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from hidden_state_cache import StoreIdentity
from mtptrain import __version__
from mtptrain.capture import CaptureSettings, identity
from mtptrain.drafts.base import Draft, DraftConfig, HeadConfig
from mtptrain.given import given_answer
from mtptrain.inputs import Inputs
from mtptrain.lock import only_writer
from mtptrain.prepare import PrepareSettings
from mtptrain.run import StageFolder, cache_dir, fingerprint
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.runtime.tree import TreeShape
from mtptrain.targets.base import layer_count, place_taps
from mtptrain.train.module import TrainSettings
from mtptrain.types import Sample, UserError


@dataclass
class Session(Inputs):
    """See the file's opening."""

    locks: ExitStack = field(default_factory=ExitStack)  # on the folders that this command writes
    held: set[Path] = field(default_factory=set)
    times: dict[str, float] = field(default_factory=dict)
    head_dir: Path | None = None  # folder of the run that trains the head; None: this one

    def beside(self, config: DictConfig) -> Session:
        """A session of the same command and target, with another draft."""
        other = Session(config, self.recording, self.locks, self.held)
        other.parts = self.parts
        return other

    @cached_property
    def draft_config(self) -> DraftConfig:
        """What proposes."""
        config = instantiate(self.config.draft)
        if not isinstance(config, DraftConfig):
            raise UserError("draft= names no draft; choose one, such as draft=mtp")
        self.tree.require(config)
        return config

    @cached_property
    def head_config(self) -> HeadConfig | None:
        """What of it is trained, its taps placed; None: nothing."""
        head = self.draft_config.trained()
        if head is None:
            return None
        assert isinstance(head, HeadConfig)
        return replace(head, taps=self._placed(head.taps))

    def _placed(self, taps: Sequence[str]) -> tuple[str, ...]:
        return place_taps(taps, layer_count(self.folder))

    @property
    def taps(self) -> tuple[str, ...]:
        """What is captured: `capture.taps`, and what is read of it."""
        asked = self.settings(CaptureSettings, "capture").taps
        return tuple(dict.fromkeys((*self._placed(asked), *self.read_taps)))

    @property
    def read_taps(self) -> tuple[str, ...]:
        """The draft's taps, and `final` for the target's own distribution."""
        mine = self.head_config.taps if self.head_config else ()
        return tuple(dict.fromkeys((*mine, "final")))

    # ---- engines -------------------------------------------------------------------------------------------

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
            float(self.config.min_confidence),
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
        return self._features_key(self.taps)

    def _features_key(self, taps: tuple[str, ...]) -> str:
        capture = self.settings(CaptureSettings, "capture")
        return fingerprint("store", self.answers_key, taps, capture.dtype)

    @cached_property
    def train_key(self) -> str:
        settings = self.settings(TrainSettings, "train")
        parts = (self.head_config, type(self.head_config).__name__, self.config.loss, settings)
        features = self._features_key(self.read_taps)  # whatever else the store may hold
        start = [] if self.head_config is None else [self.head_config.weights_key()]
        return fingerprint("train", features, *parts, *filter(None, start), self.seed)

    @cached_property
    def draft_key(self) -> str:
        """Of what is validated: the trained head, and what another draft is around it."""
        trained = None if self.head_config is None else self.train_key
        if self.draft_config.trained() is self.draft_config:
            return self.train_key
        how = (self.target_fingerprint, self.chat.thinking, str(self.config.target.dtype))
        what = (trained, self.draft_config, self.draft_config.weights_key())
        return fingerprint("draft", __version__, *what, *how, self.seed)

    @cached_property
    def validate_key(self) -> str:
        c = self.config
        parts = (self.eval_prompts, c.num_draft_tokens, c.temperature, c.batch_size, c.validate)
        return fingerprint("validate", self.draft_key, *parts, self.tree, c.min_confidence)

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
        return StageFolder((self.head_dir or self.run_dir) / "train")

    @property
    def draft_folder(self) -> Path:
        return (self.head_dir or self.run_dir) / "draft"

"""The stages in order, each reading one folder and writing one, skipped when whole for the same fingerprint.

prepare and capture write into the cache, keyed by what went into them, so that runs which differ only in the
draft share answers and features; train and validate write into the run folder. A stage first makes sure of
the ones before it, so every verb works alone. It gives up parallel stages: one after the other.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from hidden_state_cache import FeatureStore, FeatureWriter, StoreIdentity
from mtptrain import __version__
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.capture import CaptureSettings, ShardSink, capture_missing, identity
from mtptrain.chat import Chat
from mtptrain.data.prompts import evaluation_prompts, training_prompts
from mtptrain.datasets.base import DataSettings
from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.drafts.folder import check_contract, contract, load_draft, save_draft
from mtptrain.prepare import PrepareSettings, completion_answer, prepare_shards, read_answers
from mtptrain.run import (
    VERBS,
    StageFolder,
    cache_dir,
    check_disk_space,
    fingerprint,
    provenance,
    save_resolved,
)
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target, layer_count, place_taps
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.targets.gguf import resolve
from mtptrain.train.fit import fit_draft
from mtptrain.train.module import TrainSettings
from mtptrain.types import Completion, Conversation, UserError
from mtptrain.validate.model_card import write_model_card
from mtptrain.validate.replay import ReplaySettings, replay
from mtptrain.validate.report import load_report, summary_line, write_report

log = logging.getLogger("mtptrain")


def run(verb: str, config: DictConfig) -> None:
    """Runs one verb and the stages it needs. Raises UserError for the user's mistakes."""
    assert verb in VERBS, verb
    session = Session(config)
    save_resolved(config, session.run_dir)
    stages = {"prepare": prepare, "capture": capture, "train": train, "validate": validate}
    stages["validate" if verb == "fit" else verb](session)


@dataclass
class Session:
    """What the stages of one command share; each part is made when first asked for."""

    config: DictConfig
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
        return Chat.load(self.folder)

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
                "draft= names a draft that needs no training; choose a head such as draft=mtp"
            )
        return replace(config, taps=place_taps(config.taps, layer_count(self.folder)))

    @property
    def taps(self) -> tuple[str, ...]:
        """What is captured: the draft's taps, and `final` for the target's own distribution."""
        mine = self.draft_config.taps
        return mine if "final" in mine else (*mine, "final")

    @cached_property
    def data(self) -> DataSettings:
        return self.settings(DataSettings, "data")

    @cached_property
    def prompts(self) -> list[Conversation]:
        held = [] if self.data.overlap == "allow" else self.eval_prompts
        return training_prompts(self.data, held, self.run_dir / "data.json")

    @cached_property
    def eval_prompts(self) -> list[Conversation]:
        return evaluation_prompts(self.data, self.run_dir / "eval_data.json")

    def settings(self, kind: type, key: str) -> Any:
        """A section of the config as its frozen dataclass."""
        return kind(**OmegaConf.to_container(self.config[key], resolve=True))  # pyright: ignore

    def limits(self, max_batch: int, num_draft_tokens: int = 0) -> EngineLimits:
        runtime = self.config.runtime
        pages = -(-int(runtime.kv_tokens) // int(runtime.page_size))
        return EngineLimits(
            max_batch,
            int(runtime.max_prefill_tokens),
            int(runtime.page_size),
            pages,
            num_draft_tokens,
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
        parts = (self.target_fingerprint, self.prompts, self.settings(PrepareSettings, "prepare"))
        return fingerprint("answers", __version__, *parts, self.seed, str(self.config.target.dtype))

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
        return fingerprint("validate", self.train_key, *parts)

    def store_identity(self) -> StoreIdentity:
        key = self.answers_key[:16]
        return identity(self.target, self.chat, self.taps, self.target_fingerprint, key)

    @property
    def answers_stage(self) -> StageFolder:
        return StageFolder(cache_dir() / "answers" / self.answers_key[:16])

    @property
    def store_stage(self) -> StageFolder:
        return StageFolder(cache_dir() / "stores" / self.store_key[:16])

    @property
    def draft_folder(self) -> Path:
        return self.run_dir / "draft"


def prepare(session: Session) -> None:
    """The target answers the prompts; features are captured on the way unless told otherwise."""
    stage = session.answers_stage
    if _skip(session, "prepare", stage, session.answers_key):
        return
    start = time.perf_counter()
    settings: PrepareSettings = session.settings(PrepareSettings, "prepare")
    on_the_way = session.settings(CaptureSettings, "capture").during_prepare
    _check_space(session, settings)
    stage.begin(session.answers_key)
    taps = session.taps if on_the_way else ()
    engine = session.engine(settings.max_batch, capture_taps=taps)
    sink = _sink(session) if on_the_way else None

    def keep(shard: int, completions: list[Completion]) -> None:
        if sink is not None:
            answers = [completion_answer(c, session.chat) for c in completions]
            sink.from_completions(shard, completions, answers)

    prepare_shards(session.prompts, stage.path, settings, session.chat, engine, session.seed, keep)
    answers = [a for shard in read_answers(stage.path) for a in shard]
    written = sum(len(a.output_ids) for a in answers)
    stage.complete(session.answers_key, answers=len(answers), tokens=written)
    session.times["prepare"] = time.perf_counter() - start


def capture(session: Session) -> None:
    """Features of the answers, for whatever shards prepare has not captured on the way."""
    stage = session.store_stage
    if _skip(session, "capture", stage, session.store_key):
        return
    prepare(session)
    stage, start = session.store_stage, time.perf_counter()  # its own time, without prepare's
    sink = _sink(session)
    answers = read_answers(session.answers_stage.path)
    settings: CaptureSettings = session.settings(CaptureSettings, "capture")
    capture_missing(sink, session.backend, answers, settings)
    manifest = sink.writer.finish()
    stage.complete(session.store_key, samples=manifest.samples, tokens=manifest.tokens)
    session.times["capture"] = time.perf_counter() - start


def train(session: Session) -> None:
    """Fits the draft and writes its folder."""
    stage = StageFolder(session.run_dir / "train")
    whole = (session.draft_folder / "config.json").exists()
    if whole and _skip(session, "train", stage, session.train_key):
        return
    capture(session)
    start = time.perf_counter()
    store = FeatureStore.open(session.store_stage.path / "features", session.store_identity())
    stage.begin(session.train_key)
    result = fit_draft(
        session.draft_config,
        instantiate(session.config.loss),
        session.target,
        store,
        session.backend,
        session.settings(TrainSettings, "train"),
        stage.path,
        num_draft_tokens=int(session.config.num_draft_tokens),
        seed=session.seed,
    )
    chat, target = session.chat, session.target
    promise = contract(
        result.draft, target, session.target_fingerprint, chat.template_hash, chat.tokenizer_hash
    )
    save_draft(result.draft, session.draft_folder, promise)
    stage.complete(session.train_key, steps=result.steps, supervised_rows=result.supervised_rows)
    session.times["train"] = time.perf_counter() - start


def validate(session: Session) -> None:
    """Replays draft and target on the evaluation prompts and writes the report."""
    stage = StageFolder(session.run_dir / "validate")
    if not _skip(session, "validate", stage, session.validate_key):
        train(session)
        start = time.perf_counter()
        stage.begin(session.validate_key)
        for name, earlier in (
            ("prepare", session.answers_stage),
            ("capture", session.store_stage),
        ):
            if (record := earlier.record()) is not None:
                session.times.setdefault(name, record.seconds)
        check_contract(session.draft_folder, session.target_fingerprint, session.chat.template_hash)
        draft = load_draft(session.draft_folder, session.target)
        report = replay(
            session.target,
            draft,
            session.chat,
            session.eval_prompts,
            session.engine,
            session.backend,
            session.settings(ReplaySettings, "validate"),
            num_draft_tokens=int(session.config.num_draft_tokens),
            temperature=float(session.config.temperature),
            batch_size=int(session.config.batch_size),
            seed=session.seed,
            target_name=str(session.config.target.path),
            draft_name=str(session.config.draft["_target_"]).split(".")[-2],
            origin=lambda: provenance(
                session.config, session.times | {"validate": time.perf_counter() - start}
            ),
        )
        write_report(report, session.run_dir)
        write_model_card(session.draft_folder, report)
        stage.complete(
            session.validate_key, acceptance_length=report.acceptance_length.value or 0.0
        )
    print(summary_line(load_report(session.run_dir / "report.json")))
    print(f"report: {session.run_dir / 'report.md'}")


def _skip(session: Session, name: str, stage: StageFolder, key: str) -> bool:
    record = stage.record()
    if record is None or record.fingerprint != key:
        return False
    session.times[name] = record.seconds
    log.info("%s: complete, kept in %s", name, stage.path)
    return True


def _sink(session: Session) -> ShardSink:
    """Begins or goes on with the store of this session."""
    stage = session.store_stage
    stage.begin(session.store_key)
    settings: CaptureSettings = session.settings(CaptureSettings, "capture")
    writer = FeatureWriter(stage.path / "features", session.store_identity(), settings.dtype)
    greedy = session.settings(PrepareSettings, "prepare").temperature == 0
    return ShardSink(writer, session.target, session.taps, greedy)


def _check_space(session: Session, settings: PrepareSettings) -> None:
    """Estimates the store before anything is computed: every prompt's rows plus full-length answers."""
    rows = 0
    for conversation in session.prompts:
        for i, turn in enumerate(t for t in conversation.turns if t.role == "user"):
            rows += len(turn.content) // 3 + 32 + (i + 1) * settings.max_new_tokens
    width = session.target.hidden_size * len(session.taps)
    size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(str(session.config.capture.dtype), 1)
    check_disk_space(cache_dir(), rows * (width * size + 9), f"the feature store ({rows:,} tokens)")

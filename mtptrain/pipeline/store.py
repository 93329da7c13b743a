"""prepare and capture: answers to train on, and the target's features of them.

Both write into the cache, keyed by what went into them, so that runs which differ only in the draft share
answers and features. Features are taken while the target answers, unless told otherwise, and by a pass of
their own where any are missing.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from hidden_state_cache import FeatureStore, FeatureWriter, StoreError
from mtptrain.capture import CaptureSettings, ShardSink, capture_missing
from mtptrain.given import write_given
from mtptrain.pipeline.skip import skip
from mtptrain.prepare import (
    PrepareSettings,
    check_answers,
    completion_answer,
    missing_answers,
    prepare_shards,
    read_answers,
    seal_answers,
)
from mtptrain.run import cache_dir, check_disk_space
from mtptrain.session import Session
from mtptrain.types import Completion, Conversation

log = logging.getLogger("mtptrain")


def prepare(session: Session) -> None:
    """Answers for everything that is trained on: the target's own, or those that the data gives."""
    stage = session.answers_stage
    settings: PrepareSettings = session.settings(PrepareSettings, "prepare")
    missing = (
        [] if session.answers_given else missing_answers(session.prompts, stage.path, settings)
    )
    if not missing and skip(session, "prepare", stage, session.answers_key):
        return
    if stage.is_complete(session.answers_key):
        log.warning("prepare: %s lacks %d files; they are made again", stage.path, len(missing))
    start = time.perf_counter()
    _check_space(session, settings)
    session.hold(stage.path)
    stage.begin(session.answers_key)
    if session.answers_given:
        size = settings.shard_conversations
        write_given(session.rows, stage.path, size, session.chat, session.max_tokens)
    else:
        _ask_target(session, settings)
    seal_answers(stage.path)
    answers = [a for shard in read_answers(stage.path) for a in shard]
    written = sum(a.written for a in answers)
    stage.complete(session.answers_key, answers=len(answers), tokens=written)
    session.times["prepare"] = time.perf_counter() - start


def _ask_target(session: Session, settings: PrepareSettings) -> None:
    """The target answers the prompts; features are captured on the way unless told otherwise."""
    on_the_way = session.settings(CaptureSettings, "capture").during_prepare
    taps = session.taps if on_the_way else ()
    engine = session.engine(settings.max_batch, capture_taps=taps)
    sink = _sink(session) if on_the_way else None

    def keep(shard: int, completions: list[Completion]) -> None:
        if sink is not None:
            answers = [completion_answer(c, session.chat) for c in completions]
            sink.from_completions(shard, completions, answers)

    folder = session.answers_stage.path
    prepare_shards(session.prompts, folder, settings, session.chat, engine, session.seed, keep)


def capture(session: Session) -> None:
    """Features of the answers, for whatever shards prepare has not captured on the way."""
    stage = session.store_stage
    fault = _store_fault(session.store_folder)
    if fault is None and skip(session, "capture", stage, session.store_key):
        return
    if stage.is_complete(session.store_key):
        log.warning("capture: %s; it is mended", fault)
    prepare(session)
    stage, start = session.store_stage, time.perf_counter()  # its own time, without prepare's
    sink = _sink(session)
    check_answers(session.answers_stage.path)
    answers = read_answers(session.answers_stage.path)
    settings: CaptureSettings = session.settings(CaptureSettings, "capture")
    capture_missing(sink, session.backend, answers, settings)
    manifest = sink.writer.finish()
    stage.complete(session.store_key, samples=manifest.samples, tokens=manifest.tokens)
    session.times["capture"] = time.perf_counter() - start


def _sink(session: Session) -> ShardSink:
    """Begins or goes on with the store of this session."""
    stage = session.store_stage
    session.hold(stage.path)
    stage.begin(session.store_key)
    settings: CaptureSettings = session.settings(CaptureSettings, "capture")
    writer = FeatureWriter(session.store_folder, session.store_identity(), settings.dtype)
    settled: PrepareSettings = session.settings(PrepareSettings, "prepare")
    greedy = settled.temperature == 0 and settled.answers == "target"
    return ShardSink(writer, session.target, session.taps, greedy, session.backend)


def _store_fault(store: Path) -> str | None:
    """What keeps the store from being opened: a shard that is missing or cut short, or all of them."""
    try:
        FeatureStore.open(store)
    except StoreError as error:
        return str(error)


def _check_space(session: Session, settings: PrepareSettings) -> None:
    """Estimates the store before anything is computed: every row's tokens, and answers of full length."""
    rows = _given_rows(session) if session.answers_given else _asked_rows(session, settings)
    width = session.target.hidden_size * len(session.taps)
    size = {"fp32": 4, "bf16": 2, "fp16": 2}.get(str(session.config.capture.dtype), 1)
    check_disk_space(cache_dir(), rows * (width * size + 9), f"the feature store ({rows:,} tokens)")


def _asked_rows(session: Session, settings: PrepareSettings) -> int:
    return sum(
        len(turn.content) // 3 + 32 + (i + 1) * settings.max_new_tokens
        for conversation in session.prompts
        for i, turn in enumerate(t for t in conversation.turns if t.role == "user")
    )


def _given_rows(session: Session) -> int:
    return sum(
        sum(len(turn.content) // 3 + 32 for turn in row.turns)
        if isinstance(row, Conversation)
        else len(row.input_ids)
        for row in session.rows
    )

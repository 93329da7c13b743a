"""The stages in order, each reading one folder and writing one, skipped when whole for the same fingerprint.

prepare and capture write into the cache, keyed by what went into them, so that runs which differ only in the
draft share answers and features; train and validate write into the run folder. A stage first makes sure of
the ones before it, so every verb works alone. It gives up parallel stages: one after the other.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from hidden_state_cache import FeatureStore, FeatureWriter, StoreError, verify
from mtptrain.capture import CaptureSettings, ShardSink, capture_missing
from mtptrain.drafts.base import Draft
from mtptrain.drafts.folder import (
    Contract,
    check_contract,
    contract,
    load_draft,
    save_draft,
    weights_checksum,
)
from mtptrain.given import ROWS, require_supervised, write_given
from mtptrain.marked import counted, describe, unanswered
from mtptrain.prepare import (
    PrepareSettings,
    check_answers,
    completion_answer,
    missing_answers,
    prepare_shards,
    read_answers,
    seal_answers,
)
from mtptrain.run import (
    VERBS,
    StageFolder,
    cache_dir,
    check_disk_space,
    provenance,
    save_resolved,
)
from mtptrain.session import Session
from mtptrain.train.checks import check_served
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
    stages = {"prepare": prepare, "capture": capture, "train": train, "validate": validate}
    with ExitStack() as locks:
        session = Session(config, locks, recording=verb != "inspect")
        if verb == "inspect":
            return inspect_data(session)
        session.hold(session.run_dir)
        save_resolved(config, session.run_dir)
        stages["validate" if verb == "fit" else verb](session)


def prepare(session: Session) -> None:
    """Answers for everything that is trained on: the target's own, or those that the data gives."""
    stage = session.answers_stage
    settings: PrepareSettings = session.settings(PrepareSettings, "prepare")
    missing = (
        [] if session.answers_given else missing_answers(session.prompts, stage.path, settings)
    )
    if not missing and _skip(session, "prepare", stage, session.answers_key):
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
    if fault is None and _skip(session, "capture", stage, session.store_key):
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


def train(session: Session) -> None:
    """Fits the draft and writes its folder."""
    stage = session.train_stage
    whole = (session.draft_folder / "config.json").exists()
    if whole and _skip(session, "train", stage, session.train_key):
        return
    capture(session)
    start = time.perf_counter()
    store = FeatureStore.open(session.store_folder, session.store_identity())
    _prove_store(session)
    stage.begin(session.train_key)
    num_draft_tokens = int(session.config.num_draft_tokens)
    result = fit_draft(
        session.draft_config,
        instantiate(session.config.loss),
        session.target,
        store,
        session.backend,
        session.settings(TrainSettings, "train"),
        stage.path,
        num_draft_tokens=num_draft_tokens,
        seed=session.seed,
    )
    save_draft(result.draft, session.draft_folder, _promise(session, result.draft))
    saved = load_draft(session.draft_folder, session.target)
    check_served(saved, session.target, session.backend, store, num_draft_tokens)
    stage.complete(
        session.train_key,
        steps=result.steps,
        supervised_rows=result.supervised_rows,
        weights=weights_checksum(session.draft_folder),
        unmoved=", ".join(result.unmoved),
    )
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
        _check_weights(session)
        draft = load_draft(session.draft_folder, session.target)
        check_contract(session.draft_folder, _promise(session, draft))
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
            warnings=_warnings(session),
        )
        write_report(report, session.run_dir)
        write_model_card(session.draft_folder, report)
        stage.complete(
            session.validate_key, acceptance_length=report.acceptance_length.value or 0.0
        )
    print(summary_line(load_report(session.run_dir / "report.json")))
    print(f"report: {session.run_dir / 'report.md'}")


def inspect_data(session: Session) -> None:
    """Prints three samples with their loss mask, and counts; writes nothing."""
    chat, stage = session.chat, session.answers_stage
    note, counts = "", Counter[str]()
    if session.answers_given:
        samples = list(chat.samples(session.rows, counts, session.max_tokens))
        counts[ROWS] = len(session.rows)
        require_supervised(counted(samples, Counter(counts)))
    elif stage.is_complete(session.answers_key):
        samples = [a.sample() for shard in read_answers(stage.path) for a in shard]
        counts[ROWS] = len(session.prompts)
    else:
        samples = unanswered(session.prompts, chat)
        counts[ROWS] = len(session.prompts)
        note = "\nthe target has not answered yet: mtptrain prepare has it write the answers of training"
    print(describe(samples, chat, counted(samples, counts), sys.stdout.isatty()) + note)


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


def _prove_store(session: Session) -> None:
    """Every byte that is trained on is as it was written. Raises UserError naming the shards that are not."""
    if not session.settings(CaptureSettings, "capture").verify:
        return
    faults = list(verify(session.store_folder, workers=os.cpu_count() or 1).faults)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{session.store_folder}: {faults[0]}{more}")


def _check_weights(session: Session) -> None:
    record = session.train_stage.record()
    written = record.summary.get("weights") if record else None
    if written not in (None, weights_checksum(session.draft_folder)):
        raise UserError(
            f"{session.draft_folder} does not hold the weights that training wrote: delete that folder and "
            "run again, it is written anew from the last checkpoint"
        )


def _promise(session: Session, draft: Draft) -> Contract:
    """What the draft meets here and now."""
    chat, fingerprint = session.chat, session.target_fingerprint
    hashes = (fingerprint, chat.template_hash, chat.tokenizer_hash)
    return contract(draft, session.target, *hashes, chat.thinking)


def _warnings(session: Session) -> tuple[str, ...]:
    record = session.train_stage.record()
    unmoved = str(record.summary.get("unmoved", "")) if record else ""
    return (f"training has left these weights at their start: {unmoved}",) if unmoved else ()


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

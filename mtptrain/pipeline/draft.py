"""train and validate: a draft is fitted to the store, then replayed with its target and reported on.

Both write into the run folder. Whoever validates has trained first what there is to train, and compares the
weights with those that training wrote and the contract with what the head meets here. A draft around a trained
head trains that head and no other: where one lies in the run folder, it is taken.
"""

from __future__ import annotations

import os
import time

from hydra.utils import instantiate

from hidden_state_cache import FeatureStore, verify
from mtptrain.capture import CaptureSettings
from mtptrain.drafts.base import Draft
from mtptrain.drafts.folder import (
    Contract,
    check_contract,
    contract,
    load_draft,
    save_draft,
    weights_checksum,
)
from mtptrain.pipeline.skip import skip
from mtptrain.pipeline.store import capture
from mtptrain.run import StageFolder, provenance
from mtptrain.session import Session
from mtptrain.train.checks import check_served
from mtptrain.train.fit import fit_draft
from mtptrain.train.module import TrainSettings
from mtptrain.types import UserError
from mtptrain.validate.model_card import write_model_card
from mtptrain.validate.replay import ReplaySettings, replay
from mtptrain.validate.report import load_report, summary_line, write_report


def train(session: Session) -> None:
    """Fits the head and writes its folder. Raises UserError where the draft has none."""
    if (config := session.head_config) is None:
        raise UserError(
            f"draft={session.draft_config.kind} has nothing to train; run validate, or choose a head such as mtp"
        )
    stage = session.train_stage
    whole = (session.draft_folder / "config.json").exists()
    if whole and skip(session, "train", stage, session.train_key):
        return
    capture(session)
    start = time.perf_counter()
    store = FeatureStore.open(session.store_folder, session.store_identity())
    _prove_store(session)
    session.hold(stage.path.parent)
    stage.begin(session.train_key)
    num_draft_tokens = int(session.config.num_draft_tokens)
    result = fit_draft(
        config,
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
    most = min(num_draft_tokens, saved.max_draft_tokens or num_draft_tokens)  # of a hybrid's head
    check_served(saved, session.target, session.backend, store, most)
    stage.complete(
        session.train_key,
        steps=result.steps,
        supervised_rows=result.supervised_rows,
        trained_tokens=result.tokens,
        trained_seconds=round(result.seconds, 3),
        weights=weights_checksum(session.draft_folder),
        unmoved=", ".join(result.unmoved),
    )
    session.times["train"] = time.perf_counter() - start


def validate(session: Session) -> None:
    """Replays draft and target on the evaluation prompts and writes the report."""
    stage = StageFolder(session.run_dir / "validate")
    if not skip(session, "validate", stage, session.validate_key):
        if session.head_config is not None:
            train(session)
            _look_up_times(session)
        start = time.perf_counter()
        stage.begin(session.validate_key)
        report = replay(
            session.target,
            serving_draft(session),
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
            draft_name=session.draft_config.kind,
            origin=lambda: provenance(
                session.config, session.times | {"validate": time.perf_counter() - start}
            ),
            warnings=_warnings(session),
        )
        write_report(report, session.run_dir)
        alone = session.draft_config.trained() is session.draft_config
        if alone and session.head_dir in (None, session.run_dir):  # its own card, not another run's
            write_model_card(session.draft_folder, report)
        stage.complete(
            session.validate_key, acceptance_length=report.acceptance_length.value or 0.0
        )
    print(summary_line(load_report(session.run_dir / "report.json")))
    print(f"report: {session.run_dir / 'report.md'}")


def serving_draft(session: Session) -> Draft:
    """What is validated: the head that was trained, what stands around it, or a draft that needs no training."""
    head = None
    if session.head_config is not None:
        _check_weights(session)
        head = load_draft(session.draft_folder, session.target)
        check_contract(session.draft_folder, _promise(session, head))
    return session.draft_config.around(head, session.target)


def _look_up_times(session: Session) -> None:
    """Of the stages that training did not look at, because it was whole."""
    earlier = {"prepare": session.answers_stage, "capture": session.store_stage}
    for name, stage in earlier.items():
        if (record := stage.record()) is not None:
            session.times.setdefault(name, record.seconds)


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
    record = session.train_stage.record() if session.head_config is not None else None
    unmoved = str(record.summary.get("unmoved", "")) if record else ""
    return (f"training has left these weights at their start: {unmoved}",) if unmoved else ()

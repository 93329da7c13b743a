"""The stages in order, each reading one folder and writing one, skipped when whole for the same fingerprint.

`store` has those that write into the cache, `draft` those that write into the run folder, `compare` the one
that runs them for several drafts. A stage first makes sure of the ones before it, so every verb works alone. It
gives up parallel stages: one after the other.
"""

from __future__ import annotations

from contextlib import ExitStack

from omegaconf import DictConfig

from mtptrain.pipeline.compare import compare
from mtptrain.pipeline.draft import train, validate
from mtptrain.pipeline.look import inspect_data
from mtptrain.pipeline.sound import check_run
from mtptrain.pipeline.store import capture, prepare
from mtptrain.run import VERBS, save_resolved
from mtptrain.session import Session


def run(verb: str, config: DictConfig) -> None:
    """Runs one verb and the stages it needs. Raises UserError for the user's mistakes."""
    assert verb in VERBS, verb
    stages = {
        "prepare": prepare,
        "capture": capture,
        "train": train,
        "validate": validate,
        "compare": compare,
    }
    with ExitStack() as locks:
        session = Session(config, verb != "inspect", locks)
        if verb == "inspect":
            return inspect_data(session)
        if verb in ("fit", "train", "validate"):
            check_run(session)
        session.hold(session.run_dir)
        save_resolved(config, session.run_dir)
        stages["validate" if verb == "fit" else verb](session)

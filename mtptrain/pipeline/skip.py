"""When a stage is skipped: it is whole, and was made of what it would be made of now."""

from __future__ import annotations

import logging

from mtptrain.run import StageFolder
from mtptrain.session import Session

log = logging.getLogger("mtptrain")


def skip(session: Session, name: str, stage: StageFolder, key: str) -> bool:
    """Whether there is nothing to do; the log then says where the result lies."""
    record = stage.record()
    if record is None or record.fingerprint != key:
        return False
    session.times[name] = record.seconds
    log.info("%s: complete, kept in %s", name, stage.path)
    return True

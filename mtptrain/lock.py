"""One writer a folder: a second command in the same run folder, or on the same cached stage, leaves at once.

The lock is the kernel's (flock) on a file that stays in the folder, so a process that is killed holds nothing
and nothing has to be cleaned up; the file only says who holds it. It refuses where `sealed` waits: a stage
takes hours, and a user who starts it twice wants to know. It gives up machines that share a folder over a
network file system without locks.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from mtptrain.run import LOCK
from mtptrain.types import UserError


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Holds `folder`, which is made if need be, for this process.

    Raises UserError naming the folder and the process that holds it, and touches nothing, where one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a+") as file:  # "w" would wipe the holder's name before it is read
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(_in_use(folder, file)) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _in_use(folder: Path, file: IO[str]) -> str:
    file.seek(0)
    holder = file.read(20).strip() or "unknown"
    return (
        f"{folder} is being written by another mtptrain (process {holder}): wait for it or end it, "
        "or name a folder of this run's own with run_dir= or MTPTRAIN_CACHE"
    )

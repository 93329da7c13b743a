"""Which of a run's processes this one is.

torchrun, and whatever speaks its language, tells each process by environment variables; without them a run
is one process. It gives up starting the others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from mtptrain.types import UserError


@dataclass(frozen=True)
class Ranks:
    """`rank` of `world` processes, `local_world` of them on each machine."""

    rank: int = 0
    world: int = 1
    local_world: int = 1

    @classmethod
    def of_environment(cls) -> Ranks:
        """As torchrun says it. Raises UserError for numbers that do not fit each other."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        told = {name: os.environ[name] for name in names if name in os.environ}
        if not told:
            return cls()
        try:
            ranks = cls(*(int(told[name]) for name in names))
        except (KeyError, ValueError):
            raise UserError(f"{told} is not what torchrun sets; unset it, or set {names}") from None
        fits = 0 <= ranks.rank < ranks.world and ranks.world % max(ranks.local_world, 1) == 0
        if not fits or ranks.local_world < 1:
            raise UserError(f"{told} do not fit each other; start the ranks with torchrun")
        return ranks


ALONE = Ranks()

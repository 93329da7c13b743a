"""Checkpoints that are whole or absent, and are known when they are damaged.

Lightning writes to the temporary folder and moves the file, which across file systems is a copy that a kill
leaves half done; and torch reads without looking at the check sums of its own archive, so a flipped bit would
train on. Here a checkpoint is written beside its final name, flushed and renamed, and every CRC is compared
before anything is unpickled, with weights only. It gives up remote file systems.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from mtptrain.run import atomic_write
from mtptrain.types import UserError


class WholeCheckpoints(TorchCheckpointIO):
    """Lightning's plugin: how its Trainer writes and reads a checkpoint."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        archive = io.BytesIO()
        torch.save(checkpoint, archive)
        atomic_write(Path(path), archive.getbuffer())

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable | None = lambda storage, place: storage,
        weights_only: bool | None = True,
    ) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What the checkpoint holds, on the CPU. Raises UserError where a bit of it is not as written."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
        held = None if broken else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of zipfile, of torch, of its unpickler: the file is none of theirs
        broken, held = type(error).__name__, None
    if not isinstance(held, dict):
        raise UserError(
            f"{path} is damaged ({broken or 'it holds no checkpoint'}): delete it and run again, "
            "training then starts from its beginning"
        )
    return held

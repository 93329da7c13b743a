"""A checkpoint is written whole, holds all that training goes on from, and is known when it is damaged."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.losses.kl import KL
from mtptrain.targets.base import Target
from mtptrain.train.checkpoint import WholeCheckpoints, read_checkpoint
from mtptrain.train.fit import TrainResult, fit_draft
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.types import DraftBatch, UserError

Fit = Callable[..., TrainResult]


@pytest.fixture(scope="module")
def fit(
    tiny_target: Target, store: FeatureStore, backend: AttentionBackend, settings: TrainSettings
) -> Fit:
    def run(folder: Path, **changes: Any) -> TrainResult:
        how = replace(settings, epochs=1, batch_tokens=160, **changes)
        kind = (MTPConfig(draft_vocab_size=200), KL(), tiny_target, store, backend, how, folder)
        return fit_draft(*kind, num_draft_tokens=3, seed=3)

    return run


@pytest.fixture(scope="module")
def held(fit: Fit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("run")
    fit(folder, checkpoint_every=4)
    return folder / "checkpoints" / "last.ckpt"


def test_a_checkpoint_holds_all_that_training_goes_on_from(held: Path) -> None:
    """fp32 masters and moments, step, schedule, the generator's state, and the rows seen so far."""
    state = read_checkpoint(held)
    moments = state["optimizer_states"][0]["state"].values()
    assert {x.dtype for x in state["state_dict"].values()} == {torch.float32}
    assert {m[k].dtype for m in moments for k in ("exp_avg", "exp_avg_sq")} == {torch.float32}
    assert len(moments) == len(state["state_dict"])
    step = state["global_step"]
    assert step > 0 and step % 4 == 0
    assert state["lr_schedulers"][0]["last_epoch"] == step
    assert state["rng"].dtype == torch.uint8 and state["supervised_rows"] > 0


def test_a_flipped_bit_anywhere_is_found_or_changes_nothing(held: Path, tmp_path: Path) -> None:
    """300 bits, one by one: the file is refused in one line, or what it holds is what was written."""
    data, whole, draw = held.read_bytes(), read_checkpoint(held), random.Random(0)
    path, refused = tmp_path / "last.ckpt", 0
    for _ in range(300):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            found = read_checkpoint(path)
        except UserError as error:
            assert "\n" not in str(error) and f"{path} is damaged" in str(error)
            refused += 1
            continue
        pairs = zip(found["state_dict"].values(), whole["state_dict"].values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert found["global_step"] == whole["global_step"]
    assert refused > 200


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x04K\x01."])
def test_what_is_no_checkpoint_is_one_line(content: bytes, tmp_path: Path) -> None:
    """An empty file, half an archive and a bare pickle are refused, and nothing of them is run."""
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    with pytest.raises(UserError, match="is damaged .*: delete it and run again"):
        read_checkpoint(path)


class Runs:
    """Leaves a mark where unpickling it runs it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    """One that was made to run something is refused, and it is not run."""
    path, mark = tmp_path / "last.ckpt", tmp_path / "mark"
    WholeCheckpoints().save_checkpoint({"state_dict": Runs(mark)}, path)
    with pytest.raises(UserError, match="is damaged"):
        read_checkpoint(path)
    assert not mark.exists()


class Killed(Exception):
    """Stands for a kill between two steps."""


def test_random_numbers_go_on_where_they_were(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss that draws from torch's own generator gives the same bits, interrupted or not."""
    train, stop = DraftModule.training_step, 0

    def noisy(self: DraftModule, batch: DraftBatch, batch_idx: int) -> Tensor:
        if self.trainer.global_step == stop:
            raise Killed
        return train(self, batch, batch_idx) * (0.5 + torch.rand(()))

    monkeypatch.setattr(DraftModule, "training_step", noisy)
    stop = -1
    whole = fit(tmp_path / "whole", checkpoint_every=3)
    stop = 7
    with pytest.raises(Killed):
        fit(tmp_path / "cut", checkpoint_every=3)
    stop = -1
    again = fit(tmp_path / "cut", checkpoint_every=3)
    pairs = zip(whole.draft.parameters(), again.draft.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)

"""Two ranks over gloo train what one does, and a rank that dies costs no more than the steps since a checkpoint."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.train.module import TrainSettings

DRIVER = Path(__file__).with_name("two_ranks.py")
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(tiny_folder: Path, store: FeatureStore, settings: TrainSettings) -> Run:
    """`run(folder, ranks, batches a step, step at which rank 1 is killed)`"""
    names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    env = {k: v for k, v in os.environ.items() if k not in names} | {"OMP_NUM_THREADS": "1"}
    root = str(DRIVER.parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])

    short = {"epochs": 2, "batch_tokens": 160, "unroll_steps": 2, "unroll_from": 0.3}
    how = asdict(settings) | short | {"held_out": 2, "curve_points": 2, "checkpoint_every": 2}

    def start(
        folder: Path, ranks: int, accumulate: int = 1, killed_at: int = -1
    ) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        what = [tiny_folder, store.folder, folder, json.dumps(how | {"accumulate": accumulate})]
        command = [sys.executable, *launcher, DRIVER, *what, killed_at]
        return subprocess.run(
            [str(word) for word in command], env=env, capture_output=True, text=True, timeout=600
        )

    return start


def _trained(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "weights.safetensors")


def _counted(folder: Path) -> list[tuple[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [(row["step"], row["train/supervised_rows"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def pair(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    done = run(folder, 2)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


def test_two_ranks_train_what_one_does(pair: Path, run: Run, tmp_path: Path) -> None:
    """The same batches a step, two on one rank or one on each of two: weights to rounding, and exactly the same
    steps and supervised rows in the metrics."""
    done = run(tmp_path, 1, accumulate=2)
    assert done.returncode == 0, done.stderr[-2000:]
    mine, theirs = _trained(pair), _trained(tmp_path)
    assert set(mine) == set(theirs)
    for name, weight in mine.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-4, atol=1e-5)
    assert (pair / "rows").read_text() == (tmp_path / "rows").read_text()
    assert _counted(pair) == _counted(tmp_path) and len(_counted(pair)) > 2


def test_a_rank_that_dies_ends_the_run_and_the_next_one_goes_on(
    pair: Path, run: Run, tmp_path: Path
) -> None:
    """Killed with SIGKILL between two checkpoints: no rank waits for ever, and the same command again gives the
    bits of a run that was left alone."""
    assert run(tmp_path, 2, killed_at=5).returncode != 0
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert not (tmp_path / "weights.safetensors").exists()
    done = run(tmp_path, 2)
    assert done.returncode == 0, done.stderr[-2000:]
    again, whole = _trained(tmp_path), _trained(pair)
    assert all(torch.equal(again[name], weight) for name, weight in whole.items())
    assert (tmp_path / "metrics.csv").read_text() == (pair / "metrics.csv").read_text()
    assert (tmp_path / "rows").read_text() == (pair / "rows").read_text()

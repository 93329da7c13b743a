"""One rank of a training run, for `test_ranks.py`: torchrun starts it, twice.

Arguments: target folder, store folder, run folder, the settings as JSON, and the step at which rank 1 is killed
(-1: never). Rank 0 leaves its weights in `weights.safetensors` and its count of rows in `rows`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.launch import Ranks
from mtptrain.losses.kl import KL
from mtptrain.targets.base import Target
from mtptrain.train.fit import fit_draft
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.types import DraftBatch


def main(target: str, store: str, run: str, settings: str, killed_at: str) -> None:
    torch.set_num_threads(1)
    ranks, folder = Ranks.of_environment(), Path(run)
    if ranks.rank == 1 and int(killed_at) >= 0:
        _die_at(int(killed_at))
    result = fit_draft(
        MTPConfig(taps=("layer.1",), draft_vocab_size=200),
        KL(),
        Target.load(Path(target), "float32", "cpu"),
        FeatureStore.open(Path(store)),
        SdpaBackend(),
        TrainSettings(**json.loads(settings)),
        folder,
        num_draft_tokens=2,
        seed=3,
        ranks=ranks,
    )
    if ranks.rank == 0:
        save_file(result.draft.state_dict(), folder / "weights.safetensors")
        (folder / "rows").write_text(str(result.supervised_rows))
    if (
        dist.is_initialized()
    ):  # a rank that leaves while the other still talks to it may abort either
        dist.barrier()
        dist.destroy_process_group()


def _die_at(step: int) -> None:
    train = DraftModule.training_step

    def training_step(self: DraftModule, batch: DraftBatch, batch_idx: int) -> Tensor:
        if self.trainer.global_step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, batch, batch_idx)

    DraftModule.training_step = training_step


if __name__ == "__main__":
    main(*sys.argv[1:])

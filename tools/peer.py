"""The peer that training is measured against: `speculators` 0.9.0, in an environment of its own.

Its pins exclude ours, so it gets a virtual environment in the cache folder, made once. It trains through its
own command, data loader and trainer. The program below changes what must be changed for it to run on a CPU
(device names, a synchronisation that needs an accelerator), leaves out checkpoints and validation, and stops
the clock; nothing of its mathematics is touched. The options are those of the study that found them to be its
best on a CPU: AdamW (its Muon casts to bf16), eager KL loss (its fused one needs Triton), sdpa attention.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    ("torch==2.13.0",),
    ("--no-deps", "speculators==0.9.0", "hs-connectors==0.9.0"),  # it never imports torchaudio etc.
    ("transformers==5.19.0", "datasets==5.1.0", "loguru==0.7.3", "aiohttp", "click", "httpx")
    + ("openai", "psutil", "pydantic-settings", "rich", "safetensors", "typer", "tqdm", "protobuf"),
)
OPTIONS = (
    "--speculator-type=eagle3 --draft-attn-impl=sdpa --loss-implementation=eager --optimizer=adamw "
    "--hidden-states-dtype=float32 --num-workers=0 --on-missing=raise --mask-token-id=0 "
    "--train-data-ratio=0.95 --no-resume-from-checkpoint --log-freq=1000000 --epochs=1000000"
).split()
MARK = "PEER "  # begins the line that carries the result
PROGRAM = """
import json, os, sys, time
import torch

threads, warm_up, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
torch.set_num_threads(threads)
torch.accelerator.synchronize = lambda *args: None
from speculators.train import cli, trainer
from speculators.train.config import TrainConfig

trainer.get_local_rank = lambda: "cpu"
Trainer = trainer.Trainer
set_up_trainer, set_up_model, end_of_step = (
    Trainer.setup_trainer, Trainer.setup_model, Trainer._schedulers_step
)
seen = {"steps": 0, "rows": 0, "tokens": 0, "start": 0.0}

def on_cpu(self):
    self.device_type = "cpu"
    set_up_trainer(self)

def counted(self):
    set_up_model(self)
    trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
    seen["parameters"] = trainable
    self.model.register_forward_pre_hook(count, with_kwargs=True)

def count(module, args, batch):
    seen["rows"] += int(batch["loss_mask"].sum())
    seen["tokens"] += int((batch["document_ids"] >= 0).sum())

def timed(self):
    end_of_step(self)
    seen["steps"] += 1
    if seen["steps"] == warm_up:
        seen.update(rows=0, tokens=0, start=time.perf_counter())
    passed = time.perf_counter() - seen["start"]
    if seen["steps"] > warm_up and passed >= seconds:
        seen.update(seconds=passed, steps=seen["steps"] - warm_up)
        print("MARK" + json.dumps(seen), flush=True)
        os._exit(0)

Trainer.setup_trainer, Trainer.setup_model, Trainer._schedulers_step = on_cpu, counted, timed
Trainer.maybe_save_checkpoint = Trainer.val_epoch = Trainer.maybe_update_best = lambda *a, **k: None
cli.main(TrainConfig.resolve(sys.argv[4:]))
""".replace("MARK", MARK)


@dataclass(frozen=True)
class PeerRun:
    """What the peer did after its warm-up."""

    seconds: float
    steps: int
    rows: int  # that bear a loss at its first step
    tokens: int  # without padding
    parameters: int  # trainable


def environment(cache: Path) -> Path | None:
    """The Python of the peer's environment, made where it is missing; None, with the reason, if that fails."""
    folder = cache / "peer-speculators-0.9.0"
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        print(f"making the peer's environment in {folder} (about 2 GB, once)", flush=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        commands = [[sys.executable, "-m", "venv", str(folder)]]
        commands += [[*pip, *packages] for packages in PACKAGES]
        commands += [[str(python), "-c", "import speculators.train.cli"]]
        for command in commands:
            if fault := _fault(command):
                print(f"the peer cannot be set up: {fault}")
                return None
        done.touch()
    return python


def train(
    python: Path,
    target: Path,
    data: Path,
    *,
    vocabulary: int,
    unroll_steps: int,
    batch_tokens: int,
    threads: int,
    warm_up: int,
    seconds: float,
) -> PeerRun | None:
    """Trains on `data` (its own format) for `seconds` after `warm_up` steps; None, with the reason, if it fails."""
    options = [f"--verifier-name-or-path={target}", f"--data-path={data}"]
    options += [f"--save-path={data / 'saved'}", f"--draft-vocab-size={vocabulary}"]
    options += [f"--ttt-steps={unroll_steps}", f"--total-seq-len={batch_tokens}", *OPTIONS]
    command = [str(python), "-c", PROGRAM, str(threads), str(warm_up), str(seconds), *options]
    done = subprocess.run(command, capture_output=True, text=True, env=_surroundings(threads))
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        print(f"the peer did not train: {_last_line(done.stderr)}")
        return None
    seen = json.loads(lines[-1].removeprefix(MARK))
    return PeerRun(**{name: seen[name] for name in PeerRun.__dataclass_fields__})


def _surroundings(threads: int) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def _fault(command: list[str]) -> str | None:
    """The last line of what a command that failed had to say."""
    done = subprocess.run(command, capture_output=True, text=True)
    return _last_line(done.stderr + done.stdout) if done.returncode else None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")

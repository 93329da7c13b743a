"""How fast a head is trained, beside the peer `speculators` 0.9.0 (EAGLE-3), and beside the machine.

Both sides train on the same answers with 3 unrolled steps, the same vocabulary of 12,288 tokens, one draft
layer, KL, AdamW and at most as many tokens a step. A supervised row bears a loss at the first step, by each
side's own count: ours leaves out rows whose token the draft cannot say. Ours is the real module under the
real trainer, fed from a store; `peer.py` says what the peer is. The share of the machine is the FLOPs of the
matrix products that our steps need, by formula, over the time of whole steps, over the best rate of a bare
GEMM measured just before. Answers and features are made first, once, in the cache; that is not timed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import bench
import lightning as L
import numpy as np
import peer
import torch
from datasets import Dataset, disable_progress_bars
from safetensors.torch import save_file
from torch import Tensor

from hidden_state_cache import FeatureStore, FeatureWriter, StoredSample
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.capture import capture_pass, identity
from mtptrain.drafts.base import rows_from_first, supervised_chain
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.losses.kl import KL
from mtptrain.prepare import PrepareSettings, prepare_shards, read_answers
from mtptrain.run import cache_dir
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.train.data import StoreData, TapColumns
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.train.vocabulary import AllTokens, heaviest, token_weights
from mtptrain.types import DraftBatch, Sample

UNROLL, VOCABULARY, WARM_UP = 3, 12_288, 2
PEER_TAPS = ("layer.1", "layer.14", "layer.26", "final_prenorm")  # its ids 2, 15, 27 and 30
CONFIG = MTPConfig(taps=("final",), draft_vocab_size=VOCABULARY)
ENDLESS = 100_000  # epochs: the clock ends a run


@dataclass
class Clock(L.Callback):
    """Times whole steps after a warm-up and keeps what the steps were given; stops the trainer."""

    seconds: float
    start: float = 0.0
    passed: float = 0.0
    rows: int = 0
    batches: list[DraftBatch] = field(default_factory=list)  # without their features

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: DraftBatch,
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, DraftModule)
        self.passed = time.perf_counter() - self.start
        if batch_idx + 1 == WARM_UP:
            self.rows, self.start = -pl_module.supervised_rows, time.perf_counter()
        elif batch_idx >= WARM_UP:
            light = (batch.input_ids, batch.features[:, :0], batch.final[:, :0])
            self.batches.append(DraftBatch(*light, batch.loss_mask, batch.cu_seqlens))
            if self.passed >= self.seconds:
                self.rows += pl_module.supervised_rows
                trainer.should_stop = True


@dataclass(frozen=True)
class OurRun:
    """One run of ours after its warm-up."""

    rows_per_s: float
    tokens_per_s: float
    answer_tokens_per_s: float
    flops_per_s: float
    gemm_flops_per_s: float  # the machine's, just before
    steps: int


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--answers", type=int, default=128, help="answers to train on")
    parser.add_argument("--batch-tokens", type=int, default=512, help="most tokens a step")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each run of each side")
    parser.add_argument("--no-peer", action="store_true", help="compare with nothing")
    args = bench.begin(parser)
    length = 96
    if args.quick:
        args.answers, args.seconds, length = 6, 2.0, 16
    subject = bench.load_subject()
    folder = training_data(subject, args.answers, length)
    python = None if args.no_peer else peer.environment(cache_dir())
    ours, theirs = [], []
    for run in range(1, args.runs + 1):
        ours.append(our_run(subject.target, folder, args.batch_tokens, args.seconds))
        print(f"  run {run}: ours: {ours[-1].rows_per_s:,.1f} supervised rows/s", flush=True)
        their = python and peer_run(python, subject.folder, folder, args)
        if their:
            theirs.append(their)
            print(f"  run {run}: peer: {their.rows / their.seconds:,.1f} supervised rows/s")
    report(args, ours, theirs)


def peer_run(python: Path, target: Path, folder: Path, args: Any) -> peer.PeerRun | None:
    return peer.train(
        python,
        target,
        folder / "peer",
        vocabulary=VOCABULARY,
        unroll_steps=UNROLL,
        batch_tokens=args.batch_tokens,
        threads=args.threads,
        warm_up=WARM_UP,
        seconds=args.seconds,
    )


# ---- what both train on -----------------------------------------------------------------------------------


def training_data(subject: bench.Subject, count: int, length: int) -> Path:
    """Answers, our store and the peer's dump of the same forward, made once; returns their folder."""
    folder = cache_dir() / "bench" / f"train-{count}x{length}"
    if not folder.exists():
        print(f"making {count} answers of at most {length} tokens, and their features", flush=True)
        making = folder.with_suffix(".tmp")
        shutil.rmtree(making, ignore_errors=True)
        (making / "peer" / "hidden_states").mkdir(parents=True)
        write_features(subject, making, write_answers(subject, making, count, length))
        making.rename(folder)
    return folder


def write_answers(subject: bench.Subject, folder: Path, count: int, length: int) -> list[Sample]:
    prompts = [bench.first_turn(row) for row in bench.conversations(bench.STARTER, count)]
    settings = PrepareSettings(length, 0.0, 1.0, max_batch=count, shard_conversations=count)
    limits = EngineLimits(count, num_pages=count * 32)
    engine = Engine(subject.target, SdpaBackend(), limits, subject.chat.eos_ids)
    prepare_shards(prompts, folder, settings, subject.chat, engine, seed=0)
    return [answer.sample() for shard in read_answers(folder) for answer in shard]


def write_features(subject: bench.Subject, folder: Path, samples: Sequence[Sample]) -> None:
    """One forward for both; the reduced vocabulary of `mtptrain train`, in the peer's format too."""
    target, hidden = subject.target, subject.target.hidden_size
    stored = []
    passes = capture_pass(target, SdpaBackend(), (*PEER_TAPS, "final"), samples, 2048)
    for number, (sample, features) in enumerate(passes):
        theirs, final = features.split([len(PEER_TAPS) * hidden, hidden], -1)
        states = {"hidden_states": theirs.unflatten(-1, (len(PEER_TAPS), hidden)).contiguous()}
        states["token_ids"] = sample.input_ids
        save_file(states, folder / "peer" / "hidden_states" / f"hs_{number}.safetensors")
        kept = (sample.input_ids, sample.loss_mask, final)
        stored.append(StoredSample(sample.id, sample.category, *kept))
    about = identity(target, subject.chat, CONFIG.taps, "bench", "bench")
    writer = FeatureWriter(folder / "features", about, "bf16")
    writer.write_shard(0, stored)
    writer.finish()
    write_peer_table(folder / "peer", samples)
    store = FeatureStore.open(folder / "features")
    final = TapColumns.of(store, CONFIG.taps).final
    vocab = torch.tensor(heaviest(token_weights(store, final, target), VOCABULARY))
    sayable = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, vocab, True)
    np.save(folder / "peer" / f"d2t-{VOCABULARY}.npy", (vocab - torch.arange(VOCABULARY)).numpy())
    np.save(folder / "peer" / f"t2d-{VOCABULARY}.npy", sayable.numpy())


def write_peer_table(folder: Path, samples: Sequence[Sample]) -> None:
    columns = {
        "input_ids": [s.input_ids.tolist() for s in samples],
        "loss_mask": [s.loss_mask.long().tolist() for s in samples],
        "seq_len": [len(s.input_ids) for s in samples],
    }
    disable_progress_bars()
    Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)


# ---- ours -------------------------------------------------------------------------------------------------


def our_run(target: Target, folder: Path, batch_tokens: int, seconds: float) -> OurRun:
    torch.manual_seed(0)
    offsets = torch.from_numpy(np.load(folder / "peer" / f"d2t-{VOCABULARY}.npy"))
    vocab = tuple((offsets + torch.arange(VOCABULARY)).tolist())
    draft = MTPConfig(CONFIG.taps, VOCABULARY, vocab).build(target)
    store = FeatureStore.open(folder / "features")
    epochs = 1 + ENDLESS // len(store)
    data = StoreData(
        store, CONFIG.taps, batch_tokens=batch_tokens, epochs=epochs, held_out=0, seed=0
    )
    settings = train_settings(epochs, batch_tokens)
    scoring = AllTokens(draft, target.vocab_size)
    module = DraftModule(draft, KL(), settings, SdpaBackend(), scoring, len(data.batches))
    gemm, clock = gemm_rate(), Clock(seconds)
    trainer(settings, clock).fit(module, datamodule=data)
    return measured(
        clock, gemm, sum(needed_flops(b, target, scoring.tokens.index) for b in clock.batches)
    )


def measured(clock: Clock, gemm: float, flops: float) -> OurRun:
    tokens = sum(len(b.input_ids) for b in clock.batches)
    answers = sum(int(b.loss_mask.sum()) for b in clock.batches)
    return OurRun(
        rows_per_s=clock.rows / clock.passed,
        tokens_per_s=tokens / clock.passed,
        answer_tokens_per_s=answers / clock.passed,
        flops_per_s=flops / clock.passed,
        gemm_flops_per_s=gemm,
        steps=len(clock.batches),
    )


def train_settings(epochs: int, batch_tokens: int) -> TrainSettings:
    return TrainSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=1e-3,
        optimizer="adamw",
        muon_steps=5,
        other_lr_scale=0.1,
        weight_decay=0.0,
        warmup=0.01,
        clip=1.0,
        unroll_steps=UNROLL,
        unroll_from=0.0,
        step_decay=1.0,
        scored_tokens=0,
        supervise="assistant",
        held_out=0,
        curve_points=0,
        checkpoint_every=ENDLESS,
        wandb=False,
        wandb_mode="offline",
    )


def trainer(settings: TrainSettings, clock: Clock) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        gradient_clip_val=settings.clip,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


# ---- the machine ------------------------------------------------------------------------------------------


def gemm_rate() -> float:
    """FLOPs a second of the faster of two float32 products: a square one, and a chunk of the head."""
    rates = []
    for rows, inner, columns in ((1024, 1024, 1024), (512, 576, VOCABULARY)):
        a, b = torch.randn(rows, inner), torch.randn(inner, columns)
        out = torch.mm(a, b)
        spans = []
        for _ in range(12):
            start = time.perf_counter()
            torch.mm(a, b, out=out)
            spans.append(time.perf_counter() - start)
        rates.append(2 * rows * inner * columns / median(spans))
    return max(rates)


def needed_flops(batch: DraftBatch, target: Target, draft_id: Tensor) -> float:
    """Multiplications and additions of the products a step needs: a layer's three times (forward, two
    gradients), for a prompt's rows those that leave keys and values, attention over visible keys only, the
    frozen head forward and back on rows that bear a loss and forward once for each token they are held against."""
    chain = supervised_chain(batch.loss_mask, batch.cu_seqlens, UNROLL)  # [S, T]
    total, hidden = chain.shape[1], target.hidden_size
    lens = torch.diff(batch.cu_seqlens)
    position = torch.arange(total) - torch.repeat_interleave(batch.cu_seqlens[:-1], lens)
    ran = torch.cat([rows_from_first(chain[0], batch.cu_seqlens)[None], chain[1:]])
    visible = float((ran * (position + 1 + torch.arange(UNROLL)[:, None])).sum())
    heads, dim = target.kv_shape()
    query = target.config.num_attention_heads * dim
    to_keys = 2 * hidden * hidden + hidden * 2 * heads * dim
    weights = to_keys + hidden * 2 * query + 3 * hidden * target.config.intermediate_size
    layer = int(ran.sum()) * weights + (total - int(ran[0].sum())) * to_keys
    sayable = torch.cat([draft_id[batch.input_ids] >= 0, torch.zeros(UNROLL + 1, dtype=torch.bool)])
    held = [chain[j] & sayable[2 + j : 2 + j + total] for j in range(UNROLL)]
    bearing = sum(int(rows.sum()) for rows in held)
    against = torch.cat([rows.nonzero().squeeze(1) + 1 + j for j, rows in enumerate(held)])
    head = hidden * VOCABULARY * (2 * bearing + len(against.unique()))
    return 2.0 * (3 * (layer + 2 * visible * query) + head)


# ---- the report -------------------------------------------------------------------------------------------


def report(args: Any, ours: Sequence[OurRun], theirs: Sequence[peer.PeerRun]) -> None:
    rate = median(run.rows_per_s for run in ours)
    reference = median(run.rows / run.seconds for run in theirs) if theirs else None
    share = median(run.flops_per_s / run.gemm_flops_per_s for run in ours)
    answers = median(run.answer_tokens_per_s for run in ours)
    rows = [
        (
            "set-up",
            f"unroll {UNROLL}, {VOCABULARY:,} tokens of vocabulary, {args.batch_tokens} a step",
        ),
        (
            "ours",
            f"{rate:,.1f} supervised rows/s, {median(r.tokens_per_s for r in ours):,.0f} tokens/s",
        ),
        (
            "GEMM rate of the machine",
            f"{median(r.gemm_flops_per_s for r in ours) / 1e9:,.1f} GFLOP/s",
        ),
        ("ours, of that", f"{share:.2f} over whole steps"),
    ]
    if theirs and reference:
        tokens = median(run.tokens / run.seconds for run in theirs)
        rows.append(("peer", f"{reference:,.1f} supervised rows/s, {tokens:,.0f} tokens/s"))
        rows.append(
            ("ratio", f"{rate / reference:.2f}; by answer tokens {answers / reference:.2f}")
        )
    bench.table("training, median of the runs", rows)
    more = {"gemm_share": round(share, 3), "answer_tokens_per_s": round(answers, 1)}
    bench.finish("train", rate, reference, "supervised rows/s", args.threads, more)


if __name__ == "__main__":
    main()

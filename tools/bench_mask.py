"""How fast conversations become masked samples, beside the tokenizer's own batch speed on the same texts.

Ours is everything from turns to samples: rendering by the template (twice an answer), tokenising, masks,
tensors. The reference is one call of the tokenizer, without offsets or masks, on the very texts that ours
made, in chunks of the same size; so the ratio is what rendering and masking cost. Rates are per second of
CPU time of all threads, because the machine may be shared. Without --data the starter prompts serve as both
sides of chats of one to four answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import bench

from mtptrain.chat import CHUNK, Chat
from mtptrain.data.counts import Counts
from mtptrain.data.prompts import read_prompts
from mtptrain.data.reader import read_answered
from mtptrain.datasets.base import DataSettings
from mtptrain.loss_mask import render
from mtptrain.run import cache_dir, data_file
from mtptrain.targets.gguf import resolve
from mtptrain.types import Conversation, Turn


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--data", help="a file of conversations with answers")
    parser.add_argument("--tokenizer", default=bench.TARGET, help="a target: folder or package")
    parser.add_argument("--rows", type=int, default=2000)
    args = bench.begin(parser)
    chat = Chat.load(resolve(args.tokenizer, cache_dir()))
    rows = chats(args.data)[: 64 if args.quick else args.rows]
    counts = Counter[str]()
    texts = [one.text for row in rows for one in render(chat.template, row, counts)]
    works = {
        "ours, rendered, tokenised, masked": partial(masked, chat, rows),
        "the tokenizer alone, same texts": partial(tokenised, chat, texts),
    }
    for work in works.values():
        work()
    contenders = [bench.Contender(name, partial(cpu_rate, work)) for name, work in works.items()]
    ours, alone = bench.take_turns(contenders, args.runs)
    figures = {"conversations": len(rows), "samples": len(texts)} | counts
    bench.table("counted", [(name, f"{count:,}") for name, count in figures.items()])
    bench.finish("mask", ours, alone, "tokens/s of CPU", args.threads, {"texts": len(texts)})


def chats(path: str | None) -> list[Conversation]:
    """Conversations with answers: the file's, or made of the starter prompts."""
    if path:
        rows = read_answered(data_file(path, "--data"), DataSettings(), Counts())
        return [row for row in rows if isinstance(row, Conversation)]
    told = [row.turns[-1].content for row in read_prompts(data_file(bench.STARTER, "--data"))]
    said = told[1:] + told[:1]
    turns = [(Turn("user", a), Turn("assistant", b)) for a, b in zip(told, said, strict=True)]
    made = [sum(turns[i : i + 1 + i % 4], ()) for i in range(len(turns))]
    return [Conversation(str(i), "all", chat) for i, chat in enumerate(made)]


def masked(chat: Chat, rows: Sequence[Conversation]) -> int:
    return sum(len(sample.input_ids) for sample in chat.samples(rows, Counter()))


def tokenised(chat: Chat, texts: Sequence[str]) -> int:
    done = 0
    for start in range(0, len(texts), CHUNK):
        chunk = list(texts[start : start + CHUNK])
        ids = chat.tokenizer(chunk, add_special_tokens=False, verbose=False)["input_ids"]
        done += sum(map(len, ids))  # pyright: ignore[reportArgumentType]
    return done


def cpu_rate(work: Callable[[], int]) -> float:
    start = time.process_time()
    done = work()
    return done / (time.process_time() - start)


if __name__ == "__main__":
    main()

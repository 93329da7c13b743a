"""How fast answers are written in batches, beside transformers' `generate`.

Real prompts, the same number of greedy tokens after each on both sides (an end token does not stop), and
everything in the time: prefill, decoding, building the KV pool. Ours takes the prompts as they come, in
batches of at most 256 as `mtptrain prepare` does, and shares the pages of common prefixes. transformers gets
them sorted by length and left padded, so that little is padded, at the better of the batch sizes tried with
a quarter of the tokens. Tokens are compared too: a prompt that differs is a near-tie or a fault, so it is
printed. It gives up early ends, where continuous batching would gain more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import bench
from transformers import PreTrainedModel

from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.types import Request, SamplingParams

MAX_BATCH, PAGE_SIZE = 256, 16


@dataclass(frozen=True)
class Work:
    """What both sides do, and the tokens that each wrote last, by request id."""

    subject: bench.Subject
    plain: PreTrainedModel
    requests: Sequence[Request]
    new_tokens: int
    ours: dict[str, list[int]] = field(default_factory=dict)
    theirs: dict[str, list[int]] = field(default_factory=dict)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 128])
    args = bench.begin(parser)
    if args.quick:
        args.prompts, args.new_tokens, args.batch_sizes = 4, 6, [2, 4]
    subject = bench.load_subject()
    requests = bench.first_turns(bench.conversations(bench.STARTER, args.prompts), subject.chat)
    work = Work(subject, bench.plain_transformers(subject.folder), requests, args.new_tokens)
    ours = bench.Contender("ours", partial(bench.rate_of, partial(generate, work)))
    theirs = best_batch_size(work, args.batch_sizes)
    rates = bench.take_turns([ours, theirs], args.runs)
    differing = describe(work, theirs.name, *rates)
    more = {"prompts": len(requests), "prompts_that_differ": differing}
    bench.finish("generate", rates[0], rates[1], "new tokens/s", args.threads, more)


def best_batch_size(work: Work, sizes: Sequence[int]) -> bench.Contender:
    """transformers at the size that is fastest with a quarter of the tokens; warms both sides up."""
    generate(Work(work.subject, work.plain, work.requests[:2], 2))
    shorter = Work(work.subject, work.plain, work.requests, max(2, work.new_tokens // 4))
    reference(Work(work.subject, work.plain, work.requests[:2], 2), 2)
    tried = [contender(shorter, size) for size in sizes]
    print(f"choosing a batch size with {shorter.new_tokens} new tokens")
    rates = bench.take_turns(tried, 1)
    return contender(work, sizes[rates.index(max(rates))])


def contender(work: Work, size: int) -> bench.Contender:
    name = f"transformers generate, batch {size}"
    return bench.Contender(name, partial(bench.rate_of, partial(reference, work, size)))


def generate(work: Work) -> int:
    """Ours; returns the new tokens."""
    longest = max(len(r.prompt_ids) for r in work.requests) + work.new_tokens + 1
    batch = min(MAX_BATCH, len(work.requests))
    limits = EngineLimits(batch, page_size=PAGE_SIZE, num_pages=batch * -(-longest // PAGE_SIZE))
    target, chat = work.subject.target, work.subject.chat
    engine = Engine(target, SdpaBackend(), limits, chat.eos_ids)
    params = SamplingParams(max_new_tokens=work.new_tokens, ignore_eos=True)
    done = engine.generate(work.requests, params)
    work.ours.update({c.request.id: list(c.output_ids) for c in done})
    return sum(len(c.output_ids) for c in done)


def reference(work: Work, batch_size: int) -> int:
    """transformers' own loop; returns the new tokens."""
    done = bench.transformers_answers(work.plain, work.requests, work.new_tokens, batch_size)
    work.theirs.update(done)
    return sum(map(len, done.values()))


def describe(work: Work, reference_name: str, ours: float, theirs: float) -> int:
    """Prints the table; returns how many prompts got other tokens from one side than the other."""
    differing = [r for r in work.requests if work.ours[r.id] != work.theirs[r.id]]
    prompt_tokens = sum(len(r.prompt_ids) for r in work.requests)
    rows = [
        ("prompts", f"{len(work.requests)}, {prompt_tokens:,} tokens, {work.new_tokens} new each"),
        ("ours", f"{ours:,.1f} new tokens/s, prefill included"),
        (reference_name, f"{theirs:,.1f} new tokens/s, prefill included"),
        ("ratio", f"{ours / theirs:.2f}"),
        ("prompts whose tokens differ", f"{len(differing)} of {len(work.requests)}"),
    ]
    bench.table("batched generation, median of the runs", rows)
    for request in differing:
        a, b = work.ours[request.id], work.theirs[request.id]
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
        print(f"  {request.id}: new token {at} is {a[at]} here, {b[at]} there")
    return len(differing)


if __name__ == "__main__":
    main()

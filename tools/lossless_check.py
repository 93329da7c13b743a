"""Whether a trained head changes a single greedy token, held against transformers' own `generate`.

Draft and target decode together in one engine (batch 8 unless told otherwise); the same prompts go through
plain decoding in the same engine and through plain transformers with its own attention, in fp32. Every token
is compared. It gives up speed: transformers runs small left-padded batches, because only the tokens count.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import bench

from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.drafts.base import Draft
from mtptrain.drafts.folder import load_draft
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.runtime.tree import TreeShape
from mtptrain.types import Completion, SamplingParams

PAGE_SIZE = 16
Answers = dict[str, list[int]]


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run folder of a trained head")
    parser.add_argument("--target", default=bench.TARGET, help="what the head was trained on")
    parser.add_argument("--data", default="prompts/starter_eval.jsonl")
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    kinds = ("static", "dynamic", "best_first")
    parser.add_argument("--tree", choices=kinds, help="propose trees, not chains")
    args = bench.begin(parser)
    if args.quick:
        args.prompts, args.new_tokens = min(args.prompts, 8), min(args.new_tokens, 24)
    subject = bench.load_subject(args.target)
    requests = bench.first_turns(bench.conversations(args.data, args.prompts), subject.chat)
    draft = load_draft(args.run_dir / "draft", subject.target)
    tree = TreeShape(args.tree)

    def engine(head: Draft | None, num_draft_tokens: int) -> Answers:
        longest = max(len(r.prompt_ids) for r in requests) + args.new_tokens
        pages = args.batch_size * ((longest + tree.most_rows(num_draft_tokens)) // PAGE_SIZE + 1)
        limits = EngineLimits(args.batch_size, 1024, PAGE_SIZE, pages, num_draft_tokens, tree)
        runner = Engine(subject.target, SdpaBackend(), limits, subject.chat.eos_ids, head)
        done: Sequence[Completion] = runner.generate(
            requests, SamplingParams(max_new_tokens=args.new_tokens)
        )
        return {c.request.id: list(c.output_ids) for c in done}

    together = engine(draft, args.num_draft_tokens)
    references: dict[str, Answers] = {
        "plain decoding": engine(None, 0),
        "transformers generate": bench.transformers_answers(
            bench.plain_transformers(subject.folder),
            requests,
            args.new_tokens,
            args.batch_size,
            subject.chat.eos_ids,
        ),
    }
    checked = sum(map(len, together.values()))
    wrong = {name: mismatches(together, answers) for name, answers in references.items()}
    rows = [("tokens checked", f"{checked:,} of {len(requests)} prompts, batch {args.batch_size}")]
    rows += [(f"differ from {name}", str(count)) for name, count in wrong.items()]
    bench.table("greedy tokens with the draft", rows)
    raise SystemExit(1 if any(wrong.values()) else 0)


def mismatches(mine: Answers, theirs: Answers) -> int:
    """Tokens that one side has and the other has not in the same place; names the prompts."""
    wrong = 0
    for name, tokens in mine.items():
        same = sum(a == b for a, b in zip(tokens, theirs[name], strict=False))
        differing = max(len(tokens), len(theirs[name])) - same
        if differing:
            print(f"  {name}: {differing} tokens differ")
        wrong += differing
    return wrong


if __name__ == "__main__":
    main()

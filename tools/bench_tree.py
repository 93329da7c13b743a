"""What a token tree's mask costs: a verify pass of 60 rows with it, beside that of a chain of as many rows.

Both run over the same pages, plan included, at growing contexts, as the backend runs them by itself: the tree's
mask meets its own rows only, so the ratio should stay at one. Beside them stands the same tree with a mask over
the whole sequence. The network has the default target's shape and random weights, for time does not depend on
them. It gives up the draft's side of a tree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log

import bench
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtptrain.attention_backends.base import ForwardContext, PagedBatch
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.runtime.kv_pages import KVPool
from mtptrain.runtime.tree import Tree, best_first
from mtptrain.targets.base import Target

PAGE_SIZE = 16
ROWS = 60  # the newest token and 59 nodes, as EAGLE-2 verifies
ENDLESS = 1 << 40
CONTEXTS = (512, 1024, 2048, 4096, 8192)
SHAPE = {  # of the default target, SmolLM2-135M
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
QUICK = {"vocab_size": 512, "hidden_size": 72, "intermediate_size": 96, "num_hidden_layers": 2}


class WholeMask(SdpaBackend):
    """Masks all keys of a sequence, as a layer with a sliding window has to."""

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ctx: ForwardContext,
        layer: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        return super().attend(query, key, value, ctx, layer, scale, window or ENDLESS)


@dataclass(frozen=True)
class Bench:
    """One target, its pages filled with anything, and the tree whose pass is timed."""

    target: Target
    pool: KVPool
    tree: Tree
    batch_size: int

    def rate(self, context: int, backend: SdpaBackend, masked: bool) -> float:
        """Verify passes a second behind `context` rows; the plan is made anew, as in every step."""

        def work() -> int:
            ctx = self._context(context, backend, masked)
            steps = (0, *self.tree.depths) if masked else range(ROWS)
            positions = torch.tensor([context + x for x in steps] * self.batch_size)
            ids = torch.arange(len(positions)) % self.target.vocab_size
            self.target.forward(ids, positions, ctx, ("final",))
            return 1

        work()
        return bench.rate_of(work)

    def _context(self, context: int, backend: SdpaBackend, masked: bool) -> ForwardContext:
        end = context + ROWS
        pages = -(-end // PAGE_SIZE)
        tables = [torch.arange(i * pages, (i + 1) * pages) for i in range(self.batch_size)]
        rows = torch.arange(context, end)
        slots = [t[rows // PAGE_SIZE] * PAGE_SIZE + rows % PAGE_SIZE for t in tables]
        tails: tuple[Tensor, ...] | None = (self.tree.mask(),) * self.batch_size if masked else None
        paged = PagedBatch(
            self.pool.keys,
            self.pool.values,
            PAGE_SIZE,
            tuple(tables),
            (end,) * self.batch_size,
            torch.cat(slots),
            tails,
        )
        return ForwardContext.over_pages(backend, [ROWS] * self.batch_size, paged)


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--batch", type=int, default=1, help="sequences verified together")
    args = bench.begin(parser)
    contexts = CONTEXTS[:2] if args.quick else CONTEXTS
    it = _bench(args.batch, contexts[-1], SHAPE | QUICK if args.quick else SHAPE)
    rows, ratios = [], dict[int, float]()
    ours = reference = 0.0
    for context in contexts:
        print(f"{context} rows of context")
        contenders = [
            bench.Contender("tree", _work(it, context, SdpaBackend(), True)),
            bench.Contender("chain", _work(it, context, SdpaBackend(), False)),
            bench.Contender("tree, all keys masked", _work(it, context, WholeMask(), True)),
        ]
        ours, reference, whole = bench.take_turns(contenders, args.runs)
        ratios[context] = ours / reference
        times = [f"{1000 / x:,.1f}" for x in (ours, reference, whole)]
        rows.append((f"{context:,}", f"{' | '.join(times)} | {ratios[context]:.3f}"))
    bench.table(
        f"ms a pass of {ROWS} rows, batch {args.batch}: tree | chain | tree, all keys masked | tree / chain",
        rows,
    )
    more = {f"ratio_{context}": round(ratio, 3) for context, ratio in ratios.items()}
    bench.finish("tree", ours, reference, "verify passes/s", args.threads, more)


def _bench(batch_size: int, longest: int, shape: dict[str, int]) -> Bench:
    torch.manual_seed(0)
    target = Target(LlamaForCausalLM(LlamaConfig(**shape)))  # pyright: ignore[reportArgumentType]
    pages = batch_size * -(-(longest + ROWS) // PAGE_SIZE)
    pool = KVPool(pages, PAGE_SIZE, [target.kv_shape()] * target.num_layers)
    for x in (*pool.keys, *pool.values):
        x.normal_()
    laws = [[-log(2) * (rank + 1) for rank in range(10)] for _ in range(7)]
    tree = best_first([range(10)] * 7, laws, ROWS - 1)
    return Bench(target, pool, tree, batch_size)


def _work(it: Bench, context: int, backend: SdpaBackend, masked: bool) -> Callable[[], float]:
    return lambda: it.rate(context, backend, masked)


if __name__ == "__main__":
    main()

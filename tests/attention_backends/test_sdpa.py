"""The reference backend: plain forwards reproduced packed, paged and unrolled, without copied keys."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen3Config,
)

from mtptrain.attention_backends.base import (
    AttentionBackend,
    ForwardContext,
    PagedBatch,
    UnrollCache,
    register,
)
from mtptrain.attention_backends.sdpa import MAX_DECODE_QUERIES, PagePlan, SdpaBackend, trees
from mtptrain.runtime.kv_pages import KVPool
from mtptrain.targets.base import Target
from mtptrain.types import UserError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "grouped": LlamaConfig(**SHAPE),
    "qk-norm": Qwen3Config(**SHAPE),
    "window": MistralConfig(**SHAPE, sliding_window=7),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
SIZE = 4  # rows of a page
HEADS, GROUPS = 2, 8  # of the test that watches allocations


def _pair(config: PretrainedConfig) -> tuple[Any, Target]:
    """The same random weights in transformers alone and as a target."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.3)  # large enough that attention is not flat
    return plain, Target(copy.deepcopy(plain))


def _plain_final(plain: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return plain.model(input_ids=ids[None]).last_hidden_state[0]


class Paged:
    """Feeds rows of sequences to a target over scattered pages, as the runtime would."""

    def __init__(self, target: Target, tables: Sequence[Sequence[int]]) -> None:
        self.target, self.tables = target, [torch.tensor(t) for t in tables]
        shapes = [target.kv_shape()] * target.num_layers
        self.pool, self.backend = KVPool(40, SIZE, shapes), SdpaBackend()

    def batch(self, rows: dict[int, tuple[int, int]]) -> tuple[PagedBatch, list[int]]:
        """`rows`: sequence -> (first row, one behind the last)."""
        tables = [self.tables[s] for s in rows]
        places = [torch.arange(a, b) for a, b in rows.values()]
        slots = [t[p // SIZE] * SIZE + p % SIZE for t, p in zip(tables, places, strict=True)]
        kv_lens = tuple(b for _, b in rows.values())
        keys, values = self.pool.keys, self.pool.values
        batch = PagedBatch(keys, values, SIZE, tuple(tables), kv_lens, torch.cat(slots))
        return batch, [b - a for a, b in rows.values()]

    def run(self, ids: Sequence[Tensor], rows: dict[int, tuple[int, int]]) -> dict[int, Tensor]:
        batch, lens = self.batch(rows)
        ctx = ForwardContext.over_pages(self.backend, lens, batch)
        tokens = torch.cat([ids[s][a:b] for s, (a, b) in rows.items()])
        positions = torch.cat([torch.arange(a, b) for a, b in rows.values()])
        out = self.target.forward(tokens, positions, ctx, ("final",)).final
        return dict(zip(rows, out.split(lens), strict=True))


@every_family
def test_packed_documents_equal_plain_forwards(family: str, backend: AttentionBackend) -> None:
    """Documents packed into one row give what each gives alone in transformers."""
    plain, target = _pair(FAMILIES[family])
    lens = [1, 19, 8, 33]
    ids = torch.randint(0, 97, (sum(lens),))
    positions = torch.cat([torch.arange(n) for n in lens])
    out = target.forward(ids, positions, ForwardContext.packed(backend, lens), ("final",)).final
    for got, document in zip(out.split(lens), ids.split(lens), strict=True):
        torch.testing.assert_close(got, _plain_final(plain, document), atol=2e-5, rtol=0)


@every_family
def test_chunks_decode_and_verify_equal_the_plain_forward(family: str) -> None:
    """Prefill in chunks of any size, decode and ragged verify steps over scattered pages, two of them
    shared, give the plain forward's rows."""
    plain, target = _pair(FAMILIES[family])
    head = torch.randint(0, 97, (2 * SIZE,))  # two full pages that both sequences begin with
    ids = [torch.cat([head, torch.randint(0, 97, (n,))]) for n in (72, 30)]
    tables = [[9, 3, *range(20, 39)], [9, 3, 0, 17, 1, 16, 2, 15, 4, 14, 5]]
    paged, expected = Paged(target, tables), [_plain_final(plain, x) for x in ids]
    chunk = 8 + MAX_DECODE_QUERIES + 8  # one sequence at a time
    steps = [
        {0: (0, 3)},
        {0: (3, 8)},
        {0: (8, chunk), 1: (8, 11)},  # the second starts behind the shared pages
        {0: (chunk, 60), 1: (11, 20)},
        {0: (60, 61), 1: (20, 21)},
        {1: (21, 22)},
        {0: (61, 66), 1: (22, 25)},
        {1: (23, 29), 0: (62, 67)},  # rolled back: rows are written again, in another order
    ]
    for rows in steps:
        for s, out in paged.run(ids, rows).items():
            torch.testing.assert_close(out, expected[s][slice(*rows[s])], atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("dense", [True, False])
def test_both_paged_paths_agree(dense: bool, window: int | None) -> None:
    """Pages as units of work and one call a sequence give the same, in a dense pool and in a sparse one."""
    torch.manual_seed(1)
    tables = [[0, 1, 3], [0, 5], [0, 1, 4]] if dense else [[0, 1, 30], [0, 39], [0, 1, 8]]
    paged = Paged(_pair(FAMILIES["grouped"])[1], tables)
    for pool in (*paged.pool.keys, *paged.pool.values):
        pool.normal_()
    batch, lens = paged.batch({0: (8, 11), 1: (4, 5), 2: (8, 12)})
    plan = paged.backend.plan(tuple(lens), batch)
    assert isinstance(plan, PagePlan) and (plan.pages is None) is dense and plan.shared
    q, k, v = torch.randn(8, 6, 8), torch.randn(8, 2, 8), torch.randn(8, 2, 8)
    outs = [
        paged.backend.attend(
            q, k, v, ForwardContext(paged.backend, tuple(lens), batch, plan=p), 0, 0.4, window
        )
        for p in (plan, None)
    ]
    torch.testing.assert_close(*outs, atol=1e-6, rtol=1e-5)


def test_a_long_chunk_is_not_planned() -> None:
    """One sequence with more rows than a verify pass has turns the step into calls a sequence."""
    paged = Paged(_pair(FAMILIES["grouped"])[1], [range(20), [30]])
    batch, lens = paged.batch({0: (0, MAX_DECODE_QUERIES + 1), 1: (0, 1)})
    assert paged.backend.plan(tuple(lens), batch) is None


# ---- token trees ------------------------------------------------------------------------------------------

TREES = {  # parents of each node; 0 is the root's first child, -1 the root
    0: (-1, -1, 0, 0, 1, 2, 2, 5, -1),
    1: (-1,),
    2: (-1, 0, 1, 2, 3, 4),
}


def _tree_mask(parents: Sequence[int]) -> Tensor:
    """The root's row first; every row sees its ancestors and itself."""
    mask = torch.eye(len(parents) + 1, dtype=torch.bool)
    for node, parent in enumerate(parents):
        mask[node + 1] |= mask[parent + 1]
    return mask


def _one_by_one(
    query: Tensor, keys: Tensor, values: Tensor, tail: Tensor, window: int | None
) -> Tensor:
    """The rows of one sequence, entry by entry; keys, values [rows, heads, d], the newest rows a tree."""
    out, first = torch.zeros_like(query), len(keys) - tail.shape[1]
    for i in range(len(query)):
        chain = [*range(first), *(first + j for j in range(tail.shape[1]) if tail[i, j])]
        chain = chain if window is None else chain[-window:]
        for head in range(query.shape[1]):
            mine = head // (query.shape[1] // keys.shape[1])
            scores = torch.stack([query[i, head] @ keys[row, mine] * 0.4 for row in chain])
            for weight, row in zip(scores.softmax(0), chain, strict=True):
                out[i, head] += weight * values[row, mine]
    return out


by_tree_path = pytest.mark.parametrize(
    "most", [64, 0], ids=["pages with a mask", "prefix and masked tail"]
)


@by_tree_path
@pytest.mark.parametrize("window", [None, 1, 4, 9])
@pytest.mark.parametrize("newest", [False, True], ids=["whole trees", "their newest rows"])
@pytest.mark.parametrize("start", [6, 0], ids=["behind a prefix", "one of them behind nothing"])
def test_a_tree_sees_the_prefix_its_ancestors_and_itself(
    start: int, newest: bool, window: int | None, most: int
) -> None:
    """Either way to mask a tree gives what a loop over single entries gives: trees of three shapes at once,
    that begin and end anywhere in a page, over shared pages, with a window that counts along the path; all
    their rows at once, or only the newest over rows that lie there already."""
    torch.manual_seed(3)
    paged = Paged(_pair(FAMILIES["grouped"])[1], [[0, 1, 3, 7, 8], [0, 5], [0, 1, 4, 6]])
    paged.backend = SdpaBackend(most)
    for pool in (*paged.pool.keys, *paged.pool.values):
        pool.normal_()
    tails = [_tree_mask(p) for p in TREES.values()]
    starts = [start, 5, 9]
    first = [a + (len(t) // 2 if newest else 0) for a, t in zip(starts, tails, strict=True)]
    ends = [a + len(t) for a, t in zip(starts, tails, strict=True)]
    batch, lens = paged.batch({s: x for s, x in enumerate(zip(first, ends, strict=True))})
    tails = tuple(t[-n:] for t, n in zip(tails, lens, strict=True))
    batch = replace(batch, tails=tails)
    q, k, v = torch.randn(sum(lens), 6, 8), *torch.randn(2, sum(lens), 2, 8)
    ctx = ForwardContext.over_pages(paged.backend, lens, batch)
    assert isinstance(ctx.plan, PagePlan) == bool(most)
    got = paged.backend.attend(q, k, v, ctx, 1, 0.4, window)
    for s, (mine, out) in enumerate(zip(q.split(lens), got.split(lens), strict=True)):
        rows = torch.arange(ends[s])
        page, offset = paged.tables[s][rows // SIZE], rows % SIZE
        keys, values = paged.pool.keys[1][page, :, offset], paged.pool.values[1][page, :, offset]
        expected = _one_by_one(mine, keys, values, tails[s], window)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@by_tree_path
@every_family
def test_a_tree_in_one_pass_is_each_of_its_paths_as_a_chain(family: str, most: int) -> None:
    """The target's rows of a tree of 59 nodes, beside one of another shape, equal the plain forward over the
    prompt and the node's own path, whichever way the mask is met."""
    plain, target = _pair(FAMILIES[family])
    big = tuple(-1 if i < 4 else (i - 4) * 2 // 3 for i in range(59))
    shapes, prompts = {0: big, 1: TREES[0]}, [torch.randint(0, 97, (n,)) for n in (22, 7)]
    ids = [
        torch.cat([p, torch.randint(0, 97, (len(shapes[s]) + 1,))]) for s, p in enumerate(prompts)
    ]
    paged = Paged(target, [[9, 3, *range(20, 39)], [1, 16, 2, 15, 4, 14, 5]])
    paged.run(ids, {0: (0, 22), 1: (0, 7)})
    paged.backend = SdpaBackend(most)
    rows = {s: (len(p), len(ids[s])) for s, p in enumerate(prompts)}
    batch, lens = paged.batch(rows)
    tails = tuple(_tree_mask(shapes[s]) for s in rows)
    ctx = ForwardContext.over_pages(paged.backend, lens, replace(batch, tails=tails))
    assert isinstance(ctx.plan, PagePlan) == bool(most)
    tokens = torch.cat([ids[s][a:b] for s, (a, b) in rows.items()])
    depth = [len(prompts[s]) + t.sum(1) - 1 for s, t in enumerate(tails)]
    got = target.forward(tokens, torch.cat(depth), ctx, ("final",)).final.split(lens)
    for s, prompt in enumerate(prompts):
        for i, seen in enumerate(tails[s]):
            path = torch.cat([prompt, ids[s][len(prompt) :][seen]])
            expected = _plain_final(plain, path)[-1]
            torch.testing.assert_close(got[s][i], expected, atol=2e-5, rtol=0)


def test_a_trees_mask_touches_its_own_pages_only() -> None:
    """The longer the prefix the more pages are read, but no more of them meet a mask."""
    pool = KVPool(600, 16, [(2, 8)])
    tail = _tree_mask(TREES[0])
    masked = []
    for prefix in (100, 1000, 8000):
        rows = prefix + len(tail)
        table = torch.arange(-(-rows // 16))
        slots = torch.arange(prefix, rows)
        paged = PagedBatch(pool.keys, pool.values, 16, (table,), (rows,), slots, (tail,))
        plan = SdpaBackend(64).plan((len(tail),), paged)
        assert isinstance(plan, PagePlan) and len(plan.owner) == len(table)
        masked.append(len(plan.bias))
    assert max(masked) <= 2


def test_a_large_trees_mask_is_no_larger_than_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longer the prefix the more keys every row sees without a mask; those that meet one are the tree's own."""
    pool, tail = KVPool(600, 16, [(2, 8)]), _tree_mask(tuple(range(-1, 40)))
    seen = dict[str, list[int]](masked=[], unmasked=[])
    for name, keys in seen.items():
        attend = getattr(trees, f"_{name}")

        def spy(q: Tensor, k: Tensor, *rest: Any, attend: Any = attend, keys: Any = keys) -> Any:
            keys.append(k.shape[-2])
            return attend(q, k, *rest)

        monkeypatch.setattr(trees, f"_{name}", spy)
    backend, q, kv = SdpaBackend(), torch.randn(len(tail), 6, 8), torch.randn(len(tail), 2, 8)
    for prefix in (100, 1000, 8000):
        rows = torch.arange(prefix, prefix + len(tail))
        tables, lens = (torch.arange(600),), (prefix + len(tail),)
        paged = PagedBatch(pool.keys, pool.values, 16, tables, lens, rows, (tail,))
        ctx = ForwardContext.over_pages(backend, [len(tail)], paged)
        backend.attend(q, kv, kv, ctx, 0, 0.4, None)
    assert seen == {"masked": [len(tail)] * 3, "unmasked": [100, 1000, 8000]}


class _Allocations(TorchDispatchMode):
    """Remembers the largest tensor of storage of its own that any operation gave, and how far apart the
    keys of neighbouring query heads lay when a fused kernel was called."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.group_strides = 0, list[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if "scaled_dot_product" in str(func):
            self.group_strides += [args[1].view(HEADS, GROUPS, *args[1].shape[-2:]).stride(1)]
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("work", ["documents", "chunk", "decode", "tree", "unroll", "blocks"])
def test_keys_are_never_repeated_per_query_head(work: str, backend: AttentionBackend) -> None:
    """No operation allocates [query heads, keys, head dimension], in any of the shapes of work, and fused
    kernels read a stride-0 view."""
    heads, groups, dim, keys = HEADS, GROUPS, 64, 512
    whole = heads * groups * keys * dim
    rows = {
        "documents": keys,
        "chunk": MAX_DECODE_QUERIES + 1,
        "decode": 2,
        "tree": MAX_DECODE_QUERIES + 1,
        "unroll": 3,
        "blocks": 6,
    }
    rows = rows[work]
    q = torch.randn(rows, heads * groups, dim)
    k, v = torch.randn(2, rows, heads, dim).unbind(0)
    pool = KVPool(keys // 16, 16, [(heads, dim)])
    table, slots = torch.arange(keys // 16), torch.arange(keys - rows, keys)
    tails = (torch.ones(rows, rows).tril().bool(),) if work == "tree" else None
    paged = PagedBatch(pool.keys, pool.values, 16, (table,), (keys,), slots, tails)
    lens = (keys,) if work in ("documents", "unroll", "blocks") else (rows,)
    ctx = ForwardContext.packed(backend, lens)
    if work in ("chunk", "decode", "tree"):
        ctx = ForwardContext.over_pages(backend, lens, paged)
    elif work in ("unroll", "blocks"):
        seen = torch.ones(3, 3, dtype=torch.bool) if work == "blocks" else None
        going = rows if seen is None else rows // 3
        own = UnrollCache(torch.arange(5, 5 + going), (going,), "extend", seen=seen)
        own.step0 = (torch.randn(keys, heads, dim), torch.randn(keys, heads, dim))
        ctx = replace(ctx, unroll=own)
    with _Allocations() as seen:
        backend.attend(q, k, v, ctx, 0, 0.1, None)
    limit = whole if work == "documents" else whole // groups  # `whole`: the output itself
    assert seen.largest <= limit
    fused = work in ("documents", "chunk", "tree")
    assert set(seen.group_strides) == ({0} if fused else set())


# ---- unrolled training steps -----------------------------------------------------------------------------


def _dense_unroll(
    qkv: list[tuple[Tensor, Tensor, Tensor]],
    rows: list[Tensor],
    document: Tensor,
    window: int | None,
) -> list[Tensor]:
    """One dense softmax with the mask of design 5.1 over [step-0 keys, every later step's keys]."""
    at = [torch.arange(len(document)), *rows]  # token of each row, by step
    token = torch.cat(at)
    step = torch.cat([torch.full((len(r),), j) for j, r in enumerate(at)])
    k, v = (torch.cat([x[i] for x in qkv]).repeat_interleave(3, 1) for i in (1, 2))
    outs = []
    for j, (q, _, _) in enumerate(qkv):
        row = at[j][:, None]
        past = (step == 0) & (token <= row) & (document[token] == document[row])
        visible = past | ((step > 0) & (step <= j) & (token == row))
        if window is not None:
            visible &= (row + j) - (token + step) < window
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return outs


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("quiet", [None, (2, 0, 3), (1, 4, 0)])
def test_unrolled_steps_equal_dense_attention(
    window: int | None, quiet: tuple[int, ...] | None, backend: AttentionBackend
) -> None:
    """Step j of a row sees step-0 keys up to its row in its document and its own keys of steps 1..j; output
    and gradients are those of dense attention with that mask, while rows drop out on the way. The first rows of
    a document, `quiet` of them, may leave their keys in a forward before."""
    torch.manual_seed(2)
    lens = (7, 4, 9)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lens))
    rows = [torch.tensor(r) for r in ([2, 3, 4, 12, 15, 16], [3, 4, 12, 15], [3, 12])]
    sizes = [20, *(len(r) for r in rows)]
    qkv = [tuple(torch.randn(n, h, 8, requires_grad=True) for h in (6, 2, 2)) for n in sizes]
    cache = UnrollCache(rows[0], (3, 0, 3))
    ctx = ForwardContext(backend, lens, unroll=cache)
    asks = torch.ones(20, dtype=torch.bool)
    if quiet is not None:
        row = torch.cat([torch.arange(n) for n in lens])
        asks = row >= torch.tensor(quiet)[document]
        first = ForwardContext(backend, quiet, unroll=cache, keys_only=True)
        backend.attend(*(x[~asks] for x in qkv[0]), first, 0, 0.3, window)
    own = tuple(torch.bincount(document[asks], minlength=3).tolist())
    step0 = [x[asks] for x in qkv[0]]
    outs = [backend.attend(*step0, ForwardContext(backend, own, unroll=cache), 0, 0.3, window)]
    cache.mode = "extend"
    for j, mine in enumerate(qkv[1:]):
        if j:
            keep = torch.isin(rows[j - 1], rows[j])
            cache.narrow(keep, ((2, 0, 2), (1, 0, 1))[j - 1])
        outs.append(backend.attend(*mine, ctx, 0, 0.3, window))
    expected = _dense_unroll(qkv, rows, document, window)
    expected[0] = expected[0][asks]
    inputs = [x for step in qkv for x in step]
    weights = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad([(w * x).sum() for w, x in zip(weights, xs, strict=True)], inputs)
        for xs in (outs, expected)
    ]
    for got, want in zip((*outs, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


BLOCKS = {
    "whole": torch.ones(3, 3, dtype=torch.bool),
    "causal": torch.ones(3, 3, dtype=torch.bool).tril(),
    "tree": torch.tensor([[True, False, False], [True, True, False], [True, False, True]]),
}


def _dense_blocks(
    past: tuple[Tensor, ...],
    block: tuple[Tensor, ...],
    rows: list[int],
    document: list[int],
    seen: Tensor,
    window: int | None,
) -> Tensor:
    """One dense softmax over [step-0 keys, every block's keys]; the mask key by key, in an obvious loop. A query
    stands at the place that the keys it sees give it."""
    width, total = len(seen), len(document)
    mask = torch.zeros(len(rows) * width, total + len(rows) * width, dtype=torch.bool)
    for i, row in enumerate(rows):
        for slot in range(width):
            place = row + int(seen[slot].sum())
            near = [place - t < (window or 1 << 30) for t in range(row + width + 1)]
            for t in range(row + 1):
                mask[i * width + slot, t] = document[t] == document[row] and near[t]
            at = row
            for other in range(width):
                at += int(seen[slot, other])
                visible = bool(seen[slot, other]) and near[at]
                mask[i * width + slot, total + i * width + other] = visible
    q = block[0]
    k, v = (torch.cat([past[i], block[i]]).repeat_interleave(3, 1) for i in (1, 2))
    scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


@pytest.mark.parametrize("window", [None, 2, 5])
@pytest.mark.parametrize("shape", BLOCKS)
def test_blocks_equal_dense_attention(
    shape: str, window: int | None, backend: AttentionBackend
) -> None:
    """Each query of a block sees the keys of its document up to the block's row, which nobody asked anything, and
    what its mask names of its own block; output and gradients are those of dense attention."""
    torch.manual_seed(4)
    lens, rows, seen = (7, 4, 9), [0, 3, 6, 12, 19], BLOCKS[shape]
    document = [0] * 7 + [1] * 4 + [2] * 9
    made = [
        tuple(torch.randn(n, h, 8, requires_grad=True) for h in (6, 2, 2))
        for n in (20, len(rows) * 3)
    ]
    cache = UnrollCache(torch.tensor(rows), (3, 0, 2), seen=seen)
    writes = ForwardContext(backend, lens, unroll=cache, keys_only=True)
    assert not bool(backend.attend(*made[0], writes, 0, 0.3, window).any())
    cache.mode = "extend"
    got = backend.attend(*made[1], ForwardContext(backend, lens, unroll=cache), 0, 0.3, window)
    expected = _dense_blocks(made[0], made[1], rows, document, seen, window)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    inputs = [*made[0][1:], *made[1]]
    weight = torch.randn_like(got)
    gradients = (torch.autograd.grad((weight * x).sum(), inputs) for x in (got, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 3])
def test_a_long_document_is_worked_off_in_pieces(
    width: int, backend: AttentionBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers and gradients are those of the whole at once, and nothing is as large as rows times keys."""
    torch.manual_seed(6)
    keys, rows = 300, torch.arange(0, 300, 2)
    past = [torch.randn(keys, h, 8, requires_grad=True) for h in (6, 2, 2)]
    block = [torch.randn(len(rows) * width, h, 8, requires_grad=True) for h in (6, 2, 2)]
    results = []
    for most in (1 << 30, 20 * keys * width):
        monkeypatch.setattr("mtptrain.attention_backends.sdpa.unroll.MOST_SCORES", most)
        seen = torch.ones(width, width, dtype=torch.bool) if width > 1 else None
        cache = UnrollCache(rows, (len(rows),), seen=seen)
        ctx = ForwardContext(backend, (keys,), unroll=cache, keys_only=True)
        backend.attend(*past, ctx, 0, 0.3, None)
        cache.mode = "extend"
        with _Allocations() as held:
            out = backend.attend(*block, replace(ctx, keys_only=False), 0, 0.3, None)
            grads = torch.autograd.grad(out.square().sum(), [*past[1:], *block])
        results.append((out, *grads))
        if most < 1 << 30:
            assert held.largest <= 6 * 21 * width * (keys + width)
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_blocks_over_pages_are_those_of_an_unroll(
    window: int | None, backend: AttentionBackend
) -> None:
    """Rows written without a question, then a block as a tail that every one of its rows sees: the same numbers,
    row for row, as in training."""
    torch.manual_seed(5)
    lens, rows, seen = (7, 10), (6, 14), BLOCKS["whole"]
    past, block = (
        tuple(torch.randn(n, h, 8) for h in (6, 2, 2)) for n in (sum(lens), len(rows) * 3)
    )
    cache = UnrollCache(torch.tensor(rows), (1, 1), seen=seen)
    backend.attend(
        *past, ForwardContext(backend, lens, unroll=cache, keys_only=True), 0, 0.3, window
    )
    cache.mode = "extend"
    expected = backend.attend(*block, ForwardContext(backend, lens, unroll=cache), 0, 0.3, window)
    pool = KVPool(12, SIZE, [(2, 8)])
    tables = (torch.tensor([5, 2, 9]), torch.tensor([0, 11, 3, 8]))

    def paged(spans: list[tuple[int, int]], tails: tuple[Tensor, ...] | None) -> PagedBatch:
        at = [torch.arange(a, b) for a, b in spans]
        slots = [t[x // SIZE] * SIZE + x % SIZE for t, x in zip(tables, at, strict=True)]
        ends = tuple(b for _, b in spans)
        return PagedBatch(pool.keys, pool.values, SIZE, tables, ends, torch.cat(slots), tails)

    writes = ForwardContext(backend, lens, paged([(0, 7), (0, 10)], None), keys_only=True)
    assert not bool(backend.attend(*past, writes, 0, 0.3, window).any())
    spans = [
        (7, 10),
        (8, 11),
    ]  # the second block stands on row 7 of its document, above it is overwritten
    reads = ForwardContext.over_pages(backend, (3, 3), paged(spans, (seen, seen)))
    got = backend.attend(*block, reads, 0, 0.3, window)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_unroll_whose_rows_have_all_ended_attends_nothing(backend: AttentionBackend) -> None:
    """A step without rows gives an empty result instead of failing."""
    cache = UnrollCache(torch.zeros(0, dtype=torch.long), (0,), "extend")
    cache.step0 = (torch.randn(4, 2, 8), torch.randn(4, 2, 8))
    q, k = torch.randn(0, 6, 8), torch.randn(0, 2, 8)
    out = backend.attend(q, k, k, ForwardContext(backend, (4,), unroll=cache), 0, 0.3, None)
    assert out.shape == (0, 6, 8)


# ---- how networks reach it -------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [{"softcap": 30.0}, {"s_aux": torch.zeros(6)}])
def test_what_is_not_computed_is_refused(
    asked: dict[str, object], backend: AttentionBackend
) -> None:
    """A family with soft-capped logits or attention sinks is an error, never a silently wrong result."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[register()]
    module = torch.nn.Module()
    module.layer_idx = 0  # pyright: ignore
    q, k = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 3, 8)
    ctx = ForwardContext.packed(backend, [3])
    with pytest.raises(UserError, match="sinks"):
        attention(module, q, k, k, None, scaling=0.3, ctx=ctx, **asked)

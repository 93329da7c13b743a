"""How fast a head is validated, beside transformers' own speculative decoding with the same head.

Ours is the replay's speculative half: draft and target in one engine, batch 8, greedy, real prompts,
prefill and pools included. transformers decodes with MTP layers by itself (`use_mtp`), one sequence at a
time, which is all it offers. Our weights go into its own `MtpLayer`, once for each drafted token: it has no
shared module, so from the second drafted token on its keys are those of a chain of modules and acceptance
may differ a little; it scores the whole vocabulary. It drafts the best of a few lengths, and need not load
the weights again for every prompt, as it would. Without a head, prompt lookup is what is compared; with
one it is shown as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import bench
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.drafts.base import Draft
from mtptrain.drafts.folder import load_draft
from mtptrain.drafts.mtp import MTP
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.types import Request, SamplingParams, UserError

PAGE_SIZE = 16
THEIR_NAMES = {"fc": "eh_proj", "layer": "mtp_block", "norm": "post_norm"}


@dataclass
class Emitted:
    """What one side emitted last."""

    tokens: dict[str, list[int]] = field(default_factory=dict)  # by request id
    steps: int = 0  # target passes after prefill

    def per_step(self) -> float:
        """Tokens a decode step; each answer's first token comes from prefill."""
        return sum(len(t) - 1 for t in self.tokens.values()) / max(self.steps, 1)


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    subject: bench.Subject
    plain: PreTrainedModel
    requests: Sequence[Request]
    new_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Pair:
    """Ours and theirs with the same kind of draft."""

    draft: str
    ours: bench.Contender
    theirs: bench.Contender
    we: Emitted
    they: Emitted


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--run-dir", type=Path, help="run folder of a trained MTP head")
    parser.add_argument("--data", default="prompts/starter_eval.jsonl")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    args = bench.begin(parser)
    if args.quick:
        args.prompts, args.new_tokens = 2, 6
    subject = bench.load_subject()
    requests = bench.first_turns(bench.conversations(args.data, args.prompts), subject.chat)
    plain = bench.plain_transformers(subject.folder)
    work = Work(subject, plain, requests, args.new_tokens, args.batch_size)
    pairs = [lookup_pair(work, args.num_draft_tokens)]
    if args.run_dir:
        pairs.insert(0, head_pair(work, args.run_dir, args.num_draft_tokens))
    generate(work, NgramConfig().build(), 1, Emitted())  # warms up threads and allocator
    rates = [take_turns(pair, args.runs if i == 0 else 1) for i, pair in enumerate(pairs)]
    differing = [describe(pair, *rate) for pair, rate in zip(pairs, rates, strict=True)]
    more = {"draft": pairs[0].draft, "batch": args.batch_size, "prompts_that_differ": differing[0]}
    bench.finish("validate", *rates[0], "emitted tokens/s", args.threads, more)


def take_turns(pair: Pair, runs: int) -> tuple[float, float]:
    ours, theirs = bench.take_turns([pair.ours, pair.theirs], runs)
    return ours, theirs


def lookup_pair(work: Work, num_draft_tokens: int) -> Pair:
    we, they = Emitted(), Emitted()
    draft = NgramConfig().build(work.subject.target)
    options = {"prompt_lookup_num_tokens": num_draft_tokens, "max_matching_ngram_size": 4}
    ours = partial(bench.rate_of, partial(generate, work, draft, num_draft_tokens, we))
    theirs = partial(bench.rate_of, partial(reference, work, options, they))
    return Pair(
        "prompt lookup",
        bench.Contender(f"ours, prompt lookup, batch {work.batch_size}", ours),
        bench.Contender("transformers, prompt lookup, one at a time", theirs),
        we,
        they,
    )


def head_pair(work: Work, run_dir: Path, num_draft_tokens: int) -> Pair:
    draft = load_draft(run_dir / "draft", work.subject.target)
    if not isinstance(draft, MTP) or draft.taps != ("final",) or draft.config.norms != "restored":
        raise UserError(f"{run_dir}/draft is no MTP head that transformers can run; leave it out")
    we, they = Emitted(), Emitted()
    ours = partial(bench.rate_of, partial(generate, work, draft, num_draft_tokens, we))
    best = best_length(work, draft, num_draft_tokens)
    their_work = partial(reference_head, work, draft, best, they)
    return Pair(
        "MTP head",
        bench.Contender(f"ours, head, D={num_draft_tokens}, batch {work.batch_size}", ours),
        bench.Contender(
            f"transformers, same head, D={best}, one at a time",
            partial(bench.rate_of, their_work),
        ),
        we,
        they,
    )


def best_length(work: Work, draft: MTP, most: int) -> int:
    """The number of drafted tokens at which transformers is fastest, tried on the first prompts."""
    few = Work(work.subject, work.plain, work.requests[:2], work.new_tokens, 1)
    lengths = sorted({1, 2, most})
    tried = []
    for length in lengths:
        rate = partial(bench.rate_of, partial(reference_head, few, draft, length, Emitted()))
        tried.append(bench.Contender(f"transformers, D={length}, two prompts", rate))
    tried[0].rate()  # warms up
    rates = bench.take_turns(tried, 1)
    return lengths[rates.index(max(rates))]


def generate(work: Work, draft: Draft, num_draft_tokens: int, emitted: Emitted) -> int:
    """Ours; returns emitted tokens."""
    longest = max(len(r.prompt_ids) for r in work.requests) + work.new_tokens
    pages = work.batch_size * -(-(longest + num_draft_tokens + 1) // PAGE_SIZE)
    limits = EngineLimits(work.batch_size, 1024, PAGE_SIZE, pages, num_draft_tokens)
    eos = work.subject.chat.eos_ids
    engine = Engine(work.subject.target, SdpaBackend(), limits, eos, draft)
    done = engine.generate(work.requests, SamplingParams(max_new_tokens=work.new_tokens))
    emitted.tokens = {c.request.id: list(c.output_ids) for c in done}
    emitted.steps = sum(c.decode_steps for c in done)
    return sum(len(c.output_ids) for c in done)


def reference_head(work: Work, draft: MTP, length: int, emitted: Emitted) -> int:
    """transformers with our head in `length` layers of its own kind."""
    config = work.plain.config
    config.num_mtp_layers = length  # pyright: ignore[reportAttributeAccessIssue]
    chain = MtpModel(work.plain, length).eval().requires_grad_(False)
    for index, layer in enumerate(chain.layers):
        ours = draft.steps[min(index, len(draft.steps) - 1)]
        layer.load_state_dict(their_state(ours), assign=True)  # shares our tensors
    # It looks for the weights in the model's folder, at every call; here they are in memory.
    MtpModel.from_pretrained = staticmethod(lambda *_, **__: chain)  # pyright: ignore
    return reference(work, {"use_mtp": True}, emitted)


def their_state(module: nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, tensor in module.state_dict().items():
        first, _, rest = name.partition(".")
        state[f"{THEIR_NAMES.get(first, first)}.{rest}"] = tensor
    return state


def reference(work: Work, options: dict[str, int | bool], emitted: Emitted) -> int:
    """transformers' assisted decoding, one request at a time; returns emitted tokens."""
    eos = sorted(work.subject.chat.eos_ids)
    config = GenerationConfig(
        do_sample=False, max_new_tokens=work.new_tokens, eos_token_id=eos, pad_token_id=0, **options
    )
    emitted.tokens, passes = {}, []
    hook = work.plain.register_forward_hook(lambda *_: passes.append(1))
    for request in work.requests:
        ids = torch.tensor([request.prompt_ids])
        with torch.inference_mode():
            out = work.plain.generate(ids, generation_config=config)  # pyright: ignore[reportCallIssue]
        emitted.tokens[request.id] = out[0, ids.shape[1] :].tolist()
    hook.remove()
    emitted.steps = len(passes) - len(work.requests)
    return sum(len(tokens) for tokens in emitted.tokens.values())


def describe(pair: Pair, ours: float, theirs: float) -> int:
    """Prints the pair; returns how many answers differ."""
    differing = sum(tokens != pair.they.tokens[name] for name, tokens in pair.we.tokens.items())
    rows = [
        (pair.ours.name, f"{ours:,.1f} tokens/s, {pair.we.per_step():.2f} a decode step"),
        (pair.theirs.name, f"{theirs:,.1f} tokens/s, {pair.they.per_step():.2f} a decode step"),
        ("ratio", f"{ours / theirs:.2f}"),
        ("answers that differ", f"{differing} of {len(pair.we.tokens)}"),
    ]
    bench.table(f"{pair.draft}, greedy, emitted tokens with prefill", rows)
    return differing


if __name__ == "__main__":
    main()

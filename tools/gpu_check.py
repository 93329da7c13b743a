"""What can be checked in a minute on a CUDA device, as JSON; without one it says so and exits 0.

A tiny target with random weights is built on the CPU and copied to the device, so nothing is fetched. Checked
in fp32: the packed forward equals the CPU's, plain batched decoding writes the CPU's tokens, and decoding
with a draft writes the plain tokens. Each check stands alone, so one that fails hides no other; any failure
gives exit code 1. The figures (GEMM rate, decode rate) tell that the device works, not how fast mtptrain is.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtptrain.attention_backends.base import ForwardContext
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.drafts.base import Draft
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.machine import describe_machine
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.types import Request, SamplingParams

VOCABULARY, NEW_TOKENS, DRAFT_TOKENS = 512, 32, 3
TOLERANCE = 1e-3  # of hidden states of size about 1, TF32 off
Value = float | int | str | None


def main() -> None:
    figures: dict[str, Value] = {"name": "gpu_check", "machine": describe_machine()}
    if not torch.cuda.is_available():
        print("no CUDA device: nothing was checked")
        print(json.dumps(figures | {"device": None, "failed": 0}))
        return
    torch.backends.cuda.matmul.allow_tf32 = False
    cpu = Target(tiny_model())
    gpu = Target(copy.deepcopy(cpu.model).to("cuda"))
    checks: dict[str, Callable[[], Value]] = {
        "forward_max_difference": partial(forward_difference, cpu, gpu),
        "plain_prompts_that_differ": partial(plain_difference, cpu, gpu),
        "speculative_prompts_that_differ": partial(speculative_difference, gpu),
        "decode_tokens_per_s": partial(decode_rate, gpu),
        "gemm_tflops_bf16": gemm_rate,
    }
    failed = 0
    for name, check in checks.items():
        figures[name] = run(check)
        failed += isinstance(figures[name], str)
        print(f"{name}: {figures[name]}", flush=True)
    print(json.dumps(figures | {"device": torch.cuda.get_device_name(), "failed": failed}))
    raise SystemExit(1 if failed else 0)


def run(check: Callable[[], Value]) -> Value:
    """The check's figure, or one line about its failure."""
    try:
        return check()
    except (AssertionError, RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def tiny_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).float()


def requests() -> list[Request]:
    """Prompts of different lengths, some with a common beginning (shared pages)."""
    draw = torch.Generator().manual_seed(1)
    common = torch.randint(3, VOCABULARY, (20,), generator=draw).tolist()
    rest = [torch.randint(3, VOCABULARY, (n,), generator=draw).tolist() for n in (3, 17, 40, 9)]
    return [
        Request(str(i), "all", (*(common if i % 2 else ()), *ids)) for i, ids in enumerate(rest)
    ]


def forward_difference(cpu: Target, gpu: Target) -> Value:
    lens = [len(r.prompt_ids) for r in requests()]
    ids = torch.tensor([t for r in requests() for t in r.prompt_ids])
    positions = torch.cat([torch.arange(n) for n in lens])

    def states(target: Target) -> Tensor:  # [T, H]
        ctx = ForwardContext.packed(SdpaBackend(), lens)
        on = target.device
        return target.forward(ids.to(on), positions.to(on), ctx, ("final",)).final.cpu()

    difference = float((states(cpu) - states(gpu)).abs().max())
    assert difference < TOLERANCE, f"final states differ by {difference}"
    return difference


def decode(target: Target, draft: Draft | None = None) -> list[tuple[int, ...]]:
    limits = EngineLimits(4, num_pages=64, num_draft_tokens=DRAFT_TOKENS if draft else 0)
    engine = Engine(target, SdpaBackend(), limits, frozenset(), draft)
    done = engine.generate(requests(), SamplingParams(max_new_tokens=NEW_TOKENS))
    return [c.output_ids for c in done]


def plain_difference(cpu: Target, gpu: Target) -> Value:
    return none_differ(decode(cpu), decode(gpu))


def speculative_difference(gpu: Target) -> Value:
    """With a reduced draft vocabulary, as heads have it."""
    draft = MTPConfig(draft_vocab=tuple(range(0, VOCABULARY, 2))).build(gpu).to(gpu.device).eval()
    return none_differ(decode(gpu), decode(gpu, draft))


def none_differ(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> int:
    differing = sum(x != y for x, y in zip(a, b, strict=True))
    assert not differing, f"{differing} of {len(a)} prompts differ"
    return differing


def decode_rate(gpu: Target) -> Value:
    start = time.perf_counter()
    new = sum(map(len, decode(gpu)))
    return round(new / (time.perf_counter() - start), 1)


def gemm_rate(size: int = 4096, products: int = 20) -> Value:
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(products):
        a @ b
    torch.cuda.synchronize()
    return round(products * 2 * size**3 / (time.perf_counter() - start) / 1e12, 1)


if __name__ == "__main__":
    main()

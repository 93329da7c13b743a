"""What must hold around training, checked on the run's own data: silent faults here cost acceptance later.

Before: the target's distribution recomputed from stored features is the target's own, so the store belongs to
this target and this norm. After: every weight has moved. And the saved head, loaded back and decoding step by
step over pages, accepts what its unroll accepts over the same answers: what was trained is what is served. It
gives up completeness: a few samples of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from hidden_state_cache import FeatureStore, StoredSample
from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.datasets.base import evenly
from mtptrain.drafts.base import Draft
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Request, SamplingParams, UserError
from mtptrain.validate.simulated import simulate

SAMPLES, ROWS, NEW_TOKENS = 4, 128, 16
MAX_DISTANCE = (
    0.05  # mean total variation: room for rows of few bits, far from another norm's or target's
)
MAX_DIFFERING = 0.05  # of passes: near-ties fall either way in another order of summation


@torch.inference_mode()
def check_teacher(
    store: FeatureStore, final: slice, target: Target, backend: AttentionBackend
) -> float:
    """Mean total variation, 0 to 1, between the target's next-token law and that of its stored features.

    `final` is that tap's place in a stored row. Raises UserError where they are different laws.
    """
    distances = torch.cat([_distances(s, final, target, backend) for s in _some(store)])
    mean = float(distances.mean())
    if not mean <= MAX_DISTANCE:
        raise UserError(
            f"the feature store does not fit: the target's next-token law recomputed from it is {mean:.3f} away "
            f"from the target's own (at most {MAX_DISTANCE}); they are of another target or norm: capture again"
        )
    return mean


def _some(store: FeatureStore) -> Iterator[StoredSample]:
    return (store[i] for i in evenly(range(len(store)), SAMPLES))


def _distances(
    sample: StoredSample, final: slice, target: Target, backend: AttentionBackend
) -> Tensor:  # [T]
    ids = sample.input_ids.to(target.device)
    positions = torch.arange(len(ids), device=target.device)
    own = target.forward(ids, positions, ForwardContext.packed(backend, [len(ids)]), ()).final
    stored = sample.features[:, final].to(own)
    pairs = zip(own.split(ROWS), stored.split(ROWS), strict=True)
    return torch.cat([_total_variation(target.logits(a), target.logits(b)) for a, b in pairs])


def _total_variation(a: Tensor, b: Tensor) -> Tensor:  # [T, V] logits -> [T]
    return 0.5 * (a.float().softmax(-1) - b.float().softmax(-1)).abs().sum(-1)


def footprints(draft: nn.Module) -> dict[str, tuple[float, float]]:
    """Sum and sum of squares of every trainable tensor: enough to see whether it has moved."""
    trainable = ((n, p.detach().double()) for n, p in draft.named_parameters() if p.requires_grad)
    return {name: (float(p.sum()), float(p.square().sum())) for name, p in trainable}


def unmoved(
    before: Mapping[str, tuple[float, float]], after: Mapping[str, tuple[float, float]]
) -> tuple[str, ...]:
    """Names of the tensors that training has left as they were."""
    return tuple(name for name in before if before[name] == after[name])


def check_served(
    draft: Draft,
    target: Target,
    backend: AttentionBackend,
    store: FeatureStore,
    num_draft_tokens: int,
) -> int:
    """Verify passes over some stored prompts that a replay and the unroll were seen to agree on.

    Raises RuntimeError where they differ in more than near-ties: a fault of the head's own code.
    """
    requests = [_prompt(sample) for sample in _some(store)]
    alone = _decode(requests, target, backend, None, 0, draft.taps)
    together = _decode(requests, target, backend, draft, num_draft_tokens, ())
    walked = list(simulate(draft, alone, num_draft_tokens, backend))
    pairs = [
        (a, b)
        for x, y in zip(walked, together, strict=True)
        for a, b in zip(x.passes[:-1], y.passes[:-1], strict=False)
    ]
    differing = sum(a.accepted != b.accepted for a, b in pairs)
    if differing > max(1, MAX_DIFFERING * len(pairs)):
        raise RuntimeError(
            f"the saved head accepts otherwise when decoding than in its unroll, in {differing} of {len(pairs)} "
            "passes; it was trained as something else than what is served"
        )
    return len(pairs) - differing


def _prompt(sample: StoredSample) -> Request:
    """The sample's tokens before its first answer."""
    first = int(sample.loss_mask.int().argmax()) or 1
    return Request(sample.id, sample.category, tuple(sample.input_ids[:first].tolist()))


def _decode(
    requests: Sequence[Request],
    target: Target,
    backend: AttentionBackend,
    draft: Draft | None,
    num_draft_tokens: int,
    taps: tuple[str, ...],
) -> list[Completion]:
    rows = max(len(r.prompt_ids) for r in requests) + NEW_TOKENS + num_draft_tokens + 1
    pages = len(requests) * -(-rows // EngineLimits.page_size)
    limits = EngineLimits(len(requests), num_pages=pages, num_draft_tokens=num_draft_tokens)
    engine = Engine(target, backend, limits, frozenset(), draft, taps)
    return engine.generate(requests, SamplingParams(max_new_tokens=NEW_TOKENS))

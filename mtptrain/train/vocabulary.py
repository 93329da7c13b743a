"""Which target tokens a reduced draft vocabulary keeps.

Tokens are ranked by the target's own probability mass over a sample of stored rows plus their count in the
stored text. The mass covers tokens that the target would write but did not write in this sample, which
counts alone miss. It gives up per-domain vocabularies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hidden_state_cache import FeatureStore
from mtptrain.targets.base import Target

SAMPLED_ROWS = 16_384
CHUNK_ROWS = 128


def choose_vocabulary(
    store: FeatureStore, final: slice, target: Target, size: int
) -> tuple[int, ...]:
    """The `size` heaviest token ids, ascending; all ids (an empty tuple) where size is 0 or at least V.

    `final` is the place of the `final` tap in a feature row.
    """
    if not 0 < size < target.vocab_size:
        return ()
    weight = torch.zeros(target.vocab_size, dtype=torch.float64)
    stride = max(1, store.num_tokens // SAMPLED_ROWS)
    at = 0
    for index in range(len(store)):
        sample = store[index]
        weight += torch.bincount(sample.input_ids, minlength=target.vocab_size)
        offset = -at % stride
        weight += stride * _mass(sample.features[offset::stride, final], target)
        at += len(sample.input_ids)
    return tuple(weight.topk(size).indices.sort().values.tolist())


@torch.inference_mode()
def _mass(states: Tensor, target: Target) -> Tensor:  # [R, H] -> [V]
    mass = torch.zeros(target.vocab_size, dtype=torch.float64)
    for chunk in states.split(CHUNK_ROWS):
        mass += torch.softmax(target.logits(chunk.to(target.device)), -1).sum(0).double().cpu()
    return mass

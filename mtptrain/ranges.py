"""What a recipe's numbers may be: one table, looked at before anything runs.

A batch of -1 or a learning rate of nan would fail hours later in a library's words. Kinds are `overrides`'
to check, and choices their own files'; here are only the ends of ranges. It gives up what depends on the
target or the data.
"""

from __future__ import annotations

from collections.abc import Mapping

from mtptrain.types import UserError

MOST = 10**12  # of anything that is counted
RANGES: dict[str, tuple[float, float]] = {
    "num_draft_tokens": (1, 1024),
    "min_confidence": (0, 1),
    "tree.nodes": (1, 1024),
    "tree.top_k": (1, 64),
    "temperature": (0, 1000),
    "batch_size": (1, MOST),
    "seed": (0, 2**32 - 1),  # what torch, numpy and Lightning all take
    "data.max_turns": (1, MOST),
    "data.limit": (0, MOST),
    "data.eval_limit": (0, MOST),
    "data.max_tokens": (1, MOST),
    "draft.draft_vocab_size": (0, MOST),
    "draft.head.draft_vocab_size": (0, MOST),
    "prepare.max_new_tokens": (1, MOST),
    "prepare.temperature": (0, 1000),
    "prepare.top_p": (1e-9, 1),
    "prepare.max_batch": (1, MOST),
    "prepare.shard_conversations": (1, MOST),
    "capture.max_tokens": (1, MOST),
    "train.epochs": (1, MOST),
    "train.max_steps": (1, MOST),
    "train.max_minutes": (1e-9, 1e9),
    "train.anchors": (0, MOST),
    "train.depth_keep": (1e-9, 1),
    "train.depth_least": (0, 1),
    "train.batch_tokens": (1, MOST),
    "train.accumulate": (1, MOST),
    "train.learning_rate": (0, 1e30),
    "train.muon_steps": (1, 1000),
    "train.other_lr_scale": (0, 1e30),
    "train.weight_decay": (0, 1e30),
    "train.warmup": (0, 1),
    "train.clip": (0, 1e30),
    "train.unroll_steps": (1, 1024),
    "train.unroll_from": (0, 1),
    "train.step_decay": (1e-9, 1e9),
    "train.feature_noise": (0, 1e9),
    "train.scored_tokens": (0, MOST),
    "train.held_out": (0, MOST),
    "train.curve_points": (0, MOST),
    "train.checkpoint_every": (1, MOST),
    "validate.max_new_tokens": (1, MOST),
    "validate.sampled_prompts": (0, MOST),
    "validate.top_k": (0, MOST),
    "validate.top_p": (1e-9, 1),
    "validate.min_p": (0, 1),
    "validate.typical_threshold": (0, 1),
    "validate.typical_alpha": (1e-9, 1 - 1e-9),
    "runtime.page_size": (1, MOST),
    "runtime.kv_tokens": (1, MOST),
    "runtime.max_prefill_tokens": (1, MOST),
}


def check_ranges(values: Mapping[str, object]) -> None:
    """Raises UserError at the first of the `dotted.key: value` that lies outside its range."""
    for key, (least, most) in RANGES.items():
        value = values.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not least <= value <= most:  # false of nan, too
            raise UserError(f"{key}={value} must lie in {least:g} to {most:g}")

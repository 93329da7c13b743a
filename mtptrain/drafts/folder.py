"""A draft on disk: `config.json`, `model.safetensors`, `contract.json`, `README.md` (design §5.3).

Only what was trained is written, in fp32; what is shared with the target is absent and named in the contract
with its hash. The reduced vocabulary is kept as the field's `d2t` offsets (target id = draft id + d2t[draft
id]). It gives up pickle: a folder is JSON and safetensors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.run import atomic_write
from mtptrain.targets.base import Target
from mtptrain.types import UserError

WEIGHTS = "model.safetensors"
PACKAGE = "mtptrain.drafts."


@dataclass(frozen=True)
class Contract:
    """What training promised and serving must keep."""

    target_id: str
    target_fingerprint: str
    template_hash: str
    tokenizer_hash: str
    taps: tuple[str, ...]
    feature_norm: str  # post: outputs of the final norm; pre: residual stream
    norm_kind: str
    norm_eps: float
    rope: dict[str, object]
    concat_order: tuple[str, ...]
    position_rule: str
    shared: dict[str, str]  # what the draft borrows from the target, with its hash
    draft_vocab_size: int


def contract(
    draft: Draft, target: Target, fingerprint: str, template: str, tokenizer: str
) -> Contract:
    """The contract of a head with its target, read off both."""
    rope = getattr(target.config, "rope_parameters", None) or getattr(
        target.config, "rope_scaling", None
    )
    return Contract(
        target.config.name_or_path or target.path,
        fingerprint,
        template,
        tokenizer,
        draft.taps,
        "post" if draft.taps == ("final",) else "pre" if "final" not in draft.taps else "mixed",
        type(target.decoder.norm).__name__,
        target.norm_eps,
        dict(rope or {}),
        ("embedding", "feature"),
        "row t at unrolled step j sits at position t + j",
        {
            "embedding": _hash(
                target.embed(torch.arange(min(64, target.vocab_size)).to(target.device))
            ),
            "lm_head": _hash(target.head_weight[:64]),
        },
        len(draft.vocab) if draft.vocab is not None else target.vocab_size,
    )


def _hash(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()[:16]


def save_draft(draft: Draft, folder: Path, promise: Contract) -> None:
    """Writes the folder; `config.json` comes last, so a folder that has one is whole."""
    assert isinstance(draft.config, HeadConfig)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").unlink(missing_ok=True)
    tensors = {name: p.detach().float().contiguous() for name, p in draft.state_dict().items()}
    if draft.vocab is not None:
        tensors["d2t"] = draft.vocab - torch.arange(len(draft.vocab))
    atomic_write(folder / WEIGHTS, save(tensors))
    atomic_write(folder / "contract.json", json.dumps(asdict(promise), indent=2) + "\n")
    config = {"_target_": f"{type(draft.config).__module__}.{type(draft.config).__name__}"}
    config |= {k: v for k, v in asdict(draft.config).items() if k != "draft_vocab"}
    atomic_write(folder / "config.json", json.dumps(config, indent=2) + "\n")


def load_draft(folder: Path, target: Target) -> Draft:
    """Rebuilds a saved head on its target. Raises UserError where the folder is not one or does not fit."""
    try:
        raw = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder} holds no whole draft ({error}); train it first") from None
    config = _config(folder, raw)
    offsets = tensors.pop("d2t", None)
    if offsets is not None:
        ids = offsets + torch.arange(len(offsets))
        config = replace(config, draft_vocab=tuple(ids.tolist()))
    draft = config.build(target)
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise UserError(
            f"{folder} does not fit target {target.path} ({line}); validate it with its own"
        ) from None
    return draft.to(target.device).eval().requires_grad_(False)


def check_contract(folder: Path, fingerprint: str, template_hash: str) -> None:
    """Raises UserError where the head was trained on another target or template, with both values."""
    promise = load_contract(folder)
    for what, trained, now in (
        ("target weights", promise.target_fingerprint, fingerprint),
        ("chat template", promise.template_hash, template_hash),
    ):
        if trained != now:
            raise UserError(
                f"{folder} was trained with {what} {trained} and meets {now}; use its own target or train again"
            )


def load_contract(folder: Path) -> Contract:
    raw = json.loads((folder / "contract.json").read_text())
    tuples = {k: tuple(v) for k, v in raw.items() if isinstance(v, list)}
    return Contract(**(raw | tuples))


def _config(folder: Path, raw: object) -> HeadConfig:
    """Names are looked up among mtptrain's own drafts only: a folder executes nothing."""
    fields = dict(raw) if isinstance(raw, dict) else {}
    module, _, name = str(fields.pop("_target_", "")).rpartition(".")
    try:
        kind = (
            getattr(importlib.import_module(module), name) if module.startswith(PACKAGE) else None
        )
        if isinstance(kind, type) and issubclass(kind, HeadConfig):
            return kind(**fields)
        reason = f"{module}.{name} is no head of mtptrain"
    except (ImportError, AttributeError, TypeError) as error:
        reason = str(error)
    raise UserError(f"{folder}/config.json cannot be used ({reason}); export it again") from None

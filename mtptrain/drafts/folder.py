"""A draft on disk: `config.json`, `model.safetensors`, `contract.json`, `README.md` (design §5.3).

Only what was trained is written, in fp32; what is shared with the target is absent and named in the contract
with its hash. The reduced vocabulary is kept as the field's `d2t` offsets (target id = draft id + d2t[draft
id]). A folder comes from anyone: each of its values is held against its type and against the target before
anything is built by it, and it names classes of mtptrain's own drafts only. It gives up pickle: a folder is
JSON and safetensors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from dataclasses import asdict, dataclass, replace
from inspect import isabstract
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from hidden_state_cache.decode import decode, shown
from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.run import atomic_write
from mtptrain.targets.base import Target
from mtptrain.types import UserError

WEIGHTS = "model.safetensors"
MECHANISM = re.compile(r"(mtptrain\.drafts\.[a-z0-9_]+)\.([A-Za-z0-9_]+)")
T = TypeVar("T")


@dataclass(frozen=True)
class Contract:
    """What training promised and serving must keep."""

    target_id: str
    target_fingerprint: str
    template_hash: str
    tokenizer_hash: str
    thinking: str
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
    draft: Draft, target: Target, fingerprint: str, template: str, tokenizer: str, thinking: str
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
        thinking,
        draft.taps,
        "post" if draft.taps == ("final",) else "pre" if "final" not in draft.taps else "mixed",
        type(target.decoder.norm).__name__,
        target.norm_eps,
        dict(rope or {}),
        draft.concat_order,
        draft.position_rule,
        _borrowed(draft, target),
        len(draft.vocab) if draft.vocab is not None else target.vocab_size,
    )


def _borrowed(draft: Draft, target: Target) -> dict[str, str]:
    """Hashes of the frozen tables that the draft reads."""
    shared = {}
    if draft.reads_embedding:
        ids = torch.arange(min(64, target.vocab_size)).to(target.device)
        shared["embedding"] = _hash(target.embed(ids))
    if draft.own_head() is None:
        shared["lm_head"] = _hash(target.head_weight[:64])
    return shared


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
    config = _config(folder)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise _not_whole(folder, error) from None
    _require_finite(folder, tensors)
    target.require_taps(config.taps)
    offsets = tensors.pop("d2t", None)
    if offsets is not None:
        config = replace(config, draft_vocab=_vocabulary(folder, offsets, target.vocab_size))
    draft = config.build(target)
    try:
        draft.load_state_dict(tensors)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise UserError(
            f"{folder} does not fit target {target.path} ({line}); validate it with its own"
        ) from None
    return draft.to(target.device).eval().requires_grad_(False)


def _require_finite(folder: Path, tensors: dict[str, Tensor]) -> None:
    broken = sorted(name for name, x in tensors.items() if not bool(torch.isfinite(x).all()))
    if broken:
        raise UserError(f"{folder / WEIGHTS}: {shown(broken[0])} is not finite; train it again")


def _vocabulary(folder: Path, offsets: Tensor, vocab_size: int) -> tuple[int, ...]:
    """Target ids of the draft's tokens, from the field's offsets."""
    whole = offsets.dtype == torch.int64 and offsets.dim() == 1 and 0 < len(offsets) <= vocab_size
    ids = (offsets + torch.arange(len(offsets))).tolist() if whole else []
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise UserError(
            f"{folder / WEIGHTS}: d2t names no tokens of a target of {vocab_size}, in ascending order; "
            "export it again"
        )
    return tuple(ids)


def weights_checksum(folder: Path) -> str:
    """SHA-256 of the weights file; empty where there is none."""
    path = folder / WEIGHTS
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_contract(folder: Path, now: Contract) -> None:
    """Raises UserError naming all in which the head's contract differs from what it meets, with both values.

    A target may have moved: only its name may differ.
    """
    promise = load_contract(folder)
    faults = [
        f"{name} is {shown(getattr(promise, name))} in its contract and {shown(getattr(now, name))} here"
        for name in Contract.__dataclass_fields__
        if name != "target_id" and getattr(promise, name) != getattr(now, name)
    ]
    if faults:
        raise UserError(
            f"{folder} was trained for something else: {'; '.join(faults)}; use it with its own target and "
            "settings, or train again"
        )


def load_contract(folder: Path) -> Contract:
    """Reads `contract.json`. Raises UserError where it is not there or not of this form."""
    return _decoded(Contract, _json(folder, "contract.json"), folder / "contract.json")


def _config(folder: Path) -> HeadConfig:
    fields = _json(folder, "config.json")
    kind = _mechanism(fields.pop("_target_", None), folder / "config.json")
    return _decoded(kind, fields | {"draft_vocab": []}, folder / "config.json")


def _mechanism(name: object, where: Path) -> type[HeadConfig]:
    """Looked up among mtptrain's own drafts only: a folder executes nothing."""
    named = MECHANISM.fullmatch(name) if isinstance(name, str) else None
    try:
        kind = getattr(importlib.import_module(named[1]), named[2]) if named else None
    except (ImportError, AttributeError):
        kind = None
    if isinstance(kind, type) and issubclass(kind, HeadConfig) and not isabstract(kind):
        return kind
    raise UserError(f"{where}: {shown(name)} is no head of mtptrain; export it again")


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        held = json.loads((folder / name).read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _not_whole(folder, error) from None
    if not isinstance(held, dict):
        raise UserError(f"{folder / name} is no JSON object; export it again")
    return held


def _decoded(kind: type[T], fields: dict[str, Any], where: Path) -> T:
    try:
        return decode(kind, fields)
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} cannot be used ({error}); export it again") from None


def _not_whole(folder: Path, error: Exception) -> UserError:
    reason = " ".join(str(error).split())[:200]
    return UserError(f"{folder} holds no whole draft ({reason}); train it first")

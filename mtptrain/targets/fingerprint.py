"""Which weights a target folder holds: one hash over everything that changes what the target says.

Every byte of weights is read (about 1.5 GB/s), because a fine-tuned weight must not pass for the original.
It gives up speed on the largest targets: minutes, once a run.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

SPOKEN = ("*.safetensors", "config.json", "generation_config.json", "tokenizer*.json", "*.jinja")


def target_fingerprint(folder: Path) -> str:
    """sha256 (16 hex digits) over weights, config, tokenizer and template files, with their names."""
    total = hashlib.sha256()
    for path in sorted({p for pattern in SPOKEN for p in folder.glob(pattern)}):
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        total.update(f"{path.name} {digest}\n".encode())
    return total.hexdigest()[:16]

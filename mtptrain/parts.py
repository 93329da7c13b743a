"""What depends on the target alone: where it lies, its template, its weights, the attention under it.

Each part is made when first asked for. Sessions that differ in their draft share one, so that a comparison
of drafts loads the target once.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import Chat
from mtptrain.run import cache_dir
from mtptrain.targets.base import Target
from mtptrain.targets.fingerprint import target_fingerprint
from mtptrain.targets.gguf import resolve
from mtptrain.template import thinking_mode


class TargetParts:
    """See the file's opening."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config

    @cached_property
    def folder(self) -> Path:
        return resolve(str(self.config.target.path), cache_dir())

    @cached_property
    def fingerprint(self) -> str:
        return target_fingerprint(self.folder)

    @cached_property
    def chat(self) -> Chat:
        return Chat.load(self.folder, thinking_mode(self.config.data.thinking))

    @cached_property
    def target(self) -> Target:
        device = str(self.config.target.device)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Target.load(self.folder, str(self.config.target.dtype), device)

    @cached_property
    def outline(self) -> Target:
        """Shapes alone: what fits the target is known before its weights are loaded."""
        return Target.outline(self.folder)

    @cached_property
    def backend(self) -> AttentionBackend:
        return instantiate(self.config.attention_backend)

"""A target: a transformers network read through taps, with its embedding, final norm and `lm_head`.

The network is transformers' own class, loaded once and frozen; our attention reaches it through
`ForwardContext`. Parts are found by the model's accessors (`get_decoder`, `get_input_embeddings`,
`get_output_embeddings`), so a family needs a file only for what it does differently. Logits are computed
here in vocabulary blocks where only the best token is asked for. It gives up generation: that is `runtime`'s.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from mtptrain.attention_backends.base import ForwardContext, register
from mtptrain.layers.gated_mlp import fuse_gated_mlps
from mtptrain.layers.packed_linear import pack_linears
from mtptrain.layers.product import product
from mtptrain.types import UserError

VOCABULARY_BLOCK = 4096  # columns of `lm_head` at a time: a block of logits stays in cache


@dataclass(frozen=True)
class TargetOutput:
    """One forward over T packed tokens."""

    final: Tensor  # [T, H] output of the final norm
    features: Tensor  # [T, W] the asked taps, side by side in the asked order


class Target:
    """A frozen causal language model. Use `Target.load` or wrap a transformers model that is in memory."""

    def __init__(self, model: nn.Module, path: str = "in-memory") -> None:
        self.model = model.eval().requires_grad_(False)
        self.path = path
        self.config: PretrainedConfig = _text_config(model)
        self.config._attn_implementation = register()
        self.decoder: Any = model.get_decoder()  # pyright: ignore[reportCallIssue]
        pack_linears(self.decoder.layers)
        fuse_gated_mlps(self.decoder.layers)
        self.embedding: nn.Module = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
        head = model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        if head is None:
            raise UserError(
                f"target {path} has no lm_head; use a causal language model as target.path"
            )
        self.head_weight: Tensor = head.weight  # [V, H]

    @classmethod
    def load(cls, folder: Path, dtype: str = "float32", device: str = "cpu") -> Target:
        """Reads a transformers folder. Raises UserError where it holds no causal language model."""
        name = register()
        try:
            config = AutoConfig.from_pretrained(folder)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                config=config,
                dtype=getattr(torch, dtype),
                attn_implementation=name,
                output_loading_info=True,
            )
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise _not_loaded(folder, error) from None
        model, info = loaded
        if missing := sorted(info["missing_keys"]):  # transformers would leave them random
            raise UserError(
                f"target.path={folder} lacks {len(missing)} weights of its model ({missing[0]}); get it again"
            )
        return cls(model.to(device), str(folder))

    @classmethod
    def outline(cls, folder: Path) -> Target:
        """The target's shapes without its weights, on the meta device: for building what fits it, not for running."""
        try:
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(folder)
                model = AutoModelForCausalLM.from_config(config, attn_implementation=register())
        except (OSError, ValueError, KeyError) as error:
            raise _not_loaded(folder, error) from None
        return cls(model, str(folder))

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def vocab_size(self) -> int:
        return self.head_weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    @property
    def norm_eps(self) -> float:
        return float(getattr(self.config, "rms_norm_eps", 1e-6))

    def kv_shape(self) -> tuple[int, int]:
        """(KV heads, head dimension) of a layer's pages."""
        heads = self.config.num_attention_heads
        dim = getattr(self.config, "head_dim", None) or self.hidden_size // heads
        return getattr(self.config, "num_key_value_heads", heads), dim

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, ctx: ForwardContext, taps: Sequence[str]
    ) -> TargetOutput:
        """Runs T packed tokens. Shapes: input_ids, positions [T]; see `TargetOutput`."""
        with self._record(taps) as recorded:
            out = self.decoder(
                input_ids=input_ids[None], position_ids=positions[None], use_cache=False, ctx=ctx
            )
        final = out.last_hidden_state[0]
        parts = [final if tap == "final" else recorded[tap] for tap in taps]
        features = parts[0] if len(parts) == 1 else torch.cat([final[:, :0], *parts], -1)
        return TargetOutput(final, features)

    @contextmanager
    def _record(self, taps: Sequence[str]) -> Iterator[dict[str, Tensor]]:
        recorded: dict[str, Tensor] = {}

        def keep(name: str) -> Any:
            def hook(module: nn.Module, inputs: object, output: Tensor) -> None:
                recorded[name] = (output[0] if isinstance(output, tuple) else output)[0]

            return hook

        places = {tap: self._tap_module(tap) for tap in taps if tap != "final"}
        handles = [module.register_forward_hook(keep(tap)) for tap, module in places.items()]
        try:
            yield recorded
        finally:
            for handle in handles:
                handle.remove()

    def _tap_module(self, tap: str) -> nn.Module:
        """`final_prenorm` is the output of the last layer; `layer.k` that of decoder layer k, 0-based."""
        self.require_taps([tap])
        index = self.num_layers - 1 if tap == "final_prenorm" else tap_layer(tap)
        return self.decoder.layers[index]

    def require_taps(self, taps: Sequence[str]) -> None:
        """Raises UserError where there is no tap, one does not exist here, or one is named twice."""
        places = {"final", "final_prenorm", *(f"layer.{k}" for k in range(self.num_layers))}
        for tap in taps or ("",):
            if tap not in places:
                raise UserError(
                    f"tap {tap[:80]!r} does not exist in a target of {self.num_layers} layers; use final, "
                    f"final_prenorm or layer.0 to layer.{self.num_layers - 1}"
                )
        if len(set(taps)) < len(taps):
            raise UserError(f"a tap is named twice in {', '.join(taps)[:200]}; name each once")

    def embed(self, input_ids: Tensor) -> Tensor:  # [T] -> [T, H]
        return self.embedding(input_ids)

    def logits(self, final: Tensor) -> Tensor:  # [T, H] -> [T, V]
        return product(final, self.head_weight)

    def greedy(self, final: Tensor) -> Tensor:
        """The best token of each row, [T, H] -> [T]; ties go to the lower id, logits are never whole."""
        best = final.new_full((len(final),), float("-inf"))
        token = torch.zeros(len(final), dtype=torch.long, device=final.device)
        for start in range(0, self.vocab_size, VOCABULARY_BLOCK):
            block = product(final, self.head_weight[start : start + VOCABULARY_BLOCK])
            value, index = block.max(-1)
            better = value > best
            best = torch.where(better, value, best)
            token = torch.where(better, index + start, token)
        return token

    def position_embeddings(self, like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The target's own RoPE (cos, sin) at `positions` [T]."""
        return self.decoder.rotary_emb(like[None], position_ids=positions[None])

    def new_decoder_layer(self, layer_index: int, pool_layer: int) -> nn.Module:
        """A trainable copy of the target's layer `layer_index` whose pages are layer `pool_layer` of the pool."""
        layer = copy.deepcopy(self.decoder.layers[layer_index]).float().train().requires_grad_(True)
        layer.self_attn.layer_idx = pool_layer
        return layer

    def new_norm(self) -> nn.Module:
        """A trainable norm of the target's own class, with the gain of its final norm."""
        return copy.deepcopy(self.decoder.norm).float().train().requires_grad_(True)


def layer_count(folder: Path) -> int:
    """Decoder layers of a transformers folder, from its config alone. Raises UserError as `Target.load` does."""
    return int(_folder_config(folder).num_hidden_layers)


def max_positions(folder: Path) -> int | None:
    """The longest sequence that the target was made for, in tokens; None where its config does not say."""
    positions = getattr(_folder_config(folder), "max_position_embeddings", None)
    return int(positions) if positions else None


def _folder_config(folder: Path) -> PretrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder).get_text_config()
        int(config.num_hidden_layers)
        return config
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise _not_loaded(folder, error) from None


def place_taps(taps: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """Gives `layer.80%` its number, so that a recipe fits targets of any depth; other names stay.

    A share is that of the layers up to and including the tapped one. Raises UserError for an impossible share.
    """
    return tuple(_place_tap(tap, num_layers) for tap in taps)


def _place_tap(tap: str, num_layers: int) -> str:
    kind, _, share = tap.partition(".")
    if kind != "layer" or not share.endswith("%"):
        return tap
    percent = share.removesuffix("%")
    if not percent.isdigit() or not 0 < int(percent) <= 100:
        raise UserError(f"tap {tap!r} is no share of the layers; use layer.1% to layer.100%")
    return f"layer.{max(1, round(int(percent) * num_layers / 100)) - 1}"


def _not_loaded(folder: Path, error: Exception) -> UserError:
    reason = str(error).strip().splitlines()[0]
    return UserError(
        f"target.path={folder} cannot be loaded ({reason}); give a folder or hub id of a causal LM"
    )


def tap_layer(tap: str) -> int | None:
    """Layer index of a tap name `layer.k`, else None."""
    kind, _, index = tap.partition(".")
    return int(index) if kind == "layer" and index.isdecimal() and len(index) < 9 else None


def _text_config(model: nn.Module) -> PretrainedConfig:
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config  # pyright: ignore

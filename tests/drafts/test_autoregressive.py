"""The unroll of heads that draft token by token: prompt rows leave their keys, and nobody misses the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Olmo2Config, Olmo2ForCausalLM

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import HeadConfig, autoregressive
from mtptrain.drafts.dflash import DFlashConfig
from mtptrain.drafts.eagle import EagleConfig
from mtptrain.drafts.eagle3 import Eagle3Config
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.targets.base import Target
from mtptrain.types import DraftBatch

CONFIGS = [
    MTPConfig(),
    MTPConfig(norms="none"),
    EagleConfig(),
    Eagle3Config(taps=("layer.0", "layer.1", "final")),
]


def _batch(width: int) -> DraftBatch:
    """An answer behind a prompt, two turns, a prompt alone, an answer alone, an answer of one token."""
    masks = ["0001111", "00111001110", "000", "11111", "00001"]
    mask = torch.tensor([c == "1" for text in masks for c in text])
    cu_seqlens = torch.tensor([0, *map(len, masks)]).cumsum(0)
    ids = torch.randint(0, 97, (len(mask),))
    return DraftBatch(
        ids, torch.randn(len(ids), width), torch.randn(len(ids), 64), mask, cu_seqlens
    )


def _states_and_gradients(
    config: HeadConfig, batch: DraftBatch, target: Target, backend: AttentionBackend
) -> list[Tensor]:
    torch.manual_seed(0)
    draft = config.build(target)
    steps = [s.states for s in draft.unroll(batch, 3, batch.loss_mask, backend)]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)) for x in steps]
    total = torch.stack([(w * x).sum() for w, x in zip(weights, steps, strict=True)]).sum()
    trained = [p for p in draft.parameters() if p.requires_grad]
    grads = torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
    return [*steps, *grads]


def _named(config: HeadConfig) -> str:
    return f"{type(config).__name__}-{getattr(config, 'norms', '')}"


@pytest.fixture(scope="module")
def post_norm(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target whose layers norm what attention and MLP give, not what they read."""
    folder = tmp_path_factory.mktemp("olmo2")
    torch.manual_seed(0)
    config = Olmo2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    Olmo2ForCausalLM(config).save_pretrained(folder)
    return Target.load(folder)


@pytest.mark.parametrize("family", ["tiny_target", "post_norm"])
@pytest.mark.parametrize("config", CONFIGS, ids=_named)
def test_prompt_rows_that_leave_their_keys_alone_change_nothing(
    config: HeadConfig,
    family: str,
    request: pytest.FixtureRequest,
    backend: AttentionBackend,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """States and gradients are those of an unroll that runs every row through the whole layer."""
    torch.manual_seed(3)
    batch, target = _batch(64 * len(config.taps)), request.getfixturevalue(family)
    ran: list[int] = []
    monkeypatch.setattr(
        autoregressive,
        "rows_from_first",
        lambda s, c, real=autoregressive.rows_from_first: _seen(real(s, c), ran),
    )
    got = _states_and_gradients(config, batch, target, backend)
    assert ran == [5 + 10 + 0 + 5 + 0], "rows from the one that reads an answer's first token on"
    monkeypatch.setattr(autoregressive, "rows_from_first", lambda s, _: torch.ones_like(s))
    for a, b in zip(got, _states_and_gradients(config, batch, target, backend), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)


def _seen(run: Tensor, ran: list[int]) -> Tensor:
    ran.append(int(run.sum()))
    return run


def test_a_block_reads_what_layers_without_an_input_norm_read(
    post_norm: Target, backend: AttentionBackend
) -> None:
    """Where the target's layers norm no input, neither is the context of a block head normed, and it trains."""
    torch.manual_seed(3)
    config = DFlashConfig(taps=("layer.1",), num_layers=2)
    batch, draft = _batch(64), config.build(post_norm)
    assert torch.equal(draft.context_norm(batch.features), batch.features)
    got = _states_and_gradients(config, batch, post_norm, backend)
    assert all(x.isfinite().all() and x.any() for x in got)


def test_a_batch_that_teaches_nothing_runs_through(
    tiny_target: Target, backend: AttentionBackend
) -> None:
    """Answers of one token supervise no row; the steps are empty, and backward finds zeros."""
    torch.manual_seed(3)
    whole = _batch(64)
    last = slice(-5, None)
    batch = DraftBatch(
        whole.input_ids[last],
        whole.features[last],
        whole.final[last],
        whole.loss_mask[last],
        torch.tensor([0, 5]),
    )
    assert not any(x.any() for x in _states_and_gradients(MTPConfig(), batch, tiny_target, backend))

"""The walk over stored features is the replay, up to the last pass of an answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.drafts.base import Draft
from mtptrain.drafts.dflash import DFlashConfig
from mtptrain.drafts.dspark import DSparkConfig
from mtptrain.drafts.eagle3 import Eagle3Config
from mtptrain.drafts.medusa import MedusaConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.drafts.peagle import PEagleConfig
from mtptrain.drafts.suffix import SuffixConfig
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Request, SamplingParams
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.simulated import accepted_runs, pack, simulate, simulate_lookup, walk

LONG = SamplingParams(max_new_tokens=120)
HEADS = {
    "shared module": (MTPConfig(), 4),
    "three modules": (MTPConfig(depth=3), 3),
    "several taps, reduced vocabulary": (
        MTPConfig(taps=("layer.1", "final"), draft_vocab=tuple(range(0, 512, 2))),
        2,
    ),
    "fed back raw, a head of its own": (
        Eagle3Config(taps=("layer.1", "layer.2", "final_prenorm"), head="own"),
        3,
    ),
    "a block": (DFlashConfig(taps=("layer.1", "layer.2"), num_layers=2), 3),
    "a corrected block": (DSparkConfig(taps=("layer.2",), num_layers=2, confidence=False), 3),
    "masks": (PEagleConfig(taps=("layer.1", "layer.2"), num_layers=2), 3),
    "heads that read no draft": (MedusaConfig(taps=("layer.1",), num_heads=3, num_blocks=2), 3),
}


@pytest.fixture(scope="module")
def generate(
    tiny_target: Target, backend: AttentionBackend, requests: list[Request]
) -> Callable[..., list[Completion]]:
    """Long answers, for end tokens are ignored: the last pass of each weighs little."""

    def run(
        draft: Draft | None = None, tokens: int = 0, taps: tuple[str, ...] = (), batch: int = 64
    ) -> list[Completion]:
        limits = EngineLimits(batch, num_draft_tokens=tokens)
        return Engine(tiny_target, backend, limits, frozenset(), draft, taps).generate(
            requests[:16], LONG
        )

    return run


def _check_walk(walked: list[Completion], replayed: list[Completion]) -> None:
    """The same answers and passes; in the last pass the walk accepts no more than the replay."""
    for a, b in zip(walked, replayed, strict=True):
        assert a.output_ids == b.output_ids and a.decode_steps == b.decode_steps
        assert a.passes[:-1] == b.passes[:-1]
        for mine, real in zip(a.passes[-1:], b.passes[-1:], strict=True):
            assert (mine.proposed, mine.emitted) == (real.proposed, real.emitted)
            assert mine.accepted <= real.accepted


@pytest.mark.parametrize("name", HEADS)
def test_the_walk_of_a_head_is_its_replay(
    name: str,
    generate: Callable[..., list[Completion]],
    fit_head: Callable[..., Draft],
    backend: AttentionBackend,
) -> None:
    """Pass by pass the same, and within 1 % of the acceptance length, on a head that is right half the time."""
    config, tokens = HEADS[name]
    draft = fit_head(config)
    walked = list(simulate(draft, generate(taps=draft.taps), tokens, backend))
    replayed = generate(draft, tokens)
    _check_walk(walked, replayed)
    simulated, real = (
        measure_acceptance(x, tokens).acceptance_length.value for x in (walked, replayed)
    )
    assert simulated == pytest.approx(real, rel=0.01) and simulated is not None and simulated > 1.1


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("lookup", [NgramConfig(), SuffixConfig()], ids=lambda x: x.kind)
def test_the_walk_of_a_lookup_is_its_replay(
    lookup: NgramConfig | SuffixConfig, tokens: int, generate: Callable[..., list[Completion]]
) -> None:
    """Tokens alone tell what would be proposed and accepted; steps without a proposal count as steps. What is
    learnt from past answers is learnt as by a server that answers one request after another."""
    walked = list(simulate_lookup(lookup.build(), generate(), tokens))
    replayed = generate(lookup.build(), tokens, batch=1)
    _check_walk(walked, replayed)
    real = measure_acceptance(replayed, tokens)
    assert measure_acceptance(walked, tokens).tokens_per_step == real.tokens_per_step
    assert real.passes < real.decode_steps


def test_answers_of_a_few_tokens(
    fit_head: Callable[..., Draft],
    tiny_target: Target,
    backend: AttentionBackend,
    requests: list[Request],
) -> None:
    """An answer shorter than the proposal walks as it replays, down to one token, which has no pass."""
    for config, tokens in HEADS.values():
        draft = fit_head(config)
        for length in (1, 2, 3, 4):
            params = SamplingParams(max_new_tokens=length)
            engines = (
                Engine(tiny_target, backend, EngineLimits(), frozenset(), None, draft.taps),
                Engine(
                    tiny_target, backend, EngineLimits(num_draft_tokens=tokens), frozenset(), draft
                ),
            )
            plain, replayed = (e.generate(requests[:3], params) for e in engines)
            _check_walk(list(simulate(draft, plain, tokens, backend)), replayed)


def test_documents_of_a_batch_do_not_meet(
    fit_head: Callable[..., Draft],
    answers: list[Completion],
    document: Callable[..., Any],
    backend: AttentionBackend,
) -> None:
    """Runs of several answers packed together are those of each alone; no run starts in a prompt."""
    draft = fit_head(MTPConfig())
    documents = [document(c, draft.taps) for c in answers[:5]]
    together = accepted_runs(draft, pack(documents), 4, backend).split(
        [len(d[0]) for d in documents]
    )
    for run, one in zip(together, documents, strict=True):
        assert torch.equal(run, accepted_runs(draft, pack([one]), 4, backend))
        prompt = int((~one[3]).sum())
        assert not bool(run[: prompt - 1].any()) and int(run.max()) > 0


def test_the_walk_keeps_the_answers_end() -> None:
    """Every token after the first is emitted by some pass, the last pass is cut, and empty proposals are steps."""
    request = Request("a", "all", (1, 2, 3))
    plan = {3: (4, 2), 6: (0, 0), 7: (4, 4)}  # newest token -> proposed, accepted
    done = walk(request, tuple(range(10, 18)), lambda newest: plan[newest])
    assert [(p.proposed, p.accepted, p.emitted) for p in done.passes] == [(4, 2, 3), (4, 4, 3)]
    assert done.decode_steps == 3
    assert walk(request, (5,), lambda newest: (4, 4)).passes == ()


def test_the_held_out_curve_walks_the_same_way(
    fit_head: Callable[..., Draft],
    answers: list[Completion],
    document: Callable[..., Any],
    backend: AttentionBackend,
) -> None:
    """The curve's own walk over a stored sample counts the passes of `simulate`."""
    from mtptrain.train.callbacks import _walk_rows

    draft = fit_head(MTPConfig())
    final = [
        replace(c, features=c.features[:, -64:]) for c in answers[:6] if c.features is not None
    ]
    for completion, walked in zip(answers, simulate(draft, final, 4, backend), strict=False):
        batch = pack([document(completion, draft.taps)])
        runs = accepted_runs(draft, batch, 4, backend)
        assert _walk_rows(batch, runs) == [p.accepted for p in walked.passes]

"""The replay of draft and target, and everything the report says of it.

The target first answers alone: the reference for losslessness and speed, the text that the lookups and the
simulated walk run over, and the source of second-turn prompts. Then draft and target answer the same
requests together, at the asked temperature and, unless that was sampled already, some of them at T=1. It
gives up engines of others: `exporters` and a test in a real engine are for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.chat import Chat
from mtptrain.datasets.base import evenly
from mtptrain.drafts.base import Draft
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.drafts.suffix import SuffixConfig
from mtptrain.prepare import answer_turns
from mtptrain.progress import progress
from mtptrain.run import Provenance
from mtptrain.runtime.engine import Engine, EngineTimes
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Conversation, Request, SamplingParams, UserError
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.report import (
    Baseline,
    Baselines,
    Lossless,
    MeasuredRun,
    Report,
    Sampling,
    Speed,
    assemble,
    measured_run,
)
from mtptrain.validate.simulated import simulate, simulate_lookup

log = logging.getLogger("mtptrain")
NOT_LOSSLESS = (
    "above T=0 tokens were accepted as typical: what was said does not follow the target's law, and these figures "
    "must not be compared with lossless ones"
)


@dataclass(frozen=True)
class ReplaySettings:
    """What is replayed; from `validate:` in the recipe."""

    max_new_tokens: int
    sampled_prompts: int  # so many are replayed at T=1 as well, spread evenly; 0: none
    top_k: int = 0  # these six: as in SamplingParams, for whatever is not greedy
    top_p: float = 1.0
    min_p: float = 0.0
    block_verify: bool = False
    typical_threshold: float = 0.0
    typical_alpha: float = 0.3

    def sampling(self, temperature: float, seed: int) -> SamplingParams:
        """How the replay at this temperature draws. Raises UserError for options out of range."""
        return SamplingParams(
            temperature,
            self.top_k,
            self.top_p,
            self.max_new_tokens,
            seed,
            min_p=self.min_p,
            block_verify=self.block_verify,
            typical_threshold=self.typical_threshold,
            typical_alpha=self.typical_alpha,
        )


class MakeEngine(Protocol):
    """Builds an engine for this run's target."""

    def __call__(
        self,
        max_batch: int,
        draft: Draft | None = None,
        num_draft_tokens: int = 0,
        capture_taps: tuple[str, ...] = (),
    ) -> Engine: ...


def replay(
    target: Target,
    draft: Draft,
    chat: Chat,
    conversations: Sequence[Conversation],
    engine: MakeEngine,
    backend: AttentionBackend,
    settings: ReplaySettings,
    *,
    num_draft_tokens: int,
    temperature: float,
    batch_size: int,
    seed: int,
    target_name: str,
    draft_name: str,
    origin: Callable[[], Provenance],
    warnings: tuple[str, ...] = (),
) -> Report:
    """The whole report (design §5.4). Raises UserError for settings that cannot be replayed."""
    if batch_size < 1:
        raise UserError(f"batch_size={batch_size} must be at least 1")
    greedy = settings.sampling(0, seed)
    alone = engine(batch_size, capture_taps=draft.taps)
    tree, least = alone.limits.tree, alone.limits.min_confidence
    plain = _plain(alone, conversations, chat, greedy)
    requests = [c.request for c in plain]

    def together(
        at: float, asked: Sequence[Request], name: str
    ) -> tuple[MeasuredRun, list[Completion]]:
        runner = engine(batch_size, draft, num_draft_tokens)
        params = settings.sampling(at, seed)
        done = _generate(runner, asked, params, name)
        measured = measure_acceptance(done, num_draft_tokens, seed)
        how = (params.top_k, params.top_p, params.min_p, params.block_verify)
        sampling = Sampling(
            *(at, num_draft_tokens, tree.name, seed, batch_size, *how),
            typical_threshold=params.typical_threshold,
            typical_alpha=params.typical_alpha,
            min_confidence=least,
        )
        speed = _speed(alone.times, runner.times)
        return measured_run(measured, sampling, speed), done

    run, speculative = together(temperature, requests, f"draft and target, T={temperature:g}")
    sampled = None
    if settings.sampled_prompts and temperature == 0:
        some = evenly(requests, settings.sampled_prompts)
        sampled, _ = together(1.0, some, "draft and target, T=1")
    walked = None  # the walk goes over whole chains of a head
    if tree.kind is None and not least and draft.config.trained() is draft.config:
        walked = _simulated(draft, plain, num_draft_tokens, backend)
    if not all(r is None or r.sampling.lossless for r in (run, sampled)):
        warnings = (*warnings, NOT_LOSSLESS)
    return assemble(
        run,
        target=target_name,
        draft=draft_name,
        provenance=origin(),
        baselines=_baselines(plain, num_draft_tokens),
        simulated_acceptance_length=walked,
        lossless=compare(plain, speculative) if temperature == 0 else None,
        sampled=sampled,
        warnings=warnings,
    )


def compare(plain: Sequence[Completion], speculative: Sequence[Completion]) -> Lossless:
    """Tokens of the plain answers that the speculative ones do not have in the same place."""
    checked = mismatches = 0
    for a, b in zip(plain, speculative, strict=True):
        same = sum(x == y for x, y in zip(a.output_ids, b.output_ids, strict=False))
        checked += len(a.output_ids)
        mismatches += max(len(a.output_ids), len(b.output_ids)) - same
    return Lossless(checked, mismatches)


def _baselines(plain: Sequence[Completion], num_draft_tokens: int) -> Baselines:
    """The lookups with their usual settings, over the same answers."""

    def of(lookup: Draft) -> Baseline:
        walked = list(simulate_lookup(lookup, plain, num_draft_tokens))
        return Baseline(measure_acceptance(walked, num_draft_tokens).tokens_per_step)

    return Baselines(of(NgramConfig().build()), of(SuffixConfig().build()))


def _simulated(
    draft: Draft, plain: Sequence[Completion], num_draft_tokens: int, backend: AttentionBackend
) -> float | None:
    passes = list(simulate(draft, plain, num_draft_tokens, backend))
    return measure_acceptance(passes, num_draft_tokens).acceptance_length.value


def _plain(
    engine: Engine, conversations: Sequence[Conversation], chat: Chat, params: SamplingParams
) -> list[Completion]:
    total = sum(turn.role == "user" for c in conversations for turn in c.turns)
    with progress("validate: target alone", total, unit="answers") as bar:
        return answer_turns(conversations, chat, engine, params, lambda _: bar.advance())


def _generate(
    engine: Engine, requests: Sequence[Request], params: SamplingParams, name: str
) -> list[Completion]:
    with progress(f"validate: {name}", len(requests), unit="answers") as bar:
        return engine.generate(requests, params, lambda _: bar.advance())


def _speed(plain: EngineTimes, speculative: EngineTimes) -> Speed:
    """Decode rates, prefill left out on both sides."""
    a = plain.decoded_tokens / max(plain.decode_s, 1e-9)
    b = speculative.decoded_tokens / max(speculative.decode_s, 1e-9)
    return Speed(a, b, b / max(a, 1e-9), speculative.draft_s / max(speculative.decode_s, 1e-9))

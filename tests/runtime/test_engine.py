"""Draft and target in lock-step: speculation changes the speed and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mtptrain.attention_backends.base import AttentionBackend, ForwardContext
from mtptrain.capture import capture_pass
from mtptrain.chat import Chat
from mtptrain.drafts.base import Draft, DraftConfig, HeadConfig, Proposal
from mtptrain.drafts.dflash import DFlashConfig
from mtptrain.drafts.dspark import DSparkConfig
from mtptrain.drafts.eagle3 import Eagle3Config
from mtptrain.drafts.hybrid import Hybrid, HybridConfig
from mtptrain.drafts.medusa import MedusaConfig
from mtptrain.drafts.mtp import MTPConfig
from mtptrain.drafts.ngram import NgramConfig
from mtptrain.drafts.peagle import PEagleConfig
from mtptrain.drafts.suffix import SuffixConfig
from mtptrain.losses.base import Loss
from mtptrain.losses.confidence import Confidence
from mtptrain.losses.kl import KL
from mtptrain.losses.weighted_sum import WeightedSum
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.kv_pages import PageBook
from mtptrain.runtime.model_runner import ModelRunner
from mtptrain.runtime.scheduler import EngineLimits, Scheduler, Sequence
from mtptrain.runtime.tree import TreeShape
from mtptrain.targets.base import Target
from mtptrain.types import Completion, Request, Sample, SamplingParams, UserError
from mtptrain.validate.acceptance import measure_acceptance

NEW = 24
GREEDY = SamplingParams(max_new_tokens=NEW)
ROOMY = EngineLimits()
TIGHT = EngineLimits(max_batch=3, max_prefill_tokens=7, page_size=4, num_pages=75)


TWO = ("layer.1", "layer.2")


@dataclass(frozen=True)
class Case:
    config: DraftConfig
    num_draft_tokens: int
    tree: TreeShape = TreeShape()


CASES = {
    "shared module": Case(MTPConfig(), 4),
    "one drafted token": Case(MTPConfig(), 1),
    "three modules": Case(MTPConfig(depth=3), 3),
    "fewer tokens than modules": Case(MTPConfig(depth=3), 2),
    "several taps": Case(MTPConfig(taps=("layer.1", "final_prenorm", "final")), 3),
    "reduced vocabulary": Case(MTPConfig(draft_vocab=tuple(range(0, 512, 2))), 3),
    "a head of its own": Case(Eagle3Config(taps=("layer.1", "layer.2"), head="own"), 4),
    "heads that read no draft": Case(MedusaConfig(num_heads=3), 3),
    "a block": Case(DFlashConfig(taps=TWO, num_layers=2), 4),
    "a shorter block": Case(DFlashConfig(taps=TWO, num_layers=2), 1),
    "a corrected block": Case(DSparkConfig(taps=TWO, num_layers=2, confidence=False), 4),
    "a corrected block of a reduced vocabulary": Case(
        DSparkConfig(taps=TWO, num_layers=2, draft_vocab=tuple(range(0, 512, 2))), 3
    ),
    "masks": Case(PEagleConfig(taps=TWO, num_layers=2), 4),
    "masks of a reduced vocabulary": Case(
        PEagleConfig(taps=TWO, num_layers=2, draft_vocab=tuple(range(0, 512, 2))), 3
    ),
    "prompt lookup": Case(NgramConfig(), 4),
    "static tree": Case(MTPConfig(), 5, TreeShape("static")),
    "dynamic tree": Case(MTPConfig(), 4, TreeShape("dynamic", 40, 5)),
    "tree of a reduced vocabulary": Case(
        MTPConfig(draft_vocab=tuple(range(0, 512, 2))), 3, TreeShape("dynamic", 9, 3)
    ),
    "tree of normed states": Case(
        Eagle3Config(taps=("layer.1", "layer.2"), tap_norms=True), 3, TreeShape("dynamic", 9, 3)
    ),
    "static tree of drawn children": Case(MTPConfig(), 4, TreeShape("static", drawn=True)),
    "best-first tree": Case(MedusaConfig(num_heads=3), 3, TreeShape("best_first", 24)),
    "suffix": Case(SuffixConfig(), 4),
    "suffix alone": Case(SuffixConfig(max_outputs=0), 6),
    "hybrid": Case(HybridConfig(SuffixConfig(), MTPConfig(), 1.5), 4),
    "hybrid of three modules": Case(
        HybridConfig(SuffixConfig(max_outputs=0), MTPConfig(depth=3), 1.5), 5
    ),
}
LOOKUPS = (NgramConfig, SuffixConfig)
FIXED = (  # drafts that learn nothing from other requests
    "shared module",
    "three modules",
    "a block",
    "a corrected block",
    "masks",
    "prompt lookup",
    "suffix alone",
    "hybrid of three modules",
    "static tree of drawn children",
    "best-first tree",
)
every_case = pytest.mark.parametrize("name", CASES)
every_limit = pytest.mark.parametrize(
    ("limits", "first"),
    [(EngineLimits(max_batch=1), 3), (EngineLimits(max_batch=8), 12), (TIGHT, 10)],
    ids=["alone", "batch of eight", "tight"],
)


@pytest.fixture(scope="module")
def run(
    tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend, fit_head: Callable[..., Draft]
) -> Callable[..., list[Completion]]:
    """Generates with the draft of a case, or with none; checks that no page is lost."""

    def fitted(config: DraftConfig) -> Draft:
        if isinstance(config, HybridConfig):
            return Hybrid(config, config.lookup.build(tiny_target), fit_head(config.head))
        return fit_head(config) if isinstance(config, HeadConfig) else config.build(tiny_target)

    def generate(
        requests: list[Request],
        limits: EngineLimits = ROOMY,
        case: Case | None = None,
        params: SamplingParams = GREEDY,
        taps: tuple[str, ...] = (),
    ) -> list[Completion]:
        draft = None
        if case is not None:
            draft = fitted(case.config)
            limits = replace(limits, num_draft_tokens=case.num_draft_tokens, tree=case.tree)
        engine = Engine(tiny_target, backend, limits, tiny_chat.eos_ids, draft, taps)
        return engine.generate(requests, params)

    return generate


@pytest.fixture(scope="module")
def reference(
    plain_model: LlamaForCausalLM, tiny_chat: Chat, requests: list[Request]
) -> list[tuple[int, ...]]:
    """What transformers' own generate answers, one prompt at a time."""
    outs = []
    for request in requests[:12]:
        ids = torch.tensor([request.prompt_ids])
        out = plain_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=list(tiny_chat.eos_ids),
            pad_token_id=0,
        )
        outs.append(tuple(out[0, ids.shape[1] :].tolist()))
    return outs


def _tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [c.output_ids for c in completions]


# ---- greedy: identical tokens ----------------------------------------------------------------------------


@every_limit
def test_plain_greedy_is_transformers_generate(
    run: Callable[..., list[Completion]],
    requests: list[Request],
    reference: list[tuple[int, ...]],
    limits: EngineLimits,
    first: int,
) -> None:
    """Token by token, alone, batched, and in chunks of seven rows over a pool that holds a few sequences."""
    completions = run(requests[:first], limits)
    assert _tokens(completions) == reference[:first]
    assert [c.request for c in completions] == requests[:first]
    whole = {len(c.output_ids) == NEW for c in completions if c.finish_reason == "length"}
    assert whole <= {True}


@every_case
@every_limit
def test_speculative_greedy_is_plain_greedy(
    run: Callable[..., list[Completion]],
    requests: list[Request],
    reference: list[tuple[int, ...]],
    limits: EngineLimits,
    first: int,
    name: str,
) -> None:
    """Any draft, any batch, chunk and pool size: the tokens are those of the target alone, although drafted
    tokens are accepted here and rejected there, and sequences join and leave at every step."""
    completions = run(requests[:first], limits, CASES[name])
    assert _tokens(completions) == reference[:first]
    accepted = {p.accepted for c in completions for p in c.passes}
    assert max(accepted, default=0) <= CASES[name].num_draft_tokens
    partly = [p for c in completions for p in c.passes if 0 < p.accepted < p.proposed]
    assert (0 in accepted and max(accepted) > 0) or first < 10
    assert partly or first < 10 or CASES[name].num_draft_tokens == 1


@every_case
def test_counts_add_up(
    run: Callable[..., list[Completion]], requests: list[Request], name: str
) -> None:
    """The first token comes from prefill; every later one from a decode step, which is a verify pass where
    something was proposed."""
    for completion in run(requests[:8], EngineLimits(max_batch=5), CASES[name]):
        kept = sum(p.emitted for p in completion.passes)
        alone = completion.decode_steps - len(completion.passes)
        assert 1 + kept + alone == len(completion.output_ids)
        assert all(0 < p.proposed for p in completion.passes)
        whole = [p for p in completion.passes[:-1]]
        assert all(p.emitted == p.accepted + 1 for p in whole)
        if not isinstance(CASES[name].config, LOOKUPS):
            assert alone == 0


def test_the_drafts_acceptance_does_not_depend_on_batch_or_chunks(
    run: Callable[..., list[Completion]], requests: list[Request]
) -> None:
    """The passes themselves, not only the tokens, are the same alone, batched and in tiny chunks."""
    for name in (*FIXED, "dynamic tree"):
        alone, batched, tight = (
            run(requests[:4], limits, CASES[name])
            for limits in (EngineLimits(max_batch=1), EngineLimits(max_batch=8), TIGHT)
        )
        assert [c.passes for c in alone] == [c.passes for c in batched] == [c.passes for c in tight]


def test_answers_end_inside_a_pass_at_their_length(
    run: Callable[..., list[Completion]], requests: list[Request], reference: list[tuple[int, ...]]
) -> None:
    """Every length from 1 on is a prefix of the longer answer, with speculation as without."""
    for length in range(1, 7):
        params = replace(GREEDY, max_new_tokens=length)
        for case in (None, CASES["shared module"], CASES["dynamic tree"]):
            done = run(requests[:4], EngineLimits(), case, params)
            assert _tokens(done) == [x[:length] for x in reference[:4]]


@pytest.mark.parametrize("length", [1, 2, 3])
@every_case
def test_prompts_of_a_few_tokens(
    run: Callable[..., list[Completion]], length: int, name: str
) -> None:
    """A prompt shorter than the draft's own depth decodes as the target alone does, in chunks of one row."""
    requests = [Request(str(i), "all", (40 + i, 41, 42)[:length]) for i in range(3)]
    limits = EngineLimits(max_prefill_tokens=1)
    assert _tokens(run(requests, limits, CASES[name])) == _tokens(run(requests))


# ---- trees ------------------------------------------------------------------------------------------------


def test_a_tree_accepts_more_than_the_chain_of_the_same_head(
    run: Callable[..., list[Completion]], requests: list[Request]
) -> None:
    """Of the same trained head at the same depth the dynamic tree accepts more tokens a pass, in fewer passes;
    neither of its paths nor of its nodes more than were asked for."""
    chain, tree = (
        run(requests[:16], EngineLimits(max_batch=5), Case(MTPConfig(), 4, shape))
        for shape in (TreeShape(), TreeShape("dynamic", 24, 4))
    )
    assert _tokens(chain) == _tokens(tree)
    of_chain, of_tree = (measure_acceptance(x, 4) for x in (chain, tree))
    lengths = [x.acceptance_length.value for x in (of_chain, of_tree)]
    assert lengths[0] is not None and lengths[1] is not None and lengths[1] > lengths[0] + 0.1
    assert of_tree.passes < of_chain.passes
    assert {p.proposed for c in tree for p in c.passes} == {24}
    assert max(p.accepted for c in tree for p in c.passes) <= 4


def test_a_tree_of_one_child_is_the_chain(
    run: Callable[..., list[Completion]], requests: list[Request]
) -> None:
    """With one node at a level the passes themselves are those of the chain."""
    chain, tree = (
        run(requests[:8], EngineLimits(max_batch=3), Case(MTPConfig(), 4, shape))
        for shape in (TreeShape(), TreeShape("dynamic", 4, 1))
    )
    assert [c.passes for c in chain] == [c.passes for c in tree]


def test_the_rows_of_an_accepted_path_are_those_of_a_chain(
    run: Callable[..., list[Completion]], requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of every kept token, in every layer of the target, equal those of plain decoding, though
    nodes were accepted that did not lie where a chain has them."""
    moved: list[bool] = []
    ends: dict[str, dict[int, Tensor]] = {"plain": {}, "tree": {}}
    keep_paths = ModelRunner.keep_paths

    def spy(self: ModelRunner, sequences: list[Sequence], paths: list[list[int]]) -> None:
        keep_paths(self, sequences, paths)
        moved.extend(path != list(range(len(path))) for path in paths)

    def read(runner: ModelRunner, sequence: Sequence) -> Tensor:
        pool, n = runner.pool, runner.target.num_layers
        layers = torch.stack([*pool.keys[:n], *pool.values[:n]], 1)[sequence.pages]
        return layers.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, : sequence.kv_len].clone()

    for name, case in (("plain", None), ("tree", CASES["dynamic tree"])):
        store = ModelRunner.store_features

        def note(
            self: ModelRunner,
            sequences: list[Sequence],
            *rest: Any,
            store: Any = store,
            name: str = name,
        ) -> None:
            store(self, sequences, *rest)
            ends[name].update({s.place: read(self, s) for s in sequences})

        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "keep_paths", spy)
            patch.setattr(ModelRunner, "store_features", note)
            run(requests[:4], TIGHT, case)
    assert any(moved)
    for place, plain in ends["plain"].items():
        rows = min(plain.shape[1], ends["tree"][place].shape[1])
        assert rows > len(requests[place].prompt_ids) + 3
        torch.testing.assert_close(
            ends["tree"][place][:, :rows], plain[:, :rows], atol=1e-4, rtol=1e-4
        )


def test_a_draft_that_grows_no_trees_is_the_users_error(
    tiny_target: Target, backend: AttentionBackend
) -> None:
    """Prompt lookup and a head of several modules propose chains; the message says how to ask for one, or for
    the trees that a draft does propose."""
    limits = EngineLimits(num_draft_tokens=2, tree=TreeShape("static"))
    for config in (NgramConfig(), MTPConfig(depth=3)):
        with pytest.raises(UserError, match="proposes chains; use tree.kind=null"):
            Engine(tiny_target, backend, limits, frozenset(), config.build(tiny_target))
    for kind, config, use in (
        ("static", MedusaConfig(), "best_first or null"),
        ("best_first", MTPConfig(), "static or dynamic or null"),
    ):
        shaped = replace(limits, tree=TreeShape(kind))
        with pytest.raises(UserError, match=f"proposes other trees; use tree.kind={use}"):
            Engine(tiny_target, backend, shaped, frozenset(), config.build(tiny_target))


# ---- shared pages and captured features ------------------------------------------------------------------


def test_prompts_that_share_a_prefix_share_its_pages(
    run: Callable[..., list[Completion]],
    requests: list[Request],
    reference: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Later prompts start behind the system prompt that earlier ones have computed, and answer the same."""
    found: list[int] = []
    shared_prefix = PageBook.shared_prefix

    def spy(book: PageBook, token_ids: tuple[int, ...]) -> list[int]:
        pages = shared_prefix(book, token_ids)
        found.append(len(pages))
        return pages

    monkeypatch.setattr(PageBook, "shared_prefix", spy)
    for case in (None, CASES["shared module"], CASES["dynamic tree"]):
        found.clear()
        assert _tokens(run(requests[:8], TIGHT, case)) == reference[:8]
        assert sum(n > 2 for n in found) >= 5
    found.clear()
    run(requests[:2], TIGHT, CASES["three modules"])
    assert not found  # memories of a separate module are not in the pages


@every_limit
def test_captured_features_are_those_of_a_separate_pass(
    run: Callable[..., list[Completion]],
    requests: list[Request],
    reference: list[tuple[int, ...]],
    tiny_target: Target,
    backend: AttentionBackend,
    limits: EngineLimits,
    first: int,
) -> None:
    """A row a token of prompt and answer, the last one included, equal to one forward over the whole text,
    shared pages or not; and capturing changes no token."""
    taps = ("layer.1", "final_prenorm", "final")
    completions = run(requests[:first], limits, None, GREEDY, taps)
    assert _tokens(completions) == reference[:first]
    ids = [torch.tensor(c.request.prompt_ids + c.output_ids) for c in completions]
    samples = [Sample("", "", x, torch.ones(len(x), dtype=torch.bool)) for x in ids]
    rows = capture_pass(tiny_target, backend, taps, samples, max_tokens=256)
    for completion, (sample, features) in zip(completions, rows, strict=True):
        assert completion.features is not None
        assert completion.features.shape == (len(sample.input_ids), 3 * tiny_target.hidden_size)
        torch.testing.assert_close(completion.features, features, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 2])
def test_features_of_an_answer_of_a_token_or_two(
    run: Callable[..., list[Completion]], requests: list[Request], length: int
) -> None:
    """An answer that ends in prefill is read once more, so that its last token has a feature too; that step is
    no decode step of the answer."""
    params = replace(GREEDY, max_new_tokens=length)
    for completion in run(requests[:5], TIGHT, None, params, ("final",)):
        assert completion.features is not None
        assert len(completion.features) == len(completion.request.prompt_ids) + length
        assert completion.decode_steps == length - 1


def test_no_page_leaks(
    run: Callable[..., list[Completion]], requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a run every page of the pool can be dealt again."""
    books: list[PageBook] = []
    make = Scheduler.__init__

    def spy(self: Scheduler, *args: object) -> None:
        make(self, *args)  # pyright: ignore
        books.append(self.book)

    monkeypatch.setattr(Scheduler, "__init__", spy)
    for case in (None, *CASES.values()):
        run(requests[:5], TIGHT, case, replace(GREEDY, max_new_tokens=6))
    assert len(books) == 1 + len(CASES) and all(b.available == TIGHT.num_pages for b in books)


# ---- sampling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", (*FIXED, "dynamic tree"))
def test_sampled_answers_do_not_depend_on_the_batch(
    run: Callable[..., list[Completion]], requests: list[Request], name: str
) -> None:
    """At T=1 a request draws from its own stream: alone, batched or in tiny chunks it says the same."""
    params = SamplingParams(1.0, top_p=0.95, max_new_tokens=12, seed=3)
    alone, batched, tight = (
        _tokens(run(requests[:5], limits, CASES[name], params))
        for limits in (EngineLimits(max_batch=1), EngineLimits(max_batch=8), TIGHT)
    )
    assert alone == batched == tight
    assert alone != _tokens(run(requests[:5], TIGHT, CASES[name], replace(params, seed=4)))


def test_both_parts_of_a_hybrid_propose_in_one_step(
    run: Callable[..., list[Completion]],
    requests: list[Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hybrids above are no head or lookup in disguise: some steps have certain and drawn tokens."""
    proposals: list[list[bool]] = []
    propose = Hybrid.propose

    def spy(self: Hybrid, *args: object) -> Proposal:
        made = propose(self, *args)  # pyright: ignore
        laws = [None] * len(made.token_ids) if made.probs is None else made.probs
        proposals.append([law is None for law in laws])
        return made

    monkeypatch.setattr(Hybrid, "propose", spy)
    for name in ("hybrid", "hybrid of three modules"):
        proposals.clear()
        run(requests[:8], EngineLimits(max_batch=4), CASES[name], replace(GREEDY, temperature=0.3))
        assert any(0 < sum(certain) < len(certain) for certain in proposals)


SMALL = 6  # vocabulary of the target whose law is known exactly
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)


@pytest.fixture(scope="module")
def small_target() -> Target:
    """A random target with six tokens, whose next two depend strongly on each other."""
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=SMALL,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return Target(model)


def _exact_law(target: Target, backend: AttentionBackend) -> np.ndarray:
    """Probability of every three tokens after the prompt, [V, V, V]."""
    pairs = torch.cartesian_prod(torch.arange(SMALL), torch.arange(SMALL))
    rows = torch.cat([torch.tensor(PROMPT).expand(len(pairs), -1), pairs], 1)  # [V * V, T]
    ctx = ForwardContext.packed(backend, [rows.shape[1]] * len(rows))
    position = torch.arange(rows.shape[1]).repeat(len(rows))
    final = target.forward(rows.flatten(), position, ctx, ("final",)).final
    laws = target.logits(final).double().softmax(-1).view(SMALL, SMALL, rows.shape[1], SMALL)
    at = len(PROMPT) - 1
    first, second, third = laws[0, 0, at], laws[:, 0, at + 1], laws[:, :, at + 2]
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def _pvalue(counts: np.ndarray, law: np.ndarray) -> float:
    expected = law.flatten() / law.sum() * counts.sum()
    rare = expected < 5
    observed = np.append(counts.flatten()[~rare], counts.flatten()[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum() + 1e-9)
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


ONCE = SuffixConfig(max_outputs=40, spec_factor=2.0)  # some of 3,000 short answers
SAMPLED = {
    "plain": None,
    "shared module": Case(MTPConfig(), 2),
    "reduced vocabulary": Case(MTPConfig(draft_vocab=(1, 2, 4)), 2),
    "two modules": Case(MTPConfig(depth=2), 2),
    "a block": Case(DFlashConfig(num_layers=1, block_size=3), 2),
    "masks": Case(PEagleConfig(num_layers=1), 2),
    "prompt lookup": Case(NgramConfig(min_ngram=1), 2),
    "suffix": Case(ONCE, 2),
    "hybrid": Case(HybridConfig(ONCE, MTPConfig(draft_vocab=(1, 2, 4)), 0.9), 2),
    "static tree": Case(MTPConfig(), 2, TreeShape("static")),
    "dynamic tree": Case(MTPConfig(), 2, TreeShape("dynamic", 4, 2)),
    "static tree of drawn children": Case(MTPConfig(), 2, TreeShape("static", drawn=True)),
    "drawn children of a reduced vocabulary": Case(
        MTPConfig(draft_vocab=(1, 2, 4)), 2, TreeShape("static", drawn=True)
    ),
    "best-first tree": Case(MedusaConfig(num_heads=2), 2, TreeShape("best_first", 4)),
}


@pytest.mark.parametrize(
    ("name", "block_verify"),
    [
        (name, block)
        for name, case in SAMPLED.items()
        for block in (False, True)
        if not block or (case and case.tree.kind is None)
    ],
)
def test_sampled_speculation_has_the_targets_law(
    small_target: Target, backend: AttentionBackend, name: str, block_verify: bool
) -> None:
    """Of 3,000 answers at T=1, tokens one and two and tokens two and three together pass a chi-square test
    against the target's exact law, whichever way they are verified."""
    case = SAMPLED[name]
    limits = EngineLimits(max_batch=512)
    if case:
        limits = replace(limits, num_draft_tokens=case.num_draft_tokens, tree=case.tree)
    draft = case.config.build(small_target) if case else None
    done = _three_tokens(Engine(small_target, backend, limits, frozenset(), draft), block_verify)
    if case is not None:
        assert 0.1 < np.mean([p.accepted for c in done for p in c.passes]) < 1.9


def _three_tokens(engine: Engine, block_verify: bool) -> list[Completion]:
    """3,000 sampled answers of three tokens, whose law is the target's."""
    requests = [Request(str(i), "all", PROMPT) for i in range(3000)]
    params = SamplingParams(1.0, max_new_tokens=3, seed=1, block_verify=block_verify)
    done = engine.generate(requests, params)
    law = _exact_law(engine.target, engine.runner.backend)
    counts = np.zeros(law.shape)
    np.add.at(counts, tuple(np.array(_tokens(done)).T), 1)
    assert _pvalue(counts.sum(2), law.sum(2)) > 1e-3
    assert _pvalue(counts.sum(0), law.sum(0)) > 1e-3
    return done


@pytest.mark.parametrize("block_verify", [False, True])
@pytest.mark.parametrize("least", [0.0, 0.05])
def test_corrected_and_cut_chains_have_the_targets_law(
    small_target: Target, backend: AttentionBackend, least: float, block_verify: bool
) -> None:
    """The same where every guess depends on the token drawn before it, and where chains end by a confidence that
    depends on it too: none, one and two tokens are proposed side by side."""
    torch.manual_seed(4)
    draft = DSparkConfig(num_layers=1, block_size=2, markov_rank=3).build(small_target)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(torch.randn_like(p))
    limits = EngineLimits(max_batch=512, num_draft_tokens=2, min_confidence=least)
    done = _three_tokens(Engine(small_target, backend, limits, frozenset(), draft), block_verify)
    lengths = {p.proposed for c in done for p in c.passes}
    alone = sum(c.decode_steps - len(c.passes) for c in done)
    assert lengths == ({1, 2} if least else {2}) and (alone > 0) == (least > 0)
    assert 0.1 < np.mean([p.accepted for c in done for p in c.passes])


@pytest.mark.parametrize("limits", [EngineLimits(max_batch=1), EngineLimits(max_batch=8), TIGHT])
def test_chains_cut_by_confidence_change_no_token(
    tiny_target: Target,
    tiny_chat: Chat,
    backend: AttentionBackend,
    fit_head: Callable[..., Draft],
    requests: list[Request],
    reference: list[tuple[int, ...]],
    limits: EngineLimits,
) -> None:
    """Greedy tokens are the target's, passes do not depend on the batch, chains of several lengths occur, and
    what is left out would more often have been refused."""
    parts: dict[str, Loss] = {"kl": KL(), "confidence": Confidence()}
    loss = WeightedSum(parts, dict.fromkeys(parts, 1.0))
    draft = fit_head(DSparkConfig(taps=TWO, num_layers=2), loss, unroll_steps=4)

    def answer(limits: EngineLimits, least: float) -> list[Completion]:
        limits = replace(limits, num_draft_tokens=4, min_confidence=least)
        engine = Engine(tiny_target, backend, limits, tiny_chat.eos_ids, draft)
        return engine.generate(requests[:12], GREEDY)

    whole, cut = answer(ROOMY, 0.0), answer(limits, 0.2)
    assert _tokens(cut) == _tokens(whole) == reference[:12]
    assert [c.passes for c in cut] == [c.passes for c in answer(ROOMY, 0.2)]
    rates = [measure_acceptance(x, 4).acceptance_rate for x in (whole, cut)]
    assert len({p.proposed for c in cut for p in c.passes}) > 1
    assert rates[0] is not None and rates[1] is not None and rates[1] > 1.5 * rates[0]


TYPICAL = {
    "shared module": CASES["shared module"],
    "prompt lookup": CASES["prompt lookup"],
    "dynamic tree": CASES["dynamic tree"],
    "best-first tree": CASES["best-first tree"],
}


@pytest.mark.parametrize("name", TYPICAL)
def test_typical_acceptance_accepts_more_and_only_above_temperature_0(
    run: Callable[..., list[Completion]],
    requests: list[Request],
    reference: list[tuple[int, ...]],
    name: str,
) -> None:
    """At T=0 the tokens are still the target's; at T=1 more are accepted than by rejection, and what a request
    says depends on nobody else in its batch."""
    case, limits = TYPICAL[name], EngineLimits(max_batch=8)
    params = SamplingParams(1.0, max_new_tokens=NEW, seed=3, typical_threshold=0.09)
    greedy = run(requests[:8], limits, case, replace(params, temperature=0.0))
    assert _tokens(greedy) == reference[:8]
    typical = run(requests, limits, case, params)
    exact = run(requests, limits, case, replace(params, typical_threshold=0.0))
    lengths = [measure_acceptance(x, 5).acceptance_length.value for x in (typical, exact)]
    assert lengths[0] is not None and lengths[1] is not None and lengths[0] > lengths[1]
    alone = run(requests[:3], EngineLimits(max_batch=1), case, params)
    assert _tokens(alone) == _tokens(typical[:3])


# ---- what is refused -------------------------------------------------------------------------------------


def test_a_confidence_that_nobody_states_is_the_users_error(
    tiny_target: Target, backend: AttentionBackend
) -> None:
    """A draft without confidence cannot end its chains by it; the message says which can."""
    limits = EngineLimits(num_draft_tokens=2, min_confidence=0.3)
    for config in (NgramConfig(), MTPConfig(), DSparkConfig(confidence=False)):
        with pytest.raises(UserError, match="min_confidence=0.3 needs .*; use draft=dspark or"):
            Engine(tiny_target, backend, limits, frozenset(), config.build(tiny_target))


def test_more_drafted_tokens_than_modules_is_the_users_error(
    tiny_target: Target, backend: AttentionBackend
) -> None:
    """A head of three modules drafts three tokens at most; the message says so."""
    draft = MTPConfig(depth=3).build(tiny_target)
    with pytest.raises(UserError, match="num_draft_tokens=4 does not fit this draft; use 1 to 3"):
        Engine(tiny_target, backend, EngineLimits(num_draft_tokens=4), frozenset(), draft)


def test_completions_are_handed_over_as_they_end(
    tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend, requests: list[Request]
) -> None:
    """`on_finish` hears of every completion once, the shortest ones first; the result keeps the order."""
    heard: list[Completion] = []
    engine = Engine(tiny_target, backend, EngineLimits(), tiny_chat.eos_ids)
    done = engine.generate(requests[:8], GREEDY, heard.append)
    assert sorted(heard, key=lambda c: c.request.id) == sorted(done, key=lambda c: c.request.id)
    lengths = [len(c.output_ids) for c in heard]
    assert lengths == sorted(lengths)
    assert engine.times.decoded_tokens == sum(len(c.output_ids) - 1 for c in done)

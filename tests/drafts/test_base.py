"""Which rows a head learns from: exactly those a server would run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtptrain.drafts.base import Draft, HeadConfig, supervised_chain
from mtptrain.targets.base import Target


def _by_definition(mask: Tensor, cu_seqlens: Tensor, steps: int) -> Tensor:
    """Row t at step j iff m[t+1] .. m[t+2+j] all hold inside t's document."""
    chain = torch.zeros(steps, len(mask), dtype=torch.bool)
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        for t in range(start, end):
            for j in range(steps):
                chain[j, t] = t + 2 + j < end and bool(mask[t + 1 : t + 3 + j].all())
    return chain


@pytest.mark.parametrize("seed", range(8))
def test_rows_follow_the_definition(seed: int) -> None:
    """Random masks in random documents, one-token ones among them, give what the definition says."""
    torch.manual_seed(seed)
    lens = torch.cat([torch.randint(1, 9, (5,)), torch.tensor([1, 2])])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lens.cumsum(0)])
    mask = torch.rand(int(lens.sum())) < 0.8
    got = supervised_chain(mask, cu_seqlens, 4)
    assert torch.equal(got, _by_definition(mask, cu_seqlens, 4))


def test_turn_and_document_borders() -> None:
    """The row in front of an answer is supervised, for it reads the answer's first token; nothing predicts the
    first token of an answer, a user's token, or anything across a document's end."""
    #                    user   answer  user  answer | user  answer
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1]).bool()
    first, second = supervised_chain(mask, torch.tensor([0, 9, 13]), 2)
    assert first.nonzero().flatten().tolist() == [1, 2, 6, 9, 10]
    assert second.nonzero().flatten().tolist() == [1, 9]


def test_more_steps_than_tokens() -> None:
    """A text shorter than the unroll supervises nothing late, and fails nowhere."""
    chain = supervised_chain(torch.ones(3).bool(), torch.tensor([0, 3]), 6)
    assert chain.sum(1).tolist() == [1, 0, 0, 0, 0, 0]


def test_configs_of_yaml_and_json_are_those_of_code() -> None:
    """Lists become tuples, so that a config read from a file equals the one written, and can be a key."""

    class Config(HeadConfig):
        def build(self, target: Target) -> Draft:
            raise NotImplementedError

    read = Config(taps=["final"], draft_vocab=[1, 2])  # pyright: ignore
    written = Config(taps=("final",), draft_vocab=(1, 2))
    assert read == written and hash(read) == hash(written)

"""What the target's states say of a step's proposals: which tokens hold, and the next one of each sequence.

The rules are `verify`'s and `typical`'s; here the rows of the verify pass are scored and handed to them, no more
of them than a rule looks at. It gives up scoring several sequences' sampled rows at once.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from mtptrain.drafts.base import Proposal
from mtptrain.runtime.sampler import probabilities
from mtptrain.runtime.scheduler import Sequence
from mtptrain.runtime.tree import Tree, chain
from mtptrain.runtime.typical import verify_typical
from mtptrain.runtime.verify import (
    say_drawn,
    say_sampled,
    verify_block,
    verify_greedy,
    verify_sampled,
    verify_trees,
)
from mtptrain.targets.base import Target
from mtptrain.types import SamplingParams

Verdict = tuple[Seq[int], int]  # indices of the accepted tokens in their proposal, next token
Rows = Seq[tuple[int, int]]  # (proposal, row of it)


@dataclass(frozen=True, eq=False)
class VerifiedRows:
    """The rows of one verify pass: of each proposal the newest token's, then one for each drafted token."""

    target: Target
    sequences: Seq[Sequence]
    proposal: Proposal
    trees: Seq[Tree] | None  # those of the proposal; None: chains
    final: Tensor  # [T, H]

    @property
    def params(self) -> SamplingParams:
        return self.sequences[0].params

    @property
    def lens(self) -> list[int]:
        return [1 + len(tokens) for tokens in self.proposal.token_ids]

    def verdicts(self) -> list[Verdict]:
        """One for each sequence."""
        if not self.params.lossless:
            return self._typical()
        if self.trees is not None:
            return list(verify_trees(self.trees, self._best if self._greedy else self._say))
        if not self._greedy:
            return self._sampled()
        held = verify_greedy(self.proposal.token_ids, self._best)
        return [(range(accepted), token) for accepted, token in held]

    @property
    def _greedy(self) -> bool:
        return self.params.temperature == 0

    def _states(self, rows: Rows) -> Tensor:
        starts = [0, *accumulate(self.lens)]
        return self.final[[starts[i] + k for i, k in rows]]

    def _best(self, rows: Rows) -> list[int]:
        return self.target.greedy(self._states(rows)).tolist()

    def _laws(self, states: Tensor) -> Tensor:
        return probabilities(self.target.logits(states), self.params)

    # ---- above T=0 ----------------------------------------------------------------------------------------

    def _sampled(self) -> list[Verdict]:
        verify = verify_block if self.params.block_verify else verify_sampled
        verdicts: list[Verdict] = []
        for i, (sequence, tokens, states) in enumerate(
            zip(self.sequences, self.proposal.token_ids, self.final.split(self.lens), strict=True)
        ):
            q = None if self.proposal.probs is None else self.proposal.probs[i]
            p, vocab = self._laws(states), self.proposal.vocab
            accepted, token = verify(tokens, p, q, vocab, sequence.generator)
            verdicts.append((range(accepted), token))
        return verdicts

    def _say(self, rows: Rows) -> list[int]:
        """What each row of a tree says, its children tried first."""
        return [
            self._say_one(i, k - 1, law)
            for (i, k), law in zip(rows, self._laws(self._states(rows)), strict=True)
        ]

    def _say_one(self, i: int, node: int, law: Tensor) -> int:
        assert self.trees is not None
        holders, stream = self.trees[i].children, self.sequences[i].generator
        children = list(holders.get(node, {}))
        q = None if self.proposal.probs is None else self.proposal.probs[i]
        if q is None or not children:
            return say_sampled(law, children, stream)
        mine = q[list(holders).index(node)]
        return say_drawn(law, children, mine, self.proposal.vocab, stream)

    def _typical(self) -> list[Verdict]:
        params = self.params
        how = (params.typical_threshold, params.typical_alpha)
        trees = [chain(x) for x in self.proposal.token_ids] if self.trees is None else self.trees
        return [
            verify_typical(tree, self._laws(states), *how, sequence.generator)
            for tree, states, sequence in zip(
                trees, self.final.split(self.lens), self.sequences, strict=True
            )
        ]

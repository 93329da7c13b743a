"""Suffix decoding: what followed the newest tokens before, here and in past outputs, by how often it did.

Two trees of contexts are asked (SuffixDecoding, arXiv 2411.04975): the request's own text, and the outputs
that ended before. Every suffix of the newest tokens that a tree knows proposes its most frequent
continuation; of all, the one with the highest score is taken: the sum, over its tokens, of the product of
the empirical probabilities so far, which is what it may hope to have accepted. A longer match may propose more.

A tree holds contexts newest token first, so a new token adds one whole path and nothing that grows later;
edges are compressed, so there are at most two nodes a token, some 600 bytes. A token costs at most `max_depth`
steps, and so does each drafted one for each suffix that is tried, however long the text. It gives up other
requests' tokens while they are still being answered, and branches: a proposal is a chain.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mtptrain.drafts.base import Draft, DraftConfig, Draw, Proposal, TrueRows
from mtptrain.targets.base import Target
from mtptrain.types import Completion, UserError

Scored = tuple[tuple[int, ...], float]  # a chain and its score
NOTHING: Scored = ((), 0.0)


@dataclass(frozen=True)
class SuffixConfig(DraftConfig):
    """Sizes of the trees and when a chain ends; defaults as the serving engines have them."""

    max_depth: int = 24  # longest context, in tokens
    max_outputs: int = 1000  # past outputs that are kept, the oldest is let go; 0: none
    spec_factor: float = 1.0  # drafted tokens a matched token allows
    min_prob: float = 0.1  # a chain ends before its probability falls below

    def __post_init__(self) -> None:
        if self.max_depth < 1 or self.max_outputs < 0:
            raise UserError(
                f"draft.max_depth={self.max_depth} must be at least 1 and "
                f"draft.max_outputs={self.max_outputs} at least 0"
            )
        if not (self.spec_factor > 0 and 0 <= self.min_prob <= 1):
            raise UserError(
                f"draft.spec_factor={self.spec_factor} must be above 0 and "
                f"draft.min_prob={self.min_prob} in 0 to 1"
            )

    def build(self, target: Target | None = None) -> Suffix:
        return Suffix(self)


class Node:
    """Contexts of up to `depth` tokens: those behind `text[:end]`, the last place where they stood.

    `followers` counts what came next, in order of last appearance; `best` is the most frequent, of equals the
    newest. It is kept, not searched for: only a split copies the followers, and only letting go looks at all.
    """

    __slots__ = ("depth", "text", "end", "count", "best", "followers", "children")

    def __init__(self, depth: int, text: list[int], end: int) -> None:
        self.depth, self.text, self.end = depth, text, end
        self.count, self.best = 0, -1
        self.followers: dict[int, int] = {}
        self.children: dict[int, Node] = {}  # by the token that stands one further back

    def see(self, text: list[int], end: int) -> None:
        """Counts the place. The newest place names the context, so that old texts can be let go."""
        self.text, self.end, token = text, end, text[end]
        seen = self.followers.pop(token, 0) + 1
        if seen >= self.followers.get(self.best, 0):
            self.best = token
        self.followers[token] = seen
        self.count += 1

    def forget(self, token: int) -> None:
        """Takes back one place that `token` followed."""
        self.count -= 1
        self.followers[token] -= 1
        if not self.followers[token]:
            del self.followers[token]
        if token == self.best and self.followers:
            self.best = max(reversed(self.followers), key=self.followers.__getitem__)

    def agreement(self, text: list[int], end: int, known: int) -> int:
        """How many of the newest tokens of `text[:end]` this context has, `known` of which it surely has."""
        most = min(self.depth, end)
        while known < most and self.text[self.end - 1 - known] == text[end - 1 - known]:
            known += 1
        return known

    def upper(self, depth: int) -> Node:
        """A node above this one, for the shorter contexts on its edge: they stood in the same places."""
        node = Node(depth, self.text, self.end)
        node.count, node.best, node.followers = self.count, self.best, dict(self.followers)
        node.children[self.text[self.end - 1 - depth]] = self
        return node


class SuffixTree:
    """Every context of up to `max_depth` tokens that something followed in the texts added."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth, self.root = max_depth, Node(0, [], 0)

    def add(self, text: list[int], end: int) -> None:
        """Counts `text[end]` for each context that stands before it."""
        node, depth = self.root, min(end, self.max_depth)
        while node.depth < depth:
            back = text[end - 1 - node.depth]
            child = node.children.get(back)
            if child is None:
                child = node.children[back] = Node(depth, text, end)
            elif (shared := child.agreement(text, end, node.depth + 1)) < child.depth:
                child = node.children[back] = child.upper(shared)
            child.see(text, end)
            node = child

    def remove(self, text: list[int], end: int) -> None:
        """Takes back the oldest `add`; texts must go in the order in which they came."""
        above, node, depth = self.root, self.root, min(end, self.max_depth)
        while node.depth < depth:
            back = text[end - 1 - node.depth]
            child = node.children[back]
            child.forget(text[end])
            if not child.count:
                del node.children[back]
                break
            above, node = node, child
        below = list(node.children.values())
        if node is not self.root and len(below) == 1 and below[0].count == node.count:
            above.children[text[end - 1 - above.depth]] = below[0]

    def matches(self, text: list[int]) -> Iterator[tuple[int, Node]]:
        """(length, node) of each suffix of the text that is known, the shortest first.

        Suffixes that end on one edge stood in the same places: only the longest of them is named.
        """
        node, end = self.root, len(text)
        while node.depth < end:
            child = node.children.get(text[end - 1 - node.depth])
            if child is None:
                return
            shared = child.agreement(text, end, node.depth + 1)
            yield shared, child
            if shared < child.depth:
                return
            node = child

    def find(self, context: list[int]) -> Node | None:
        """The node of the last `max_depth` tokens of a context; None where nothing followed it yet."""
        context = context[-self.max_depth :]
        node: Node | None = self.root
        while node is not None and node.depth < len(context):
            node = node.children.get(context[-1 - node.depth])
        if node is None or node.text[node.end - len(context) : node.end] != context:
            return None
        return node

    def propose(self, text: list[int], num_draft_tokens: int, config: SuffixConfig) -> Scored:
        """The chain with the highest score, and that score; of equals the one with the longest match."""
        best = NOTHING
        for length, node in reversed(list(self.matches(text))):
            most = min(num_draft_tokens, int(length * config.spec_factor))
            if most > best[1]:  # no token counts for more than one
                drafted = self._continue(text[-length:], node, most, config.min_prob)
                best = max(best, drafted, key=lambda x: x[1])
        return best

    def _continue(
        self, context: list[int], node: Node | None, most: int, min_prob: float
    ) -> Scored:
        chain: list[int] = []
        score, prob = 0.0, 1.0
        while node is not None and len(chain) < most:
            prob *= node.followers[node.best] / node.count
            if prob < min_prob:
                break
            score += prob
            chain.append(node.best)
            context.append(node.best)
            node = self.find(context)
        return tuple(chain), score


class OwnText:
    """The tree of one request's text, prompt and answer, as it grows."""

    def __init__(self, config: SuffixConfig) -> None:
        self.tree, self.text = SuffixTree(config.max_depth), list[int]()

    def extend(self, token_ids: list[int]) -> None:
        """Adds what is new of the whole text."""
        start = len(self.text)
        self.text += token_ids[start:]
        for end in range(max(start, 1), len(self.text)):
            self.tree.add(self.text, end)


class PastOutputs:
    """The tree of the newest `max_outputs` answers that have ended."""

    def __init__(self, config: SuffixConfig) -> None:
        self.tree, self.most = SuffixTree(config.max_depth), config.max_outputs
        self.texts: deque[list[int]] = deque()

    def add(self, output_ids: tuple[int, ...]) -> None:
        """Adds an answer, and lets the oldest go where there are too many."""
        self.texts.append(list(output_ids))
        for end in range(1, len(output_ids)):
            self.tree.add(self.texts[-1], end)
        if len(self.texts) > self.most:
            oldest = self.texts.popleft()
            for end in range(1, len(oldest)):
                self.tree.remove(oldest, end)


class Suffix(Draft):
    """Each sequence's own tree lies in its memory, that of past outputs in the engine's."""

    def __init__(self, config: SuffixConfig) -> None:
        super().__init__()
        self.config: SuffixConfig = config

    def propose(self, rows: TrueRows, num_draft_tokens: int, draw: Draw) -> Proposal:
        drafted = []
        past = self._past(rows.common)
        for ids, memory in zip(rows.token_ids, rows.memories, strict=True):
            own: OwnText = memory.setdefault("own_text", OwnText(self.config))
            own.extend(ids)
            both = [x.tree.propose(own.text, num_draft_tokens, self.config) for x in (own, past)]
            drafted.append(max(both, key=lambda x: x[1]))  # of equals its own
        chains, scores = zip(*drafted, strict=True)
        return Proposal(chains, scores=scores)

    def finish(self, completion: Completion, common: dict[str, Any]) -> None:
        if self.config.max_outputs:
            self._past(common).add(completion.output_ids)

    def _past(self, common: dict[str, Any]) -> PastOutputs:
        return common.setdefault("past_outputs", PastOutputs(self.config))

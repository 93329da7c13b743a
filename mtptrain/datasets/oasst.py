"""OpenAssistant's trees: messages that answer each other, one row each, or one row a tree.

Of each tree the best-ranked path is kept: at every message the reply of the lowest rank, then the first.
Rows of a tree stand together in the published files, so only one tree is held at a time; a message whose
parent did not come before it is a bad row. Rows of other layouts pass through. It gives up the other
paths: they repeat the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mtptrain.datasets.base import BadRow, RawRow

MAX_MESSAGES = 10_000  # of one tree; the published ones have a few dozen
Message = dict[str, object]


def gather_trees(rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """The rows, with those of one tree made into one row of `messages`."""
    tree: _Tree | None = None
    for row in rows:
        value = row.value
        if isinstance(value, dict) and "message_id" in value and "parent_id" in value:
            if tree is None or not tree.holds(value):
                if tree is not None:
                    yield tree.row()
                tree = _Tree(row, value)
            elif not tree.add(value):
                yield row._replace(value=_orphan())
            continue
        if tree is not None:
            yield tree.row()
            tree = None
        yield _nested(row, value) if _is_nested(value) else row
    if tree is not None:
        yield tree.row()


class _Tree:
    """The messages of one tree, as they come in."""

    def __init__(self, row: RawRow, root: Message) -> None:
        self._first, self._root = row, root
        self._name = root.get("message_tree_id") or root.get("message_id")
        self._replies: dict[object, list[Message]] = {str(root.get("message_id")): []}
        self._orphan = root.get("parent_id") is not None

    def holds(self, message: Message) -> bool:
        named = message.get("message_tree_id")
        return named == self._name if named else message.get("parent_id") is not None

    def add(self, message: Message) -> bool:
        """Hangs a message below its parent; False where the parent is missing."""
        replies = self._replies.get(str(message.get("parent_id")))
        if replies is None:
            return False
        if len(self._replies) <= MAX_MESSAGES:  # one more says that it is too large
            replies.append(message)
            self._replies.setdefault(str(message.get("message_id")), [])
        return True

    def row(self) -> RawRow:
        if self._orphan:
            return self._first._replace(value=_orphan())
        if len(self._replies) > MAX_MESSAGES:
            return self._first._replace(value=_too_large())
        path, seen = [self._root], {str(self._root.get("message_id"))}
        while reply := _best(self._replies[str(path[-1].get("message_id"))]):
            if str(reply.get("message_id")) in seen:
                break  # two messages of one id would go round for ever
            seen.add(str(reply.get("message_id")))
            path.append(reply)
        return self._first._replace(value=_messages(self._name, path))


def _is_nested(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("prompt"), dict)


def _nested(row: RawRow, value: object) -> RawRow:
    """A row that is a whole tree: `prompt` with its `replies`, and so on down."""
    assert isinstance(value, dict)
    path: list[Message] = [value["prompt"]]
    while reply := _best(path[-1].get("replies")):
        path.append(reply)
    return row._replace(value=_messages(value.get("message_tree_id"), path))


def _best(replies: object) -> Message | None:
    """The reply of the lowest rank; those without a rank come last, deleted ones never."""
    if not isinstance(replies, list):
        return None
    kept = [r for r in replies if isinstance(r, dict) and r.get("deleted") is not True]
    return min(kept, key=_rank, default=None)


def _rank(message: Message) -> float:
    rank = message.get("rank")
    return float(rank) if isinstance(rank, (int, float)) and abs(rank) < 1e9 else float("inf")


def _messages(name: object, path: list[Message]) -> Message:
    turns = [{"role": m.get("role"), "content": m.get("text")} for m in path]
    return {"id": name, "messages": turns}


def _orphan() -> BadRow:
    return BadRow(
        "answers a message that is not among the rows before it", "keep a tree's rows together"
    )


def _too_large() -> BadRow:
    return BadRow(
        f"begins a tree of more than {MAX_MESSAGES:,} messages", "give every tree its own id"
    )

"""SPEED-Bench: most of its published rows are placeholders, which a script of its makers fills in.

Such a row reads as a prompt and is none, and a figure measured on it would be wrong without a word. It
gives up the filling in: the licences of the source sets are the user's to accept.
"""

from __future__ import annotations

from mtptrain.datasets.base import BadRow

PLACEHOLDERS = ("FULL BENCHMARK DATA SHOULD BE FETCHED", "{article}")


def refuse_placeholders(row: dict[str, object]) -> None:
    """Raises BadRow where a SPEED-Bench row is not filled in. Rows of other sets pass."""
    if "src_id" in row or "sub_category" in row:
        text = str(row.get("turns")) + str(row.get("messages"))
        if any(placeholder in text for placeholder in PLACEHOLDERS):
            raise BadRow(
                "is a SPEED-Bench row whose text is a placeholder",
                "fill the set in with its makers' prepare script first",
            )

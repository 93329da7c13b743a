"""`inspect data`: what training would see, before anything is trained."""

from __future__ import annotations

import sys
from collections import Counter

from mtptrain.given import ROWS, require_supervised
from mtptrain.marked import counted, describe, unanswered
from mtptrain.prepare import read_answers
from mtptrain.session import Session


def inspect_data(session: Session) -> None:
    """Prints three samples with their loss mask, and counts; writes nothing."""
    chat, stage = session.chat, session.answers_stage
    note, counts = "", Counter[str]()
    if session.answers_given:
        samples = list(chat.samples(session.rows, counts, session.max_tokens))
        counts[ROWS] = len(session.rows)
        require_supervised(counted(samples, Counter(counts)))
    elif stage.is_complete(session.answers_key):
        samples = [a.sample() for shard in read_answers(stage.path) for a in shard]
        counts[ROWS] = len(session.prompts)
    else:
        samples = unanswered(session.prompts, chat)
        counts[ROWS] = len(session.prompts)
        note = "\nthe target has not answered yet: mtptrain prepare has it write the answers of training"
    print(describe(samples, chat, counted(samples, counts), sys.stdout.isatty()) + note)

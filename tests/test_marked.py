"""What `inspect data` prints of a sample."""

from __future__ import annotations

from collections import Counter

import torch

from mtptrain import marked
from mtptrain.chat import Chat
from mtptrain.types import Conversation, Sample, Turn


def _sample(chat: Chat, answer: str) -> Sample:
    [sample] = chat.sample(Conversation("c", "qa", (Turn("user", "Hi"), Turn("assistant", answer))))
    return sample


def test_colour_on_a_terminal_and_brackets_elsewhere(tiny_chat: Chat) -> None:
    sample = _sample(tiny_chat, "Yes.")
    plain = marked.mark(sample, tiny_chat, colour=False)
    assert plain.endswith("<|im_start|>assistant\n[Yes.<|im_end|>]\n")
    green = marked.mark(sample, tiny_chat, colour=True)
    assert green == plain.replace("[", "\x1b[32m").replace("]", "\x1b[0m")


def test_the_middle_of_a_long_answer_is_left_out(tiny_chat: Chat) -> None:
    """Head and tail are shown, with how many tokens are not."""
    sample = _sample(tiny_chat, "one " * 900)
    text = marked.mark(sample, tiny_chat, colour=False)
    left_out = int(sample.loss_mask.sum()) - marked.HEAD - marked.TAIL
    assert f" … {left_out:,} tokens … " in text and text.endswith("<|im_end|>]\n")


def test_text_gives_the_terminal_no_orders(tiny_chat: Chat) -> None:
    """An escape sequence in the data is shown, not obeyed."""
    assert "\x1b" not in marked.mark(_sample(tiny_chat, "\x1b[2J"), tiny_chat, colour=False)


def test_three_samples_then_the_counts(tiny_chat: Chat) -> None:
    ids = torch.tensor([5, 6, 7, 8])
    samples = [Sample(f"s{i}", "qa", ids, torch.tensor([0, 0, 1, 1]).bool()) for i in range(9)]
    counts = marked.counted(samples, Counter({"rows read": 12, "rows left out: odd": 3}))
    text = marked.describe(samples, tiny_chat, counts, colour=False)
    assert [line.split()[1] for line in text.splitlines() if "──" in line] == ["s0", "s3", "s6"]
    assert [line.split(maxsplit=1) for line in text.splitlines()[-5:]] == [
        ["12", "rows read"],
        ["9", "samples"],
        ["36", "tokens"],
        ["18", "tokens supervised"],
        ["3", "rows left out: odd"],
    ]

"""How fast features are captured, beside the bare forward pass and a padded transformers loop.

Ours is the whole stage: ragged documents packed to at most 2,048 rows, one forward a pack, the shard's
checks, and the features written to a store in bf16. The bare pass is transformers' decoder alone (no
`lm_head`, no cache, its fused attention) over the same tokens cut anew into equal rows of the documents'
mean length, so that every batch is full, nothing is padded, and attention spans are as long as ours; it
keeps nothing. The padded loop is what one would write by hand: eight documents at a time in the same
order, right padded and masked, the hidden states of the real tokens kept in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import bench
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hidden_state_cache import FeatureWriter
from mtptrain.attention_backends.sdpa import SdpaBackend
from mtptrain.capture import CaptureSettings, ShardSink, capture_missing, identity
from mtptrain.prepare import Answer

TAPS = ("final",)
SETTINGS = CaptureSettings(dtype="bf16", max_tokens=2048, during_prepare=False)
PADDED_BATCH = 8


def main() -> None:
    parser = bench.arguments(__doc__)
    parser.add_argument("--data", default=bench.STARTER, help="prompts file or folder of answers")
    parser.add_argument("--documents", type=int, default=128)
    args = bench.begin(parser)
    subject, count = bench.load_subject(), 6 if args.quick else args.documents
    answers = bench.documents(args.data, count, subject.chat)
    plain = bench.plain_transformers(subject.folder)
    for contender in contenders(subject, plain, answers[:4]):
        contender.rate()  # warms up threads and allocator
    ours, bare, padded = bench.take_turns(contenders(subject, plain, answers), args.runs)
    describe(answers, ours, bare, padded)
    more = {"padded": round(padded, 2), "ratio_to_padded": round(ours / padded, 3)}
    bench.finish("capture", ours, bare, "tokens/s", args.threads, more)


def contenders(
    subject: bench.Subject, plain: PreTrainedModel, answers: Sequence[Answer]
) -> list[bench.Contender]:
    ids = [answer.sample().input_ids for answer in answers]
    works = {
        "ours, packed, into a store": partial(capture, subject, answers),
        "bare forward, full batches": partial(bare_forward, plain, ids),
        f"transformers, padded, batch {PADDED_BATCH}": partial(padded_loop, plain, ids),
    }
    return [bench.Contender(name, partial(bench.rate_of, work)) for name, work in works.items()]


def describe(answers: Sequence[Answer], ours: float, bare: float, padded: float) -> None:
    lengths = [len(a.prompt_ids) + len(a.output_ids) for a in answers]
    spread = f"{min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(lengths):.0f}"
    rows = [
        ("documents", f"{len(lengths)}, {sum(lengths):,} tokens, lengths {spread}"),
        ("ours", f"{ours:,.0f} tokens/s"),
        ("bare forward, full batches", f"{bare:,.0f} tokens/s, ours is {ours / bare:.2f} of it"),
        ("padded transformers loop", f"{padded:,.0f} tokens/s, ours is {ours / padded:.2f} of it"),
    ]
    bench.table("capture, median of the runs", rows)


def capture(subject: bench.Subject, answers: Sequence[Answer]) -> int:
    """The stage as `mtptrain capture` runs it, into a store that is thrown away; returns tokens."""
    about = identity(subject.target, subject.chat, TAPS, "bench", "bench")
    with TemporaryDirectory() as folder:
        writer = FeatureWriter(Path(folder) / "features", about, SETTINGS.dtype)
        greedy = any(answer.output_ids for answer in answers)
        sink = ShardSink(writer, subject.target, TAPS, greedy)
        capture_missing(sink, SdpaBackend(), [answers], SETTINGS)
        return writer.finish().tokens


@torch.inference_mode()
def bare_forward(plain: PreTrainedModel, ids: Sequence[Tensor]) -> int:
    """Full batches of at most 2,048 tokens; the tail that fills no row is left out."""
    tokens = torch.cat(list(ids))
    length = round(len(tokens) / len(ids))
    rows = tokens[: len(tokens) // length * length].view(-1, length)
    for batch in rows.split(max(1, SETTINGS.max_tokens // length)):
        plain.get_decoder()(input_ids=batch, use_cache=False)
    return rows.numel()


@torch.inference_mode()
def padded_loop(plain: PreTrainedModel, ids: Sequence[Tensor]) -> int:
    kept = []
    for at in range(0, len(ids), PADDED_BATCH):
        batch = ids[at : at + PADDED_BATCH]
        mask = pad_sequence([torch.ones_like(x) for x in batch], batch_first=True)  # [B, T]
        padded = pad_sequence(list(batch), batch_first=True)
        out = plain.get_decoder()(input_ids=padded, attention_mask=mask, use_cache=False)
        kept.append(out.last_hidden_state[mask.bool()])
    return sum(len(rows) for rows in kept)


if __name__ == "__main__":
    main()

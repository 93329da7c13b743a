"""The contract between a draft, the trainer that fits it and the runtime that serves it.

A draft is built from a frozen config (`DraftConfig.build(target)`), trained through `unroll` on whole packed
documents, and served through `refill` and `propose` on pages: one file does both, so what is trained is what
is served. The frozen embedding and `lm_head` are read from the target and never saved (`Head`). A draft that
cannot be trained leaves `unroll` alone; one that keeps no pages leaves `refill` alone.
What kinds of heads share lies beside it: `autoregressive` drafts token by token, `joined_layer` is the layer
of MTP and EAGLE.
"""

from mtptrain.drafts.base.draft import Draft, DraftConfig
from mtptrain.drafts.base.head import Head, HeadConfig, proposal_of, trained_copy
from mtptrain.drafts.base.proposal import Draw, Drawn, Proposal
from mtptrain.drafts.base.rows import Pages, SomePages, TrueRows
from mtptrain.drafts.base.supervision import (
    UnrollStep,
    answer_chain,
    rows_from_first,
    supervised_chain,
)

__all__ = [
    "Draft",
    "DraftConfig",
    "Draw",
    "Drawn",
    "Head",
    "HeadConfig",
    "Pages",
    "Proposal",
    "SomePages",
    "TrueRows",
    "UnrollStep",
    "answer_chain",
    "proposal_of",
    "rows_from_first",
    "supervised_chain",
    "trained_copy",
]

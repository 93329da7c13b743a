"""Attention in plain PyTorch: the reference, and the fast path on CPU.

Four shapes of work, one rule each. Whole documents and prefill chunks: one SDPA call per sequence, so no
padding is computed; query heads are grouped by stride-0 expansion, so no key is copied per query head.
Decode and verify: every page is a unit of work for one batched GEMM over the pool as it lies in memory (no
gathering of keys), and the pages of a sequence are merged by log-sum-exp; a page shared by many sequences
is read once for all of them. Only pages with a key that some query must not see meet a mask. Token trees of
more rows: a fused call over the prefix, joined by log-sum-exp with the tree's own rows under their mask, which
is no larger however long the context. Unrolled training steps: step-0 keys plus the row's own later keys, for
one query of each row or for a block of them. It gives up fused kernels on a GPU, which wants flashinfer.
"""

from mtptrain.attention_backends.sdpa.backend import MAX_DECODE_QUERIES, SdpaBackend
from mtptrain.attention_backends.sdpa.pages import PagePlan

__all__ = ["MAX_DECODE_QUERIES", "PagePlan", "SdpaBackend"]

"""Attention of a context rank: every rank's rows against the eighth of one GPU's attention to the whole sequence.

Packs of 131,072 tokens, documents with log-normal lengths of these means, 8 ranks. FLOPs are those of the visible
pairs, as in bench/kernels/attention.py. The largest time over the ranks' mean is in bench/context_parallel.py.
"""

from collections.abc import Iterator

import torch

from bench.context_parallel import (
    HEAD_DIM,
    MEANS,
    NUM_HEADS,
    NUM_KV_HEADS,
    NUM_RANKS,
    NUM_TOKENS,
    inputs_of,
    log_normal_pack,
    share_of,
)
from bench.kernels.timing import Row, Work, compare, main
from saccade.data.context_plan import attended
from saccade.kernels.attention import attention
from saccade.model.context_parallel import attend_to_sequence


def rows() -> Iterator[Row]:
    """The first and the last rank of every pack, and the whole pack."""
    for mean in MEANS:
        lengths = log_normal_pack(mean, NUM_TOKENS, 0)
        counts, inputs = attended(lengths), inputs_of(lengths)
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        q, k, v = (torch.randn(NUM_TOKENS, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for n in heads)
        starts, longest = inputs.cu_seqlens.cuda(), inputs.max_seqlen
        bounds = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": True}
        whole = {"triton": lambda q, k, v, s=starts, b=bounds: attention(q, k, v, s, s, **b)}
        yield from compare("attention", f"documents {mean}, whole", whole, (q, k, v), *_work(int(counts.sum())))
        for rank in (0, NUM_RANKS - 1):
            share = share_of(inputs, rank, NUM_RANKS, "cuda")
            own = {"triton": lambda q, k, v, share=share: attend_to_sequence(q, k, v, share)}
            work = _work(int(counts[share.tokens.cpu().numpy()].sum()))
            yield from compare(
                "context_attention", f"documents {mean}, rank {rank}", own, (q[share.tokens], k, v), *work
            )


def _work(pairs: int) -> tuple[Work, Work]:
    """Forward and backward."""
    flops = 4.0 * pairs * NUM_HEADS * HEAD_DIM
    return Work(flops=flops), Work(flops=2.5 * flops)


if __name__ == "__main__":
    main(rows)

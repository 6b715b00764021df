"""One-shot all-reduce with norm: latency of virtual ranks, which are streams of one process on one GPU.

Their buffers are in the memory of that GPU, so no link is on the way: the times are those of the kernel, its flags and
its barrier, not of NVLink. `rank alone` is the kernel of a single rank, and `add_rms_norm` what it replaces on each.
The rate counts the rows that one rank reads.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # before CUDA starts: streams must not share a queue

import statistics

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, graph_ms, main, row
from saccade.kernels.peer_all_reduce import PeerBuffers, peer_all_reduce_norm
from saccade.kernels.rms_norm import add_rms_norm

SHAPES = [(2, 1, 5120), (4, 16, 8192), (8, 1, 8192), (8, 16, 8192)]
"""Ranks, rows, columns."""
EPS = 1e-6
_CALLS, _REPLAYS = 20, 9


def _buffers(num_ranks: int, num_rows: int, dim: int) -> tuple[list[PeerBuffers], list[Tensor]]:
    """The buffers of virtual ranks, and their memory."""
    num_bytes = PeerBuffers.num_bytes(num_rows, dim, torch.bfloat16)
    memory = [torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(num_ranks)]
    addresses = torch.tensor([one.data_ptr() for one in memory], device="cuda")
    found = [
        PeerBuffers(
            rank=rank, addresses=addresses, uses=torch.zeros(num_rows + 1, dtype=torch.int64, device="cuda"),
            max_columns=dim, dtype=torch.bfloat16, max_polls=2**22,
        )
        for rank in range(num_ranks)
    ]  # fmt: skip
    return found, memory


def _virtual_ms(runs: list[Callable[[], tuple[Tensor, Tensor]]]) -> float:
    """Median time of a call among `_CALLS` that follow each other, when all ranks replay their graphs at once."""
    streams, graphs = [torch.cuda.Stream() for _ in runs], [torch.cuda.CUDAGraph() for _ in runs]
    for run, stream, graph in zip(runs, streams, graphs, strict=True):
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CALLS):
                found = run()
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs]
        for (begin, end), stream, graph in zip(pairs, streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                begin.record()
                graph.replay()
                end.record()
        torch.cuda.synchronize()
        times.append(min(begin.elapsed_time(end) for begin, end in pairs))  # of the last to start: none waits for it
    if found[1].isnan().any():
        raise RuntimeError("a rank waited in vain for another one")
    return statistics.median(times) / _CALLS


def rows() -> Iterator[Row]:
    """Virtual ranks, one rank alone, and the norm that follows the sum of another all-reduce."""
    for num_ranks, num_rows, dim in SHAPES:
        x, weight = torch.randn(num_rows, dim, device="cuda").bfloat16(), torch.ones(dim, device="cuda").bfloat16()
        shape, size = f"{num_ranks} virtual ranks, {num_rows} x {dim}", x.numel() * 2
        buffers, _memory = _buffers(num_ranks, num_rows, dim)
        lone, _lone_memory = _buffers(1, num_rows, dim)
        stopped, _stopped_memory = _buffers(num_ranks, num_rows, dim)
        run = functools.partial(peer_all_reduce_norm, x, x, weight, EPS)
        run(dataclasses.replace(stopped[0], max_polls=0))  # loads the kernel: later that could wait for other ranks
        ms = _virtual_ms([functools.partial(run, one) for one in buffers])
        yield row("peer_all_reduce_norm", shape, "triton", ms, Work(num_ranks * size))
        yield row("peer_all_reduce_norm", shape, "rank alone", graph_ms(functools.partial(run, lone[0])), Work(size))
        norm_ms = graph_ms(functools.partial(add_rms_norm, x, x, weight, EPS))
        yield row("peer_all_reduce_norm", shape, "add_rms_norm", norm_ms, Work(4 * size))


if __name__ == "__main__":
    main(rows)

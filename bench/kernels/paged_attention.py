"""Paged decode and prompt chunks at the sizes of the anchors, compared with SDPA on a contiguous cache and FlashInfer.

Decode is timed as in serving: replayed from a CUDA graph, every call on another layer's cache, so that L2 holds what it
holds in a real step. Bytes are those of keys and values. `--tune` sweeps the tiles.
"""

import copy
import functools
import math
from collections.abc import Callable, Iterator
from itertools import cycle, pairwise, product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, gpu_ms, graph_ms, main, row, sweep
from saccade.kernels import _paged_decode, _paged_prefill, launch
from saccade.kernels._paged_decode import DecodeTiles
from saccade.kernels._paged_prefill import PrefillTiles
from saccade.kernels.paged_attention import QUANTIZED_MAX, paged_attention, write_pages

HEADS, KV_HEADS, HEAD_DIM, PAGE = 16, 2, 128, 16
DECODE = {
    "256 x 1024": [1024] * 256,
    "16 x 4096": [4096] * 16,
    "1 x 65536": [65536],
    "64 x 2048": [2048] * 64,
    "1 x 2048": [2048],
    "256 x 100..1024": [100 + (i * 7919) % 925 for i in range(256)],
    "255 x 512 and 32768": [512] * 255 + [32768],
}
CHUNKS = {
    "4 x 2048 fresh": ([2048] * 4, [2048] * 4),
    "1 x 512 over 16384": ([512], [16384]),
    "1 x 640 and 64 x 1 over 1024": ([640] + [1] * 64, [640] + [1024] * 64),
}
COLD_BYTES = 400e6
"""Caches are rotated until they are several times the 50 MB of L2 (or 36, the layers of the model)."""


class Cache:
    """A paged cache of one layer: random pages, shuffled."""

    def __init__(self, context: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.context = context
        num_pages = [-(-length // PAGE) for length in context]
        owned = torch.randperm(sum(num_pages), device="cuda").int()
        self.table = torch.zeros(len(context), max(num_pages), dtype=torch.int32, device="cuda")
        for request, (begin, end) in enumerate(pairwise([0, *torch.tensor(num_pages).cumsum(0).tolist()])):
            self.table[request, : end - begin] = owned[begin:end]
        shape = (len(owned), KV_HEADS, PAGE, HEAD_DIM)
        self.pages = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)]
        is_quantized = dtype in QUANTIZED_MAX
        self.scales = [torch.rand(shape[:3], device="cuda") if is_quantized else None for _ in range(2)]
        self.lengths = torch.tensor(context, dtype=torch.int32, device="cuda")

    @property
    def num_bytes(self) -> int:
        """Bytes that decode must read."""
        scales = 4 if self.scales[0] is not None else 0
        return 2 * KV_HEADS * sum(self.context) * (HEAD_DIM * self.pages[0].element_size() + scales)


def caches(context: list[int], dtype: torch.dtype = torch.bfloat16) -> list[Cache]:
    """Enough layers to leave L2 cold, all with the same values."""
    first = Cache(context, dtype)
    return [first, *(copy.deepcopy(first) for _ in range(min(35, math.ceil(COLD_BYTES / first.num_bytes) - 1)))]


def queries(new: list[int]) -> tuple[Tensor, Tensor]:
    """q and cu_seqlens_q."""
    starts = torch.tensor([0, *new], device="cuda").cumsum(0).int()
    return torch.randn(sum(new), HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16), starts


def ours(layers: list[Cache], new: list[int]) -> Callable[[], Tensor]:
    """Calls that take the caches of the layers in turn."""
    q, starts = queries(new)
    turns = cycle(layers)

    def run() -> Tensor:
        cache = next(turns)
        return paged_attention(
            q, *cache.pages, cache.table, starts, cache.lengths, max_seqlen_q=max(new),
            key_scales_NGP=cache.scales[0], value_scales_NGP=cache.scales[1],
        )  # fmt: skip

    return run


def contiguous(layers: list[Cache], new: list[int]) -> Callable[[], Tensor]:
    """torch's SDPA on caches that are not paged: decode, equal lengths only."""
    del new
    context = layers[0].context
    if len(set(context)) > 1:
        raise ValueError("lengths differ")
    q = torch.randn(len(context), HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    size = len(context) * KV_HEADS * context[0] * HEAD_DIM * 4
    shape = (len(context), KV_HEADS, context[0], HEAD_DIM)
    turns = cycle(
        [
            [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
            for _ in range(min(16, math.ceil(COLD_BYTES / size)))
        ]
    )
    return lambda: F.scaled_dot_product_attention(q, *next(turns), enable_gqa=True)


def flashinfer_decode(layers: list[Cache], new: list[int]) -> Callable[[], Tensor]:
    """FlashInfer's decode with tensor cores, planned once per cache as its users do, run inside the graph."""
    import flashinfer

    q, _ = queries(new)
    wrappers = []
    for cache in layers:
        num_pages = -(-cache.lengths // PAGE)
        indptr = F.pad(num_pages.cumsum(0), (1, 0)).int()
        indices = torch.cat([row[:n] for row, n in zip(cache.table, num_pages.tolist(), strict=True)])
        last = ((cache.lengths - 1) % PAGE + 1).int()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda"),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=indptr.clone(),
            paged_kv_indices_buffer=indices.clone(),
            paged_kv_last_page_len_buffer=last.clone(),
        )
        wrapper.plan(indptr, indices, last, HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=q.dtype, kv_data_type=q.dtype)
        wrappers.append(wrapper)
    turns = cycle(zip(wrappers, layers, strict=True))

    def run() -> Tensor:
        wrapper, cache = next(turns)
        return wrapper.run(q, tuple(cache.pages))

    return run


def visible(new: list[int], context: list[int]) -> int:
    """Pairs of query and key the causal mask lets through."""
    return sum(n * m - n * (n - 1) // 2 for n, m in zip(new, context, strict=True))


Case = tuple[str, str, str, Callable[[], float], Work]
"""Operation, shape, path, timer, work."""


def _replayed(make: Callable[..., Callable[[], object]], layers: list[Cache], new: list[int]) -> float:
    return graph_ms(make(layers, new), repeats=32)


def _cases() -> Iterator[Case]:
    paths = {"triton": ours, "sdpa, not paged": contiguous, "flashinfer": flashinfer_decode}
    for shape, context in DECODE.items():
        layers, new = caches(context), [1] * len(context)
        for path, make in paths.items():
            clock = functools.partial(_replayed, make, layers, new)
            yield "paged decode", shape, path, clock, Work(layers[0].num_bytes)
    for dtype, shape in product(QUANTIZED_MAX, ("256 x 1024", "16 x 4096")):
        layers, new = caches(DECODE[shape], dtype), [1] * len(DECODE[shape])
        clock = functools.partial(_replayed, ours, layers, new)
        yield f"paged decode {str(dtype)[6:]}", shape, "triton", clock, Work(layers[0].num_bytes)
    for shape, (new, context) in CHUNKS.items():
        work = Work(flops=4 * HEADS * HEAD_DIM * visible(new, context))
        yield "paged chunks", shape, "triton", functools.partial(gpu_ms, ours([Cache(context)], new)), work
    for num_tokens, dtype in product((1, 256, 16384), (torch.bfloat16, *QUANTIZED_MAX)):
        yield _writing(num_tokens, dtype)


def _writing(num_tokens: int, dtype: torch.dtype) -> Case:
    """New tokens of a fused projection into pages."""
    cache = Cache([max(PAGE, num_tokens)], dtype)
    fused = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    qkv = fused.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    angles = torch.rand(num_tokens, HEAD_DIM // 2, device="cuda")
    table, slots = (angles.cos(), angles.sin()), torch.randperm(len(cache.pages[0]) * PAGE, device="cuda")[:num_tokens]
    size = num_tokens * HEAD_DIM * ((2 * HEADS + 3 * KV_HEADS) * 2 + 2 * KV_HEADS * dtype.itemsize + 4)
    clock = functools.partial(graph_ms, lambda: write_pages(*qkv, table, slots, *cache.pages, *cache.scales))
    return f"write_pages {str(dtype)[6:]}", f"{num_tokens} tokens", "triton", clock, Work(size)


def rows() -> Iterator[Row]:
    """Decode, prompt chunks, and writing. A peer that is missing is one failed row."""
    with launch.forced("triton"):
        for op, shape, path, clock, work in _cases():
            try:
                yield row(op, shape, path, clock(), work)
            except (RuntimeError, ValueError, TypeError, ImportError) as error:
                yield failed(op, shape, path, error)


DECODE_TILES = {
    torch.bfloat16: ((64, 2, 3), (64, 4, 3), (32, 2, 5), (16, 2, 7), (32, 4, 5)),
    torch.float8_e4m3fn: ((64, 4, 5), (64, 2, 5), (64, 4, 3), (64, 2, 3), (128, 4, 3), (32, 2, 5)),
}
"""Keys per step, warps, stages."""
TUNED_CHUNKS = {
    "500": ([500], [500]),
    "4 x 500": ([500] * 4, [500] * 4),
    "6 x 640": ([640] * 6, [640] * 6),
    "900 over 1800": ([900], [1800]),
    "2048 over 4096": ([2048], [4096]),
}


def tune() -> Iterator[Row]:
    """Tiles of decode, with three or four programs per multiprocessor, then of prompt chunks."""
    with launch.forced("triton"):
        for (dtype, tiles), (shape, context) in product(DECODE_TILES.items(), DECODE.items()):
            layers, tables = caches(context, dtype), ("_FEW_TILES", "_DECODE_TILES", "_MANY_TILES")
            settings = [
                {table: {(HEAD_DIM, dtype.itemsize): DecodeTiles(*one, programs)} for table in tables}
                for one, programs in product(tiles, (3, 4))
            ]
            op, work = f"paged decode {str(dtype)[6:]}", Work(layers[0].num_bytes)
            run, clock = ours(layers, [1] * len(context)), functools.partial(graph_ms, repeats=16, replays=9)
            yield from sweep(op, shape, run, vars(_paged_decode), settings, (), work, clock=clock)
        chunk_settings = [
            {(HEAD_DIM, 2): PrefillTiles(m, n, num_warps, num_stages)}
            for (m, num_warps), n, num_stages in product(((64, 4), (128, 8)), (32, 64, 128), (2, 3, 4, 5))
            if n < 128 or num_stages <= 3
        ]
        for shape, (new, context) in TUNED_CHUNKS.items():
            work, run = Work(flops=4 * HEADS * HEAD_DIM * visible(new, context)), ours([Cache(context)], new)
            yield from sweep("paged chunks", shape, run, _paged_prefill._PREFILL_TILES, chunk_settings, (), work)


if __name__ == "__main__":
    main(rows, tune)

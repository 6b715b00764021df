"""Sweep the launch settings of the serving kernels on this GPU.

    python -m bench.kernels.tune_serving --out tuned.json

Each candidate is compared with the reference before it is timed; one that is wrong or does not compile is reported and
left out. The best of each shape is marked with *. `--only` picks sections; all of them take about three minutes on an
H200, most of it compiling. The best settings are copied manually into the tables of the kernel modules.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels import linear_cross_entropy as loss_bench
from bench.kernels.paged_attention import DECODE, HEAD_DIM, HEADS, KV_HEADS, PAGE, Cache, caches, queries
from bench.kernels.timing import gpu_ms, graph_ms
from saccade.kernels import _paged_decode, _paged_prefill
from saccade.kernels import linear_cross_entropy as loss_module
from saccade.kernels import paged_attention as paged_module
from saccade.kernels._paged_tile import Pages

Result = dict[str, Any]


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of what was expected."""
    return ((actual.double() - expected.double()).square().mean() / expected.double().square().mean()).sqrt().item()


def try_candidate(
    name: str, shape: str, check: Callable[[], float], clock: Callable[[], float], num_bytes: float, bound: float = 1e-2
) -> Result:
    """Check, then time. A candidate that fails keeps its reason instead of a time."""
    result: Result = {"shape": shape, "setting": name}
    try:
        error = check()
        if not error <= bound:
            return result | {"failed": f"relative RMS error {error:.1e}"}
        ms = clock()
    except Exception as error:  # compilers fail in many ways; the sweep continues
        return result | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"}
    return result | {"ms": round(ms, 4), "tb_s": round(num_bytes / ms / 1e9, 2)}


PAGED_TILES = ((64, 2, 3), (64, 4, 3), (32, 2, 5), (16, 2, 7), (32, 4, 5))
"""Keys per step, warps, stages: the best five of 23 at 256 x 1024 in bf16."""
RAGGED = [1000, 1, 0, 4096, 129, 16]


def sweep_paged() -> Iterator[Result]:
    """Decode in bf16: tiles and programs."""
    small = PagedCase(RAGGED)
    for shape, context in DECODE.items():
        case = PagedCase(context)
        for tiles, programs_per_sm in product(PAGED_TILES, (3, 4)):
            yield case.candidate(shape, _paged_decode.DecodeTiles(*tiles, programs_per_sm), small)


def sweep_paged_fp8() -> Iterator[Result]:
    """Decode from an fp8 cache: tiles."""
    small = PagedCase(RAGGED, torch.float8_e4m3fn)
    for shape in ("256 x 1024", "16 x 4096"):
        case = PagedCase(DECODE[shape], torch.float8_e4m3fn)
        for tiles in ((64, 4, 5), (64, 2, 5), (64, 4, 3), (64, 2, 3), (128, 4, 3), (32, 2, 5)):
            yield case.candidate(f"{shape} fp8", _paged_decode.DecodeTiles(*tiles), small)


class PagedCase:
    """One decode step over cold caches, and its reference on the first of them."""

    def __init__(self, context: list[int], dtype: torch.dtype = torch.bfloat16) -> None:
        self.layers = caches(context, dtype)
        self.q, self.starts = queries([1] * len(context))
        first = self.layers[0]
        self.expected = paged_module.paged_attention_reference(
            self.q, *first.pages, first.table, self.starts, first.lengths, max_seqlen_q=1,
            key_scales_NGP=first.scales[0], value_scales_NGP=first.scales[1],
        )  # fmt: skip

    def run(self, tiles: _paged_decode.DecodeTiles) -> Callable[[], Tensor]:
        """Calls that take the caches of the layers in turn, with one plan for all."""
        first, turns = self.layers[0], cycle(self.layers)
        plan = _paged_decode.plan_decode(
            self.starts, first.lengths, first.pages[0], num_decode=len(first.lengths), tiles=tiles
        )

        def attend() -> Tensor:
            cache = next(turns)
            return paged_module.paged_attention(
                self.q, *cache.pages, cache.table, self.starts, cache.lengths, max_seqlen_q=1, decode_plan=plan,
                key_scales_NGP=cache.scales[0], value_scales_NGP=cache.scales[1],
            )  # fmt: skip

        return attend

    def error(self, tiles: _paged_decode.DecodeTiles) -> float:
        """Relative RMS against the reference."""
        return relative_rms(self.run(tiles)(), self.expected)

    def candidate(self, shape: str, tiles: _paged_decode.DecodeTiles, small: "PagedCase") -> Result:
        """Checked on ragged lengths and on these, then timed on these."""
        return try_candidate(
            "n{block_n} w{num_warps} st{num_stages} x{programs_per_sm}".format(**tiles._asdict()),
            shape,
            lambda: max(small.error(tiles), self.error(tiles)),
            lambda: graph_ms(self.run(tiles), repeats=16, replays=9),
            self.layers[0].num_bytes,
        )


CHUNK_SHAPES = {
    "500": ([500], [500]),
    "2 x 500": ([500] * 2, [500] * 2),
    "4 x 500": ([500] * 4, [500] * 4),
    "6 x 640": ([640] * 6, [640] * 6),
    "900 over 1800": ([900], [1800]),
    "2048 over 4096": ([2048], [4096]),
}
"""New tokens and context of each request."""


def sweep_chunks() -> Iterator[Result]:
    """Prompt chunks: tiles."""
    for shape, (new, context) in CHUNK_SHAPES.items():
        cache = Cache(context)
        q, starts = queries(new)
        out = torch.empty_like(q)
        pages = Pages(*cache.pages, None, None, cache.table, None)
        arguments = (q, *cache.pages, cache.table, starts, cache.lengths)
        expected = paged_module.paged_attention_reference(*arguments, max_seqlen_q=max(new))
        flops = sum(4 * HEADS * HEAD_DIM * (n * c - n * (n - 1) // 2) for n, c in zip(new, context, strict=True))
        for block_m, block_n, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 5)):
            if (block_m == 64) == (num_warps == 8) or (block_n == 128 and num_stages > 3):
                continue
            schedule = _paged_prefill.Schedule(
                block_m=block_m,
                block_n=block_n,
                num_warps=num_warps,
                num_stages=num_stages,
                num_splits=1,
                min_split=4096,
            )
            run = partial(_attend_chunks, q, pages, starts, cache.lengths, out, schedule)
            result = try_candidate(
                f"m{block_m} n{block_n} w{num_warps} st{num_stages}",
                shape,
                lambda run=run, expected=expected: relative_rms(run(), expected),
                lambda run=run: graph_ms(run, repeats=12, replays=7),
                0.0,
            )
            yield result | ({"tflop_s": round(flops / result["ms"] / 1e9)} if "ms" in result else {})


def _attend_chunks(
    q: Tensor, pages: Pages, starts: Tensor, lengths: Tensor, out: Tensor, schedule: _paged_prefill.Schedule
) -> Tensor:
    _paged_prefill.prefill(q, pages, starts, lengths, out, schedule)
    return out


def sweep_loss() -> Iterator[Result]:
    """Chunk size, splits of the hidden gradient, and the loss kernel's tile, at 16384 x 2048 x 151936."""
    hidden, weight, labels, num_labels = loss_bench.inputs(16384, 0.0)
    rows = torch.randperm(16384, device="cuda")[:256]
    part = torch.full_like(labels, -100)
    part[rows] = labels[rows]

    def gradients(run: Callable[..., Tensor]) -> Tensor:
        return torch.autograd.grad(run(hidden, weight, part, count=256.0), hidden)[0]

    expected = gradients(loss_module.linear_cross_entropy_reference)
    settings = [
        {"chunk": chunk, "splits": splits, "block": 8192, "warps": 16}
        for chunk, splits in product((512, 1024, 2048, 4096), (1, 2, 4))
    ]
    settings += [
        {"chunk": 1024, "splits": 2, "block": b, "warps": w} for b, w in ((4096, 8), (4096, 4), (8192, 8), (16384, 32))
    ]
    for s in settings:
        loss_module._HIDDEN_SPLITS, loss_module._LOSS_BLOCK, loss_module._LOSS_WARPS = (
            s["splits"],
            s["block"],
            s["warps"],
        )
        max_bytes = s["chunk"] * loss_bench.VOCAB * 2

        def ours(h: Tensor, w: Tensor, y: Tensor, n: int, max_bytes: int = max_bytes) -> Tensor:
            return loss_module.linear_cross_entropy(h, w, y, count=n, num_labels=n, max_bytes=max_bytes)

        call = lambda ours=ours: loss_bench.step(ours, hidden, weight, labels, num_labels)  # noqa: E731
        result = try_candidate(
            "chunk {chunk} splits {splits} block {block} warps {warps}".format(**s),
            "16384 x 2048 x 151936",
            lambda: relative_rms(gradients(loss_module.linear_cross_entropy), expected),
            lambda call=call: gpu_ms(call, budget_ms=250),
            0.0,
            bound=2e-2,
        )
        if "ms" in result:
            flops = 6 * 16384 * loss_bench.HIDDEN * loss_bench.VOCAB
            result |= {
                "tflop_s": round(flops / result["ms"] / 1e9),
                "extra_gib": round(loss_bench.extra_gib(call, hidden, weight), 2),
            }
        yield result


SECTIONS: dict[str, Callable[[], Iterator[Result]]] = {
    "paged": sweep_paged,
    "paged-fp8": sweep_paged_fp8,
    "chunks": sweep_chunks,
    "loss": sweep_loss,
}


def show(results: list[Result]) -> None:
    """Per shape, the best twelve candidates and the failures."""
    for shape in dict.fromkeys(r["shape"] for r in results):
        mine = sorted((r for r in results if r["shape"] == shape), key=lambda r: r.get("ms", float("inf")))
        for place, r in enumerate(mine):
            if place >= 12 and "ms" in r:
                continue
            numbers = f"{r['ms']:>9.4f} ms" if "ms" in r else f"  {r['failed']}"
            others = "  ".join(f"{key} {r[key]}" for key in ("tb_s", "tflop_s", "extra_gib") if r.get(key))
            print(
                f"{'*' if place == 0 and 'ms' in r else ' '} {shape:<24} {r['setting']:<44} {numbers}  {others}",
                flush=True,
            )


def main() -> None:
    """Run the sections asked for, print and keep the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=180.0, help="stop starting candidates after this long")
    options = parser.parse_args()
    torch.manual_seed(0)
    begin, kept = time.monotonic(), {}
    for index, name in enumerate(options.only):
        deadline = begin + options.budget_s * (index + 1) / len(options.only)
        kept[name] = []
        for result in SECTIONS[name]():
            kept[name].append(result)
            if time.monotonic() > deadline:
                print(f"{name}: out of time after {len(kept[name])} candidates")
                break
        show(kept[name])
        torch.cuda.empty_cache()
        if options.out:
            options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "sections": kept}, indent=1))
    print(f"{KV_HEADS} kv heads, page {PAGE}; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

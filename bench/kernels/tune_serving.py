"""Sweep the launch settings of the serving kernels on the GPU at hand: `python -m bench.kernels.tune_serving --out tuned.json`.

Each candidate is compared with the reference before it is timed; one that is wrong or does not compile is reported and left
out. The best of each shape is marked with *. `--only` picks sections; all of them take about three minutes on an H200, most of
it compiling. What wins goes by hand into the tables of the kernel modules, which this script does not touch.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.kernels import linear_cross_entropy as loss_bench
from bench.kernels import quant_linear as linear_bench
from bench.kernels.paged_attention import DECODE, HEAD_DIM, HEADS, KV_HEADS, PAGE, Cache, caches, queries
from bench.kernels.timing import gpu_ms, graph_ms
from saccade.kernels import linear_cross_entropy as loss_module
from saccade.kernels import paged_attention as paged_module
from saccade.kernels import quant_linear as linear_module

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
    except Exception as error:  # compilers fail in many ways; the sweep goes on
        return result | {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"}
    return result | {"ms": round(ms, 4), "tb_s": round(num_bytes / ms / 1e9, 2)}


def attend(cache: Cache, q: Tensor, starts: Tensor, schedule: paged_module.Schedule) -> Tensor:
    """One decode step as `schedule` says."""
    return paged_module._attend(q, *cache.pages, cache.table, starts, cache.lengths, schedule=schedule, is_decode=True)


def sweep_paged() -> Iterator[Result]:
    """Decode: tiles at 256 x 1024, then splits for few requests with the tiles that won."""
    small = Cache([1000, 1, 4096, 129])
    q_small, starts_small = queries([1] * 4)
    expected = paged_module.paged_attention_reference(
        q_small, *small.pages, small.table, starts_small, small.lengths, max_seqlen_q=1
    )

    def candidate(shape: str, layers: list[Cache], schedule: paged_module.Schedule) -> Result:
        q, starts = queries([1] * len(layers[0].context))
        turns = cycle(layers)
        name = "n{block_n} w{num_warps} st{num_stages} x{num_splits} >={min_split}".format(
            **dataclasses.asdict(schedule)
        )
        return try_candidate(
            name,
            shape,
            lambda: relative_rms(attend(small, q_small, starts_small, schedule), expected),
            lambda: graph_ms(lambda: attend(next(turns), q, starts, schedule), repeats=16, replays=9),
            layers[0].num_bytes,
        )

    layers, best = caches(DECODE["256 x 1024"]), {}
    for block_n, num_warps, num_stages in product((16, 32, 64, 128), (2, 4, 8), (3, 5, 7)):
        in_flight = (num_stages - 1) // 2 * block_n * HEAD_DIM * 4
        if (
            not (8 * 1024 <= in_flight <= 100 * 1024)
            or (num_warps == 8 and block_n < 64)
            or (num_warps == 2 and block_n > 64)
        ):
            continue
        schedule = paged_module.Schedule(
            block_m=16, block_n=block_n, num_warps=num_warps, num_stages=num_stages, num_splits=1, min_split=4096
        )
        result = candidate("256 x 1024", layers, schedule)
        best[result.get("ms", float("inf"))] = schedule
        yield result
    del layers
    winners = [best[ms] for ms in sorted(best)[:2]]
    for shape, splits in (
        ("16 x 4096", (4, 8, 12, 16, 32)),
        ("1 x 65536", (33, 66, 99, 128)),
        ("64 x 2048", (1, 2, 4, 8)),
    ):
        layers = caches(DECODE[shape])
        for winner, num_splits in product(winners, splits):
            schedule = dataclasses.replace(winner, num_splits=num_splits, min_split=128)
            yield candidate(shape, layers, schedule)


def sweep_chunks() -> Iterator[Result]:
    """Prompt chunks: tiles at one request of 2048 new tokens over 4096."""
    cache = Cache([4096])
    q, starts = queries([2048])
    arguments = (q, *cache.pages, cache.table, starts, cache.lengths)
    expected = paged_module.paged_attention_reference(*arguments, max_seqlen_q=2048)
    flops = 4 * HEADS * HEAD_DIM * (2048 * 4096 - 2048 * 2047 // 2)
    for block_m, block_n, num_warps, num_stages in product((64, 128), (32, 64, 128), (4, 8), (2, 3, 5)):
        if (block_m == 64) == (num_warps == 8) or (block_n == 128 and num_stages == 5):
            continue
        schedule = paged_module.Schedule(
            block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages, num_splits=1, min_split=4096
        )
        run = lambda schedule=schedule: paged_module._attend(*arguments, schedule=schedule, is_decode=False)  # noqa: E731
        result = try_candidate(
            f"m{block_m} n{block_n} w{num_warps} st{num_stages}",
            "2048 over 4096",
            lambda run=run: relative_rms(run(), expected),
            lambda run=run: gpu_ms(run, budget_ms=10),
            0.0,
        )
        yield result | ({"tflop_s": round(flops / result["ms"] / 1e9)} if "ms" in result else {})


def sweep_loss() -> Iterator[Result]:
    """Chunk size, splits of the hidden gradient, and the loss kernel's tile, at 16384 x 2048 x 151936."""
    hidden, weight, labels, num_learned = loss_bench.inputs(16384, 0.0)
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
            return loss_module.linear_cross_entropy(h, w, y, count=n, num_learned=n, max_bytes=max_bytes)

        call = lambda ours=ours: loss_bench.step(ours, hidden, weight, labels, num_learned)  # noqa: E731
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


def sweep_linear() -> Iterator[Result]:
    """Tiles and splits of the compressed layers for 1, 16 and 64 tokens, at the widest and the deepest layer."""
    tiles = linear_module.Tiles
    eight = [
        tiles(block_t=16, block_n=n, block_d=d, num_warps=w, num_stages=st, programs_per_sm=p)
        for n, d, w, st, p in (
            (16, 512, 4, 4, 1),
            (32, 256, 4, 4, 2),
            (32, 512, 4, 3, 2),
            (64, 256, 4, 4, 2),
            (32, 256, 2, 5, 4),
        )
    ]
    four = [
        tiles(block_t=16, block_n=n, block_d=128, num_warps=w, num_stages=st, programs_per_sm=p)
        for n, w, st, p in ((64, 4, 5, 4), (64, 4, 8, 2), (128, 4, 4, 3), (128, 4, 6, 2), (128, 8, 5, 2))
    ]
    for layer, kind in product(("down", "gate and up"), ("int8", "fp8", "int4")):
        num_outputs, num_inputs = linear_bench.LAYERS[layer]
        copies = linear_bench.weights(kind, (num_outputs, num_inputs))
        for num_tokens in (1, 64):
            x = torch.randn(num_tokens, num_inputs, device="cuda", dtype=torch.bfloat16)
            for base in four if kind == "int4" else eight:
                wide = max(16, num_tokens)
                candidate = dataclasses.replace(
                    base, block_t=wide, block_d=min(base.block_d, 128 if wide == 64 else 512)
                )
                run, expected = _linear(kind, x, candidate)
                turns = cycle(copies)
                yield try_candidate(
                    "n{block_n} d{block_d} w{num_warps} st{num_stages} p{programs_per_sm}".format(
                        **dataclasses.asdict(candidate)
                    ),
                    f"{kind} {layer}, {num_tokens}",
                    lambda run=run, expected=expected, copies=copies: relative_rms(run(copies[0]), expected(copies[0])),
                    lambda run=run, turns=turns, copies=copies: graph_ms(
                        lambda: run(next(turns)), repeats=len(copies), replays=7
                    ),
                    sum(w.nbytes for w in copies[0]),
                )


def _linear(
    kind: str, x: Tensor, tiles: linear_module.Tiles
) -> tuple[Callable[[tuple[Tensor, ...]], Tensor], Callable[[tuple[Tensor, ...]], Tensor]]:
    """The kernel with these tiles, and its reference, as functions of a weight."""
    if kind == "int4":
        return (
            lambda w: linear_module._linear_w4a16_triton(x, *w, None, None, tiles),
            lambda w: linear_module.linear_w4a16_reference(x, *w),
        )
    x8, scale = linear_module.quantize_activation(x, linear_bench.EIGHT_BITS[kind])
    return (
        lambda w: linear_module._matmul_w8a8_triton(x8, scale, *w, None, x.dtype, tiles),
        lambda w: linear_module.matmul_w8a8_reference(x8, scale, *w, out_dtype=x.dtype),
    )


SECTIONS: dict[str, Callable[[], Iterator[Result]]] = {
    "paged": sweep_paged,
    "chunks": sweep_chunks,
    "loss": sweep_loss,
    "linear": sweep_linear,
}


def show(results: list[Result]) -> None:
    """Per shape, the candidates from best to worst; the failures at the end."""
    for shape in dict.fromkeys(r["shape"] for r in results):
        mine = sorted((r for r in results if r["shape"] == shape), key=lambda r: r.get("ms", float("inf")))
        for place, r in enumerate(mine):
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

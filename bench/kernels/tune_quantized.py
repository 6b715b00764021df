"""Sweep the tiles of the quantized linear kernels for few tokens.

    python -m bench.kernels.tune_quantized --out tuned.json

Each candidate is compared with the reference before it is timed. The best of each layer and number of tokens are
printed as JSON, and copied manually into the tables of the kernel modules.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from bench.kernels.quantized import DEVICE, EPS, LAYERS, Case, Result, cases, measure, random, time_over
from saccade.kernels import launch, linear_w4a16, linear_w8a8, small_linear_w4a16, small_matmul_w8a8
from saccade.kernels._few_tokens import VectorTiles
from saccade.kernels._split_linear import SplitTiles
from saccade.kernels.rms_norm import add_rms_norm
from saccade.kernels.small_linear_w4a16 import Weight4bit
from saccade.kernels.swiglu import swiglu

KINDS = ("int8", "fp8", "int4")

# Tokens of a tile -> outputs and inputs of a tile, warps, stages.
INT4_TILES = {
    16: ((64, 128, 4, 6), (64, 128, 4, 4), (128, 128, 4, 5), (128, 128, 8, 5)),
    32: ((64, 128, 4, 5), (128, 128, 4, 5), (128, 128, 8, 5)),
    64: ((64, 128, 4, 4), (128, 128, 8, 4), (128, 128, 4, 4), (256, 128, 8, 3)),
}
EIGHT_BIT_TILES = {
    16: ((64, 256, 4, 3), (64, 256, 4, 4), (128, 256, 4, 3), (64, 128, 4, 6)),
    32: ((64, 256, 4, 3), (64, 128, 4, 6), (128, 128, 4, 4)),
    64: ((64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 128, 8, 4)),
}
SWEPT_TOKENS = (8, 16, 32, 64)
# Outputs of a program and warps of the kernels for one or two tokens; more than 4096 inputs?
SMALL_TILES: dict[str, dict[bool, tuple[tuple[int, int], ...]]] = {
    "int4": {False: ((2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (16, 2)), True: ((4, 2), (4, 4), (8, 2), (8, 4), (16, 4))},
    "int8": {False: ((4, 2), (4, 4), (8, 2), (8, 4), (16, 4)), True: ((4, 2), (4, 4), (8, 2), (8, 4), (8, 8))},
}  # fmt: skip
SMALL_TILES["fp8"] = SMALL_TILES["int8"]


def split_counts(num_tiles: int, num_inputs: int) -> list[int]:
    """Numbers of splits that give about 1 to 4 programs per multiprocessor, with at least 256 inputs each."""
    wanted = (round(share * launch.num_sms(torch.device(DEVICE)) / num_tiles) for share in (0.97, 1.95, 2.9, 3.9))
    return sorted({max(1, min(splits, num_inputs // 256)) for splits in wanted})


def tile_candidates(case: Case) -> Iterator[tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]]:
    """The tensor-core kernel of a case with all tiles and numbers of splits."""
    block_t = max(16, len(case.x))
    table = INT4_TILES if case.kind == "int4" else EIGHT_BIT_TILES
    num_outputs, num_inputs = LAYERS[case.layer]
    for n, d, warps, stages in table[block_t]:
        tiles = SplitTiles(block_t=block_t, block_n=n, block_d=d, num_warps=warps, num_stages=stages, programs_per_sm=1)
        for splits in split_counts(-(-num_outputs // n), num_inputs):

            def run(weight: tuple[Tensor, ...], tiles: SplitTiles = tiles, splits: int = splits) -> Tensor:
                if case.kind == "int4":
                    return linear_w4a16._linear_w4a16_triton(case.x, *weight, None, None, tiles, splits)
                return linear_w8a8._matmul_w8a8_triton(*case.rows, *weight, None, case.x.dtype, tiles, splits)

            yield f"n{n} d{d} w{warps} st{stages} split{splits}", run


def small_candidates(case: Case) -> Iterator[tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]]:
    """The kernel for one or two tokens with all tiles."""
    for block_n, warps in SMALL_TILES[case.kind][LAYERS[case.layer][1] > 4096]:
        tiles = VectorTiles(block_n, warps)
        if block_n * len(case.x) > 16:
            continue  # not enough registers
        for overlaps in (True, False):

            def run(weight: tuple[Tensor, ...], tiles: VectorTiles = tiles, overlaps: bool = overlaps) -> Tensor:
                if case.kind == "int4":
                    return small_linear_w4a16._run(case.x, Weight4bit(*weight), tiles=tiles, overlaps=overlaps)[0]
                return small_matmul_w8a8._run(*case.rows, *weight, None, case.x.dtype, tiles, overlaps)

            yield f"small n{block_n} w{warps}{'' if overlaps else ' no overlap'}", run


def fused_candidates(case: Case) -> Iterator[tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]]:
    """The 4-bit kernel with norm and activation fused and in parts; tests check it."""
    x, residual = case.x, random(*case.x.shape)
    gain = torch.ones(x.shape[1], device=DEVICE, dtype=x.dtype)
    is_gated = case.layer == "gate and up"
    for block_n, warps in SMALL_TILES["int4"][False]:
        tiles = VectorTiles(block_n, warps)
        if is_gated and block_n < 2:
            continue

        def fused(weight: tuple[Tensor, ...], tiles: VectorTiles = tiles) -> Tensor:
            return small_linear_w4a16._run(
                x, Weight4bit(*weight), residual=residual, norm=(gain, EPS), is_gated=is_gated, tiles=tiles
            )[0]

        def in_parts(weight: tuple[Tensor, ...], tiles: VectorTiles = tiles) -> Tensor:
            rows = add_rms_norm(x, residual, gain, EPS)[0]
            out = small_linear_w4a16._run(rows, Weight4bit(*weight), tiles=tiles)[0]
            return swiglu(*out.chunk(2, dim=1)) if is_gated else out

        yield f"fused n{block_n} w{warps}", fused
        yield f"in parts n{block_n} w{warps}", in_parts


def sweep(layers: list[str]) -> list[Result]:
    """All candidates. First everything is compiled, in parallel."""
    every = [case for layer in layers for case in cases(layer, KINDS, (1, 2, *SWEPT_TOKENS))]
    chosen = [(case, list(small_candidates(case) if len(case.x) <= 2 else tile_candidates(case))) for case in every]
    fused = [
        (case, list(fused_candidates(case)))
        for case in every
        if case.kind == "int4" and len(case.x) <= 2 and case.layer in ("qkv", "gate and up")
    ]
    begin = time.monotonic()
    with launch.compile_only(16), torch.no_grad():
        for case, candidates in (*chosen, *fused):
            for _, run in candidates:
                run(case.copies[0])
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)
    results = []
    with torch.no_grad():
        for case, candidates in chosen:
            expected = case.reference()
            results += [measure(case, run, expected, setting=name) for name, run in candidates]
        for case, candidates in fused:
            results += [
                {
                    "kind": case.kind,
                    "layer": f"{case.layer}, fused",
                    "tokens": len(case.x),
                    "setting": name,
                    "us": round(time_over(case.copies, run), 2),
                }
                for name, run in candidates
            ]
    return results


def show_sweep(results: list[Result], count: int = 4) -> None:
    """The best of every case as JSON, and what failed."""
    for key in dict.fromkeys((r["kind"], r["layer"], r["tokens"]) for r in results):
        mine = [r for r in results if (r["kind"], r["layer"], r["tokens"]) == key]
        best = sorted((r for r in mine if "us" in r), key=lambda r: r["us"])[:count]
        print(json.dumps({"case": " ".join(map(str, key)), "best": {r["setting"]: r["us"] for r in best}}))
        for r in mine:
            if "failed" in r:
                print(json.dumps({"case": " ".join(map(str, key)), "failed": {r["setting"]: r["failed"]}}))


def main() -> None:
    """Sweep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    results = sweep(options.layers)
    show_sweep(results)
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "sweep": results}, indent=1))


if __name__ == "__main__":
    main()

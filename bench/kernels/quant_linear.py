"""Quantized linear layers at the shapes of a 3B model, beside the bf16 matmul they replace: `python -m bench.kernels.quant_linear`.

Every kind is compared with its reference first. Then it prints microseconds and the ratio to torch's bf16 matmul, per layer and number of tokens; and
the same for all four layers of a decoder block with norm and activation, as the model runs them. `--sweep` times the tiles of the kernels for
few tokens instead and prints the best per layer as JSON; `--out` keeps all numbers. Timed as CUDA-graph replays over several copies of the weight, so that none is in L2.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, graph_ms, measured_ceilings, row
from saccade.device import resolve_device
from saccade.kernels import launch, quant_linear, small_linear, small_quant_linear
from saccade.kernels.quant_linear import (
    Tiles,
    interleave_int4,
    linear_w4a16_reference,
    matmul_w8a8_reference,
    quantize_activation,
    quantize_activation_reference,
    quantize_weight,
    quantize_weight_int4,
)
from saccade.kernels.rms_norm import add_rms_norm, add_rms_norm_quant
from saccade.kernels.small_quant_linear import (
    Weight4bit,
    norm_gated_linear_w4a16,
    norm_linear_w4a16,
    small_linear_w4a16,
    small_matmul_w8a8,
)
from saccade.kernels.swiglu import swiglu, swiglu_quant

LAYERS = {"qkv": (2560, 2048), "out": (2048, 2048), "gate and up": (22016, 2048), "down": (2048, 11008)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 256, 2048)
BLOCK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COLD_BYTES = 200e6
EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
KINDS = ("bf16", "int8", "fp8", "int4")
BOUND = 8e-3
EPS = 1e-6
DEVICE = "cuda"
HIDDEN = 2048
FP8 = torch.float8_e4m3fn
Result = dict[str, Any]


class Case(NamedTuple):
    """One layer in one kind for a number of tokens."""

    kind: str
    layer: str
    x: Tensor
    rows: tuple[Tensor, ...]
    """x, or in 8 bits the quantized tokens and their scales, as the norm before the layer makes them."""
    copies: list[tuple[Tensor, ...]]
    """Copies of the weight, enough to leave L2 cold."""

    @property
    def name(self) -> str:
        """For the report."""
        return f"{self.kind} {self.layer} {len(self.x)}"

    def call(self, weight: tuple[Tensor, ...]) -> Tensor:
        """As the model calls it."""
        if self.kind == "bf16":
            return F.linear(self.x, *weight)
        if self.kind == "int4":
            return small_linear_w4a16(self.x, Weight4bit(*weight))
        return small_matmul_w8a8(*self.rows, *weight, out_dtype=self.x.dtype)

    def reference(self) -> Tensor:
        """The reference on the first copy."""
        weight = self.copies[0]
        if self.kind == "bf16":
            return F.linear(self.x.float(), weight[0].float())
        if self.kind == "int4":
            return linear_w4a16_reference(self.x.float(), *weight)
        return matmul_w8a8_reference(*self.rows, *weight, out_dtype=torch.float32)


def quantized(kind: str, weight: Tensor) -> tuple[Tensor, ...]:
    """A weight in one kind, as the kernels read it."""
    if kind == "bf16":
        return (weight,)
    if kind == "int4":
        packed, scale, _ = quantize_weight_int4(weight, 128)
        return interleave_int4(packed), scale
    values, scale = quantize_weight(weight, EIGHT_BITS[kind])
    return values, scale.float()


def random(*shape: int) -> Tensor:
    """Drawn on the CPU: torch 2.11 refused to draw on the GPU between captures."""
    return torch.randn(shape).to(DEVICE, torch.bfloat16)


def random_weight(layer: str) -> Tensor:
    """A weight of the layer's shape."""
    return random(*LAYERS[layer]) * 0.02


def cold_copies(one: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    """Copies of one weight, enough to leave L2 cold."""
    copies = min(48, math.ceil(COLD_BYTES / sum(x.nbytes for x in one)))
    return [tuple(x.clone() for x in one) for _ in range(copies)]


def cases(layer: str, kinds: tuple[str, ...], num_tokens: tuple[int, ...]) -> Iterator[Case]:
    """All cases of a layer."""
    weight = random_weight(layer)
    for kind in kinds:
        copies = cold_copies(quantized(kind, weight))
        for count in num_tokens:
            x = random(count, LAYERS[layer][1])
            bits = EIGHT_BITS.get(kind)
            yield Case(kind, layer, x, (x,) if bits is None else quantize_activation_reference(x, bits), copies)


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over the RMS of what was expected."""
    return ((actual.float() - expected.float()).square().mean() / expected.float().square().mean()).sqrt().item()


def time_over(copies: list[Any], run: Callable[[Any], object]) -> float:
    """Microseconds of `run` on one copy, taking turns."""
    turns = cycle(copies)
    return graph_ms(lambda: run(next(turns)), repeats=len(copies), replays=5) * 1e3


def measure(case: Case, run: Callable[[tuple[Tensor, ...]], Tensor], expected: Tensor, **labels: object) -> Result:
    """Check, then time. What fails keeps its reason instead of a time."""
    result: Result = {"kind": case.kind, "layer": case.layer, "tokens": len(case.x), **labels}
    try:
        # Twice: the second run finds the counters of the splits as the first left them.
        error = max(relative_rms(run(case.copies[0]), expected) for _ in range(2))
        if not error <= BOUND:
            return result | {"failed": f"relative RMS error {error:.1e}"}
        return result | {"us": round(time_over(case.copies, run), 2)}
    except Exception as error:  # compilers fail in many ways; the others are measured
        return result | {"failed": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"}


# ------------------------------------------------------------------ the layers as the model runs them


def compare_layers(layers: list[str]) -> list[Result]:
    """Every kind, layer and number of tokens, and the library's path where there is a choice."""
    results = []
    for layer in layers:
        for case in cases(layer, KINDS, TOKENS):
            expected = case.reference()
            results.append(measure(case, case.call, expected, path="chosen"))
            if case.kind != "bf16" and len(case.x) >= 32:
                for path in ("triton", "library"):
                    results.append(measure(case, _through(path, case.call), expected, path=path))
    return results


def _through(path: launch.Path, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forced(weight: tuple[Tensor, ...]) -> Tensor:
        with launch.forced(path):
            return run(weight)

    return forced


def show_layers(results: list[Result]) -> None:
    """One line per layer and number of tokens."""
    found = {(r["layer"], r["tokens"], r["kind"], r["path"]): r for r in results}
    print(
        f"{'us (ratio to bf16)':<20}{'tokens':>7}{'bf16':>9}"
        + "".join(f"{kind:>16}" for kind in KINDS[1:])
        + "   triton / library"
    )
    for layer, count in dict.fromkeys((r["layer"], r["tokens"]) for r in results):
        plain = found[layer, count, "bf16", "chosen"].get("us", math.nan)
        line = f"{layer:<20}{count:>7}{plain:>9.1f}"
        for kind in KINDS[1:]:
            us = found[layer, count, kind, "chosen"].get("us", math.nan)
            line += f"{us:>9.1f} ({us / plain:4.2f})"
        others = [
            f"{kind} " + " / ".join(f"{found[layer, count, kind, path].get('us', math.nan):.1f}" for path in ("triton", "library"))
            for kind in KINDS[1:] if (layer, count, kind, "triton") in found
        ]  # fmt: skip
        print(line + "   " + ", ".join(others))
    for r in results:
        if "failed" in r:
            print(f"failed: {r}")


def rows() -> Iterator[Row]:
    """The same for `saccade bench kernels`: bytes of weight, tokens and outputs count up to 64 tokens, then floating-point operations."""
    measured_ceilings()
    with torch.no_grad():
        for r in compare_layers(list(LAYERS)):
            num_outputs, num_inputs = LAYERS[r["layer"]]
            op, shape = f"linear {r['kind']}", f"{r['layer']} {r['tokens']} x {num_inputs} -> {num_outputs}"
            if "us" not in r:
                yield failed(op, shape, r["path"], RuntimeError(r["failed"]))
                continue
            weight = {"bf16": 2.0, "int4": 0.5}.get(r["kind"], 1.0) * num_inputs * num_outputs
            moved = Work(weight + r["tokens"] * (num_inputs * (1 if r["kind"] in EIGHT_BITS else 2) + num_outputs * 2))
            work = moved if r["tokens"] <= 64 else Work(flops=2 * r["tokens"] * num_inputs * num_outputs)
            yield row(op, shape, r["path"], r["us"] / 1e3, work)


class Block:
    """The projections of one decoder block in one kind, with norms and activation, as the model runs them."""

    def __init__(self, kind: str, weights: dict[str, tuple[Tensor, ...]]) -> None:
        self.kind, self.weights = kind, weights
        self.bias = random(LAYERS["qkv"][0])
        self.gain = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)

    def normed(self, layer: str, x: Tensor, residual: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Norm of a sum, then linear: (out, the sum)."""
        weight = self.weights[layer]
        if self.kind == "bf16":
            return small_linear.norm_linear(x, residual, self.gain, EPS, *weight, bias)
        if self.kind == "int4":
            return norm_linear_w4a16(x, residual, self.gain, EPS, Weight4bit(*weight, bias=bias))
        x8, scale, total = add_rms_norm_quant(x, residual, self.gain, EPS, EIGHT_BITS[self.kind])
        return small_matmul_w8a8(x8, scale, *weight, bias, out_dtype=x.dtype), total

    def linear(self, layer: str, x: Tensor) -> Tensor:
        """Linear."""
        weight = self.weights[layer]
        if self.kind == "bf16":
            return small_linear.small_linear(x, *weight)
        if self.kind == "int4":
            return small_linear_w4a16(x, Weight4bit(*weight))
        return small_matmul_w8a8(*quantize_activation(x, EIGHT_BITS[self.kind]), *weight, out_dtype=x.dtype)

    def feed_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Norm of a sum, gate and up, activation, down: (out, the sum)."""
        gate_up, down = self.weights["gate and up"], self.weights["down"]
        if self.kind == "bf16":
            hidden, total = small_linear.norm_gated_linear(x, residual, self.gain, EPS, *gate_up)
            return small_linear.small_linear(hidden, *down), total
        if self.kind == "int4":
            hidden, total = norm_gated_linear_w4a16(x, residual, self.gain, EPS, Weight4bit(*gate_up))
            return small_linear_w4a16(hidden, Weight4bit(*down)), total
        wide, total = self.normed("gate and up", x, residual)
        hidden8, scale = swiglu_quant(*wide.chunk(2, dim=1), EIGHT_BITS[self.kind])
        return small_matmul_w8a8(hidden8, scale, *down, out_dtype=x.dtype), total

    def run(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """All but the attention, which is the slice of its queries."""
        qkv, total = self.normed("qkv", x, residual, self.bias)
        attended = self.linear("out", qkv[:, :HIDDEN].contiguous())
        return self.feed_forward(attended, total)


def compare_blocks(kinds: tuple[str, ...]) -> list[Result]:
    """Microseconds of a decoder block's projections, and of the steps between them."""
    results, made = [], {layer: random_weight(layer) for layer in LAYERS}
    for kind in kinds:
        one = {layer: quantized(kind, weight) for layer, weight in made.items()}
        size = sum(x.nbytes for weight in one.values() for x in weight)
        blocks = [
            Block(kind, {layer: tuple(x.clone() for x in weight) for layer, weight in one.items()})
            for _ in range(math.ceil(COLD_BYTES / size) + 2)
        ]
        for count in BLOCK_TOKENS:
            x, residual = (random(count, HIDDEN) for _ in range(2))

            def run(block: Block, x: Tensor = x, residual: Tensor = residual) -> object:
                return block.run(x, residual)

            results.append({"kind": kind, "tokens": count, "us": round(time_over(blocks, run), 2)})
    return results


def show_blocks(results: list[Result]) -> None:
    """One line per number of tokens."""
    found = {(r["tokens"], r["kind"]): r["us"] for r in results}
    print(f"{'decoder block, us':<20}{'tokens':>7}{'bf16':>9}" + "".join(f"{kind:>16}" for kind in KINDS[1:]))
    for count in BLOCK_TOKENS:
        line = f"{'':<20}{count:>7}{found[count, 'bf16']:>9.1f}"
        print(
            line
            + "".join(
                f"{found[count, kind]:>9.1f} ({found[count, kind] / found[count, 'bf16']:4.2f})" for kind in KINDS[1:]
            )
        )


def compare_steps() -> list[Result]:
    """The steps between the products: norm and activation alone, and with quantization."""
    results = []
    for count in (1, 16, 256):
        x, residual = (random(count, HIDDEN) for _ in range(2))
        gain = torch.ones(HIDDEN, device=DEVICE, dtype=torch.bfloat16)
        gate, up = random(count, LAYERS["gate and up"][0]).chunk(2, dim=1)
        steps: dict[str, Callable[[], object]] = {
            "norm": lambda x=x, residual=residual, gain=gain: add_rms_norm(x, residual, gain, EPS),
            "norm, quantized": lambda x=x, residual=residual, gain=gain: add_rms_norm_quant(x, residual, gain, EPS, FP8),
            "norm, then quantized": lambda x=x, residual=residual, gain=gain: quantize_activation(add_rms_norm(x, residual, gain, EPS)[0], FP8),
            "swiglu": lambda gate=gate, up=up: swiglu(gate, up),
            "swiglu, quantized": lambda gate=gate, up=up: swiglu_quant(gate, up, FP8),
            "swiglu, then quantized": lambda gate=gate, up=up: quantize_activation(swiglu(gate, up), FP8),
        }  # fmt: skip
        with torch.no_grad():
            results += [
                {"step": name, "tokens": count, "us": round(graph_ms(run, repeats=40, replays=5) * 1e3, 2)}
                for name, run in steps.items()
            ]
    return results


# ------------------------------------------------------------------ sweep

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
        tiles = Tiles(block_t=block_t, block_n=n, block_d=d, num_warps=warps, num_stages=stages, programs_per_sm=1)
        for splits in split_counts(-(-num_outputs // n), num_inputs):

            def run(weight: tuple[Tensor, ...], tiles: Tiles = tiles, splits: int = splits) -> Tensor:
                if case.kind == "int4":
                    return quant_linear._linear_w4a16_triton(case.x, *weight, None, None, tiles, splits)
                return quant_linear._matmul_w8a8_triton(*case.rows, *weight, None, case.x.dtype, tiles, splits)

            yield f"n{n} d{d} w{warps} st{stages} split{splits}", run


def small_candidates(case: Case) -> Iterator[tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]]:
    """The kernel for one or two tokens with all tiles."""
    for block_n, warps in SMALL_TILES[case.kind][LAYERS[case.layer][1] > 4096]:
        tiles = small_quant_linear.Tiles(block_n, warps)
        if block_n * len(case.x) > 16:
            continue  # not enough registers
        for overlaps in (True, False):

            def run(weight: tuple[Tensor, ...], tiles: Any = tiles, overlaps: bool = overlaps) -> Tensor:
                if case.kind == "int4":
                    return small_quant_linear._run_w4a16(case.x, Weight4bit(*weight), tiles=tiles, overlaps=overlaps)[0]
                return small_quant_linear._run_w8a8(*case.rows, *weight, None, case.x.dtype, tiles, overlaps)

            yield f"small n{block_n} w{warps}{'' if overlaps else ' no overlap'}", run


def fused_candidates(case: Case) -> Iterator[tuple[str, Callable[[tuple[Tensor, ...]], Tensor]]]:
    """The 4-bit kernel with norm and activation in it, and in parts. Not checked here (tests/kernels/test_small_quant_linear.py does)."""
    x, residual = case.x, random(*case.x.shape)
    gain = torch.ones(x.shape[1], device=DEVICE, dtype=x.dtype)
    is_gated = case.layer == "gate and up"
    for block_n, warps in SMALL_TILES["int4"][False]:
        tiles = small_quant_linear.Tiles(block_n, warps)
        if is_gated and block_n < 2:
            continue

        def fused(weight: tuple[Tensor, ...], tiles: Any = tiles) -> Tensor:
            return small_quant_linear._run_w4a16(
                x, Weight4bit(*weight), residual=residual, norm=(gain, EPS), is_gated=is_gated, tiles=tiles
            )[0]

        def in_parts(weight: tuple[Tensor, ...], tiles: Any = tiles) -> Tensor:
            rows = add_rms_norm(x, residual, gain, EPS)[0]
            out = small_quant_linear._run_w4a16(rows, Weight4bit(*weight), tiles=tiles)[0]
            return swiglu(*out.chunk(2, dim=1)) if is_gated else out

        yield f"fused n{block_n} w{warps}", fused
        yield f"in parts n{block_n} w{warps}", in_parts


def sweep(layers: list[str]) -> list[Result]:
    """All candidates. First everything is compiled, in parallel."""
    every = [case for layer in layers for case in cases(layer, KINDS[1:], (1, 2, *SWEPT_TOKENS))]
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
                {"kind": case.kind, "layer": f"{case.layer}, fused", "tokens": len(case.x), "setting": name, "us": round(time_over(case.copies, run), 2)}
                for name, run in candidates
            ]  # fmt: skip
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


def compile_all(layers: list[str]) -> None:
    """Compile in parallel what the tables need."""
    begin = time.monotonic()
    with launch.compile_only(16), torch.no_grad():
        for layer, kind in product(layers, KINDS[1:]):
            weight = quantized(kind, random_weight(layer))
            for count in TOKENS:
                x = random(count, LAYERS[layer][1])
                bits = EIGHT_BITS.get(kind)
                rows = (x,) if bits is None else quantize_activation_reference(x, bits)
                case = Case(kind, layer, x, rows, [weight])
                case.call(weight)
                if count >= 32:
                    _through("triton", case.call)(weight)
    print(f"compiled in {time.monotonic() - begin:.0f} s", flush=True)


CPU_LAYERS = ((896, 896), (4864, 896), (11008, 2048))


def compare_on_cpu(num_threads: int) -> list[Result]:
    """int8 layers on a CPU: quantized tokens by the dequantized weight (the reference) and by int8 products, beside fp32 and bf16."""
    torch.set_num_threads(num_threads)
    found: list[Result] = []
    for (outputs, inputs), tokens in product(CPU_LAYERS, (1, 16, 256)):
        weight, x = torch.randn(outputs, inputs), torch.randn(tokens, inputs)
        halves = (x.bfloat16(), weight.bfloat16())
        weight8 = quantize_weight(weight, torch.int8)
        calls = {
            "fp32": lambda x=x, weight=weight: F.linear(x, weight),
            "bf16": lambda halves=halves: F.linear(*halves),
            "reference": lambda x=x, weight8=weight8: quant_linear.linear_w8a8_reference(x, *weight8),
            "int8": lambda x=x, weight8=weight8: quant_linear.linear_w8a8(x, *weight8),
        }
        us = {name: round(_fastest_us(call), 1) for name, call in calls.items()}
        found.append({"outputs": outputs, "inputs": inputs, "tokens": tokens, **us})
        print(f"{inputs} x {outputs}, {tokens} tokens: " + ", ".join(f"{k} {v:.0f}" for k, v in us.items()), flush=True)
    return found


def _fastest_us(call: Callable[[], Tensor], seconds: float = 1.0) -> float:
    """The fastest of the calls within a time: other processes only slow them down."""
    begin, times = time.perf_counter(), [math.inf]
    while len(times) < 4 or time.perf_counter() < begin + seconds:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e6 * min(times)


def main() -> None:
    """Compare or sweep."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="time the tiles of the kernels for few tokens")
    parser.add_argument("--cpu", action="store_true", help="time int8 layers on this CPU instead")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--layers", nargs="*", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--out", type=Path, help="write all numbers as JSON")
    options = parser.parse_args()
    begin = time.monotonic()
    torch.manual_seed(0)
    if options.cpu:
        resolve_device("cpu")
        kept = {"cpu": compare_on_cpu(options.threads)}
        if options.out:
            options.out.write_text(json.dumps(kept, indent=1))
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    if options.sweep:
        kept = {"sweep": sweep(options.layers)}
        show_sweep(kept["sweep"])
    else:
        compile_all(options.layers)
        with torch.no_grad():
            kept = {"layers": compare_layers(options.layers)}
            show_layers(kept["layers"])
            kept["steps"] = compare_steps()
            print("us: " + ", ".join(f"{r['step']} at {r['tokens']}: {r['us']}" for r in kept["steps"]), flush=True)
            kept["blocks"] = compare_blocks(KINDS)
            show_blocks(kept["blocks"])
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), **kept}, indent=1))
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()

"""Linear layers for few tokens at the shapes of a 3B model, with norm and activation fused or in parts.

They are timed as CUDA-graph replay over several copies of the weight, so that none is in L2; bytes are those of weight,
inputs and outputs. Each way is compared with the reference first, and a wrong one is not timed. Consecutive launches of
a graph depend on each other only through the order of the stream, like the layers of a model, so that early starts
count.

`--tune` sweeps the tiles (compiled by several processes first), all of them for one token and the best for more tokens.
It prints the best of each shape and number of tokens, and the best of each shape over all, which belongs into the
table.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.timing import Row, Work, failed, graph_ms, main, row
from saccade.kernels import launch
from saccade.kernels import small_linear as module
from saccade.kernels.rms_norm import add_rms_norm, rms_norm
from saccade.kernels.small_linear import SmallLinearTiles
from saccade.kernels.swiglu import swiglu, swiglu_reference

EPS = 1e-6
TOKENS = (1, 2, 4, 8)
COLD_BYTES = 250e6
BOUND = 1e-2


class Layer(NamedTuple):
    """One linear layer of the model."""

    kind: str
    """norm, norm of sum, gated (norm of sum, and the activation after the product) or plain."""
    num_outputs: int
    num_inputs: int
    has_bias: bool = False


LAYERS = {
    "norm, qkv": Layer("norm", 2560, 2048, has_bias=True),
    "out": Layer("plain", 2048, 2048),
    "norm of sum, gate up, swiglu": Layer("gated", 22016, 2048),
    "down": Layer("plain", 2048, 11008),
    "norm of sum, head": Layer("norm of sum", 151936, 2048),
}


class Case:
    """Inputs of a layer, copies of its weight, and the ways to run it."""

    def __init__(self, name: str, num_tokens: int, copies: list[Tensor]) -> None:
        self.layer, self.copies = LAYERS[name], copies
        N, K = copies[0].shape
        self.shape = f"{name} {num_tokens} x {K} -> {N}"
        new = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
        self.x, self.is_gated = new(num_tokens, K), self.layer.kind == "gated"
        self.residual = new(num_tokens, K) if self.layer.kind in ("norm of sum", "gated") else None
        self.norm = (new(K), EPS) if self.layer.kind != "plain" else None
        self.bias = new(N) if self.layer.has_bias else None
        sizes = [x.nbytes for x in (copies[0], self.x, self.residual, self.bias) if x is not None]
        self.work = Work(sum(sizes) + 2 * num_tokens * N)
        self.expected = self.reference(copies[0])

    def reference(self, weight: Tensor) -> Tensor:
        """The specification with its rounding, the product in fp32 (in parts for a large weight)."""
        with launch.forced("reference"):
            rows = self.rows().float()
        out = torch.cat([rows @ part.float().T for part in weight.split(8192)], dim=1)
        out = out if self.bias is None else out + self.bias.float()
        return swiglu_reference(*out.chunk(2, dim=1)) if self.is_gated else out

    def rows(self) -> Tensor:
        """The input of the product: the norm as a separate launch."""
        if self.norm is None:
            return self.x
        if self.residual is None:
            return rms_norm(self.x, *self.norm)
        return add_rms_norm(self.x, self.residual, *self.norm)[0]

    def fused(self, weight: Tensor, tiles: SmallLinearTiles | None = None, overlaps: bool | None = None) -> Tensor:
        """One launch."""
        return module._run(
            self.x, weight, self.bias, residual=self.residual, norm=self.norm, is_gated=self.is_gated, tiles=tiles,
            overlaps=overlaps,
        )[0]  # fmt: skip

    def apart(self, weight: Tensor, tiles: SmallLinearTiles | None = None) -> Tensor:
        """The norm, then our product, then the activation."""
        return self.activated(module._run(self.rows(), weight, self.bias, tiles=tiles)[0])

    def in_parts(self, weight: Tensor) -> Tensor:
        """The norm, then torch's product, then the activation."""
        return self.activated(F.linear(self.rows(), weight, self.bias))

    def activated(self, out: Tensor) -> Tensor:
        """The output of the layer for the outputs of its product."""
        return swiglu(*out.chunk(2, dim=1)) if self.is_gated else out

    def measure(self, path: str, way: Callable[[Tensor], Tensor]) -> Row:
        """Compared with the reference, then timed. Compilers fail in many ways; the others continue."""
        op = f"{self.layer.kind} linear"
        turns = cycle(self.copies)
        try:
            difference = way(self.copies[0]).float() - self.expected
            error = (difference.square().mean() / self.expected.square().mean()).sqrt().item()
            if not error <= BOUND:
                return failed(op, self.shape, path, RuntimeError(f"relative RMS error {error:.1e}"))
            ms = graph_ms(lambda: way(next(turns)), repeats=max(8, len(self.copies)), replays=9)
        except Exception as error:
            return failed(op, self.shape, path, error)
        # The work is short: microseconds as well, unrounded for the ranking.
        return row(op, self.shape, f"{path} {ms * 1e3:.2f} us", ms, self.work) | {"ms": ms}


def copies_of(name: str) -> list[Tensor]:
    """Copies of a layer's weight, enough to leave L2 cold."""
    shape = LAYERS[name].num_outputs, LAYERS[name].num_inputs
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
    return [weight, *(weight.clone() for _ in range(math.ceil(COLD_BYTES / weight.nbytes) - 1))]


def rows() -> Iterator[Row]:
    """Every layer and number of tokens, every way."""
    for name in LAYERS:
        copies = copies_of(name)
        for num_tokens in TOKENS:
            case = Case(name, num_tokens, copies)
            ways: dict[str, Callable[[Tensor], Tensor]] = {"fused": case.fused}
            ways["fused, in turn"] = partial(case.fused, overlaps=False)
            if case.layer.kind != "plain":
                ways["apart"] = case.apart
            ways["in parts"] = case.in_parts
            with torch.no_grad():
                yield from (case.measure(path, way) for path, way in ways.items())


def cuts(layer: Layer) -> list[SmallLinearTiles]:
    """Tiles worth trying: threads along the inputs, 8 to 128 registers of W in flight, programs for every SM."""
    kept = []
    for block_n, block_k, num_warps, depth in product(
        (2, 4, 8, 16, 32), (256, 512, 1024, 2048), (1, 2, 4, 8), (1, 2, 3, 4)
    ):
        registers = depth * block_n * block_k // (2 * 32 * num_warps)
        steps = -(-layer.num_inputs // block_k)
        wasted = -(-steps // depth) * depth * block_k / layer.num_inputs - 1
        if (
            block_k >= 256 * num_warps
            and 8 <= registers <= 128
            and layer.num_outputs / block_n >= 120
            and wasted < 0.13
        ):
            kept.append(SmallLinearTiles(block_n, block_k, num_warps, depth))
    return kept


def _compile(name: str, num_tokens: int, chosen: list[SmallLinearTiles]) -> None:
    """Fill Triton's cache on disk, in a separate process. A launch compiles; few outputs suffice."""
    copies = [torch.zeros(64, LAYERS[name].num_inputs, device="cuda", dtype=torch.bfloat16)]
    case = Case(name, num_tokens, copies)
    for tiles in chosen:
        try:
            case.fused(copies[0], tiles)
            if num_tokens > 1 and case.layer.kind != "plain":
                case.apart(copies[0], tiles)
        except Exception as error:  # said when it is measured
            print(f"{name} {tiles}: {type(error).__name__}")


def compile_all(tasks: list[tuple[str, int, list[SmallLinearTiles]]]) -> None:
    """Compile all tiles of every task, a few per process at a time."""
    workers = max(1, (os.cpu_count() or 2) - 2)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [
            pool.submit(_compile, name, num_tokens, chosen[i : i + 4])
            for name, num_tokens, chosen in tasks
            for i in range(0, len(chosen), 4)
        ]
        for future in waiting:
            future.result()


NUM_FINALISTS = 12
TUNED = [name for name in LAYERS if not name.endswith("head")]


def tune() -> Iterator[Row]:
    """All tiles with one token, the best of them with more tokens, then the winners, with a * before their name."""
    compile_all([(name, 1, cuts(LAYERS[name])) for name in TUNED])
    finalists: dict[str, list[SmallLinearTiles]] = {}
    times: dict[tuple[str, int, SmallLinearTiles], Row] = {}
    for name in TUNED:
        copies = copies_of(name)
        case = Case(name, 1, copies)
        for tiles in cuts(LAYERS[name]):
            times[name, 1, tiles] = case.measure(_name(tiles), partial(case.fused, tiles=tiles))
            yield times[name, 1, tiles]
        ranked = sorted(cuts(LAYERS[name]), key=lambda tiles: times[name, 1, tiles]["ms"] or math.inf)
        # Also the best of each number of outputs: with more tokens other sizes win.
        best_of_size = {tiles.block_n: tiles for tiles in reversed(ranked)}.values()
        finalists[name] = list(dict.fromkeys([*ranked[:NUM_FINALISTS], *best_of_size]))
    compile_all([(name, num_tokens, finalists[name]) for name in TUNED for num_tokens in TOKENS[1:]])
    for name in TUNED:
        copies = copies_of(name)
        for num_tokens in TOKENS[1:]:
            case = Case(name, num_tokens, copies)
            for tiles in finalists[name]:
                times[name, num_tokens, tiles] = case.measure(_name(tiles), partial(case.fused, tiles=tiles))
                yield times[name, num_tokens, tiles]
                if case.layer.kind != "plain":
                    yield case.measure(f"apart {_name(tiles)}", partial(case.apart, tiles=tiles))
    for name in TUNED:
        for num_tokens in TOKENS:
            yield _marked(
                min((times[name, num_tokens, tiles] for tiles in finalists[name]), key=lambda r: r["ms"] or math.inf)
            )
        # Best over all: the least product of times, a ratio counting the same at every number of tokens.
        overall = min(
            finalists[name], key=lambda tiles: math.prod(times[name, t, tiles]["ms"] or math.inf for t in TOKENS)
        )
        print(f"{name}: best over {TOKENS} tokens {overall}", flush=True)


def _name(tiles: SmallLinearTiles) -> str:
    return f"n{tiles.block_n} k{tiles.block_k} w{tiles.num_warps} d{tiles.depth}"


def _marked(result: Row) -> Row:
    return result | {"path": f"* {result['path']}"}


if __name__ == "__main__":
    main(rows, tune)

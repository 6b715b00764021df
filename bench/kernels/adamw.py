"""A step of AdamW over all tensors of the 3B shape, compared with torch's fused step; `--tune` sweeps launch settings.

Ours has bf16 gradients and parameters with fp32 masters, 28 bytes a parameter (16 with 8-bit moments), torch's has fp32
only, 28 bytes. The host rows are the time Python needs to queue a step, per tensor.
"""

import time
from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

from bench.kernels.timing import Row, Work, gpu_ms, main, row, sweep
from saccade.kernels import adamw as module
from saccade.kernels import launch
from saccade.kernels.adamw import Settings, adamw, adamw8bit, zero_moment
from saccade.model.initialize import named_size
from saccade.model.vlm import VLM

SETTINGS = Settings(lr=1e-5, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
BYTES = {32: 28, 8: 16}
"""Read and written per parameter, by the bits of a moment."""


def _shapes() -> list[tuple[int, ...]]:
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in VLM(named_size("3b")).parameters()]


def _step(shapes: list[tuple[int, ...]], *, bits: int) -> Callable[[], None]:
    """Our step with moments of `bits` bits on fresh state."""
    masters = [torch.randn(shape, device="cuda") * 0.02 for shape in shapes]
    gradients = [torch.randn_like(x, dtype=torch.bfloat16) * 1e-3 for x in masters]
    parameters = [x.to(torch.bfloat16) for x in masters]
    first, second = (
        [torch.zeros_like(x) if bits == 32 else zero_moment(x, kind) for x in masters]
        for kind in (torch.int8, torch.uint8)
    )
    function = adamw if bits == 32 else adamw8bit

    def run() -> None:
        with launch.forced("triton"):
            function(gradients, masters, first, second, parameters, SETTINGS)  # type: ignore[arg-type]

    return run


def _torch_step(shapes: list[tuple[int, ...]]) -> Callable[[], None]:
    lists: list[list[Tensor]] = [[torch.randn(shape, device="cuda") * 1e-3 for shape in shapes] for _ in range(2)]
    lists += [[torch.zeros(shape, device="cuda") for shape in shapes] for _ in range(2)]
    steps = [torch.full((), 10.0, device="cuda") for _ in shapes]

    def run() -> None:
        torch._fused_adamw_(
            *lists, [], steps, amsgrad=False, maximize=False, lr=SETTINGS.lr, beta1=SETTINGS.beta1,
            beta2=SETTINGS.beta2, eps=SETTINGS.eps, weight_decay=SETTINGS.weight_decay,
        )  # fmt: skip

    return run


def _host_row(path: str, run: Callable[[], None], num_tensors: int) -> Row:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(20):
        run()
    ms = (time.perf_counter() - begin) / 20 * 1e3
    return {
        "op": "adamw host",
        "shape": f"{num_tensors} tensors",
        "path": path,
        "ms": round(ms, 3),
        "rate": round(ms * 1e3 / num_tensors, 2),
        "unit": "us each",
        "share": 0.0,
    }


def rows() -> Iterator[Row]:
    """The whole model, then the time of the host with tiny tensors."""
    shapes = _shapes()
    size = sum(torch.Size(shape).numel() for shape in shapes)
    label = f"{len(shapes)} tensors, {size / 1e9:.2f}e9"
    tiny = [(16, 16)] * len(shapes)
    makers: dict[str, tuple[Callable[[list[tuple[int, ...]]], Callable[[], None]], int]] = {
        "triton": (lambda shapes: _step(shapes, bits=32), BYTES[32]),
        "triton, 8 bits": (lambda shapes: _step(shapes, bits=8), BYTES[8]),
        "torch fused": (_torch_step, 28),
    }
    for path, (make, bytes_each) in makers.items():
        yield row("adamw", label, path, gpu_ms(make(shapes)), Work(bytes_each * size))
        torch.cuda.empty_cache()
        yield _host_row(path, make(tiny), len(shapes))


def tune() -> Iterator[Row]:
    """Launch settings on a quarter of the model."""
    shapes = _shapes()[::4]
    size = sum(torch.Size(shape).numel() for shape in shapes)
    for bits, name, blocks, chunks in (
        (32, "adamw", (1024, 2048, 4096), (8192, 32768, 65536)),
        (8, "adamw8bit", (2, 4, 8), (32, 128, 256)),
    ):
        settings = [{name: module._Cut(*x)} for x in product(chunks, blocks, (4, 8))]
        run, work = _step(shapes, bits=bits), Work(BYTES[bits] * size)
        yield from sweep(name, f"{size / 1e9:.2f}e9", run, module._CONFIGS, settings, (), work, clock=gpu_ms)


if __name__ == "__main__":
    main(rows, tune)

"""Sweep the tiles of the attention kernels over the shapes of the anchors; print the best, keep all with --out.

Every setting is first compared with torch's packed FlashAttention on a small ragged batch, and left out if it fails or
disagrees. Compilation takes most of the time, so settings compile in parallel processes into Triton's cache before
anything is timed. `--kernels forward window` restricts the sweep; `--quick` drops the long tail of settings.

    python -m bench.kernels.tune_attention --out tune.json
"""

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.kernels.attention import CASES, Case
from bench.kernels.timing import gpu_ms
from saccade.kernels import _attention_tiled as tiled
from saccade.kernels import _attention_window as window
from saccade.kernels._attention_tiled import AttentionTiles
from saccade.kernels._attention_window import WindowTiles

TILED_CASES = ("text 16 x 1024", "text ragged 64..2048", "vision 16 x 2304, d80", "vision ragged 256..3072, d80")
WINDOW_CASES = ("windows 576 x 64, d80", "windows ragged 16..64, d80")
BOUND = 2e-2
CRASHED = "the compiler crashed"


class Job(NamedTuple):
    """One setting of one kernel for one head dim (by the name of the case whose heads it is compiled for)."""

    kernel: str
    head_dim: int
    tiles: Any


def settings(kernel: str, head_dim: int, quick: bool) -> list[Any]:
    """Settings worth trying, the best bets first: their accumulators about fit in registers when compiled for sm_90."""
    tma = {"tma": True}
    choices: dict[str, list[Any]] = {
        "window forward": [
            WindowTiles(*x) for x in ((1, 4, 1), (2, 4, 2), (4, 4, 2), (2, 4, 1), (4, 4, 3), (1, 8, 1), (4, 8, 2))
        ],
        "window backward": [
            WindowTiles(*x) for x in ((1, 4, 1), (1, 8, 1), (2, 4, 1), (2, 8, 1), (2, 8, 2), (4, 8, 2))
        ],
        "forward": [
            AttentionTiles(128, 64, 8, 3, overlap=True, **tma),
            AttentionTiles(128, 64, 8, 2, max_registers=128, **tma),
            AttentionTiles(128, 128, 8, 2, **tma),
            AttentionTiles(128, 64, 4, 2, **tma),
            AttentionTiles(128, 64, 8, 2, overlap=True, **tma),
            AttentionTiles(64, 64, 4, 3, **tma),
            AttentionTiles(128, 32, 8, 3, max_registers=128, **tma),
            AttentionTiles(128, 64, 8, 3, overlap=True),
            AttentionTiles(128, 128, 8, 2),
            AttentionTiles(128, 32, 8, 3, max_registers=128),
        ],
        "query_gradient": [
            AttentionTiles(128, 64, 8, 2, **tma),
            AttentionTiles(64, 64, 4, 2, **tma),
            AttentionTiles(128, 32, 8, 3, **tma),
            AttentionTiles(128, 64, 8, 3, **tma),
            AttentionTiles(128, 32, 8, 2, max_registers=128, **tma),
            AttentionTiles(128, 64, 8, 2),
            AttentionTiles(128, 32, 8, 3),
        ],
        "key_gradient": [
            AttentionTiles(64, 64, 4, 2),
            AttentionTiles(32, 64, 4, 3),
            AttentionTiles(64, 128, 8, 2),
            AttentionTiles(32, 128, 8, 3),
        ],
    }
    narrow: dict[str, list[Any]] = {  # what only small heads leave registers for
        "forward": [AttentionTiles(128, 64, 4, 2), AttentionTiles(128, 128, 8, 2, overlap=True, **tma)],
        "query_gradient": [AttentionTiles(128, 128, 8, 2, **tma), AttentionTiles(64, 64, 4, 2)],
        "key_gradient": [AttentionTiles(64, 128, 8, 3)],
    }
    wanted = choices[kernel] + (narrow.get(kernel, []) if head_dim <= 96 else [])
    return wanted[:4] if quick else wanted


def _use(job: Job) -> None:
    """Make the kernels run with this setting."""
    if job.kernel.startswith("window"):
        window.CONFIGS[job.kernel.removeprefix("window ")] = job.tiles
    else:
        width = next(width for width in (64, 96, 128, 256) if job.head_dim <= width)
        tiled.CONFIGS[job.kernel, width] = job.tiles


class Saved(NamedTuple):
    """The inputs of backward, computed once per case by the default settings."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens: torch.Tensor
    out: torch.Tensor
    d_out: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor


def prepare(case: Case) -> Saved:
    """Inputs of one case and the results of its forward pass."""
    q, k, v = case.inputs()
    cu_seqlens = case.call(q, k, v).cu_seqlens_q
    if max(case.lengths) <= 64:
        d_out = torch.randn_like(q)
        return Saved(q, k, v, cu_seqlens, d_out, d_out, d_out, d_out)
    out, lse = tiled.forward(q, k, v, cu_seqlens, cu_seqlens, case.causal, None)
    d_out = torch.randn_like(out)
    _, delta = tiled.query_gradient(q, k, v, out, d_out, lse, cu_seqlens, cu_seqlens, case.causal, None)
    return Saved(q, k, v, cu_seqlens, out, d_out, lse, delta)


def runner(kernel: str, case: Case, saved: Saved) -> Callable[[], Any]:
    """A function that runs one kernel of one case, with the current setting."""
    q, k, v, cu, out, d_out, lse, delta = saved
    mask = (cu, cu, case.causal, None)
    if kernel == "forward":
        return lambda: tiled.forward(q, k, v, *mask)
    if kernel == "query_gradient":
        return lambda: tiled.query_gradient(q, k, v, out, d_out, lse, *mask)
    if kernel == "key_gradient":
        return lambda: tiled.key_gradient(q, k, v, d_out, lse, delta, *mask)
    longest = max(case.lengths)
    if kernel == "window forward":
        return lambda: window.window_attention(q, k, v, cu, cu, longest, longest)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    result = window.window_attention(*leaves, cu, cu, longest, longest)
    return lambda: torch.autograd.grad(result, leaves, d_out, retain_graph=True)


SMALL = {
    name: CASES[name]._replace(lengths=(300, 129, 1, 577) if name in TILED_CASES else (64, 16, 48, 1, 33))
    for name in (*TILED_CASES, *WINDOW_CASES)
}


def _compile(job: Job, case_name: str) -> str | None:
    """In a worker, compile and run one setting on a small batch, into Triton's cache. Returns the error, if any."""
    case = SMALL[case_name]
    try:
        torch.manual_seed(0)
        saved = prepare(case)
        _use(job)
        runner(job.kernel, case, saved)()
        torch.cuda.synchronize()
    except Exception as error:  # a setting that does not compile or fit is a result here, whatever it raises
        return f"{type(error).__name__}: {str(error).splitlines()[0][:100]}" if str(error) else type(error).__name__
    return None


def is_right(kernel: str, case: Case) -> bool:
    """Whether the setting in use agrees with the reference on a small ragged batch."""
    from saccade.kernels.attention import attention_reference

    torch.manual_seed(0)
    q, k, v = case.inputs()
    cu, longest = case.call(q, k, v).cu_seqlens_q, max(case.lengths)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    expected = attention_reference(*leaves, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=case.causal)
    d_out = torch.randn_like(q)
    gradients = torch.autograd.grad(expected, leaves, d_out.float())
    ours = [x.detach().requires_grad_() for x in (q, k, v)]
    if kernel.startswith("window"):
        out = window.window_attention(*ours, cu, cu, longest, longest)
    else:
        out = tiled.tiled_attention(*ours, cu, cu, case.causal, None)
    actual = (out, *torch.autograd.grad(out, ours, d_out))
    errors = [(a - e).float().norm() / e.norm() for a, e in zip(actual, (expected, *gradients), strict=True)]
    return max(float(error) for error in errors) < BOUND


def compile_all(jobs: dict[Job, str], num_workers: int) -> dict[Job, str | None]:
    """Compile every job in parallel processes and return their errors. After a crash each job gets its own pool."""
    errors = _compile_in_pool(jobs, num_workers)
    for job, error in errors.items():
        if error == CRASHED:
            errors |= _compile_in_pool({job: jobs[job]}, 1)
    return errors


def _compile_in_pool(jobs: dict[Job, str], num_workers: int) -> dict[Job, str | None]:
    with ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {job: pool.submit(_compile, job, case_name) for job, case_name in jobs.items()}
        return {
            job: CRASHED if isinstance(future.exception(), BrokenProcessPool) else future.result()
            for job, future in futures.items()
        }


def main() -> None:
    """Compile, check, time, report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--kernels", nargs="+", default=["window", "forward", "query_gradient", "key_gradient"])
    parser.add_argument("--quick", action="store_true", help="only the first settings of each kernel")
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    options = parser.parse_args()
    kernels = [
        name
        for kernel in options.kernels
        for name in (("window forward", "window backward") if kernel == "window" else (kernel,))
    ]

    began = time.monotonic()
    jobs: dict[Job, str] = {}
    for kernel in kernels:
        for case_name in WINDOW_CASES[:1] if kernel.startswith("window") else (TILED_CASES[0], TILED_CASES[2]):
            head_dim = CASES[case_name].head_dim
            jobs |= {Job(kernel, head_dim, tiles): case_name for tiles in settings(kernel, head_dim, options.quick)}
    errors = compile_all(jobs, options.workers)
    print(f"{len(jobs)} settings compiled in {time.monotonic() - began:.0f} s", flush=True)

    results = []
    shipped = dict(tiled.CONFIGS), dict(window.CONFIGS)
    for case_name in (*WINDOW_CASES, *TILED_CASES):
        case = CASES[case_name]
        saved = prepare(case)
        for job in jobs:
            if job.head_dim != case.head_dim or job.kernel.startswith("window") != (case_name in WINDOW_CASES):
                continue
            result = {
                "kernel": job.kernel,
                "case": case_name,
                "tiles": job.tiles._asdict(),
                "ms": None,
                "error": errors[job],
            }
            if errors[job] is None:
                _use(job)
                try:
                    if not is_right(job.kernel, SMALL[case_name]):
                        result["error"] = "disagrees with the reference"
                    else:
                        result["ms"] = round(gpu_ms(runner(job.kernel, case, saved), budget_ms=20.0), 4)
                except Exception as error:  # as in _compile
                    result["error"] = f"{type(error).__name__}: {str(error)[:100]}"
                tiled.CONFIGS.update(shipped[0])
                window.CONFIGS.update(shipped[1])
            results.append(result)
        report(case_name, case, [result for result in results if result["case"] == case_name])
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}, indent=1))
    print(f"done in {time.monotonic() - began:.0f} s")


def report(case_name: str, case: Case, results: list[dict[str, Any]]) -> None:
    """The three best settings of each kernel for one case, and what failed."""
    share = {"forward": 1.0, "query_gradient": 1.5, "key_gradient": 2.0}  # relative to the FLOPs that forward executes
    for kernel in dict.fromkeys(result["kernel"] for result in results):
        timed = sorted((r for r in results if r["kernel"] == kernel and r["ms"] is not None), key=lambda r: r["ms"])
        print(f"{case_name}, {kernel}:", flush=True)
        for r in timed[:3]:
            rate = f"{share[kernel] * case.flops / r['ms'] / 1e9:7.0f} TFLOP/s executed" if kernel in share else ""
            print(f"    {r['ms']:8.4f} ms {rate}  {tuple(r['tiles'].values())}")
        for r in results:
            if r["kernel"] == kernel and r["error"]:
                print(f"    {r['error']}  {tuple(r['tiles'].values())}")


if __name__ == "__main__":
    main()

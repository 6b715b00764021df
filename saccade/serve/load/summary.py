"""Summarize what a load has measured, under the names that the benchmark tools of vLLM and SGLang print.

TTFT counts from sending the request; TPOT is the time after the first token divided by the number of the others; ITL is
the time between two chunks of one stream; E2EL is the time to the last byte.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from saccade.report.charts import curves_svg, svg_file
from saccade.serve.load.client import Outcome


@dataclass(frozen=True)
class Load:
    """One run: a number of clients, or a rate of arrivals for some seconds."""

    concurrency: int | None = None
    rate: float | None = None
    seconds: float | None = None

    def num_requests(self, default: int) -> int:
        """Return the number of requests of the run."""
        return default if self.rate is None or self.seconds is None else max(1, round(self.rate * self.seconds))


def summarize(outcomes: Sequence[Outcome], duration_s: float, load: Load) -> dict[str, Any]:
    """Return the numbers that the tools of vLLM and SGLang report, by their names."""
    good = [outcome for outcome in outcomes if outcome.is_success]
    num_input, num_output = sum(one.num_prompt_tokens for one in good), sum(one.num_output_tokens for one in good)
    events = sorted([(one.started_at, 1) for one in outcomes] + [(one.ended_at, -1) for one in outcomes])
    open_now, peak = 0, 0
    for _, change in events:
        open_now += change
        peak = max(peak, open_now)
    return {
        "max_concurrency": load.concurrency,
        "request_rate": "inf" if load.rate is None else load.rate,
        "duration": duration_s,
        "completed": len(good),
        "failed": len(outcomes) - len(good),
        "errors": dict(Counter(str(one.error) for one in outcomes if not one.is_success)),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_concurrent_requests": peak,
        **_times("ttft", [one.ttft_s for one in good]),
        **_times("tpot", [one.tpot_s for one in good if one.tpot_s is not None]),
        **_times("itl", [gap for one in good for gap in one.gaps_s]),
        **_times("e2el", [one.latency_s for one in good]),
    }


def _times(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ms = [1e3 * value for value in seconds] or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(ms),
        f"median_{name}_ms": statistics.median(ms),
        f"std_{name}_ms": statistics.pstdev(ms),
        f"p95_{name}_ms": float(np.percentile(ms, 95)),
        f"p99_{name}_ms": float(np.percentile(ms, 99)),
    }


_LATENCIES = (
    ("Time to First Token", "TTFT"),
    ("Time per Output Token (excl. 1st token)", "TPOT"),
    ("Inter-token Latency", "ITL"),
    ("End-to-end Latency", "E2EL"),
)


def result_block(result: dict[str, Any]) -> str:
    """Write the result as a block of text."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if result["max_concurrency"] is not None:
        rows.append(("Maximum request concurrency:", result["max_concurrency"]))
    if result["request_rate"] != "inf":
        rows.append(("Request rate configured (RPS):", float(result["request_rate"])))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(50, "="), *(_line(*row) for row in rows)]
    for title, name in _LATENCIES:
        lines.append(title.center(50, "-"))
        for label, field in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
            lines.append(_line(f"{label} {name} (ms):", float(result[f"{field}_{name.lower()}_ms"])))
    lines += [_line(f"Failed ({code}):", count) for code, count in result["errors"].items()]
    return "\n".join([*lines, "=" * 50])


def _line(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"


def plot_results(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw latency over the requests per second that were served, or that arrived."""
    is_open = all(result["request_rate"] != "inf" for result in results)
    rows = [
        (
            float(result["request_rate"] if is_open else result["request_throughput"]),
            {
                f"{name} {level}": result[f"{field}_{key}_ms"]
                for name, key in (("TTFT", "ttft"), ("gap", "itl"))
                for level, field in (("p50", "median"), ("p99", "p99"))
            },
        )
        for result in results
    ]
    plot_latency(rows, path, f"latency over requests per second {'sent' if is_open else 'served'}")


def plot_latency(rows: Sequence[tuple[float, Mapping[str, float]]], path: Path, title: str) -> None:
    """Draw milliseconds by name over a load as an SVG file, on a logarithmic scale."""
    rows = sorted(rows, key=lambda row: row[0])
    curves = {name: [(load, math.log10(max(ms[name], 1e-3))) for load, ms in rows] for name in rows[0][1]}
    svg = curves_svg(title, curves, show=lambda exponent: f"{10**exponent:.3g} ms", has_names=True)
    path.write_text(svg_file(svg))

"""A plan of layouts as text, as JSON, and as a page with the timeline of a micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from saccade.plan.layouts import BUBBLE, COMPUTE, UPDATE, WAITING, LayoutPlan, LayoutPlanner
from saccade.plan.prices import LINK_SHARE, LinkPrices
from saccade.plan.timeline import COMPUTE as COMPUTE_LANE
from saccade.plan.timeline import lane_of
from saccade.report.charts import Span, timeline_chart
from saccade.report.page import paragraph, table, write_page

_SHOWN = 8
_HEAD = ("layout", "recompute", "micro-batches", "GiB", "s/step", "tokens/s/GPU", "MFU", "exposed", "why it loses")


class LayoutReport:
    """The layouts of a job on a cluster, the fastest first."""

    def __init__(self, planner: LayoutPlanner, *, gpu_hour_price: float | None = None) -> None:
        self.planner, self._price = planner, gpu_hour_price
        self.plans = planner.plan()
        self._possible = [plan for plan in self.plans if plan.is_possible]

    @property
    def best(self) -> LayoutPlan | None:
        """The fastest layout; None: none is possible."""
        return self._possible[0] if self._possible else None

    # -------------------------------------------------------------- text

    def lines(self) -> Iterator[str]:
        """The plan as text."""
        yield self._title
        rows = [_HEAD, *(self._row(plan) for plan in self._shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            cells = [cell.ljust(width) if n in (0, 1, 8) else cell.rjust(width)
                     for n, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
            yield "  " + "  ".join(cells).rstrip()
        if len(self.plans) > len(self._shown):
            yield f"  and {len(self.plans) - len(self._shown)} more: --json"
        if self.best is not None:
            yield f"the best one, {self.best.step_s * 1e3:.0f} ms a step: {_parts(self.best)}"
            yield f"  {self._cost(self.best)}"
            for row in self._communication(self.best):
                yield "  " + "  ".join(row)
        yield f"assumptions: {self.assumptions}"

    @property
    def _title(self) -> str:
        job, cluster = self.planner.job, self.planner.cluster
        return (
            f"{cluster.num_gpus} x {cluster.gpu.name}, {cluster.network.name} between nodes of "
            f"{cluster.network.gpus_per_node}; {job.global_batch_size} packed sequences of {job.seq_len} tokens a "
            f"step, {self._mean_patches:.0f} patches on average"
        )

    @property
    def _mean_patches(self) -> float:
        sequences = self.planner.sequences
        return sum(one.num_patches for one in sequences) / len(sequences)

    @property
    def _shown(self) -> list[LayoutPlan]:
        """The fastest layouts, then those that are not possible, the largest first."""
        impossible = [plan for plan in self.plans if not plan.is_possible]
        return [*self._possible[:_SHOWN], *sorted(impossible, key=lambda plan: -plan.memory_gib)[:2]]

    def _row(self, plan: LayoutPlan) -> tuple[str, ...]:
        if not plan.is_possible:
            return (str(plan.dims), *("",) * 7, plan.reason)
        per_gpu = plan.tokens_per_s / self.planner.cluster.num_gpus
        return (
            str(plan.dims), "/".join(plan.extents), str(plan.micro_batches), f"{plan.memory_gib:.1f}",
            f"{plan.step_s:.3f}", f"{per_gpu:.0f}", f"{plan.mfu:.1%}", f"{plan.exposed_s / plan.step_s:.1%}",
            plan.reason or "the fastest",
        )  # fmt: skip

    def _cost(self, plan: LayoutPlan) -> str:
        hours = self.gpu_hours(plan)
        money = "" if self._price is None else f", {hours * self._price:,.0f} at {self._price:g} per GPU hour"
        return f"1e9 tokens take {hours:,.0f} GPU hours{money}"

    def gpu_hours(self, plan: LayoutPlan) -> float:
        """GPU hours of 1e9 tokens."""
        return 1e9 / plan.tokens_per_s * self.planner.cluster.num_gpus / 3600

    def _communication(self, plan: LayoutPlan) -> Iterator[tuple[str, ...]]:
        """Rows of the collectives of a micro-batch, by communicator and kind."""
        cluster = self.planner.cluster
        links = LinkPrices(cluster.gpu, cluster.network, plan.dims)
        kinds: dict[str, list[float]] = {}
        for one in plan.collectives:
            found = kinds.setdefault(f"{lane_of(one.axes, overlaps=one.overlaps)} {one.kind}", [0.0, 0.0, 0.0])
            for n, value in enumerate((1.0, one.num_bytes / 1e9, links.seconds(one) * 1e3)):
                found[n] += value
        for name, (count, gigabytes, alone_ms) in kinds.items():
            exposed_ms = plan.timeline.exposed.get(name, 0.0) * 1e3
            yield (f"{name:<22}", f"{count:4.0f} a micro-batch", f"{gigabytes:8.2f} GB", f"{alone_ms:7.1f} ms alone",
                   f"{exposed_ms:7.1f} ms exposed")  # fmt: skip

    @property
    def assumptions(self) -> str:
        """What is not measured."""
        gpu, network = self.planner.cluster.gpu, self.planner.cluster.network
        return (
            f"{gpu.link / 1e9:.0f} GB/s between GPUs of a node, {network.adapter / 1e9:.4g} GB/s per GPU between "
            f"nodes, {LINK_SHARE:.0%} of either reached, {network.latency_s * 1e6:.0f} us per hop between nodes; "
            "kernels reach the shares of peak and bandwidth measured on an H200; ragged data of the built-in mixture; "
            "a pipeline by the formula of 1F1B"
        )

    # -------------------------------------------------------------- JSON

    def record(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "title": self._title,
            "assumptions": self.assumptions,
            "layouts": [self._plan_record(plan) for plan in self.plans],
        }

    def _plan_record(self, plan: LayoutPlan) -> dict[str, Any]:
        found: dict[str, Any] = {
            "layout": {axis: size for axis, size in vars(plan.dims).items() if size > 1},
            "reason": plan.reason,
            "memory_gib": round(plan.memory_gib, 2),
        }
        if plan.is_possible:
            found |= {
                "recompute_vision": plan.extents[0],
                "recompute_language": plan.extents[1],
                "micro_batches": plan.micro_batches,
                "step_s": plan.step_s,
                "exposed_s": plan.exposed_s,
                "parts_s": plan.parts,
                "mfu": plan.mfu,
                "tokens_per_s": plan.tokens_per_s,
                "gpu_hours_per_1e9_tokens": self.gpu_hours(plan),
            }
        return found

    # -------------------------------------------------------------- page

    def write(self, path: Path) -> None:
        """Write the page."""
        sections = [paragraph(self._title), table(_HEAD, [self._row(plan) for plan in self.plans], numbers=range(2, 8))]
        if self.best is not None:
            sections[1:1] = [
                paragraph(f"{self.best.dims}: {self.best.step_s * 1e3:.0f} ms a step, {_parts(self.best)}"),
                paragraph(self._cost(self.best)),
                timeline_chart(f"A micro-batch of {self.best.dims}, in ms", _lanes(self.best)),
                table(("collective", "number", "bytes", "alone", "exposed"), self._communication(self.best)),
            ]
        write_page(path, "Layouts", [*sections, paragraph(f"Assumptions: {self.assumptions}", "soft")])


def _parts(plan: LayoutPlan) -> str:
    """The parts of a step, the largest first."""
    order = sorted(plan.parts.items(), key=lambda item: -item[1])
    names = {COMPUTE: COMPUTE, WAITING: "waiting for the slowest rank", BUBBLE: BUBBLE, UPDATE: UPDATE}
    return ", ".join(
        f"{names.get(name, f'exposed {name}')} {seconds / plan.step_s:.1%}" for name, seconds in order if seconds > 0.0
    )


def _lanes(plan: LayoutPlan) -> dict[str, Sequence[Span]]:
    lanes: dict[str, list[Span]] = {COMPUTE_LANE: []}
    for one in plan.timeline.intervals:
        span = Span(one.start * 1e3, one.end * 1e3, f"{one.name}: {(one.end - one.start) * 1e3:.2f} ms")
        lanes.setdefault(one.lane, []).append(span)
    return dict(lanes)

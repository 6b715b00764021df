"""What operations of a training step cost: kernels by rates measured on an H200, collectives by models of links.

Kernels. Products run at a share of the peak that is calibrated on one measured step (the 3B shape, uniform packed
sequences), and not faster than memory allows. Attention runs at measured rates by length of segment
(docs/log/2026-11-15.md). All others read and write their bytes at a share of the bandwidth. Other GPUs are assumed to
reach the same shares of their peaks.

Links. Nothing here was measured: there was one GPU. A collective among the GPUs of a node uses their links, one between
nodes a network adapter per GPU, both at a share of their bandwidth; each hop of a ring adds a latency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from saccade.errors import ConfigError
from saccade.parallel_dims import Axis, ParallelDims
from saccade.plan.gpus import Gpu
from saccade.train.recorded_step import Attention, Collective, Kernel, Operation, Product

PRODUCT_SHARE = 0.6846
"""Share of the peak that products reach: the one figure that is calibrated (tests/plan/test_step_time.py)."""
KERNEL_SHARE = 0.80
"""Share of the published bandwidth of other kernels: rope and SwiGLU 0.83 to 0.90, RMSNorm and AdamW 0.74."""
THIN_SHARE = 0.61
"""Share of the bandwidth of products that memory bounds: those of LoRA adapters, 0.50 with an addition, 0.75 to 0.84
without."""
GAP_S = 1.5e-6
"""Time between two kernels: 7.9 ms in a step of 5,239 of them."""
HOST_S = 12e-3
"""Time of a step in which the GPU waits for the host: inputs are copied, the norm is read, the update begins."""
UPDATE_BYTES = 28
"""Bytes that AdamW reads and writes per parameter: 29.7 ms for 3.76e9 parameters at 3.54 TB/s."""
UPDATE_SHARE = 0.74
"""Share of the bandwidth of that update."""


class Rates(NamedTuple):
    """Measured rates of attention for segments of a length, as shares of the peak of an H200."""

    length: float
    forward: float
    backward: float


def _rates(*rows: tuple[float, float, float]) -> list[Rates]:
    return [Rates(length, forward / 989, backward / 989) for length, forward, backward in rows]


_EQUAL_CAUSAL = _rates((1024, 453, 293), (4096, 505, 381), (16384, 554, 514))
_CAUSAL = _rates((512, 380, 213), (4096, 505, 301), (16384, 502, 339))
_EQUAL_IMAGES = _rates((2304, 388, 339))
_IMAGES = _rates((729, 239, 186), (1664, 341, 264), (2304, 352, 277))
"""TFLOP/s of the H200 (docs/log/2026-11-15.md, "Packed attention"); segments of one length use another kernel."""


@dataclass(frozen=True)
class Segments:
    """Segments that attend to themselves."""

    lengths: Sequence[int]
    is_causal: bool

    @property
    def pairs(self) -> float:
        """Pairs that attend to each other, the causal half counted once."""
        return sum(n * n for n in self.lengths) / (2 if self.is_causal else 1)

    @property
    def rates(self) -> Rates:
        """Rates for these lengths, interpolated by the length of the segments that the average pair is in."""
        squares = sum(n * n for n in self.lengths)
        mean = sum(n**3 for n in self.lengths) / squares if squares else 1.0
        is_equal = len(set(self.lengths)) == 1 and self.lengths[0] % 128 == 0
        table = (_EQUAL_CAUSAL if is_equal else _CAUSAL) if self.is_causal else _EQUAL_IMAGES if is_equal else _IMAGES
        return _interpolated(table, mean)


def _interpolated(table: Sequence[Rates], length: float) -> Rates:
    if length <= table[0].length or len(table) == 1:
        return table[0]
    for below, above in pairwise(table):
        if length <= above.length:
            weight = math.log(length / below.length) / math.log(above.length / below.length)
            return Rates(length, *(a + weight * (b - a) for a, b in zip(below[1:], above[1:], strict=True)))
    return table[-1]


@dataclass(frozen=True, kw_only=True)
class KernelPrices:
    """Seconds of a rank's kernels."""

    gpu: Gpu
    """The rank's GPU."""
    decoder: Segments
    """Conversations of the packed sequence."""
    tower: Segments
    """Images of the packed sequence."""
    num_context: int = 1
    """Ranks that divide the attention of the decoder."""
    tower_share: float = 1.0
    """The rank's share of the attention of the tower."""
    product_share: float = PRODUCT_SHARE
    """Share of the peak that products reach."""

    def seconds(self, operation: Operation) -> float:
        """Time of an operation; 0 for collectives."""
        peak, bandwidth = self.gpu.bf16, self.gpu.bandwidth
        assert peak is not None, "asked of a GPU by name"
        assert bandwidth is not None, "asked of a GPU by name"
        match operation:
            case Product():
                seconds = max(
                    operation.flops / (peak * self.product_share), operation.num_bytes / (bandwidth * THIN_SHARE)
                )
            case Kernel():
                seconds = operation.num_bytes / (bandwidth * KERNEL_SHARE)
            case Attention():
                seconds = self._attention(operation, peak)
            case _:
                return 0.0
        return seconds + GAP_S

    def _attention(self, operation: Attention, peak: float) -> float:
        is_tower = " of vision." in operation.phase
        segments, share = (self.tower, self.tower_share) if is_tower else (self.decoder, 1 / self.num_context)
        flops = 4 * segments.pairs * share * operation.num_heads * operation.head_dim
        rates = segments.rates
        return 2.5 * flops / (peak * rates.backward) if operation.is_backward else flops / (peak * rates.forward)

    def update_seconds(self, num_parameters: float) -> float:
        """Time of AdamW for the parameters of a rank."""
        assert self.gpu.bandwidth is not None, "asked of a GPU by name"
        return num_parameters * UPDATE_BYTES / (self.gpu.bandwidth * UPDATE_SHARE)


# ------------------------------------------------------------------ links


@dataclass(frozen=True, kw_only=True)
class Network:
    """Links between nodes. Assumptions: none was measured."""

    name: str
    """Name for `--network`."""
    adapter: float
    """Bytes per second and direction of a node, per GPU."""
    latency_s: float
    """Time of a hop between nodes."""
    gpus_per_node: int = 8
    """GPUs that are connected by links of their own."""


NETWORKS = (
    Network(name="ib-ndr", adapter=50e9, latency_s=5e-6),
    Network(name="ib-hdr", adapter=25e9, latency_s=5e-6),
    Network(name="roce-400", adapter=50e9, latency_s=10e-6),
    Network(name="efa", adapter=50e9, latency_s=20e-6),
    Network(name="ethernet-100", adapter=100e9 / 8 / 8, latency_s=30e-6),
    Network(name="ethernet-25", adapter=25e9 / 8 / 8, latency_s=30e-6),
)
"""400 or 200 Gbit/s per GPU; ethernet: 100 or 25 Gbit/s for the eight GPUs of a node together."""
LINK_SHARE = 0.7
"""Share of a link's bandwidth that a large collective reaches. Assumed, as for serving (`throughput.py`)."""
NODE_HOP_S = 2e-6
"""Time of a hop within a node. Assumed."""
START_S = 10e-6
"""Time of a collective besides its hops. Assumed."""


def network_named(name: str, gpus_per_node: int = 8) -> Network:
    """A network by its name, or by the Gbit/s that each GPU has."""
    known = {network.name: network for network in NETWORKS}
    if name.lower() in known:
        return replace(known[name.lower()], gpus_per_node=gpus_per_node)
    try:
        gigabits = float(name)
    except ValueError:
        gigabits = math.nan
    if not 0.0 < gigabits < math.inf:
        raise ConfigError(
            f"unknown network {name!r}. Known: {', '.join(known)}; or give the Gbit/s of each GPU, such as 400"
        )
    return Network(
        name=f"{gigabits:g} Gbit/s per GPU", adapter=gigabits * 1e9 / 8, latency_s=1e-5, gpus_per_node=gpus_per_node
    )


@dataclass(frozen=True)
class LinkPrices:
    """Seconds of collectives in a layout."""

    gpu: Gpu
    network: Network
    dims: ParallelDims

    def seconds(self, collective: Collective) -> float:
        """Time of a collective alone.

        Every rank receives (n - 1) / n of the buffer, twice for an all-reduce. Between nodes, what a node receives
        arrives through the adapters of its ranks of the group.
        """
        num_ranks, per_node = self.group(collective.axes)
        if num_ranks == 1:
            return 0.0
        rounds, nodes = 2 if collective.kind == "all-reduce" else 1, num_ranks // per_node
        num_bytes = rounds * collective.num_bytes
        inside = num_bytes * (num_ranks - 1) / num_ranks / (self.gpu.link * LINK_SHARE)
        between = num_bytes * (nodes - 1) / nodes / (per_node * self.network.adapter * LINK_SHARE)
        hops = (per_node - 1) * NODE_HOP_S + (nodes - 1) * self.network.latency_s
        if collective.kind == "all-to-all":
            hops = max(NODE_HOP_S, self.network.latency_s if nodes > 1 else 0.0)
        else:
            # Large groups use trees: hops grow with the logarithm of the number of nodes.
            hops = min(hops, (per_node - 1) * NODE_HOP_S + 2 * math.log2(nodes) * self.network.latency_s)
        return START_S + rounds * hops + (max(inside, between) if per_node > 1 else between)

    def group(self, axes: Sequence[Axis]) -> tuple[int, int]:
        """(ranks of a group of these axes, those of them on one node); neighbouring ranks are on one node."""
        return _group(self.dims, tuple(axes), self.network.gpus_per_node)

    def peer_seconds(self, num_bytes: float, axis: Axis) -> float:
        """Time to send bytes to the next rank on an axis."""
        _, per_node = self.group((axis,))
        bandwidth = self.gpu.link if per_node > 1 else self.network.adapter
        return START_S + num_bytes / (bandwidth * LINK_SHARE)


@cache
def _group(dims: ParallelDims, axes: tuple[Axis, ...], per_node: int) -> tuple[int, int]:
    ranks = next(ranks for ranks in dims.groups(*axes) if 0 in ranks)
    return len(ranks), sum(rank < per_node for rank in ranks)

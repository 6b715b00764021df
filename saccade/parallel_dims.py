"""The layout of a training run: how many ranks each dimension of parallelism has, and which ranks work together.

    pipeline   layers of the model are divided over ranks
    replicate  copies of the model; gradients are averaged over them (DDP; between the shards of HSDP)
    shard      parameters, gradients and optimizer state are divided (FSDP)
    context    tokens of a packed sequence are divided
    tensor     matrices of every layer are divided

Ranks are numbered with `pipeline` as the slowest axis and `tensor` as the fastest one, so that the ranks that
communicate most are neighbours, on one node. Everything that depends on the layout asks for a set of axes: ranks that
differ in these axes only are a group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from saccade.errors import ConfigError

Axis = Literal["pipeline", "replicate", "shard", "context", "tensor"]
Size = int | Literal["rest"]
"""Number of ranks of an axis; "rest" is what the other axes leave."""

AXES: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
DATA: tuple[Axis, ...] = ("replicate", "shard")
"""Ranks that differ in these axes read different packed sequences."""
LOSS: tuple[Axis, ...] = ("replicate", "shard", "context")
"""Ranks that differ in these axes compute the loss of different tokens; gradients are summed over them."""
REPLICAS: tuple[Axis, ...] = ("replicate",)
"""Ranks that hold the same shards, if parameters are sharded."""
SHARDS: tuple[Axis, ...] = ("shard", "context")
"""Ranks over which FSDP divides parameters: context ranks hold the same weights, so they can share them out too."""
PIECES: tuple[Axis, ...] = ("pipeline", "shard", "context", "tensor")
"""Ranks that together hold a model; the gradient norm is summed over them."""
VISION: tuple[Axis, ...] = ("replicate", "shard", "context", "tensor")
"""Ranks that may encode each other's images."""


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Number of ranks of every axis. One rank by default."""

    pipeline: int = 1
    """Stages of layers."""
    replicate: int = 1
    """Copies of the model."""
    shard: int = 1
    """Ranks that divide the parameters of a copy."""
    context: int = 1
    """Ranks that divide a packed sequence."""
    tensor: int = 1
    """Ranks that divide every matrix."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.count(*AXES)

    def count(self, *axes: Axis) -> int:
        """Number of ranks in a group of these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> dict[Axis, int]:
        """Return the coordinate of a rank on every axis."""
        found: dict[Axis, int] = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def index(self, rank: int, *axes: Axis) -> int:
        """Number of a rank among those of its group, counted from 0."""
        at, number = self.coordinates(rank), 0
        for axis in AXES:
            if axis in axes:
                number = number * getattr(self, axis) + at[axis]
        return number

    def groups(self, *axes: Axis) -> list[list[int]]:
        """All groups of these axes, each as its ranks in the order of `index`."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            at = self.coordinates(rank)
            found.setdefault(tuple(at[axis] for axis in AXES if axis not in axes), []).append(rank)
        return list(found.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis in AXES if (size := getattr(self, axis)) > 1) or "1 rank"


def resolve_dims(sizes: Mapping[Axis, Size], num_ranks: int) -> ParallelDims:
    """The layout of these sizes on `num_ranks` ranks; an impossible one is refused with the nearest possible one."""
    rest = [axis for axis, size in sizes.items() if size == "rest"]
    if len(rest) > 1:
        raise ConfigError(f"parallel.{' and parallel.'.join(rest)} are both 'rest'. Give all but one a number")
    fixed = {axis: int(size) for axis, size in sizes.items() if size != "rest"}
    if bad := [axis for axis, size in fixed.items() if size < 1]:
        raise ConfigError(f"parallel.{bad[0]} is {fixed[bad[0]]}. Give 1 or more, or 'rest'")
    num_fixed = math.prod(fixed.values())
    if rest and num_ranks % num_fixed == 0:
        fixed[rest[0]] = num_ranks // num_fixed
    elif rest or num_fixed != num_ranks:
        wanted = " x ".join(f"{axis} {sizes[axis]}" for axis in AXES if sizes.get(axis, 1) != 1) or "1 rank"
        needed = f"a multiple of {num_fixed} ranks" if rest else f"{num_fixed} rank{'s' if num_fixed > 1 else ''}"
        nearest = _nearest(sizes, num_ranks)
        settings = ", ".join(f"parallel.{axis} = {getattr(nearest, axis)}" for axis in AXES if _is_set(axis, nearest))
        raise ConfigError(
            f"the layout {wanted} takes {needed}, and there are {num_ranks}. "
            f"The nearest layout that is possible: {settings}"
        )
    return ParallelDims(**fixed)


def _is_set(axis: Axis, dims: ParallelDims) -> bool:
    """Whether an axis is named in a suggested layout."""
    return getattr(dims, axis) > 1 or (axis == "shard" and dims.size == 1)


def _nearest(sizes: Mapping[Axis, Size], num_ranks: int) -> ParallelDims:
    """The layout of exactly `num_ranks` ranks that changes the given sizes least, by ratio; "rest" may be anything."""
    free = [axis for axis in AXES if sizes.get(axis, 1) != 1 or axis == "shard"]

    def cost(dims: ParallelDims) -> float:
        given = ((getattr(dims, axis), sizes.get(axis, 1)) for axis in free)
        return sum(abs(math.log(size / wanted)) for size, wanted in given if wanted != "rest")

    divisors = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    candidates = (
        ParallelDims(**dict(zip(free, chosen, strict=True)))
        for chosen in itertools.product(divisors, repeat=len(free))
        if math.prod(chosen) == num_ranks
    )
    return min(candidates, key=cost)

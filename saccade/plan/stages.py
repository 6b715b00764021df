"""The operations of a step cut into the stages of a pipeline: layers as in a run, but by time instead of FLOPs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from saccade.train.pipeline_schedule import split_layers
from saccade.train.recorded_step import Operation

_FIRST, _LAST = "the first stage", "the last stage"


def stage_operations(
    operations: Sequence[Operation], num_stages: int, seconds: Callable[[Operation], float]
) -> list[list[Operation]]:
    """The operations of every stage. Embedding and vision tower are in the first one, the head is in the last one."""
    if num_stages == 1:
        return [list(operations)]
    cost: dict[str, float] = {}
    for one in operations:
        unit = _unit(one.phase)
        cost[unit] = cost.get(unit, 0.0) + seconds(one)
    layers = sorted((unit for unit in cost if unit.isdigit()), key=int)
    of_ends = cost.get(_FIRST, 0.0), cost.get(_LAST, 0.0)
    bounds = split_layers(of_ends[0], [cost[layer] for layer in layers], of_ends[1], num_stages)
    number = {_FIRST: 0, _LAST: num_stages - 1}
    for stage, (start, stop) in enumerate(pairwise(bounds)):
        number |= dict.fromkeys(layers[start:stop], stage)
    stages: list[list[Operation]] = [[] for _ in range(num_stages)]
    for one in operations:
        stages[number[_unit(one.phase)]].append(one)
    return stages


def _unit(phase: str) -> str:
    """The decoder layer of a phase, or the end of the model that it belongs to."""
    _, _, layer = phase.partition(" of language.layers.")
    return layer or (_LAST if phase == "the loss" else _FIRST)

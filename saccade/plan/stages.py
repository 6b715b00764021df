"""The operations of a step cut into the stages of a pipeline, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    units = [_FIRST, *layers, _LAST]
    stage_of = _cut([cost.get(unit, 0.0) for unit in units], num_stages)
    stages: list[list[Operation]] = [[] for _ in range(num_stages)]
    number = dict(zip(units, stage_of, strict=True))
    for one in operations:
        stages[number[_unit(one.phase)]].append(one)
    return stages


def _unit(phase: str) -> str:
    """The decoder layer of a phase, or the end of the model that it belongs to."""
    _, _, layer = phase.partition(" of language.layers.")
    return layer or (_LAST if phase == "the loss" else _FIRST)


def _cut(costs: Sequence[float], num_stages: int) -> list[int]:
    """The stage of every item, ascending: the least limit on a stage's cost with which they are enough."""
    low, high = max(costs), sum(costs)
    for _ in range(40):
        limit = (low + high) / 2
        low, high = (low, limit) if _filled(costs, limit)[-1] < num_stages else (limit, high)
    return _filled(costs, high)


def _filled(costs: Sequence[float], limit: float) -> list[int]:
    stages, stage, used = [], 0, 0.0
    for cost in costs:
        if used and used + cost > limit:
            stage, used = stage + 1, 0.0
        used += cost
        stages.append(stage)
    return stages

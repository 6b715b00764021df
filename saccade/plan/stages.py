"""The operations of a step cut into the stages of a pipeline, as a run cuts its layers."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.train.pipeline_stages import PipelineStages
from saccade.train.recorded_step import Operation


def stage_operations(operations: Sequence[Operation], stages: PipelineStages) -> list[list[Operation]]:
    """The operations of every stage. Embedding and vision tower are in the first one, the head is in the last one."""
    found: list[list[Operation]] = [[] for _ in range(stages.last + 1)]
    for one in operations:
        found[stages.stage_of_phase(one.phase)].append(one)
    return found

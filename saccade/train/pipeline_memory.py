"""What a rank of a pipeline holds: phases of a step of the whole model, in the order of the rank's passes.

A forward pass holds the rows that it was given and what its layers save until the backward pass of the same
micro-batch; as many micro-batches are in flight as the schedule of the rank says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from saccade.model.live_bytes import Bytes, Phase, Phases, plus
from saccade.train.pipeline_stages import PipelineStages

ROWS = "activations of the decoder: rows between stages"
_BUFFERS = 2
"""Rows that are being sent, or received for the next pass."""


def rank_phases(step: Phases, stages: PipelineStages, rank: int, num_micro_batches: int, rows: Sequence[int]) -> Phases:
    """The phases of a rank's step, given those of one micro-batch on the whole model.

    `rows`: bytes that each stage is given. Passes that repeat earlier ones are left out.
    """
    own = [chunk * stages.num_ranks + rank for chunk in range(stages.num_chunks)]
    forward = [_of_stage(step, stages, stage, is_forward=True) for stage in own]
    backward = [_of_stage(step, stages, stage, is_forward=False) for stage in own]
    buffers = _BUFFERS * max(rows[stage] for stage in (*own, own[-1] + 1) if stage < len(rows))
    found = [Phase("messages", change={ROWS: buffers}, peak={ROWS: buffers})]
    in_flight: dict[tuple[int, int], Bytes] = {}
    deferred: dict[tuple[int, int], Bytes] = {}
    passes = stages.schedule(num_micro_batches).passes[rank]
    first_backward = next(number for number, one in enumerate(passes) if not one.is_forward)
    for one in passes[: first_backward + 4 * stages.num_ranks * stages.num_chunks]:
        key = one.chunk, one.micro_batch
        if one.is_of_weights:
            ran = [_freed(deferred.pop(key))]
        elif one.is_forward:
            given = {ROWS: rows[own[one.chunk]]}
            ran = [Phase("rows received", change=given, peak=given), *forward[one.chunk]]
            in_flight[key] = _change(ran)
        else:
            ran = backward[one.chunk]
            if num_micro_batches > 1:  # gradients are added to those of earlier micro-batches
                ran = [*ran, _freed(plus(in_flight[key], _change(ran)))]
            held = in_flight.pop(key)
            if stages.defers_weights:  # operands of the gradients of weights, about what the forward pass saved
                deferred[key] = held
                ran = [*ran, Phase("gradients deferred", change=held, peak=held)]
        found += ran
    found += [_freed(held) for held in (*in_flight.values(), *deferred.values())]
    return [*found, *(phase for phase in step if phase.name == "the update")]


def _of_stage(step: Phases, stages: PipelineStages, stage: int, *, is_forward: bool) -> Phases:
    """The phases of a stage's forward or backward pass; the last stage computes its loss in backward."""
    found = []
    for phase in step:
        is_first = phase.name == "the start" or phase.name.startswith("forward of")
        if phase.name != "the update" and is_first == is_forward and stages.stage_of_phase(phase.name) == stage:
            found.append(replace(phase, change=_temporary(phase.change), peak=_temporary(phase.peak)))
    return found


def _temporary(held: Bytes) -> Bytes:
    return {kind: size for kind, size in held.items() if kind != "frozen models"}


def _change(phases: Phases) -> Bytes:
    total: Bytes = {}
    for phase in phases:
        total = plus(total, phase.change)
    return total


def _freed(held: Bytes) -> Phase:
    change = {kind: -size for kind, size in held.items()}
    return Phase("rows freed", change=change, peak={})

"""Commands of the leader to the followers, as plain data that msgpack packs.

A command is (name, number, arguments). A follower reports that it has finished a command with a number; commands
without one (0) are not reported, and must not fail.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from saccade.engine.core.step import Chunk, ImageFeatures, ImageToEncode, SlotStart, StepPlan

_chunk = partial(tuple.__new__, Chunk)


def plan_to_plain(plan: StepPlan) -> tuple[Any, ...]:
    """What a follower needs of a plan: chunks, and requests that get a slot."""
    return plan.number, plan.chunks, plan.started


def plan_from_plain(fields: tuple[Any, ...]) -> StepPlan:
    """Inverse of `plan_to_plain`, after packing and unpacking."""
    number, chunks, started = fields
    return StepPlan(
        number=number,
        chunks=tuple([_plain_chunk(chunk) for chunk in chunks]),
        started=tuple([SlotStart(*start) for start in started]),
    )


def _plain_chunk(fields: tuple[Any, ...]) -> Chunk:
    chunk: Chunk = _chunk(fields)
    return chunk._replace(images=tuple([ImageFeatures(*one) for one in chunk.images])) if chunk.images else chunk


def images_from_plain(images: tuple[tuple[Any, ...], ...]) -> list[ImageToEncode]:
    """Images of an encoder pass, after packing and unpacking."""
    return [ImageToEncode(*image) for image in images]

"""Checks of the messages of workers, which decode untrusted files: a file may take a worker over."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, NamedTuple

from saccade.engine.frontend.preprocessing.config import MAX_TOKENS, ProcessorMetadata
from saccade.engine.frontend.preprocessing.prompt_processor import is_possible
from saccade.engine.media import ImageTask
from saccade.errors import ImageError
from saccade.processor.families import VisionRules
from saccade.processor.image import MediaLimits, check_size
from saccade.processor.parts import Part
from saccade.processor.patches import Grid
from saccade.workers.pool import WorkerLostError

_MAX_TEXT_TOKENS = 64
"""Maximum tokens of a text between the features of a video."""
_MAX_SECONDS = 1e6
"""Maximum of a duration that a worker reports."""


def check_count(value: object, maximum: int) -> int:
    """A number of a worker's message. Raises `WorkerLostError` if it is none, or too large."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise WorkerLostError("it sent something else than a count")
    return value


def check_seconds(value: object) -> float:
    """A duration of a worker's message. Raises `WorkerLostError` if it is none."""
    if not isinstance(value, float) or not 0 <= value <= _MAX_SECONDS:
        raise WorkerLostError("it sent something else than a duration")
    return value


class ImageChecks(NamedTuple):
    """Checks of the results of image workers."""

    rules: VisionRules
    limits: MediaLimits
    metadata: Future[ProcessorMetadata]
    allows_whole: bool
    """Whether images may be sent as pixels."""
    measures_only: bool
    """Whether no patches are sent."""

    def parts(self, message: dict[str, Any], task: ImageTask) -> tuple[Part, ...]:
        """The tokens of a task's result. Raises `WorkerLostError` unless the task can have it."""
        found, texts = message.get("grid"), message.get("texts")
        if not isinstance(found, list) or len(found) != 3:
            raise WorkerLostError("it sent no grid")
        first, second, third = (check_count(number, MAX_TOKENS) for number in found)
        grid = first, second, third
        if not is_possible(grid, task, self.rules, self.limits):
            raise WorkerLostError(f"it sent the grid {found}, which no such {task.kind} has")
        if not isinstance(texts, list) or len(texts) != self.rules.num_texts(task.kind, grid):
            raise WorkerLostError(f"it sent other texts than a {task.kind} of grid {found} has")
        return self.rules.parts(task.kind, grid, task.fps, [self._text(text) for text in texts])

    def whole_shape(self, size: object, grid: Grid, task: ImageTask) -> tuple[int, int, int]:
        """The shape of an image that is sent as pixels. Raises `WorkerLostError` unless the task can have it."""
        if not isinstance(size, list) or len(size) != 2:
            raise WorkerLostError("it sent something else than the size of an image")
        height, width = (check_count(side, self.limits.max_side) for side in size)
        try:
            check_size((width, height), self.limits)
        except ImageError as error:
            raise WorkerLostError(f"it sent an image of {width}x{height} pixels") from error
        is_allowed = task.kind == "image" and self.allows_whole and self.rules.can_patchify_on_device(height, width)
        if not is_allowed:
            raise WorkerLostError(f"it sent a {task.kind} of {width}x{height} pixels as it is")
        if self.rules.image_grid(height, width, task.num_images) != grid:
            raise WorkerLostError(f"it sent the grid {list(grid)}, which no image of {width}x{height} pixels has")
        return height, width, 3

    def _text(self, token_ids: object) -> list[int]:
        """Token ids of a text: few, and none of them a control token."""
        metadata = self.metadata.result()
        if not isinstance(token_ids, list) or len(token_ids) > _MAX_TEXT_TOKENS:
            raise WorkerLostError("it sent something else than a text")
        ids = [check_count(token_id, metadata.vocab_size - 1) for token_id in token_ids]
        if not set(metadata.control_ids).isdisjoint(ids):
            raise WorkerLostError("it sent a control token as text")
        return ids

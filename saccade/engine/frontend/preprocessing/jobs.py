"""Jobs of the worker processes: the data that a worker gets, and how its result is read."""

from __future__ import annotations

import contextlib
import json
import mmap
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from saccade.engine.frontend.preprocessing.checks import ImageChecks, check_count, check_seconds
from saccade.engine.frontend.preprocessing.config import MAX_TOKENS, ProcessorMetadata
from saccade.engine.frontend.preprocessing.prompt_processor import Patchified
from saccade.engine.media import ImageTask
from saccade.errors import ImageError, RequestError
from saccade.processor.parts import Visual, feature_spans
from saccade.workers.messages import send
from saccade.workers.pool import Job, Worker, WorkerLostError
from saccade.workers.shared_memory import SharedMemory

_KEPT_BYTES = 32 * 2**20
"""Larger inboxes and outboxes are freed after use; smaller ones are kept, since fresh memory is slow."""
_FREE_BYTES = 4 * 2**20
"""Free memory that is ready for the next patches. Larger patches are partly written to fresh memory."""

_Number = TypeVar("_Number", np.int64, np.uint8)


class Mailbox:
    """Memory shared with one worker: an inbox for its requests, an outbox for its results."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        """Create one, or open one in the worker."""
        self.inbox, self.outbox = (SharedMemory(), SharedMemory()) if fds is None else map(SharedMemory, fds)

    @property
    def fds(self) -> tuple[int, int]:
        """File descriptors that are passed to the worker."""
        return self.inbox.fd, self.outbox.fd

    def read_outbox(self, shape: tuple[int, ...], dtype: type[_Number]) -> NDArray[_Number]:
        """A copy of the result, read-only."""
        array = np.empty(shape, dtype)
        if not self.outbox.read_into(array):
            raise WorkerLostError("it sent less than it said")
        array.flags.writeable = False
        return array

    def free_if_large(self) -> None:
        """Free the memory of unusually large images."""
        self.inbox.free_if_larger(_KEPT_BYTES)
        self.outbox.free_if_larger(_KEPT_BYTES)


class TextJob(Job[Mailbox, list[int]]):
    """Tokenise a conversation or a text."""

    max_crashes = 2

    def __init__(self, task: dict[str, Any], metadata: Future[ProcessorMetadata], timeout_s: float) -> None:
        """`task` has the arguments of `PromptProcessor.tokenize` as `conversation`, or a `text`."""
        super().__init__()
        self._task, self._metadata, self.timeout_s = json.dumps(task).encode(), metadata, timeout_s

    @property
    def num_bytes(self) -> int:
        """Size of the task."""
        return len(self._task)

    def send(self, worker: Worker[Mailbox]) -> None:
        """Send the task; its data is in the inbox."""
        # The text is in the inbox: a large message on the socket would wait for the worker to read it.
        send(worker.connection, {"text_bytes": worker.channel.inbox.write(self._task, 0)})

    def receive(self, message: dict[str, Any], worker: Worker[Mailbox]) -> list[int]:
        """Read the token ids from the outbox."""
        ids = worker.channel.read_outbox((check_count(message.get("num_tokens"), MAX_TOKENS),), np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._metadata.result().vocab_size:
            raise WorkerLostError("it sent tokens that are not in the vocabulary")
        worker.channel.free_if_large()
        token_ids: list[int] = ids.tolist()
        return token_ids

    def error(self, reason: str) -> RequestError:
        """Why the text cannot be tokenised."""
        return RequestError(
            f"text: tokenising it failed {_times(self.num_crashes)}: the worker was lost, {reason}. Send less text"
        )

    def __str__(self) -> str:
        return f"text ({self.num_bytes} bytes)"


class ImageJob(Job[Mailbox, Patchified]):
    """Preprocess an image or video."""

    max_crashes = 2

    def __init__(self, task: ImageTask, checks: ImageChecks, timeout_s: float) -> None:
        super().__init__()
        self._task, self._checks, self.timeout_s = task, checks, timeout_s

    def send(self, worker: Worker[Mailbox]) -> None:
        """Send the task; its data is in the inbox."""
        offset = 0
        for source in self._task.sources:
            offset += worker.channel.inbox.write(source.data, offset)
        send(worker.connection, {"image": self._task.describe()})
        _touch_free_memory()  # while the worker works

    def receive(self, message: dict[str, Any], worker: Worker[Mailbox]) -> Patchified:
        """Read the patches from the outbox."""
        metadata = self._checks.metadata.result().of(self._task.kind)
        parts = self._checks.parts(message, self._task)
        num_pixels = check_count(message.get("num_pixels"), 2**53)
        decode_s, preprocess_s = check_seconds(message.get("decode_s")), None
        shape: tuple[int, ...] = sum(span.num_patches for span in feature_spans(parts)), metadata.patch_bytes
        if self._checks.measures_only:
            shape = 0, metadata.patch_bytes
        elif "whole" in message:
            shape = self._checks.whole_shape(message["whole"], tuple(message["grid"]), self._task)
        else:
            preprocess_s = check_seconds(message.get("preprocess_s"))
        patches = worker.channel.read_outbox(shape, np.uint8)
        worker.channel.free_if_large()
        visual = Visual(patches, tuple(message["grid"]), message["texts"], parts)
        return Patchified(visual, num_pixels, decode_s, preprocess_s)

    def error(self, reason: str) -> ImageError:
        """Why the image cannot be preprocessed."""
        return ImageError(
            f"preprocessing it failed {_times(self.num_crashes)}: the worker was lost, {reason}. "
            "Send a smaller image, or save it again as PNG or JPEG"
        )

    def __str__(self) -> str:
        return f"{self._task.kind} ({self._task.num_bytes} bytes)"


def _touch_free_memory() -> None:
    """Have the system provide memory for the next result that this thread reads.

    A page fault takes 2 us on a virtual machine, 0.7 ms for the patches of 672 x 672 pixels. Memory that is freed here
    is kept (`keep_freed_memory`) for the next allocation of this thread.
    """
    with contextlib.suppress(MemoryError):  # the job is sent
        np.empty(_FREE_BYTES, np.uint8)[:: mmap.PAGESIZE] = 0


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"

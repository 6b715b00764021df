"""Tokenise conversations and patchify images in worker processes, or in threads of this one.

    engine  --JSON on a socket, bytes in the worker's inbox-->  worker  --JSON, bytes in its outbox-->  engine

Workers decode untrusted files. They are sealed (`sandbox.py`): no file, socket or other process can be reached from one. The engine
trusts nothing they send: messages have a bounded size and are validated; inbox and outbox are read and written but never mapped, since
a worker could truncate mapped memory or change it after the check; and image keys are hashes that the engine computes itself, over the
image as it was sent, so that no worker can claim the key of another image and place its features in a cache.
Conversations are tokenised by workers of their own, so that text never waits for images: one worker for each of several sizes, so that a
question never waits for a book.
"""

from __future__ import annotations

import bisect
import codecs
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import math
import mmap
import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from saccade.errors import ImageError, RequestError
from saccade.processor.conversation import Message
from saccade.processor.families import VisionRules, load_rules
from saccade.processor.image import (
    FORMATS,
    Grid,
    ImageSettings,
    MediaBudget,
    MediaLimits,
    Pixels,
    check_size,
    load_image,
    read_encoded,
)
from saccade.processor.parts import Part, Visual, VisualKind, feature_spans
from saccade.processor.processor import Processor, ResizeName, prefix_errors
from saccade.processor.tools import Tool
from saccade.processor.video import import_all_of_av, sampled_frames
from saccade.workers.fork_server import ForkServer, RunWorker
from saccade.workers.messages import encode_error, receive, send
from saccade.workers.pool import Job, Worker, WorkerLostError, WorkerPool
from saccade.workers.process import keep_freed_memory
from saccade.workers.sandbox import ResourceLimits, missing_features, seal
from saccade.workers.shared_memory import SharedMemory, byte_view

logger = logging.getLogger(__name__)

_FRAMES_PER_TIMEOUT = 32
"""A video may take the timeout of one image for this many frames."""
_BYTES_PER_TIMEOUT = 8 * 2**20
"""A video file may take the timeout of one image for this many bytes."""
MAX_WORKER_BYTES = 8 * 2**30
"""Memory a worker may allocate beyond what it was forked with; more is an error of the request."""
_MAX_CPU_S = 3600
"""CPU time of one worker; then it is replaced. What a single job may take is its timeout."""
_ENCODINGS = ("ascii", "latin-1", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "cp437")
"""Of the text in image and video files. Python loads an encoding when it is first used."""
_KEPT_BYTES = 32 * 2**20
"""Larger inboxes and outboxes are freed after use; smaller ones are kept, since fresh memory is slow."""
_FREE_BYTES = 4 * 2**20
"""Free memory that is ready for the next patches; those of larger images are partly written to fresh memory."""
_KEPT_HEAP_BYTES = 2**27
"""Freed memory a worker keeps."""
_LARGE_IMAGE = 952, 1288
"""Height and width of the image that a worker preprocesses when it starts."""
_TEXT_BYTES = (2**13, 2**17, math.inf)
"""Largest text, as JSON, of each text worker. 8 KiB take up to 10 ms, 128 KiB 0.2 s, and one of 10 MB seconds."""
_MAX_TOKENS = 2**24
"""Maximum tokens of a conversation."""
_MAX_TEXT_TOKENS = 64
"""Maximum tokens of a text between the features of a video."""
_MAX_SECONDS = 1e6
"""Maximum of a duration that a worker reports."""
_MAX_MESSAGE_BYTES = 2**20
"""Maximum size of a message of a worker."""
_FINGERPRINT_BYTES = 64
"""Bytes of an image or frame that its fingerprint is made of."""
_Number = TypeVar("_Number", np.int64, np.uint8)


# ------------------------------------------------------------------ what is exchanged


@dataclass(frozen=True, kw_only=True)
class PreprocessingConfig:
    """Configuration of the workers."""

    folder: Path
    """The checkpoint folder."""
    limits: MediaLimits
    """Limits on images and videos."""
    resize: ResizeName
    """Implementation of the resize."""
    chat_template: str | None = None
    """Source of a template that replaces the checkpoint's."""
    max_worker_bytes: int = MAX_WORKER_BYTES
    """Memory a worker may allocate."""
    patchifies_on_device: bool = False
    """Leave it to the vision tower to resize and patchify images, where the family allows it; workers decode them."""

    @property
    def sends_whole_images(self) -> bool:
        """Whether images may be patchified on the device, which resizes as Pillow does."""
        return self.patchifies_on_device and self.resize == "pillow"

    def to_json(self) -> dict[str, Any]:
        """For a message to another process."""
        return dataclasses.asdict(self) | {"folder": str(self.folder)}

    @staticmethod
    def from_json(content: dict[str, Any]) -> PreprocessingConfig:
        """Inverse of `to_json`."""
        return PreprocessingConfig(
            folder=Path(content["folder"]),
            limits=MediaLimits(**content["limits"]),
            resize=content["resize"],
            chat_template=content["chat_template"],
            max_worker_bytes=content["max_worker_bytes"],
            patchifies_on_device=content["patchifies_on_device"],
        )


@dataclass(frozen=True, kw_only=True)
class VisualMetadata:
    """What the engine needs to know about images, or about videos, of a checkpoint."""

    token_id: int | None
    """Their placeholder; None if the model takes none of them."""
    patch_bytes: int
    """Bytes of a patch: all its frames of a video, the one frame of an image."""
    max_bytes: int
    """Maximum size of the patches of one image or video."""
    settings: str
    """What else the patches depend on; part of the image key."""


@dataclass(frozen=True, kw_only=True)
class ProcessorMetadata:
    """What the engine needs to know about a checkpoint's processor to assemble prompts."""

    image: VisualMetadata
    """Of images."""
    video: VisualMetadata
    """Of videos."""
    vocab_size: int
    """Number of token ids."""
    control_ids: list[int]
    """Token ids that no text has."""

    def of(self, kind: VisualKind) -> VisualMetadata:
        """Of images or of videos."""
        return self.image if kind == "image" else self.video

    @staticmethod
    def from_json(content: dict[str, Any]) -> ProcessorMetadata:
        """Inverse of `dataclasses.asdict`."""
        image, video = VisualMetadata(**content["image"]), VisualMetadata(**content["video"])
        return ProcessorMetadata(**content | {"image": image, "video": video})


@dataclass(frozen=True)
class Source:
    """An image, frame or video file as the user gave it."""

    form: Literal["image_file", "image_url", "video_file", "video_url", "pixels"]
    """An encoded file, a data URL in UTF-8, or [height, width, 3] upright RGB."""
    data: bytes | Pixels

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return len(self.data) if isinstance(self.data, bytes) else self.data.nbytes

    def describe(self) -> list[Any]:
        """Its form and shape, as JSON."""
        return [self.form, *(self.data.shape if isinstance(self.data, np.ndarray) else [len(self.data)])]


@dataclass(frozen=True)
class ImageTask:
    """An image or video to preprocess."""

    kind: VisualKind
    sources: Sequence[Source]
    """One image, the frames of a video, or a video file."""
    fps: float = 1.0
    """Frames per second of a video."""
    num_images: int = 1
    """Images of the conversation, as far as the patches depend on it (`VisionRules.counted_images`)."""

    @property
    def is_video_file(self) -> bool:
        """Whether the frames are not known yet."""
        return self.sources[0].form in ("video_file", "video_url")

    @property
    def num_bytes(self) -> int:
        """Size of all sources."""
        return sum(source.num_bytes for source in self.sources)

    def describe(self) -> dict[str, Any]:
        """All but the data of the sources, as JSON."""
        return {
            "kind": self.kind,
            "fps": self.fps,
            "num_images": self.num_images,
            "sources": [source.describe() for source in self.sources],
        }

    def fingerprint(self) -> int:
        """A hash of a few of the bytes, in 10 us: tasks of different fingerprints have different digests."""
        views = [byte_view(source.data) for source in self.sources]
        samples = [view[:: len(view) // _FINGERPRINT_BYTES + 1].tobytes() for view in views]
        return hash((json.dumps(self.describe()), *samples))

    def digest(self) -> bytes:
        """sha256 of all that the result depends on but the settings; takes 0.8 ms for 672 x 672 pixels."""
        digest = hashlib.sha256(json.dumps(self.describe()).encode())
        for source in self.sources:
            digest.update(byte_view(source.data))
        return digest.digest()


# ------------------------------------------------------------------ the work itself


class Patchified(NamedTuple):
    """Patches of an image or video, and what they cost."""

    visual: Visual
    """Its patches are read-only. Of an image that is patchified on the device they are its pixels, [height, width, 3]."""
    num_pixels: int
    """Decoded pixels of all frames, before resizing."""
    decode_s: float | None
    """Time to decode it. None: it came as pixels."""
    preprocess_s: float | None
    """Time to resize it and to cut it into patches. None: left to the device."""


class PromptProcessor:
    """Tokenises conversations and patchifies images for one checkpoint folder."""

    def __init__(self, config: PreprocessingConfig) -> None:
        self._processor = Processor.load(
            config.folder, limits=config.limits, resize=config.resize, chat_template=config.chat_template
        )
        self._config = config
        self.rules = rules = self._processor.rules
        tokenizer = self._processor.tokenizer
        self.metadata = ProcessorMetadata(
            image=self._visual_metadata("image", rules.image_id, rules.images),
            video=self._visual_metadata("video", rules.video_id, rules.videos),
            vocab_size=tokenizer.vocab_size,
            control_ids=sorted(tokenizer.control_ids.values()),
        )

    def tokenize(
        self,
        messages: Sequence[Message],
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[int]:
        """Token ids up to the start of the assistant's turn, with one placeholder per image and video."""
        return self._processor.tokenize(messages, not continue_final_message, continue_final_message, tools)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text that is no conversation, with those that the tokenizer puts before a prompt."""
        tokenizer = self._processor.tokenizer
        return [*tokenizer.prefix_ids, *tokenizer.encode_text(text)]

    def patchify(self, task: ImageTask) -> Patchified:
        """Decode, resize and patchify. Errors name the frame, but not the image."""
        started_at = time.perf_counter()
        frames = self._frames(task, MediaBudget(self._config.limits))
        decoded_at = time.perf_counter()
        whole = whole_image(task, frames[0], self.rules, self._config)
        if whole is not None:
            visual = whole
        elif task.kind == "image":
            visual = self._patchify_image(frames[0], task.num_images)
        else:
            visual = self._processor.patchify_video(frames, task.fps)
        visual.patches.flags.writeable = False
        if not _is_possible(visual.grid, task, self.rules, self._config.limits):
            raise ImageError(
                f"a {task.kind} of grid {visual.grid} at {task.fps:g} frames per second cannot be computed. Use another fps"
            )
        num_pixels = sum(frame.shape[0] * frame.shape[1] for frame in frames)
        preprocess_s = None if whole is not None else time.perf_counter() - decoded_at
        return Patchified(visual, num_pixels, decoded_at - started_at, preprocess_s)

    def _patchify_image(self, pixels: Pixels, num_images: int) -> Visual:
        """Each patch holds the one frame once: half the bytes to send, to cache and to copy to the device."""
        height, width = pixels.shape[:2]
        num_patches = self.rules.num_patches(self.rules.image_grid(height, width, num_images))
        into = np.empty((num_patches, self.rules.images.frame_dim), np.uint8)
        return self._processor.patchify_image(pixels, into, num_images)

    def warm_up(self) -> None:
        """Run once what is slow the first time, and load what a sealed worker can no longer load."""
        Image.init()
        self.patchify(ImageTask("image", [Source("pixels", np.zeros((60, 90, 3), dtype=np.uint8))]))
        for name in FORMATS:
            file = io.BytesIO()
            Image.new("RGB", (28, 28)).save(file, name)
            with contextlib.suppress(ImageError):  # the limits may be tighter
                self.patchify(ImageTask("image", [Source("image_file", file.getvalue())]))
        import_all_of_av()
        self.tokenize([{"role": "user", "content": "text"}])
        for encoding in _ENCODINGS:
            codecs.lookup(encoding)
        datetime.now().astimezone()

    def _visual_metadata(self, kind: VisualKind, token_id: int | None, settings: ImageSettings) -> VisualMetadata:
        patch_bytes = settings.frame_dim if kind == "image" else settings.patch_dim
        return VisualMetadata(
            token_id=token_id,
            patch_bytes=patch_bytes,
            max_bytes=self.rules.max_patches(kind, self._config.limits) * patch_bytes,
            settings=json.dumps([kind, repr(settings), self._config.resize]),
        )

    def _frames(self, task: ImageTask, budget: MediaBudget) -> list[Pixels]:
        if task.is_video_file:
            return sampled_frames(read_encoded(_encoded(task.sources[0]), budget.limits, "video"), task.fps, budget)
        if task.kind == "image":
            return [self._pixels(task.sources[0], budget)]
        frames = []
        for number, source in enumerate(task.sources):
            with prefix_errors(f"frame {number + 1}"):
                frames.append(self._pixels(source, budget))
        return frames

    def _pixels(self, source: Source, budget: MediaBudget) -> Pixels:
        if isinstance(source.data, np.ndarray):
            return source.data
        return load_image(_encoded(source), budget.limits, budget)


def whole_image(task: ImageTask, pixels: Pixels, rules: VisionRules, config: PreprocessingConfig) -> Visual | None:
    """An image that the vision tower resizes and patchifies. None: not this one."""
    height, width = pixels.shape[:2]
    if task.kind != "image" or not config.sends_whole_images or not rules.can_patchify_on_device(height, width):
        return None
    grid = rules.image_grid(height, width, task.num_images)
    return Visual(pixels, grid, [], rules.parts("image", grid, task.fps, []))


def image_key(metadata: VisualMetadata, digest: bytes) -> bytes:
    """sha256 of an image as sent (`ImageTask.digest`) and of the settings it is preprocessed with: equal keys have equal features.

    Computed in the engine's process, never by a worker.
    """
    return hashlib.sha256(metadata.settings.encode() + digest).digest()


def _encoded(source: Source) -> str | bytes:
    data = source.data if isinstance(source.data, bytes) else source.data.tobytes()
    return data.decode() if source.form in ("image_url", "video_url") else data


def _is_possible(grid: Grid, task: ImageTask, rules: VisionRules, limits: MediaLimits) -> bool:
    """Whether preprocessing the task can have this result."""
    num_frames = len(task.sources)
    frames = range(1, limits.max_frames + 1) if task.is_video_file else range(num_frames, num_frames + 1)
    return rules.is_possible(task.kind, grid, task.fps, frames, limits, task.num_images)


# ------------------------------------------------------------------ engine's process


class LocalBackend:
    """Runs the work in two threads of this process, one for text and one for images."""

    num_crashes = 0
    pids: Sequence[int] = ()

    def __init__(self, config: PreprocessingConfig) -> None:
        self._config, self._processor = config, PromptProcessor(config)
        self.metadata: Future[ProcessorMetadata] = Future()
        self.metadata.set_result(self._processor.metadata)
        self._text = ThreadPoolExecutor(1, "saccade-tokenize")
        self._images = ThreadPoolExecutor(1, "saccade-images")

    def tokenize(
        self, messages: Sequence[Message], continue_final_message: bool, tools: Sequence[Tool] | None
    ) -> Future[list[int]]:
        """As `PromptProcessor.tokenize`."""
        return self._text.submit(self._processor.tokenize, messages, continue_final_message, tools)

    def encode(self, text: str) -> Future[list[int]]:
        """As `PromptProcessor.encode`."""
        return self._text.submit(self._processor.encode, text)

    def patchify(self, task: ImageTask) -> Future[Patchified]:
        """As `PromptProcessor.patchify`."""
        return self._images.submit(self._processor.patchify, task)

    def as_pixels(self, task: ImageTask) -> Future[Patchified] | None:
        """See `_as_pixels`."""
        return _as_pixels(task, self._processor.rules, self._config)

    def counted_images(self, num_images: int) -> int:
        """As `VisionRules.counted_images`."""
        return self._processor.rules.counted_images(num_images)

    def close(self) -> None:
        """Cancel what has not started."""
        self._text.shutdown(cancel_futures=True)
        self._images.shutdown(cancel_futures=True)


class ProcessBackend:
    """Runs the work in worker processes: one for texts of each size, `num_workers` for images."""

    def __init__(self, config: PreprocessingConfig, num_workers: int, timeout_s: float) -> None:
        """Starts the workers without waiting for them."""
        self._config, self._timeout_s = config, timeout_s
        fork_server = ForkServer(initialize, config.to_json())
        open_pool = functools.partial(
            WorkerPool, fork_server, open_channel=Mailbox, max_message_bytes=_MAX_MESSAGE_BYTES
        )
        self._texts = [open_pool(1) for _ in _TEXT_BYTES]
        self._images = open_pool(num_workers)
        self.metadata: Future[ProcessorMetadata] = Future()
        self._images.metadata.add_done_callback(self._set_metadata)

    @functools.cached_property
    def _checks(self) -> ImageChecks:
        """Read from the folder by this process: workers are not trusted."""
        return ImageChecks(
            load_rules(self._config.folder), self._config.limits, self.metadata, self._config.sends_whole_images
        )

    @property
    def num_crashes(self) -> int:
        """Workers lost so far."""
        return sum(pool.num_crashes for pool in (*self._texts, self._images))

    @property
    def pids(self) -> list[int]:
        """Process ids of the running image workers."""
        return self._images.pids

    @property
    def text_pids(self) -> list[int]:
        """Process ids of the running text workers."""
        return [pid for pool in self._texts for pid in pool.pids]

    def tokenize(
        self, messages: Sequence[Message], continue_final_message: bool, tools: Sequence[Tool] | None
    ) -> Future[list[int]]:
        """As `PromptProcessor.tokenize`."""
        return self._submit_text({"conversation": [messages, continue_final_message, tools]})

    def encode(self, text: str) -> Future[list[int]]:
        """As `PromptProcessor.encode`."""
        return self._submit_text({"text": text})

    def _submit_text(self, task: dict[str, Any]) -> Future[list[int]]:
        job = _TextJob(task, self.metadata, self._timeout_s)
        return self._texts[bisect.bisect_left(_TEXT_BYTES, job.num_bytes)].submit(job)

    def patchify(self, task: ImageTask) -> Future[Patchified]:
        """As `PromptProcessor.patchify`."""
        size = task.num_bytes / _BYTES_PER_TIMEOUT if task.is_video_file else len(task.sources) / _FRAMES_PER_TIMEOUT
        return self._images.submit(_ImageJob(task, self._checks, self._timeout_s * math.ceil(size)))

    def as_pixels(self, task: ImageTask) -> Future[Patchified] | None:
        """See `_as_pixels`."""
        return _as_pixels(task, self._checks.rules, self._config)

    def counted_images(self, num_images: int) -> int:
        """As `VisionRules.counted_images`."""
        return self._checks.rules.counted_images(num_images)

    def close(self) -> None:
        """Kill the workers."""
        for pool in (*self._texts, self._images):
            pool.close()

    def _set_metadata(self, received: Future[Any]) -> None:
        if error := received.exception():
            self.metadata.set_exception(error)
            return
        if missing := received.result()["no_sandbox"]:
            logger.warning(
                "media workers decode untrusted files without %s, which this system lacks: a flaw in a decoder may reach files and the "
                "network. Use Linux 5.13 or newer on x86-64 or arm64",
                " and ".join(missing),
            )
        self.metadata.set_result(ProcessorMetadata.from_json(received.result()["processor"]))


def _as_pixels(task: ImageTask, rules: VisionRules, config: PreprocessingConfig) -> Future[Patchified] | None:
    """An image that came as pixels and is patchified on the device: there is nothing to do for a worker. None: there is."""
    pixels = task.sources[0].data
    if not isinstance(pixels, np.ndarray) or (visual := whole_image(task, pixels, rules, config)) is None:
        return None
    visual.patches.flags.writeable = False
    done: Future[Patchified] = Future()
    done.set_result(Patchified(visual, pixels.shape[0] * pixels.shape[1], None, None))
    return done


class Mailbox:
    """Memory shared with one worker: an inbox for its requests, an outbox for its results."""

    def __init__(self, fds: tuple[int, int] | None = None) -> None:
        """Create one, or open one in the worker."""
        self.inbox, self.outbox = (SharedMemory(), SharedMemory()) if fds is None else map(SharedMemory, fds)

    @property
    def fds(self) -> tuple[int, int]:
        """Passed to the worker."""
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


class _TextJob(Job[Mailbox, list[int]]):
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
        # The text is in the inbox: a large message on the socket would wait for the worker to read it.
        send(worker.connection, {"text_bytes": worker.channel.inbox.write(self._task, 0)})

    def receive(self, message: dict[str, Any], worker: Worker[Mailbox]) -> list[int]:
        ids = worker.channel.read_outbox((_count(message.get("num_tokens"), _MAX_TOKENS),), np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self._metadata.result().vocab_size:
            raise WorkerLostError("it sent tokens that are not in the vocabulary")
        worker.channel.free_if_large()
        token_ids: list[int] = ids.tolist()
        return token_ids

    def error(self, reason: str) -> RequestError:
        return RequestError(
            f"text: tokenising it failed {_times(self.num_crashes)}: the worker was lost, {reason}. Send less text"
        )

    def __str__(self) -> str:
        return f"text ({self.num_bytes} bytes)"


class _ImageJob(Job[Mailbox, Patchified]):
    """Preprocess an image or video."""

    max_crashes = 2

    def __init__(self, task: ImageTask, checks: ImageChecks, timeout_s: float) -> None:
        super().__init__()
        self._task, self._checks, self.timeout_s = task, checks, timeout_s

    def send(self, worker: Worker[Mailbox]) -> None:
        offset = 0
        for source in self._task.sources:
            offset += worker.channel.inbox.write(source.data, offset)
        send(worker.connection, {"image": self._task.describe()})
        _touch_free_memory()  # while the worker works

    def receive(self, message: dict[str, Any], worker: Worker[Mailbox]) -> Patchified:
        metadata = self._checks.metadata.result().of(self._task.kind)
        parts = self._checks.parts(message, self._task)
        num_pixels = _count(message.get("num_pixels"), 2**53)
        decode_s, preprocess_s = check_seconds(message.get("decode_s")), None
        shape: tuple[int, ...] = sum(span.num_patches for span in feature_spans(parts)), metadata.patch_bytes
        if "whole" in message:
            shape = self._checks.whole_shape(message["whole"], tuple(message["grid"]), self._task)
        else:
            preprocess_s = check_seconds(message.get("preprocess_s"))
        patches = worker.channel.read_outbox(shape, np.uint8)
        worker.channel.free_if_large()
        visual = Visual(patches, tuple(message["grid"]), message["texts"], parts)
        return Patchified(visual, num_pixels, decode_s, preprocess_s)

    def error(self, reason: str) -> ImageError:
        return ImageError(
            f"preprocessing it failed {_times(self.num_crashes)}: the worker was lost, {reason}. "
            "Send a smaller image, or save it again as PNG or JPEG"
        )

    def __str__(self) -> str:
        return f"{self._task.kind} ({self._task.num_bytes} bytes)"


def _touch_free_memory() -> None:
    """Have the system provide memory for the next result that this thread reads.

    A page fault takes 2 us on a virtual machine, 0.7 ms for the patches of 672 x 672 pixels. What is freed here is not returned to the system
    (`keep_freed_memory`), so that the next allocation of this thread has it.
    """
    with contextlib.suppress(MemoryError):  # the job is sent
        np.empty(_FREE_BYTES, np.uint8)[:: mmap.PAGESIZE] = 0


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _count(value: object, maximum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
        raise WorkerLostError("it sent something else than a count")
    return value


def check_seconds(value: object) -> float:
    """A duration of a worker's message. Raises `WorkerLostError` if it is none."""
    if not isinstance(value, float) or not 0 <= value <= _MAX_SECONDS:
        raise WorkerLostError("it sent something else than a duration")
    return value


class ImageChecks(NamedTuple):
    """Checks of what workers say about images."""

    rules: VisionRules
    limits: MediaLimits
    metadata: Future[ProcessorMetadata]
    allows_whole: bool
    """Whether images may be sent as pixels."""

    def parts(self, message: dict[str, Any], task: ImageTask) -> tuple[Part, ...]:
        """The tokens of a task's result. Raises `WorkerLostError` unless the task can have it."""
        found, texts = message.get("grid"), message.get("texts")
        if not isinstance(found, list) or len(found) != 3:
            raise WorkerLostError("it sent no grid")
        first, second, third = (_count(number, _MAX_TOKENS) for number in found)
        grid = first, second, third
        if not _is_possible(grid, task, self.rules, self.limits):
            raise WorkerLostError(f"it sent the grid {found}, which no such {task.kind} has")
        if not isinstance(texts, list) or len(texts) != self.rules.num_texts(task.kind, grid):
            raise WorkerLostError(f"it sent other texts than a {task.kind} of grid {found} has")
        return self.rules.parts(task.kind, grid, task.fps, [self._text(text) for text in texts])

    def whole_shape(self, size: object, grid: Grid, task: ImageTask) -> tuple[int, int, int]:
        """The shape of an image that is patchified on the device. Raises `WorkerLostError` unless it may be, and has this grid."""
        if not isinstance(size, list) or len(size) != 2:
            raise WorkerLostError("it sent something else than the size of an image")
        height, width = (_count(side, self.limits.max_side) for side in size)
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
        ids = [_count(token_id, metadata.vocab_size - 1) for token_id in token_ids]
        if not set(metadata.control_ids).isdisjoint(ids):
            raise WorkerLostError("it sent a control token as text")
        return ids


# ------------------------------------------------------------------ worker processes


def initialize(config: Any) -> tuple[RunWorker, dict[str, Any]]:
    """Load what all workers share; return the processor's metadata and what their sandbox lacks."""
    keep_freed_memory(_KEPT_HEAP_BYTES)
    settings = PreprocessingConfig.from_json(config)
    if settings.resize == "torch":
        import torch

        torch.set_num_threads(1)
    processor = PromptProcessor(settings)
    processor.warm_up()
    limits = ResourceLimits(
        memory_bytes=settings.max_worker_bytes,
        file_bytes=max(2 * processor.metadata.image.max_bytes, processor.metadata.video.max_bytes, 8 * _MAX_TOKENS),
        cpu_s=_MAX_CPU_S,
    )
    metadata = {"processor": dataclasses.asdict(processor.metadata), "no_sandbox": missing_features()}
    return functools.partial(_run_worker, processor, limits), metadata


def _run_worker(processor: PromptProcessor, limits: ResourceLimits, connection: socket.socket, *fds: int) -> None:
    """Handle one request after the other until the connection is closed."""
    mailbox = Mailbox((fds[0], fds[1]))
    seal(limits)
    _touch_memory(processor, mailbox)
    while (request := receive(connection)) is not None:
        try:
            send(connection, _reply(request, mailbox, processor))
        except (BrokenPipeError, ConnectionResetError):
            return
        except MemoryError:
            send(connection, encode_error(ImageError("it needs more memory than a worker may use. Send less")))
        except Exception as error:
            send(connection, encode_error(error))


def _touch_memory(processor: PromptProcessor, mailbox: Mailbox) -> None:
    """Preprocess a large image, so that memory and threads are there when the first one comes: it took 35 ms instead of 14."""
    task = ImageTask("image", [Source("pixels", np.zeros((*_LARGE_IMAGE, 3), np.uint8))])
    # What fails here, such as a limit on memory, fails again for the image of a request, which gets the error.
    with contextlib.suppress(Exception):
        mailbox.outbox.write(processor.patchify(task).visual.patches, 0)


def _reply(request: dict[str, Any], mailbox: Mailbox, processor: PromptProcessor) -> dict[str, Any]:
    """Do what is asked for; the result is in the outbox."""
    if "text_bytes" in request:
        text = np.empty(request["text_bytes"], np.uint8)
        mailbox.inbox.read_into(text)
        task = json.loads(text.tobytes())
        token_ids = processor.encode(task["text"]) if "text" in task else processor.tokenize(*task["conversation"])
        mailbox.outbox.write(np.array(token_ids, dtype=np.int64), 0)
        return {"num_tokens": len(token_ids)}
    task = request["image"]
    sources = _sources(task["sources"], mailbox.inbox)
    visual, num_pixels, decode_s, preprocess_s = processor.patchify(
        ImageTask(task["kind"], sources, task["fps"], task["num_images"])
    )
    mailbox.outbox.write(np.ascontiguousarray(visual.patches), 0)
    reply = {
        "grid": visual.grid,
        "texts": visual.texts,
        "num_pixels": num_pixels,
        "decode_s": decode_s,
        "preprocess_s": preprocess_s,
    }
    return reply | ({"whole": visual.patches.shape[:2]} if visual.patches.ndim == 3 else {})


def _sources(descriptions: Sequence[Sequence[Any]], inbox: SharedMemory) -> list[Source]:
    """Read the sources, which follow one another in the inbox."""
    sources, offset = [], 0
    for form, *shape in descriptions:
        data = np.empty(shape, dtype=np.uint8)
        inbox.read_into(data, offset)
        offset += data.nbytes
        sources.append(Source(form, data if form == "pixels" else data.tobytes()))
    return sources

"""Processed images for prompts: from the cache, from a job for another prompt, or from a job of their own."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from saccade.engine.core.encoder_cache import salted
from saccade.engine.core.time_histogram import TimeHistogram
from saccade.engine.frontend.futures import done, failed
from saccade.engine.frontend.preprocessing.backends import LocalBackend, ProcessBackend
from saccade.engine.frontend.preprocessing.config import PreprocessingConfig, VisualMetadata
from saccade.engine.frontend.preprocessing.prompt_processor import Patchified, as_pixels
from saccade.engine.media import EncodedImage, ImageTask, TaskDescription
from saccade.errors import RequestError
from saccade.processor.image import Pixels
from saccade.processor.parts import Part, VisualKind, feature_spans

_READ_AHEAD_BYTES = 512 * 2**20
"""Bytes of images that are read before a worker is free for them."""

_ENTRY_BYTES = 2048
"""Size of an entry of the cache without its patches."""


@dataclass(frozen=True)
class ProcessedImage:
    """An image or video as model input, independent of its position in a prompt."""

    key: bytes
    """sha256 of the image as sent and of the preprocessing settings. Equal keys have equal features."""
    parts: tuple[Part, ...]
    """The tokens that replace its placeholder."""
    patches: Pixels
    """The patches of its spans in order, read-only: [patches, patch_dim]. A still image may have [patches, frame_dim],
    or its pixels, [height, width, 3]; an image that was encoded elsewhere has its features, [tokens, bytes]."""
    num_pixels: int = 0
    """Decoded pixels of all frames, before resizing."""
    is_encoded: bool = False
    """Whether `patches` is the features."""


class ProcessedImages:
    """Preprocesses each image once, whichever prompts it is in. Any thread may use it."""

    def __init__(
        self, backend: LocalBackend | ProcessBackend, config: PreprocessingConfig, cache_bytes: int, max_read_ahead: int
    ) -> None:
        """`max_read_ahead`: images that may wait for a worker; `get` waits while there are more."""
        self._backend, self._config = backend, config
        self._read_ahead = ReadAhead(_READ_AHEAD_BYTES, max_read_ahead)
        self._lock = threading.Lock()
        """Guards the fields below."""
        self.cache = ProcessedImageCache(cache_bytes)
        self._in_progress: dict[bytes, _ImageInProgress] = {}
        """Images that are being preprocessed, by salted digest."""
        self.num_processed = self.num_cache_hits = self.num_shared = 0
        self.decode_times, self.preprocess_times = TimeHistogram(), TimeHistogram()

    def get(self, task: ImageTask, salt: bytes) -> Future[ProcessedImage]:
        """The processed image of a task, for a prompt that calls `leave` when it ends."""
        cache_key = salted(salt, task.digest)
        with self._lock:
            if (found := self._find(cache_key)) is not None:
                return found
            image = self._in_progress[cache_key] = _ImageInProgress(cache_key)
        image.job = self.patchify(task)
        image.job.add_done_callback(partial(self._finish, task.kind, task.digest, image))
        return image

    def put(self, task: TaskDescription, image: EncodedImage, salt: bytes) -> Future[ProcessedImage] | None:
        """Keep an image that was encoded elsewhere. None: it is not what the task describes."""
        try:
            parts = self._backend.rules.parts(task.kind, image.grid, task.fps, image.texts)
        except (ValueError, TypeError, LookupError, ArithmeticError, RequestError):
            return None
        if sum(span.length for span in feature_spans(parts)) != len(image.features):
            return None
        key = image_key(self._backend.metadata.result().of(task.kind), task.digest)
        processed = ProcessedImage(key, parts, image.features, image.num_pixels, is_encoded=True)
        with self._lock:
            self.cache.put(salted(salt, task.digest), processed)
        return done(processed)

    def has(self, digest: bytes, salt: bytes) -> bool:
        """Whether the image with this digest is cached or in progress."""
        cache_key = salted(salt, digest)
        with self._lock:
            return cache_key in self._in_progress or self.cache.get(cache_key) is not None

    def find(self, digest: bytes, salt: bytes) -> Future[ProcessedImage] | None:
        """The processed image with this digest, if it is cached or in progress, for a prompt that calls `leave`."""
        with self._lock:
            return self._find(salted(salt, digest))

    def _find(self, cache_key: bytes) -> Future[ProcessedImage] | None:
        """An image that is cached or in progress. The lock is held."""
        if processed := self.cache.get(cache_key):
            self.num_cache_hits += 1
            return done(processed)
        if (shared := self._in_progress.get(cache_key)) is not None:
            self.num_shared += 1
            shared.num_waiting += 1
        return shared

    def leave(self, images: Sequence[Future[ProcessedImage]]) -> None:
        """End a prompt with these images: cancel the jobs of those that no other prompt waits for."""
        for image in images:
            if not isinstance(image, _ImageInProgress):
                continue
            with self._lock:
                image.num_waiting -= 1
                is_unused = image.num_waiting == 0
                if is_unused:
                    self._forget(image)  # before the next prompt joins
            if is_unused and image.job is not None:
                image.job.cancel()

    def flush(self) -> None:
        """Forget all processed images."""
        with self._lock:
            self.cache.clear()

    def patchify(self, task: ImageTask) -> Future[Patchified]:
        """Have a worker preprocess an image, unless it was sent as pixels that are measured or the device patchifies.

        Never raises: a job that cannot start has failed, for all prompts with this image.
        """
        try:
            ready = as_pixels(task, self._backend.rules, self._config)
            return done(ready) if ready is not None else self._start_job(task)
        except Exception as error:
            return failed(error)

    def _start_job(self, task: ImageTask) -> Future[Patchified]:
        cost = self._read_ahead.acquire(task.num_bytes)
        try:
            job = self._backend.patchify(task)
        except BaseException:
            self._read_ahead.release(cost)
            raise
        job.add_done_callback(lambda _: self._read_ahead.release(cost))
        return job

    def _finish(self, kind: VisualKind, digest: bytes, image: _ImageInProgress, job: Future[Patchified]) -> None:
        try:
            patchified = job.result()
            key = image_key(self._backend.metadata.result().of(kind), digest)
            visual = patchified.visual
            processed = ProcessedImage(key, visual.parts, visual.patches, patchified.num_pixels)
        except BaseException as error:
            with self._lock:
                self._forget(image)
            image.set_exception(error)
            return
        with self._lock:
            self._observe(patchified)
            self.cache.put(image.cache_key, processed)
            self._forget(image)
        image.set_result(processed)

    def _observe(self, patchified: Patchified) -> None:
        self.num_processed += 1
        if patchified.decode_s is not None:
            self.decode_times.observe(patchified.decode_s)
        if patchified.preprocess_s is not None:
            self.preprocess_times.observe(patchified.preprocess_s)

    def _forget(self, image: _ImageInProgress) -> None:
        """Let a later prompt start a job of its own, unless the image is cached. The lock is held."""
        if self._in_progress.get(image.cache_key) is image:
            del self._in_progress[image.cache_key]


class _ImageInProgress(Future[ProcessedImage]):
    """An image that is being preprocessed, for one or several prompts."""

    def __init__(self, cache_key: bytes) -> None:
        super().__init__()
        self.cache_key = cache_key
        self.num_waiting = 1
        """Prompts that wait for it."""
        self.job: Future[Patchified] | None = None


class ReadAhead:
    """Bounds the bytes and the number of images that are read but not processed yet."""

    def __init__(self, max_bytes: int, max_images: int) -> None:
        self._max_bytes, self._min_cost = max_bytes, max_bytes // max_images
        self._used = 0
        self._changed = threading.Condition()

    def acquire(self, num_bytes: int) -> int:
        """Wait for space and return the bytes to release. An image above the bound waits until it is alone."""
        cost = min(max(num_bytes, self._min_cost), self._max_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._used + cost <= self._max_bytes)
            self._used += cost
        return cost

    def release(self, cost: int) -> None:
        """Give space back."""
        with self._changed:
            self._used -= cost
            self._changed.notify_all()


def image_key(metadata: VisualMetadata, digest: bytes) -> bytes:
    """sha256 of the digest of an image as sent and of its preprocessing settings: equal keys have equal features.

    It is computed in the engine's process, never by a worker.
    """
    return hashlib.sha256(metadata.settings.encode() + digest).digest()


class ProcessedImageCache:
    """Processed images in host memory by digest of the image as sent, salted; the least recently used are evicted.

    It holds at most `max_bytes`. Not thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[bytes, ProcessedImage] = OrderedDict()
        """Images by digest; the least recently used is first."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._images)

    def get(self, digest: bytes) -> ProcessedImage | None:
        """The image that was sent with this digest."""
        if digest in self._images:
            self._images.move_to_end(digest)
        return self._images.get(digest)

    def put(self, digest: bytes, image: ProcessedImage) -> None:
        """Add an image, unless it is larger than the cache. An image that is cached stays: two jobs may process one
        image, if the prompt of the first was cancelled while a worker processed it."""
        if digest in self._images or _size(image) > self._max_bytes:
            return
        self._images[digest] = image
        self.num_bytes += _size(image)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= _size(self._images.popitem(last=False)[1])

    def clear(self) -> None:
        """Evict all images."""
        self._images.clear()
        self.num_bytes = 0


def _size(image: ProcessedImage) -> int:
    return image.patches.nbytes + _ENTRY_BYTES

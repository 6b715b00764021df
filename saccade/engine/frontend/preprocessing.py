"""Preprocess conversations into prompts, outside the engine's thread.

    submit -> tokenise (text worker) -----------------------------------------------------------> assemble -> TokenPrompt
          \\-> read, hash, look up (reader thread) -> decode, resize, patchify (image workers) -/

On a GPU the vision tower resizes and patchifies the still images of some families; workers only decode those, and none is needed for one that
comes as pixels.

Each image is a job of its own: images of one prompt are preprocessed in parallel, an image that several prompts use is preprocessed
once, and a slow one occupies a single worker. An image that cannot be in the cache, by its fingerprint, is hashed while a worker
preprocesses it; so one that both readers get at about the same time may be preprocessed twice. A request without images touches neither
readers nor image workers.

Cancelling a prompt cancels those of its jobs that no worker has started, except for images that other prompts wait for.
"""

from __future__ import annotations

import hashlib
import operator
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from PIL import Image

from saccade.engine.core.encoder_cache import salted
from saccade.engine.core.time_histogram import TimeHistogram
from saccade.engine.frontend.preprocessing_worker import (
    MAX_WORKER_BYTES,
    ImageTask,
    LocalBackend,
    Patchified,
    PreprocessingConfig,
    ProcessBackend,
    ProcessorMetadata,
    Source,
    image_key,
)
from saccade.engine.frontend.processed_images import ProcessedImage, ProcessedImageCache
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan
from saccade.errors import RequestError
from saccade.processor.conversation import ImageItem, Message, VideoFileItem, VisualItem
from saccade.processor.image import (
    ImageSource,
    MediaBudget,
    MediaLimits,
    check_data_url,
    load_image,
    read_encoded,
)
from saccade.processor.parts import VisualKind, expand_placeholders, feature_spans, in_written_order
from saccade.processor.processor import (
    ResizeName,
    count_images,
    prefix_errors,
    split_visuals,
    visual_kind,
)
from saccade.processor.tools import Tool, check_tools
from saccade.workers.process import keep_freed_memory

_NUM_READERS = 2
"""Reader threads. They compete with the engine's thread for the interpreter: with 12, 256 requests at once delayed its first step by
0.26 s, with two 0.18; two read and hash about 1000 images of 672 x 672 per second."""
_READ_AHEAD_BYTES = 512 * 2**20
"""Bytes of images that are read before a worker is free for them."""
_READ_AHEAD_PER_WORKER = 2
"""Images that are read for each worker before it is free; more would only take memory."""
_KEPT_HEAP_BYTES = 2**28
"""Freed memory that this process keeps: images are read into it, and fresh memory is slow."""
_NUM_FINGERPRINTS = 2**16
"""Fingerprints of recent images that are kept; an older image may be preprocessed although it is in the cache."""
_NUM_IMAGE_LOCKS = 61
"""A prime: ids of objects are multiples of 16."""
_Value = TypeVar("_Value")
_BegunImage = tuple[ImageTask, Future[Patchified] | None] | Exception
"""An image with its job, if it was not sent recently, or why it could not be read."""


def default_num_workers() -> int:
    """Preprocessing workers by the number of cores. Two are left for the engine loop and its clients."""
    return max(0, min(12, len(os.sched_getaffinity(0)) - 2))


@dataclass(frozen=True, kw_only=True)
class PreprocessingStatistics:
    """Counters since the start."""

    num_prompts: int
    """Prompts that are ready, failed or cancelled."""
    num_processed: int
    """Images decoded, and patchified unless the device does it."""
    num_cache_hits: int
    """Images found in the processed-image cache."""
    num_shared: int
    """Images that were being preprocessed for another prompt."""
    num_worker_crashes: int
    """Worker processes that crashed or were killed."""
    num_cached: int
    """Images in the cache now."""
    cached_bytes: int
    """Their size."""
    num_unfinished: int
    """Prompts that are being preprocessed now."""
    decode_times: TimeHistogram
    """Of images and videos that workers decoded."""
    preprocess_times: TimeHistogram
    """Resizing and cutting into patches, where workers did it."""


class Preprocessor:
    """Turns conversations into prompts. Any thread may submit.

    A submitted conversation must not change before its prompt is ready. PIL images and arrays are decoded in this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_workers: int,
        processed_image_cache_bytes: int,
        timeout_s: float = 10.0,
        max_images: int = 64,
        limits: MediaLimits | None = None,
        resize: ResizeName = "pillow",
        chat_template: str | None = None,
        max_worker_bytes: int = MAX_WORKER_BYTES,
        patchifies_on_device: bool = False,
    ) -> None:
        """Starts the workers without waiting for them. With none, two threads of this process do their work.

        A worker that takes longer than `timeout_s` for one image, text or 32 frames of a video is killed and replaced. `max_images`
        bounds the images and videos of a request, `limits` what each of them may be, `chat_template` replaces the checkpoint's, `max_worker_bytes` the memory that a worker
        may allocate. `patchifies_on_device`: images are decoded only, and the vision tower does the rest, where the family allows it.
        """
        keep_freed_memory(_KEPT_HEAP_BYTES)
        self._limits, self._max_images = limits or MediaLimits(), max_images
        config = PreprocessingConfig(
            folder=Path(folder),
            limits=self._limits,
            resize=resize,
            chat_template=chat_template,
            max_worker_bytes=max_worker_bytes,
            patchifies_on_device=patchifies_on_device,
        )
        self._backend = ProcessBackend(config, num_workers, timeout_s) if num_workers else LocalBackend(config)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "saccade-reader")
        self._read_ahead = _ReadAhead(_READ_AHEAD_BYTES, _READ_AHEAD_PER_WORKER * max(1, num_workers))
        self._image_locks = [threading.Lock() for _ in range(_NUM_IMAGE_LOCKS)]
        """PIL images are not thread-safe: file and EXIF are read on first access."""

        self._lock = threading.Lock()
        """Guards the fields below."""
        self._cache = ProcessedImageCache(processed_image_cache_bytes)
        self._in_progress: dict[bytes, _ImageInProgress] = {}
        """By salted digest of the task."""
        self._fingerprints: dict[tuple[bytes, int], None] = {}
        """Salt and fingerprint of recent images, the oldest first."""
        self._unfinished: set[Future[TokenPrompt]] = set()
        self._is_closed = False
        self._num_prompts = self._num_processed = self._num_cache_hits = self._num_shared = 0
        self._decode_times, self._preprocess_times = TimeHistogram(), TimeHistogram()

    # -------------------------------------------------------------- public API

    def submit(
        self,
        messages: Sequence[Message],
        *,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        salt: bytes = b"",
    ) -> Future[TokenPrompt]:
        """The prompt of a conversation, up to the start of the assistant's turn, or open after its final message.

        `tools` are functions that the model may call. Processed images are shared only between submissions of equal `salt`.
        """
        future = self._open()
        try:
            text, items = split_visuals(messages)
            self._check_num_images(len(items))
            token_ids = self._backend.tokenize(
                text, continue_final_message, None if tools is None else check_tools(tools)
            )
        except BaseException as error:
            self._finish(future, error)
        else:
            self._start(future, token_ids, items, salt)
        return future

    def submit_tokens(
        self, token_ids: Sequence[int], images: Sequence[Any], *, salt: bytes = b""
    ) -> Future[TokenPrompt]:
        """The prompt of token ids that contain the placeholder of each image once. A video is a part of a message."""
        future = self._open()
        try:
            ids = _check_ids(token_ids)
            self._check_num_images(len(images))
            parts = [image if isinstance(image, Mapping) else {"type": "image", "image": image} for image in images]
            _, items = split_visuals([{"role": "user", "content": parts or "no image"}])
        except BaseException as error:
            self._finish(future, error)
        else:
            self._start(future, _done(ids), items, salt)
        return future

    def encode(self, text: str) -> Future[list[int]]:
        """Token ids of a text that is no conversation, with those that the tokenizer puts before a prompt."""
        return self._backend.encode(text)

    def flush(self) -> None:
        """Forget all processed images."""
        with self._lock:
            self._cache.clear()
            self._fingerprints.clear()

    def wait_until_ready(self) -> None:
        """Wait until the workers have loaded the processor; raises what is wrong with the checkpoint folder."""
        self._backend.metadata.result()

    @property
    def statistics(self) -> PreprocessingStatistics:
        """Counters since the start."""
        with self._lock:
            return PreprocessingStatistics(
                num_prompts=self._num_prompts,
                num_processed=self._num_processed,
                num_cache_hits=self._num_cache_hits,
                num_shared=self._num_shared,
                num_worker_crashes=self._backend.num_crashes,
                num_cached=len(self._cache),
                cached_bytes=self._cache.num_bytes,
                num_unfinished=len(self._unfinished),
                decode_times=self._decode_times.copy(),
                preprocess_times=self._preprocess_times.copy(),
            )

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running image workers."""
        return list(self._backend.pids)

    def close(self) -> None:
        """Cancel unfinished prompts and kill the workers."""
        with self._lock:
            self._is_closed = True
            unfinished = list(self._unfinished)
        for future in unfinished:
            future.cancel()
            self._finish(future, None)
        self._backend.close()
        self._readers.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- from a request to jobs

    def _open(self) -> Future[TokenPrompt]:
        future: Future[TokenPrompt] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the preprocessor is closed")
            self._unfinished.add(future)
        return future

    def _check_num_images(self, num_images: int) -> None:
        if num_images > self._max_images:
            raise RequestError(
                f"{num_images} images and videos, over the limit of {self._max_images} per request. Send fewer, or raise "
                "max_images_per_request"
            )

    def _start(
        self, future: Future[TokenPrompt], token_ids: Future[list[int]], items: Sequence[VisualItem], salt: bytes
    ) -> None:
        """Read the images in a reader thread; a prompt without images needs none."""
        future.add_done_callback(lambda done: token_ids.cancel() if done.cancelled() else None)
        if not items:
            self._assemble_when_done(future, token_ids, [], [])
            return
        try:
            self._readers.submit(self._read_images, future, token_ids, items, salt)
        except RuntimeError as error:  # closed meanwhile
            self._finish(future, error)

    def _read_images(
        self, future: Future[TokenPrompt], token_ids: Future[list[int]], items: Sequence[VisualItem], salt: bytes
    ) -> None:
        kinds, budget = [visual_kind(item) for item in items], MediaBudget(self._limits)
        images: list[Future[ProcessedImage]] = []
        begun: _BegunImage | None = None
        try:
            if token_ids.done() and not token_ids.cancelled():
                _placeholders(token_ids.result(), kinds, self._backend.metadata.result())  # fail before the images do
            num_images = self._backend.counted_images(count_images(items))
            for item in items:
                if future.cancelled():
                    break
                before, begun = begun, self._begin_image(item, num_images, budget, salt)
                if before is not None:
                    images.append(self._image(before, salt))  # hashed while the next one is preprocessed
            if begun is not None:
                images.append(self._image(begun, salt))
        except BaseException as error:
            self._finish(future, error)
            return
        finally:
            future.add_done_callback(lambda _: self._leave(images))
        if future.cancelled():
            self._finish(future, None)
        else:
            self._assemble_when_done(future, token_ids, kinds, images)

    def _begin_image(self, item: VisualItem, num_images: int, budget: MediaBudget, salt: bytes) -> _BegunImage:
        """Read an image, and have it preprocessed if it was not sent recently."""
        try:
            task = self._read(item, num_images, budget)
        except Exception as error:  # reported when all are done, so that of two bad images the first is named
            return error
        return task, self._patchify(task) if self._is_new(task, salt) else None

    def _image(self, begun: _BegunImage, salt: bytes) -> Future[ProcessedImage]:
        """The image from the cache, from another prompt's job, or from its own job."""
        if isinstance(begun, Exception):
            return _failed(begun)
        task, job = begun
        digest = task.digest()
        cache_key = salted(salt, digest)
        with self._lock:
            if processed := self._cache.get(cache_key):
                self._num_cache_hits += 1
                return _done(processed)
            if (shared := self._in_progress.get(cache_key)) is not None:
                self._num_shared += 1
                shared.num_waiting += 1
                return shared
            image = self._in_progress[cache_key] = _ImageInProgress(cache_key)
        image.job = job or self._patchify(task)
        image.job.add_done_callback(partial(self._image_done, task.kind, digest, image))
        return image

    def _leave(self, images: Sequence[Future[ProcessedImage]]) -> None:
        """A prompt has ended: cancel the jobs of its images that no other prompt waits for. No effect on images that are ready."""
        for image in images:
            if not isinstance(image, _ImageInProgress):
                continue
            with self._lock:
                image.num_waiting -= 1
                is_unused = image.num_waiting == 0
                if is_unused and self._in_progress.get(image.cache_key) is image:
                    del self._in_progress[image.cache_key]  # before the next prompt joins
            if is_unused and image.job is not None:
                image.job.cancel()

    def _is_new(self, task: ImageTask, salt: bytes) -> bool:
        """Whether the image was not sent recently. Remembers it."""
        fingerprint = salt, task.fingerprint()
        with self._lock:
            is_new = fingerprint not in self._fingerprints
            self._fingerprints[fingerprint] = None
            if len(self._fingerprints) > _NUM_FINGERPRINTS:
                del self._fingerprints[next(iter(self._fingerprints))]
        return is_new

    def _patchify(self, task: ImageTask) -> Future[Patchified]:
        """Have a worker preprocess an image, once there is space to read ahead; nothing is to be done for one that is sent as pixels.

        Never raises: what keeps the job from starting is its failure, which all prompts with this image get.
        """
        try:
            return self._backend.as_pixels(task) or self._patchify_by_worker(task)
        except Exception as error:
            return _failed(error)

    def _patchify_by_worker(self, task: ImageTask) -> Future[Patchified]:
        cost = self._read_ahead.acquire(task.num_bytes)
        try:
            job = self._backend.patchify(task)
        except BaseException:
            self._read_ahead.release(cost)
            raise
        job.add_done_callback(lambda _: self._read_ahead.release(cost))
        return job

    def _read(self, item: VisualItem, num_images: int, budget: MediaBudget) -> ImageTask:
        """Read the bytes of an image, of a video file, or of all frames of a video."""
        if isinstance(item, ImageItem):
            return ImageTask("image", [self._read_source(item.source, budget)], num_images=num_images)
        if isinstance(item, VideoFileItem):
            return ImageTask("video", [self._read_encoded(item.source, "video", budget)], item.fps)
        budget.add_frames(len(item.frames))
        sources = []
        for number, frame in enumerate(item.frames):
            with prefix_errors(f"frame {number + 1}"):
                sources.append(self._read_source(frame, budget))
        return ImageTask("video", sources, item.fps)

    def _read_source(self, source: ImageSource, budget: MediaBudget) -> Source:
        if isinstance(source, Image.Image):
            with self._image_locks[id(source) % _NUM_IMAGE_LOCKS]:
                return Source("pixels", np.ascontiguousarray(load_image(source, self._limits, budget)))
        return self._read_encoded(source, "image", budget)

    def _read_encoded(self, source: str | Path | bytes, kind: VisualKind, budget: MediaBudget) -> Source:
        if isinstance(source, str) and source[:5].lower() == "data:":  # the worker decodes base64
            check_data_url(source, self._limits, kind)
            budget.add_bytes(len(source) * 3 // 4)
            return Source("image_url" if kind == "image" else "video_url", source.encode(errors="replace"))
        data = read_encoded(source, self._limits, kind)
        budget.add_bytes(len(data))
        return Source("image_file" if kind == "image" else "video_file", data)

    # -------------------------------------------------------------- from finished jobs to the prompt

    def _image_done(self, kind: VisualKind, digest: bytes, image: _ImageInProgress, job: Future[Patchified]) -> None:
        try:
            visual, num_pixels, decode_s, preprocess_s = job.result()
            key = image_key(self._backend.metadata.result().of(kind), digest)
            processed = ProcessedImage(key, visual.parts, visual.patches, num_pixels)
            with self._lock:
                if decode_s is not None:
                    self._decode_times.observe(decode_s)
                if preprocess_s is not None:
                    self._preprocess_times.observe(preprocess_s)
                self._cache.put(image.cache_key, processed)
                self._num_processed += 1
        except BaseException as error:
            self._forget(image)
            image.set_exception(error)
        else:
            self._forget(image)
            image.set_result(processed)

    def _forget(self, image: _ImageInProgress) -> None:
        """A later request starts a job of its own, unless the image is in the cache."""
        with self._lock:
            if self._in_progress.get(image.cache_key) is image:
                del self._in_progress[image.cache_key]

    def _assemble_when_done(
        self,
        future: Future[TokenPrompt],
        token_ids: Future[list[int]],
        kinds: Sequence[VisualKind],
        images: Sequence[Future[ProcessedImage]],
    ) -> None:
        def assemble() -> None:
            """Runs in the thread that finishes the last part."""
            try:
                ids = token_ids.result()
                processed, budget = [], MediaBudget(self._limits)
                for number, (kind, image) in enumerate(zip(kinds, images, strict=True)):
                    with prefix_errors(f"{kind} {number + 1}"):
                        processed.append(image.result())
                        budget.add_decoded(processed[-1].num_pixels)
                prompt = _token_prompt(ids, kinds, processed, self._backend.metadata.result())
            except BaseException as error:
                self._finish(future, error)
            else:
                self._finish(future, prompt)

        _when_all_done([self._backend.metadata, token_ids, *images], assemble)

    def _finish(self, future: Future[TokenPrompt], outcome: TokenPrompt | BaseException | None) -> None:
        """Resolve a prompt, once. A cancelled future needs no outcome."""
        with self._lock:
            if future not in self._unfinished:
                return
            self._unfinished.remove(future)
            self._num_prompts += 1
        if not future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, TokenPrompt):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)


class _ImageInProgress(Future[ProcessedImage]):
    """An image that is being preprocessed, for one or several prompts."""

    def __init__(self, cache_key: bytes) -> None:
        super().__init__()
        self.cache_key = cache_key
        self.num_waiting = 1
        """Prompts that wait for it."""
        self.job: Future[Patchified] | None = None


class _ReadAhead:
    """Bounds the bytes and the number of images that are read but not processed yet."""

    def __init__(self, max_bytes: int, max_images: int) -> None:
        self._max_bytes, self._min_cost = max_bytes, max_bytes // max_images
        self._used = 0
        self._changed = threading.Condition()

    def acquire(self, num_bytes: int) -> int:
        """Wait for space; return what to release. An image above the bound waits until it is alone."""
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


def _token_prompt(
    token_ids: Sequence[int],
    kinds: Sequence[VisualKind],
    images: Sequence[ProcessedImage],
    metadata: ProcessorMetadata,
) -> TokenPrompt:
    indices, written = _placeholders(token_ids, kinds, metadata)
    images = in_written_order(written, kinds, images)
    expanded, positions, starts = expand_placeholders(token_ids, indices, [image.parts for image in images])
    prompt_images: list[PromptImage] = []
    for image in images:
        prompt_images += _prompt_images(image, starts[len(prompt_images) :])
    return TokenPrompt(token_ids=expanded, positions=positions, images=tuple(prompt_images))


def _prompt_images(image: ProcessedImage, starts: Sequence[int]) -> Iterator[PromptImage]:
    """Each span of features of an image or video, with its first token and its patches."""
    spans, first = feature_spans(image.parts), 0
    for number, (span, start) in enumerate(zip(spans, starts, strict=False)):
        patches = image.patches if len(spans) == 1 else image.patches[first : first + span.num_patches]
        key = image.key if len(spans) == 1 else hashlib.sha256(image.key + number.to_bytes(4)).digest()
        yield PromptImage(
            span=ImageSpan(key=key, start=start, num_tokens=span.length, num_patches=span.num_patches),
            grid=span.grid,
            patches=patches,
        )
        first += span.num_patches


def _placeholders(
    token_ids: Sequence[int], kinds: Sequence[VisualKind], metadata: ProcessorMetadata
) -> tuple[list[int], list[VisualKind]]:
    """Indices and kinds of the placeholders, one per image and video."""
    kind_of: dict[int | None, VisualKind] = {metadata.image.token_id: "image", metadata.video.token_id: "video"}
    indices = [index for index, token_id in enumerate(token_ids) if token_id in kind_of]
    written = [kind_of[token_ids[index]] for index in indices]
    if sorted(written) != sorted(kinds):
        raise RequestError(
            f"the tokens have {len(indices)} placeholders of images or videos, but {len(kinds)} were given. "
            f"Put one {metadata.image.token_id} where each image belongs"
        )
    return indices, written


def _check_ids(token_ids: Sequence[int]) -> list[int]:
    try:
        ids = list(map(operator.index, token_ids))
    except TypeError as error:
        raise RequestError("token ids must be integers") from error
    if ids and min(ids) < 0:
        raise RequestError(f"token ids must not be negative; got {min(ids)}")
    return ids


def _when_all_done(futures: Sequence[Future[Any]], callback: Callable[[], None]) -> None:
    """Call back from the thread that finishes the last of them."""
    num_open = count(len(futures) - 1, -1)

    def one_done(_: Future[Any]) -> None:
        if next(num_open) == 0:
            callback()

    for future in futures:
        future.add_done_callback(one_done)


def _done(value: _Value) -> Future[_Value]:
    future: Future[_Value] = Future()
    future.set_result(value)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future

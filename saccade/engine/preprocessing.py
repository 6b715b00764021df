"""Conversations to prompts, beside the engine's thread and in other processes.

    submit -> [reader: check, read, hash, look up] -> [worker: tokens] and [worker: each new image] -> put together -> TokenPrompt

Readers are threads; they look at what was sent but decode no file. Each image is work of its own: images of one prompt are made at the
same time, one that several prompts ask for is made once, and one that takes long holds up a single worker. No step relies on the
order in which another ends.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from PIL import Image

from saccade.engine.preprocessing_pool import WorkerPool
from saccade.engine.preprocessing_work import Facts, ImageWork, Source, VisualFacts, WorkSetup, Workshop
from saccade.engine.processed_images import ProcessedImage, ProcessedImageCache
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan
from saccade.errors import RequestError
from saccade.processor.conversation import ImageItem, Message, VideoFileItem, VisualItem
from saccade.processor.image import ImageSource, MediaBudget, MediaLimits, load_image, read_encoded
from saccade.processor.positions import VisionSpan
from saccade.processor.processor import (
    ResizeName,
    VisualKind,
    expand_placeholders,
    prefix_errors,
    split_visuals,
    visual_kind,
)

_READERS = 2
"""The engine's thread shares the interpreter with them and waits its turn behind them all. With 12, 256 requests at once held its
first step up for 0.26 s, with two 0.18; two read and hash some 1000 pictures of 672 x 672 a second."""
_AHEAD = 2
"""Images read for each worker before it can take them. More would only take memory."""
_PICTURE_LOCKS = 61
"""A prime: the ids of objects are multiples of 16."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class PreprocessingStatistics:
    """What has been done so far."""

    num_prompts: int
    """Prompts that are ready, failed or cancelled."""
    num_processed: int
    """Images that were decoded and cut."""
    num_cache_hits: int
    """Images that were in host memory already."""
    num_shared: int
    """Images that were being made for another prompt."""
    num_worker_crashes: int
    """Worker processes that died or had to be ended."""
    num_cached: int
    """Images in host memory now."""
    cached_bytes: int
    """What they take."""


class Preprocessor:
    """Makes prompts of conversations. Any thread may submit.

    What is submitted must not be changed before its prompt is ready. A PIL image whose file is not read yet is decoded in this process.
    """

    def __init__(
        self,
        folder: Path,
        *,
        num_workers: int,
        processed_image_cache_bytes: int,
        limits: MediaLimits | None = None,
        resize: ResizeName = "pillow",
    ) -> None:
        """Starts the workers, but does not wait for them. Without any, work is done by a thread of this process."""
        self._limits = limits or MediaLimits()
        setup = WorkSetup(folder=Path(folder), limits=self._limits, resize=resize)
        self._pool = WorkerPool(setup, num_workers) if num_workers else None
        self._workshop = self._pool or Workshop(setup)
        num_threads = max(1, num_workers)
        self._readers = ThreadPoolExecutor(min(_READERS, num_threads), "saccade-reader")
        self._bench = ThreadPoolExecutor(num_threads, "saccade-bench")
        """A thread for each worker, which asks it and waits."""
        self._room_ahead = threading.Semaphore(_AHEAD * num_threads)
        self._picture_locks = [threading.Lock() for _ in range(_PICTURE_LOCKS)]
        """Two threads must not ask the same PIL image: it is read and its EXIF parsed when first asked."""

        self._lock = threading.Lock()
        """For all below."""
        self._kept = ProcessedImageCache(processed_image_cache_bytes)
        self._in_making: dict[bytes, Future[ProcessedImage]] = {}
        """By sha256 of the source."""
        self._unfinished: set[Future[TokenPrompt]] = set()
        self._is_closed = False
        self._num_prompts = self._num_made = self._num_found = self._num_shared = 0

    # -------------------------------------------------------------- the door

    def submit(self, messages: Sequence[Message]) -> Future[TokenPrompt]:
        """The prompt of a conversation, up to where the assistant is to speak."""
        return self._start(partial(self._read_conversation, messages))

    def submit_tokens(self, token_ids: Sequence[int], images: Sequence[ImageSource]) -> Future[TokenPrompt]:
        """The prompt of token ids in which each image's placeholder stands once."""
        return self._start(partial(self._read_tokens, token_ids, images))

    def wait_until_ready(self) -> None:
        """Until the workers have loaded the processor; raises what is wrong with the checkpoint folder."""
        _ = self._workshop.facts

    @property
    def statistics(self) -> PreprocessingStatistics:
        """What has been done so far."""
        with self._lock:
            return PreprocessingStatistics(
                num_prompts=self._num_prompts,
                num_processed=self._num_made,
                num_cache_hits=self._num_found,
                num_shared=self._num_shared,
                num_worker_crashes=self._pool.num_lost if self._pool else 0,
                num_cached=len(self._kept),
                cached_bytes=self._kept.num_bytes,
            )

    @property
    def worker_pids(self) -> list[int]:
        """The worker processes at present."""
        return self._pool.pids if self._pool else []

    def close(self) -> None:
        """Cancel what is not ready, end the workers."""
        with self._lock:
            self._is_closed = True
            unfinished = list(self._unfinished)
        for future in unfinished:
            future.cancel()
            self._finish(future, None)
        if self._pool:
            self._pool.close()
        self._bench.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- from what was sent to work for the workers

    def _start(self, read: Callable[[], _Parts]) -> Future[TokenPrompt]:
        future: Future[TokenPrompt] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the preprocessor is closed")
            self._unfinished.add(future)
            self._readers.submit(self._begin, future, read)
        return future

    def _begin(self, future: Future[TokenPrompt], read: Callable[[], _Parts]) -> None:
        """In a reader's thread."""
        if future.cancelled():
            self._finish(future, None)
            return
        try:
            parts = read()
        except BaseException as error:
            self._finish(future, error)
        else:
            _when_all_done([parts.token_ids, *parts.images], partial(self._put_together, future, parts))

    def _read_conversation(self, messages: Sequence[Message]) -> _Parts:
        text, items = split_visuals(messages)
        token_ids = self._bench.submit(self._workshop.tokens, text)
        return _Parts(token_ids, [visual_kind(item) for item in items], [self._image(item) for item in items])

    def _read_tokens(self, token_ids: Sequence[int], images: Sequence[ImageSource]) -> _Parts:
        kinds: list[VisualKind] = ["image"] * len(images)
        ids = _check_ids(token_ids)
        _places(ids, kinds, self._workshop.facts)
        return _Parts(_done(ids), kinds, [self._image(ImageItem(image)) for image in images])

    def _image(self, item: VisualItem) -> Future[ProcessedImage]:
        """An image that is there, is being made, or is now ordered."""
        try:
            work = self._read(item)
        except Exception as error:  # told when all is there, so that of two bad images the first is named
            return _failed(error)
        source = work.digest()
        with self._lock:
            if image := self._kept.find(source):
                self._num_found += 1
                return _done(image)
            if source in self._in_making:
                self._num_shared += 1
                return self._in_making[source]
            future = self._in_making[source] = Future()
        self._room_ahead.acquire()
        task = self._bench.submit(self._make, source, work, future)
        task.add_done_callback(lambda _: self._room_ahead.release())
        return future

    def _read(self, item: VisualItem) -> ImageWork:
        """The bytes of an image, or of all frames of a video."""
        if isinstance(item, ImageItem):
            return ImageWork("image", [self._read_source(item.source)])
        if isinstance(item, VideoFileItem):
            raise RequestError("video files are not decoded by the engine. Send the video as a list of frames")
        MediaBudget(self._limits).add_frames(len(item.frames))
        sources = []
        for number, frame in enumerate(item.frames):
            with prefix_errors(f"frame {number + 1}"):
                sources.append(self._read_source(frame))
        return ImageWork("video", sources, item.fps)

    def _read_source(self, source: ImageSource) -> Source:
        if isinstance(source, Image.Image):
            with self._picture_locks[id(source) % _PICTURE_LOCKS]:
                return Source("pixels", np.ascontiguousarray(load_image(source, self._limits)))
        if isinstance(source, str) and source[:5].lower() == "data:":  # base64 is left to the worker
            return Source("url", source.encode(errors="replace"))
        return Source("file", read_encoded(source, self._limits))

    # -------------------------------------------------------------- from finished work to the prompt

    def _make(self, source: bytes, work: ImageWork, future: Future[ProcessedImage]) -> None:
        """In a thread of the bench."""
        try:
            image = self._workshop.image(work)
            with self._lock:
                image = self._kept.keep(source, image)
                self._num_made += 1
        except BaseException as error:
            with self._lock:
                del self._in_making[source]
            future.set_exception(error)
            return
        with self._lock:
            del self._in_making[source]
        future.set_result(image)

    def _put_together(self, future: Future[TokenPrompt], parts: _Parts) -> None:
        """In the thread that did the last of it."""
        try:
            token_ids = parts.token_ids.result()
            images = []
            for number, (kind, image) in enumerate(zip(parts.kinds, parts.images, strict=True)):
                with prefix_errors(f"{kind} {number + 1}"):
                    images.append(image.result())
            prompt = _token_prompt(token_ids, parts.kinds, images, self._workshop.facts)
        except BaseException as error:
            self._finish(future, error)
        else:
            self._finish(future, prompt)

    def _finish(self, future: Future[TokenPrompt], outcome: TokenPrompt | BaseException | None) -> None:
        """Whoever comes first tells the outcome. A cancelled future needs none."""
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


@dataclass(frozen=True)
class _Parts:
    """What a prompt is put together from, as far as it is there."""

    token_ids: Future[list[int]]
    """With one placeholder for each image and video."""
    kinds: Sequence[VisualKind]
    images: Sequence[Future[ProcessedImage]]


def _token_prompt(
    token_ids: Sequence[int], kinds: Sequence[VisualKind], images: Sequence[ProcessedImage], facts: Facts
) -> TokenPrompt:
    places = _places(token_ids, kinds, facts)
    spans = [_span(image, facts.of(kind)) for image, kind in zip(images, kinds, strict=True)]
    expanded, positions, starts = expand_placeholders(token_ids, places, spans)
    prepared = [
        PromptImage(
            span=ImageSpan(key=image.key, start=start, num_tokens=span.length, num_patches=len(image.patches)),
            grid=image.grid,
            patches=image.patches,
        )
        for image, span, start in zip(images, spans, starts, strict=True)
    ]
    return TokenPrompt(token_ids=expanded, positions=positions, images=tuple(prepared))


def _span(image: ProcessedImage, facts: VisualFacts) -> VisionSpan:
    pairs, rows, columns = image.grid
    return VisionSpan(pairs, rows // facts.merge_size, columns // facts.merge_size, image.time_step)


def _places(token_ids: Sequence[int], kinds: Sequence[VisualKind], facts: Facts) -> list[int]:
    """Where the placeholders stand, one for each image and video."""
    kind_of: dict[int, VisualKind] = {facts.image.token_id: "image", facts.video.token_id: "video"}
    places = [place for place, token_id in enumerate(token_ids) if token_id in kind_of]
    if [kind_of[token_ids[place]] for place in places] != list(kinds):
        raise RequestError(
            f"the tokens have {len(places)} placeholders of images or videos, but {len(kinds)} were given. "
            f"Put one {facts.image.token_id} where each image stands"
        )
    return places


def _check_ids(token_ids: Sequence[int]) -> list[int]:
    try:
        ids = list(map(operator.index, token_ids))
    except TypeError as error:
        raise RequestError("token ids are whole numbers; something else is among them") from error
    if ids and min(ids) < 0:
        raise RequestError(f"token ids are not negative, but {min(ids)} is among them")
    return ids


def _when_all_done(futures: Sequence[Future[Any]], do: Callable[[], None]) -> None:
    """Have the thread that ends the last of them do it."""
    num_open = count(len(futures) - 1, -1)

    def one_less(_: Future[Any]) -> None:
        if next(num_open) == 0:
            do()

    for future in futures:
        future.add_done_callback(one_less)


def _done(value: _Value) -> Future[_Value]:
    future: Future[_Value] = Future()
    future.set_result(value)
    return future


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future

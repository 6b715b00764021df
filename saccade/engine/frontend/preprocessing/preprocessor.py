"""The preprocessor: conversations in, prompts out.

Each image is a job of its own: images of one prompt are preprocessed in parallel, an image of several prompts is
preprocessed once, and a slow image occupies a single worker. A request without images uses neither readers nor image
workers. Cancelling a prompt cancels its jobs that no worker has started, except for images that other prompts wait for.

On a GPU the vision tower resizes and patchifies the still images of some families. Workers only decode these, and an
image that is sent as pixels needs no worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from saccade.engine.frontend.futures import done, failed, when_all_done
from saccade.engine.frontend.preprocessing.backends import LocalBackend, ProcessBackend
from saccade.engine.frontend.preprocessing.config import MAX_WORKER_BYTES, PreprocessingConfig
from saccade.engine.frontend.preprocessing.media import MediaReader
from saccade.engine.frontend.preprocessing.processed_images import ProcessedImage, ProcessedImages
from saccade.engine.frontend.preprocessing.prompt_assembly import assemble_prompt, find_placeholders, plain_ids
from saccade.engine.frontend.preprocessing.prompt_processor import Patchified
from saccade.engine.frontend.preprocessing.statistics import PreprocessingStatistics
from saccade.engine.media import EncodedImage, ImageTask, MediaMissingError, TaskDescription
from saccade.engine.prompt import PromptSources, TokenPrompt
from saccade.errors import RequestError
from saccade.processor.image import MediaBudget, MediaLimits
from saccade.processor.messages import Message, VisualItem
from saccade.processor.parts import VisualKind
from saccade.processor.processor import ResizeName, count_images, prefix_errors, split_visuals, visual_kind
from saccade.processor.tools import Tool, check_tools
from saccade.workers.process import keep_freed_memory

_NUM_READERS = 2
"""Reader threads. They compete with the engine's thread for the interpreter; two read and hash about 1000 images of 672
x 672 per second."""
_READ_AHEAD_PER_WORKER = 2
"""Images that are read for each worker before the worker is free; more would only take memory."""
_KEPT_HEAP_BYTES = 2**28
"""Freed memory that this process keeps: images are read into it, and fresh memory is slow."""


Readable = Callable[[], ImageTask]
"""Reads an image or video, in a reader thread."""


def default_num_workers() -> int:
    """Preprocessing workers by the number of cores. Two are left for the engine loop and its clients."""
    return max(0, min(12, len(os.sched_getaffinity(0)) - 2))


class Preprocessor:
    """Turns conversations into prompts. Any thread may submit.

    A submitted conversation must not change before its prompt is ready. PIL images and arrays are read in this process.
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
        measures_only: bool = False,
    ) -> None:
        """Start the workers without waiting for them. With `num_workers` 0, two threads of this process do the work.

        A worker that takes longer than `timeout_s` for one image, text or 32 frames of a video is killed and replaced.
        `max_images` bounds the images and videos of a request, `limits` the size of each, `max_worker_bytes` the memory
        of a worker. `chat_template` replaces the checkpoint's. `patchifies_on_device`: images are only decoded here,
        and patchified by the vision tower, if the family allows it. `measures_only`: prompts have no patches, but the
        `sources` from which another preprocessor makes the same prompt (`submit_tasks`).
        """
        keep_freed_memory(_KEPT_HEAP_BYTES)
        self._limits, self._max_images, self._measures_only = limits or MediaLimits(), max_images, measures_only
        config = PreprocessingConfig(
            folder=Path(folder),
            limits=self._limits,
            resize=resize,
            chat_template=chat_template,
            max_worker_bytes=max_worker_bytes,
            patchifies_on_device=patchifies_on_device,
            measures_only=measures_only,
        )
        self._backend = ProcessBackend(config, num_workers, timeout_s) if num_workers else LocalBackend(config)
        max_read_ahead = _READ_AHEAD_PER_WORKER * max(1, num_workers)
        self._images = ProcessedImages(self._backend, config, processed_image_cache_bytes, max_read_ahead)
        self._reader = MediaReader(self._limits)
        self._readers = ThreadPoolExecutor(_NUM_READERS, "saccade-reader")
        self._lock = threading.Lock()
        """Guards the fields below."""
        self._unfinished: set[Future[TokenPrompt]] = set()
        self._is_closed = False
        self._num_prompts = 0

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

        `tools` are functions that the model may call. Processed images are shared only between submissions of equal
        `salt`.
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
            self._start_conversation(future, token_ids, items, salt)
        return future

    def submit_tokens(
        self, token_ids: Sequence[int], images: Sequence[Any], *, salt: bytes = b""
    ) -> Future[TokenPrompt]:
        """The prompt of token ids that have one placeholder per image. A video is given as a part of a message."""
        future = self._open()
        try:
            ids = plain_ids(token_ids)
            self._check_num_images(len(images))
            parts = [image if isinstance(image, Mapping) else {"type": "image", "image": image} for image in images]
            _, items = split_visuals([{"role": "user", "content": parts or "no image"}])
        except BaseException as error:
            self._finish(future, error)
        else:
            self._start_conversation(future, done(ids), items, salt)
        return future

    def submit_tasks(
        self,
        token_ids: Sequence[int],
        tasks: Sequence[TaskDescription],
        media: Sequence[bytes | EncodedImage | None],
        *,
        salt: bytes = b"",
    ) -> Future[TokenPrompt]:
        """The prompt of the `sources` of a prompt without patches: token ids with one placeholder per task.

        `media` has the data of each task, the encoded image, or None where `has` found the image. MediaMissingError: it
        was evicted since, or the encoded image does not fit the task, and nothing is started.
        """
        images = self._found(tasks, media, salt)
        found = [image for image in images if isinstance(image, Future)]
        try:
            future = self._open()
        except BaseException:
            self._images.leave(found)
            raise
        future.add_done_callback(lambda _: self._images.leave(found))
        try:
            ids = plain_ids(token_ids)
            self._check_num_images(len(tasks))
        except BaseException as error:
            self._finish(future, error)
        else:
            self._start(future, done(ids), [task.kind for task in tasks], images, salt)
        return future

    def patchify(self, task: ImageTask) -> Future[Patchified]:
        """An image or video by itself, which is not kept. Waits while many images are read ahead."""
        return self._images.patchify(task)

    def has(self, digest: bytes, salt: bytes) -> bool:
        """Whether the image or video with this digest (`ImageTask.digest`) is processed, or being processed."""
        return self._images.has(digest, salt)

    def encode(self, text: str) -> Future[list[int]]:
        """Token ids of plain text, after the ids that the tokenizer puts before a prompt."""
        return self._backend.encode(text)

    def flush(self) -> None:
        """Forget all processed images."""
        self._images.flush()

    def wait_until_ready(self) -> None:
        """Wait until the workers have loaded the processor. Raises if the checkpoint folder cannot be used."""
        self._backend.metadata.result()

    @property
    def statistics(self) -> PreprocessingStatistics:
        """Counters since the start."""
        images = self._images
        return PreprocessingStatistics(
            num_prompts=self._num_prompts,
            num_processed=images.num_processed,
            num_cache_hits=images.num_cache_hits,
            num_shared=images.num_shared,
            num_worker_crashes=self._backend.num_crashes,
            num_cached=len(images.cache),
            cached_bytes=images.cache.num_bytes,
            num_unfinished=len(self._unfinished),
            decode_times=images.decode_times.copy(),
            preprocess_times=images.preprocess_times.copy(),
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
        self._backend.close()
        self._readers.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- one prompt

    def _open(self) -> Future[TokenPrompt]:
        future: Future[TokenPrompt] = Future()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the preprocessor is closed")
            self._unfinished.add(future)
        future.add_done_callback(lambda _: self._finish(future, None) if future.cancelled() else None)
        return future

    def _check_num_images(self, num_images: int) -> None:
        if num_images > self._max_images:
            raise RequestError(
                f"{num_images} images and videos, over the limit of {self._max_images} per request. Send fewer, or "
                "raise max_images_per_request"
            )

    def _found(
        self, tasks: Sequence[TaskDescription], media: Sequence[bytes | EncodedImage | None], salt: bytes
    ) -> list[Readable | Future[ProcessedImage]]:
        """Images that are processed already, or the data that they are read from."""
        images: list[Readable | Future[ProcessedImage]] = []
        missing = []
        for number, (task, data) in enumerate(zip(tasks, media, strict=True)):
            found: Readable | Future[ProcessedImage] | None
            if isinstance(data, EncodedImage):
                found = self._images.put(task, data, salt)
            else:
                found = self._images.find(task.digest, salt) if data is None else partial(task.with_media, data)
            images += [] if found is None else [found]
            missing += [number] if found is None else []
        if missing:
            self._images.leave([image for image in images if isinstance(image, Future)])
            raise MediaMissingError(missing)
        return images

    def _start_conversation(
        self, future: Future[TokenPrompt], token_ids: Future[list[int]], items: Sequence[VisualItem], salt: bytes
    ) -> None:
        num_images, budget = count_images(items), MediaBudget(self._limits)

        def read(item: VisualItem) -> ImageTask:
            return self._reader.read(item, self._backend.rules.counted_images(num_images), budget)

        kinds, images = [visual_kind(item) for item in items], [partial(read, item) for item in items]
        self._start(future, token_ids, kinds, images, salt)

    def _start(
        self,
        future: Future[TokenPrompt],
        token_ids: Future[list[int]],
        kinds: Sequence[VisualKind],
        images: Sequence[Readable | Future[ProcessedImage]],
        salt: bytes,
    ) -> None:
        """Read the images in a reader thread; a prompt without images needs none."""
        future.add_done_callback(lambda _: token_ids.cancel() if future.cancelled() else None)
        if not images:
            self._assemble_when_done(future, token_ids, [], [], [])
            return
        try:
            self._readers.submit(self._read_images, future, token_ids, kinds, images, salt)
        except RuntimeError as error:  # closed meanwhile
            self._finish(future, error)

    def _read_images(
        self,
        future: Future[TokenPrompt],
        token_ids: Future[list[int]],
        kinds: Sequence[VisualKind],
        given: Sequence[Readable | Future[ProcessedImage]],
        salt: bytes,
    ) -> None:
        images: list[Future[ProcessedImage]] = []
        own: list[Future[ProcessedImage]] = []
        tasks: list[ImageTask] = []
        try:
            if token_ids.done() and not token_ids.cancelled():  # fail before the images are read
                find_placeholders(token_ids.result(), kinds, self._backend.metadata.result())
            for image in given:
                if future.cancelled():
                    break
                if not isinstance(image, Future):
                    image = self._image(image, salt, tasks)
                    own.append(image)
                images.append(image)
        except BaseException as error:
            self._finish(future, error)
            return
        finally:
            future.add_done_callback(lambda _: self._images.leave(own))
        if not future.cancelled():
            self._assemble_when_done(future, token_ids, kinds, images, tasks)

    def _image(self, read: Readable, salt: bytes, tasks: list[ImageTask]) -> Future[ProcessedImage]:
        """Read an image and have it preprocessed. Its task is kept if the prompt has to be made again."""
        try:
            task = read()
        except Exception as error:  # reported when all images are done: the first of two bad ones is named
            return failed(error)
        if self._measures_only:
            tasks.append(task)
        return self._images.get(task, salt)

    def _assemble_when_done(
        self,
        future: Future[TokenPrompt],
        token_ids: Future[list[int]],
        kinds: Sequence[VisualKind],
        images: Sequence[Future[ProcessedImage]],
        tasks: Sequence[ImageTask],
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
                prompt = assemble_prompt(ids, kinds, processed, self._backend.metadata.result())
                if self._measures_only:
                    prompt = replace(prompt, sources=PromptSources(token_ids=list(ids), tasks=tuple(tasks)))
            except BaseException as error:
                self._finish(future, error)
            else:
                self._finish(future, prompt)

        when_all_done([self._backend.metadata, token_ids, *images], assemble)

    def _finish(self, future: Future[TokenPrompt], outcome: TokenPrompt | BaseException | None) -> None:
        """Resolve a prompt, once. A cancelled prompt has no outcome."""
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

"""A vision encoder by itself: encoded media in, features out. An `EngineHost` takes them in place of the media.

    TaskDescription, media -> preprocess (media workers) -> passes of the vision encoder (a thread) -> EncodedImage

It loads the vision tower and the projector of a checkpoint alone. Features have the dtype of the model, and are equal
to those that an engine of the same checkpoint and device computes.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.device.encoder import Encoder, patch_budgets
from saccade.engine.device.failures import is_alive
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.frontend.preprocessing.processed_images import ProcessedImage
from saccade.engine.frontend.preprocessing.prompt_assembly import images_by_themselves
from saccade.engine.frontend.preprocessing.prompt_processor import Patchified
from saccade.engine.media import EncodedImage, TaskDescription
from saccade.engine.prompt import PromptImage
from saccade.engine.start import media_preprocessor
from saccade.errors import ImageError
from saccade.model.prepacked_linear import prepack_storage
from saccade.model.weights import load_vision
from saccade.processor.families import load_rules
from saccade.processor.image import MediaLimits

logger = logging.getLogger(__name__)

_WEIGHT = 0.1
"""Weight of the newest pass in the mean time per patch."""

_IDLE_S = 0.02
"""Seconds without an image after which a CUDA graph is captured."""


class _Job(NamedTuple):
    """An image or video whose patches are ready."""

    images: Sequence[PromptImage]
    """Its spans of features."""
    patchified: Patchified
    encoded: Future[EncodedImage]

    @property
    def num_patches(self) -> int:
        return sum(image.span.num_patches for image in self.images)


class EncoderHost:
    """Encodes images of several callers at once. Thread-safe. Close it to end its thread and processes."""

    def __init__(
        self, preprocessor: Preprocessor, encoder: Encoder, stream: torch.cuda.Stream | None, max_patches: int
    ) -> None:
        """`stream`: the one that the encoder was warmed up on. `max_patches`: maximum patches of a pass with several
        images. `load` makes the arguments.
        """
        self._preprocessor, self._encoder, self._max_patches = preprocessor, encoder, max_patches
        self._stream = stream
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.patch_s = 0.0
        """Measured seconds per patch; 0 before the first pass."""
        self.has_failed = False
        """Whether the device has failed or the host is closed, so that nothing is encoded any more."""
        self._thread = threading.Thread(target=self._run, name="saccade-encoder", daemon=True)
        self._thread.start()

    @staticmethod
    def load(
        folder: str | Path, *, device: str | torch.device = "auto", dtype: str | torch.dtype | None = None,
        config: EngineConfig | None = None, limits: MediaLimits | None = None,
    ) -> EncoderHost:  # fmt: skip
        """Load the encoder of a checkpoint folder. `config` is that of the engines that read its features."""
        folder, device, config = Path(folder), resolve_device(device), config or EngineConfig()
        with contextlib.ExitStack() as opened:
            preprocessor = opened.enter_context(media_preprocessor(folder, config, limits, device))
            model = load_vision(folder, device=device, dtype=dtype)
            prepack_storage(model)
            pixels, stream = load_rules(folder).images, None
            budgets: Sequence[int] = ()
            if device.type == "cuda":  # the default stream cannot be captured
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stream.wait_stream(torch.cuda.current_stream(device))
            if stream is not None and config.cuda_graphs:
                budgets = patch_budgets(config.max_encoder_patches, model.config.vision.patches_per_token)
            with torch.inference_mode(), _on(stream):
                encoder = Encoder(model, pixel_mean=pixels.mean, pixel_std=pixels.std, budgets=budgets)
                encoder.warm_up()
            preprocessor.wait_until_ready()
            opened.pop_all()
        return EncoderHost(preprocessor, encoder, stream, config.max_encoder_patches)

    def encode(self, described: TaskDescription, media: bytes) -> Future[EncodedImage]:
        """Encode an image or video, given its data. Waits while many images are read ahead.

        The future raises ImageError if the data is not what the task describes, or cannot be decoded.
        """
        encoded: Future[EncodedImage] = Future()
        try:
            task = described.with_media(media)
            if task.digest != described.digest:
                raise ImageError("the data of an image has another digest than its task. Send what the task describes")
            patchified = self._preprocessor.patchify(task)
        except Exception as error:
            encoded.set_exception(error)
        else:
            patchified.add_done_callback(partial(self._add, encoded))
        return encoded

    def _add(self, encoded: Future[EncodedImage], done: Future[Patchified]) -> None:
        """Queue an image whose patches are ready."""
        try:
            patchified = done.result()
        except BaseException as error:
            encoded.set_exception(error)
            return
        visual = patchified.visual
        images = images_by_themselves(ProcessedImage(b"", visual.parts, visual.patches))
        self._jobs.put(_Job(images, patchified, encoded))
        if self.has_failed:
            self._fail_rest(None)

    def close(self) -> None:
        """Stop. Images that are not encoded fail."""
        self._preprocessor.close()
        self._jobs.put(None)
        self._thread.join()

    # -------------------------------------------------------------- the thread

    def _run(self) -> None:
        following: _Job | None = None
        with _on(self._stream):
            while not self.has_failed:
                following = following or self._next_job()
                if following is None:  # the host is closed
                    break
                batch, following = self._next_pass(following)
                self._encode_or_isolate(batch)
        self.has_failed = True
        self._fail_rest(following)

    def _next_job(self) -> _Job | None:
        """Wait for an image, or for the end; meanwhile capture CUDA graphs that are missing."""
        with torch.inference_mode():
            while True:
                try:
                    return self._jobs.get(timeout=_IDLE_S)
                except queue.Empty:
                    if not self._encoder.capture_next():
                        return self._jobs.get()

    def _next_pass(self, first: _Job) -> tuple[list[_Job], _Job | None]:
        """The images of the next pass, in order, and one that does not fit into it."""
        batch, num_patches = [first], first.num_patches
        with contextlib.suppress(queue.Empty):
            while (job := self._jobs.get_nowait()) is not None:
                num_patches += job.num_patches
                if num_patches > self._max_patches:
                    return batch, job
                batch.append(job)
            self._jobs.put(None)  # the host is closed after this pass
        return batch, None

    def _encode_or_isolate(self, batch: Sequence[_Job]) -> None:
        """Encode a pass. If it fails, encode its images in halves until the failing image is alone."""
        try:
            features = self._encode(batch)
        except Exception as error:
            if not is_alive(self._encoder.device):
                self.has_failed = True
            if len(batch) == 1 or self.has_failed:
                logger.warning("images could not be encoded: %r", error, exc_info=error)
                for job in batch:
                    job.encoded.set_exception(ImageError("an image could not be encoded; send another one"))
                return
            middle = len(batch) // 2
            self._encode_or_isolate(batch[:middle])
            self._encode_or_isolate(batch[middle:])
            return
        for job, found in zip(batch, features, strict=True):
            visual = job.patchified.visual
            job.encoded.set_result(
                EncodedImage(
                    grid=visual.grid, texts=tuple(map(tuple, visual.texts)), num_pixels=job.patchified.num_pixels,
                    features=found,
                )
            )  # fmt: skip

    def _encode(self, batch: Sequence[_Job]) -> list[NDArray[np.uint8]]:
        """Features of each image, [tokens, bytes]."""
        begun = time.perf_counter()
        features_MF = _bytes_of(self._encoder.encode([image for job in batch for image in job.images]))
        per_patch_s = (time.perf_counter() - begun) / sum(job.num_patches for job in batch)
        self.patch_s += (per_patch_s - self.patch_s) * (_WEIGHT if self.patch_s else 1.0)
        counts = [sum(image.span.num_tokens for image in job.images) for job in batch]
        return np.split(features_MF, np.cumsum(counts)[:-1])

    def _fail_rest(self, waiting: _Job | None) -> None:
        """Fail the images that are queued."""
        with contextlib.suppress(queue.Empty):
            while True:
                if waiting is not None:
                    waiting.encoded.set_exception(ImageError("the encoder is closed"))
                waiting = self._jobs.get_nowait()


def _on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Context in which work is queued on a stream."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _bytes_of(features_MF: Tensor) -> NDArray[np.uint8]:
    """[M, bytes] on the host."""
    found: NDArray[np.uint8] = features_MF.contiguous().cpu().view(torch.uint8).numpy()
    return found

"""Where preprocessing runs: in threads of this process, or in worker processes.

    engine  --JSON on a socket, bytes in the worker's inbox-->  worker  --JSON, bytes in its outbox-->  engine

Text has workers of its own, so that it never waits for images. There is one for each of several sizes, so that a
question never waits for a book.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from saccade.engine.frontend.preprocessing.checks import ImageChecks
from saccade.engine.frontend.preprocessing.config import PreprocessingConfig, ProcessorMetadata
from saccade.engine.frontend.preprocessing.jobs import ImageJob, Mailbox, TextJob
from saccade.engine.frontend.preprocessing.prompt_processor import Patchified, PromptProcessor
from saccade.engine.frontend.preprocessing.worker import initialize
from saccade.engine.media import ImageTask
from saccade.processor.families import VisionRules, load_rules
from saccade.processor.messages import Message
from saccade.processor.tools import Tool
from saccade.workers.fork_server import ForkServer
from saccade.workers.pool import WorkerPool

logger = logging.getLogger(__name__)

_FRAMES_PER_TIMEOUT = 32
"""A video may take the timeout of one image for this many frames."""
_BYTES_PER_TIMEOUT = 8 * 2**20
"""A video file may take the timeout of one image for this many bytes."""
_TEXT_BYTES = (2**13, 2**17, math.inf)
"""Largest text, as JSON, of each text worker. 8 KiB take up to 10 ms, 128 KiB 0.2 s, and one of 10 MB seconds."""
_MAX_MESSAGE_BYTES = 2**20
"""Maximum size of a message of a worker."""


class LocalBackend:
    """Runs the work in two threads of this process, one for text and one for images."""

    num_crashes = 0
    pids: Sequence[int] = ()

    def __init__(self, config: PreprocessingConfig) -> None:
        self._processor = PromptProcessor(config)
        self.rules = self._processor.rules
        self.metadata: Future[ProcessorMetadata] = Future()
        self.metadata.set_result(self._processor.metadata)
        self._text = ThreadPoolExecutor(1, "saccade-tokenize")
        self._images = ThreadPoolExecutor(1, "saccade-images")

    def tokenize(
        self, messages: Sequence[Message], continue_final_message: bool, tools: Sequence[Tool] | None
    ) -> Future[list[int]]:
        """See `PromptProcessor.tokenize`."""
        return self._text.submit(self._processor.tokenize, messages, continue_final_message, tools)

    def encode(self, text: str) -> Future[list[int]]:
        """See `PromptProcessor.encode`."""
        return self._text.submit(self._processor.encode, text)

    def patchify(self, task: ImageTask) -> Future[Patchified]:
        """See `PromptProcessor.patchify`."""
        return self._images.submit(self._processor.patchify, task)

    def close(self) -> None:
        """Cancel the work that has not started."""
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
    def rules(self) -> VisionRules:
        """The checkpoint's rules, read from the folder by this process: workers are not trusted."""
        return load_rules(self._config.folder)

    @functools.cached_property
    def _checks(self) -> ImageChecks:
        config = self._config
        return ImageChecks(self.rules, config.limits, self.metadata, config.sends_whole_images, config.measures_only)

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
        """See `PromptProcessor.tokenize`."""
        return self._submit_text({"conversation": [messages, continue_final_message, tools]})

    def encode(self, text: str) -> Future[list[int]]:
        """See `PromptProcessor.encode`."""
        return self._submit_text({"text": text})

    def _submit_text(self, task: dict[str, Any]) -> Future[list[int]]:
        job = TextJob(task, self.metadata, self._timeout_s)
        return self._texts[bisect.bisect_left(_TEXT_BYTES, job.num_bytes)].submit(job)

    def patchify(self, task: ImageTask) -> Future[Patchified]:
        """See `PromptProcessor.patchify`."""
        size = task.num_bytes / _BYTES_PER_TIMEOUT if task.is_video_file else len(task.sources) / _FRAMES_PER_TIMEOUT
        return self._images.submit(ImageJob(task, self._checks, self._timeout_s * math.ceil(size)))

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
                "media workers decode untrusted files without %s, which this system lacks: a flaw in a decoder may "
                "reach files and the network. Use Linux 5.13 or newer on x86-64 or arm64",
                " and ".join(missing),
            )
        self.metadata.set_result(ProcessorMetadata.from_json(received.result()["processor"]))

"""A preprocessing worker process: it tokenises texts, or decodes and patchifies images, one after the other.

Workers decode untrusted files. They are sealed (`saccade.workers.sandbox`): a worker can reach no file, socket or other
process. The engine trusts nothing that a worker sends:
- Messages have a bounded size and are validated (`checks.py`).
- Inbox and outbox are read and written but never mapped: a worker could truncate mapped memory, or change it after the
  check.
- Image keys are hashes that the engine computes itself over the image as it was sent. No worker can claim the key of
  another image and place its features in a cache.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np

from saccade.engine.frontend.preprocessing.config import MAX_TOKENS, PreprocessingConfig
from saccade.engine.frontend.preprocessing.jobs import Mailbox
from saccade.engine.frontend.preprocessing.prompt_processor import PromptProcessor
from saccade.engine.media import ImageTask, Source
from saccade.errors import ImageError
from saccade.workers.fork_server import RunWorker
from saccade.workers.messages import encode_error, receive, send
from saccade.workers.process import keep_freed_memory
from saccade.workers.sandbox import ResourceLimits, missing_features, seal
from saccade.workers.shared_memory import SharedMemory

_MAX_CPU_S = 3600
"""CPU time of one worker, which is then replaced. A single job is bounded by its timeout."""
_KEPT_HEAP_BYTES = 2**27
"""Freed memory a worker keeps."""


def initialize(config: Any) -> tuple[RunWorker, dict[str, Any]]:
    """Load what all workers share. Returns their loop, and metadata of the processor and of the sandbox."""
    keep_freed_memory(_KEPT_HEAP_BYTES)
    settings = PreprocessingConfig.from_json(config)
    if settings.resize == "torch":
        import torch

        torch.set_num_threads(1)
    processor = PromptProcessor(settings)
    processor.warm_up()
    limits = ResourceLimits(
        memory_bytes=settings.max_worker_bytes,
        file_bytes=max(2 * processor.metadata.image.max_bytes, processor.metadata.video.max_bytes, 8 * MAX_TOKENS),
        cpu_s=_MAX_CPU_S,
    )
    metadata = {"processor": dataclasses.asdict(processor.metadata), "no_sandbox": missing_features()}
    return functools.partial(_run_worker, processor, limits), metadata


def _run_worker(processor: PromptProcessor, limits: ResourceLimits, connection: socket.socket, *fds: int) -> None:
    """Handle one request after the other until the connection is closed."""
    mailbox = Mailbox((fds[0], fds[1]))
    seal(limits)
    while (request := receive(connection)) is not None:
        try:
            send(connection, _reply(request, mailbox, processor))
        except (BrokenPipeError, ConnectionResetError):
            return
        except MemoryError:
            send(connection, encode_error(ImageError("it needs more memory than a worker may use. Send less")))
        except Exception as error:
            send(connection, encode_error(error))


def _reply(request: dict[str, Any], mailbox: Mailbox, processor: PromptProcessor) -> dict[str, Any]:
    """Do the work of a request and write the result to the outbox."""
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
    """Read the sources, which are one after the other in the inbox."""
    sources, offset = [], 0
    for form, *shape in descriptions:
        data = np.empty(shape, dtype=np.uint8)
        inbox.read_into(data, offset)
        offset += data.nbytes
        sources.append(Source(form, data if form == "pixels" else data.tobytes()))
    return sources

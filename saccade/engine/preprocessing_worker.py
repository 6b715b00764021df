"""The processes that prepare prompts, from within.

Workers decode what strangers send. They share nothing with the engine but a socket, an inbox and an outbox.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.engine.preprocessing_work import ImageWork, Source, WorkSetup, Workshop
from saccade.fork_server import RunWorker, encode_error, keep_freed_memory, receive, send
from saccade.shared_memory import SharedMemory

_KEPT_BYTES = 2**27
"""Freed memory a worker keeps. What the largest images take is given back."""


def get_ready(setup: Any) -> tuple[RunWorker, dict[str, Any]]:
    """What the workers are forked with, loaded once, and the facts of the checkpoint folder."""
    torch.set_num_threads(1)
    keep_freed_memory(_KEPT_BYTES)
    workshop = Workshop(WorkSetup.from_json(setup))
    workshop.warm_up()
    return functools.partial(_work, workshop), workshop.facts.to_json()


def _work(workshop: Workshop, connection: socket.socket, inbox_fd: int, outbox_fd: int) -> None:
    """A worker's life: one question after the other until the connection ends."""
    _go_first_when_memory_runs_out()
    inbox, outbox = SharedMemory(inbox_fd), SharedMemory(outbox_fd)
    while (question := receive(connection)) is not None:
        try:
            for answer in _answers(question, inbox, outbox, workshop):
                send(connection, answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            send(connection, encode_error(error))


def _answers(
    question: dict[str, Any], inbox: SharedMemory, outbox: SharedMemory, workshop: Workshop
) -> Iterator[dict[str, Any]]:
    """An image is answered twice, so that its patches are read over there while they are hashed here."""
    if "messages" in question:
        token_ids = workshop.tokens(question["messages"])
        outbox.write(np.array(token_ids, dtype=np.int64), 0)
        yield {"num_tokens": len(token_ids)}
    else:
        work = question["image"]
        visual = workshop.cut(ImageWork(work["kind"], _sources(work["sources"], inbox), work["fps"]))
        outbox.write(visual.patches, 0)
        yield {"grid": visual.grid, "time_step": visual.span.time_step}
        yield {"key": workshop.key(work["kind"], visual).hex()}


def _sources(descriptions: Sequence[Sequence[Any]], inbox: SharedMemory) -> list[Source]:
    """Take the sources out of the inbox, where they lie one behind the other."""
    sources, position = [], 0
    for form, *shape in descriptions:
        data = np.empty(shape, dtype=np.uint8)
        inbox.read_into(data, position)
        position += data.nbytes
        sources.append(Source(form, data if form == "pixels" else data.tobytes()))
    return sources


def _go_first_when_memory_runs_out() -> None:
    """A worker is soon replaced, the engine is not."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")

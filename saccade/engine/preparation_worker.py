"""The processes that prepare prompts, from within: a foreman that gets ready once, and the workers it forks.

Workers decode what strangers send. They share nothing with the engine but a socket, an inbox and an outbox.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from saccade.engine.preparation_messages import MemoryFile, receive, send
from saccade.engine.preparation_work import ImageWork, Source, WorkSetup, Workshop
from saccade.errors import UserError

_MAX_ERROR_LENGTH = 10_000
"""Characters of an error's text at most."""


def foreman(control_fd: int, engine_pid: int) -> None:
    """Main function of the foreman: get ready once, then fork a worker whenever the engine sends a connection for one."""
    _die_with(engine_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the engine, which then ends us
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # dead workers vanish: the engine sees their connection end
    torch.set_num_threads(1)
    _keep_freed_memory()
    with socket.socket(fileno=control_fd) as control:
        setup = receive(control)
        try:
            workshop = Workshop(WorkSetup.from_json(setup))
            workshop.warm_up()
        except Exception as error:
            send(control, _describe_error(error))
            return
        gc.freeze()  # what is here now stays shared with the workers
        own_pid = os.getpid()
        send(control, workshop.facts.to_json())
        while True:
            request, fds, _, _ = socket.recv_fds(control, 1, 3)
            if not request:
                return
            if (pid := os.fork()) == 0:
                control.close()
                _live(fds, workshop, own_pid)
            for fd in fds:
                os.close(fd)
            send(control, {"pid": pid})


def _live(fds: Sequence[int], workshop: Workshop, foreman_pid: int) -> NoReturn:
    """A worker's life, from the fork on."""
    try:
        _die_with(foreman_pid)
        _go_first_when_memory_runs_out()
        _work(socket.socket(fileno=fds[0]), MemoryFile(fds[1]), MemoryFile(fds[2]), workshop)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _work(connection: socket.socket, inbox: MemoryFile, outbox: MemoryFile, workshop: Workshop) -> None:
    """One question after the other until the connection ends."""
    while (question := receive(connection)) is not None:
        try:
            for answer in _answers(question, inbox, outbox, workshop):
                send(connection, answer)
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:
            send(connection, _describe_error(error))


def _answers(
    question: dict[str, Any], inbox: MemoryFile, outbox: MemoryFile, workshop: Workshop
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


def _sources(descriptions: Sequence[Sequence[Any]], inbox: MemoryFile) -> list[Source]:
    """Take the sources out of the inbox, where they lie one behind the other."""
    sources, position = [], 0
    for form, *shape in descriptions:
        data = np.empty(shape, dtype=np.uint8)
        inbox.read_into(data, position)
        position += data.nbytes
        sources.append(Source(form, data if form == "pixels" else data.tobytes()))
    return sources


def _describe_error(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"error": type(error).__name__, "text": str(error)[:_MAX_ERROR_LENGTH]}
    return {"error": "bug", "text": "".join(traceback.format_exception(error))[-_MAX_ERROR_LENGTH:]}


def _keep_freed_memory() -> None:
    """Have the C library keep memory that is freed: the next picture needs it again at once, and fresh pages are slow."""
    if sys.platform == "linux":
        m_trim_threshold, m_mmap_threshold = -1, -3
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl has none
        if mallopt is not None:
            mallopt(m_trim_threshold, 2**27)
            mallopt(m_mmap_threshold, 2**25)  # the most it takes: 32 MiB


def _go_first_when_memory_runs_out() -> None:
    """A worker is soon replaced, the engine is not."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def _die_with(parent_pid: int) -> None:
    """Have the kernel end this process when its parent ends (Linux; elsewhere the end of the connection does)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)

"""The inbox of the front end's thread: commands of other threads, and outputs of the core."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Sequence

from saccade.engine.request import RequestOutput, merge_outputs

Command = Callable[[], None]
Outputs = Sequence[RequestOutput]


class Inbox:
    """A queue of commands and outputs. Any thread may put, one thread gets."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Command | Outputs] = queue.SimpleQueue()
        self._next: Command | None = None
        """A command that was found while outputs were merged."""
        self.put = self._queue.put

    def get(self, timeout_s: float | None = None) -> Command | Iterable[RequestOutput] | None:
        """Wait for the next command or outputs. None: neither arrived in time."""
        if self._next is not None:
            command, self._next = self._next, None
            return command
        try:
            item = self._queue.get(timeout=timeout_s)
        except queue.Empty:
            return None
        return item if callable(item) or self._queue.empty() else self._merged(item)

    def _merged(self, outputs: Outputs) -> Iterable[RequestOutput]:
        """These outputs and all later ones up to the next command, merged by request.

        A thread that is slower than the core detokenizes and calls back once for several steps, and so catches up.
        """
        merged = {output.request_id: output for output in outputs}
        while True:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                return merged.values()
            if callable(item):
                self._next = item
                return merged.values()
            for output in item:
                earlier = merged.get(output.request_id)
                merged[output.request_id] = output if earlier is None else merge_outputs(earlier, output)

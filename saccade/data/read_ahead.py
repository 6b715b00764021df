"""Download chunks before they are needed, in a few threads of a process that will read them or whose siblings will.

packing buffer of the next round -> byte ranges of its samples -> chunks, in the order of their first use -> threads
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from saccade.data import storage
from saccade.data.config import StreamConfig
from saccade.data.lanes import Owners
from saccade.data.packing_buffer import PackingBuffer
from saccade.data.sources import IndexedSource
from saccade.data.storage import Chunk, StorageConfig
from saccade.errors import DataError
from saccade.log import log_once


class ReadAhead:
    """Threads that download chunks. They start with the first chunk and end with the process."""

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._queue: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
        self._num_threads = 0

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Download these chunks after those that were added before."""
        if not self._config.num_ahead:
            return
        for chunk in chunks:
            self._queue.put(chunk)
        while self._num_threads < self._config.num_ahead and not self._queue.empty():
            threading.Thread(target=self._run, name="saccade read ahead", daemon=True).start()
            self._num_threads += 1

    def _run(self) -> None:
        while True:
            chunk = self._queue.get()
            try:
                storage.storage(self._config).fetch(chunk)
            except DataError as error:  # who needs the chunk tries again, and fails if it must
                log_once("data", f"{error} (read ahead)", logging.WARNING)


def chunks_of(buffer: PackingBuffer, sources: Sequence[IndexedSource], config: StreamConfig) -> Iterator[Chunk]:
    """The remote chunks with the samples of a packing buffer, which this node will read.

    None with fewer lanes than nodes: each node reads only some samples of a lane then, and which is not known yet.
    """
    owners = Owners(config.num_lanes, config.num_ranks, config.ranks_per_node or config.num_ranks)
    if not owners.is_divided:
        return
    of_shards = []
    shards, begins = np.unique(buffer.table[:, :2], axis=0, return_index=True)
    for source, shard in shards[np.argsort(begins)].tolist():
        if sources[source].index.files[shard].is_remote:
            is_here = (buffer.table[:, 0] == source) & (buffer.table[:, 1] == shard)
            rows = buffer.table[is_here, 2].astype(np.int64)
            of_shards.append(sources[source].chunks(shard, rows, config.unit_bytes))
    for turn in itertools.zip_longest(*of_shards):
        yield from (chunk for chunk in turn if chunk is not None)

"""Worker processes that plan packing buffers, and collate packed sequences into shared memory.

    trainer  --round, lane-->  worker: draw, look up lengths, pack into sequences    --sample refs-->  trainer
    trainer  --sample refs-->  worker: read, decode, pack into shared memory  --offsets-->  trainer: tensors in place

A buffer is reused once the last tensor in it is freed, because fresh pages are slow.
"""

from __future__ import annotations

import dataclasses
import functools
import mmap
import os
import socket
import weakref
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from saccade.config import decode, encode
from saccade.data import storage
from saccade.data.bad_samples import BadSample
from saccade.data.batch_sampler import BatchSampler
from saccade.data.collate import CollateResult, Collator, PackedSequence
from saccade.data.config import StreamConfig
from saccade.data.packing_buffer import BufferId, PackingBuffer, SampleRef, SequenceRefs
from saccade.data.read_ahead import ReadAhead, chunks_of
from saccade.data.sources import IndexedSource
from saccade.data.storage import StorageCounters
from saccade.errors import DataError, UserError
from saccade.processor.image import Pixels
from saccade.processor.inputs import ModelInputs
from saccade.workers.fork_server import ForkServer, ForkServerError, RunWorker
from saccade.workers.messages import encode_error, receive_with_fds, send
from saccade.workers.pool import Job, PoolClosedError, Worker, WorkerPool
from saccade.workers.process import keep_freed_memory
from saccade.workers.shared_memory import SharedMemory

_QUEUE_DEPTH = 2
"""Sequences per worker, running and queued, so that a worker never waits for the trainer's process."""
_ALIGNMENT = 64
"""Alignment of tensors in a buffer, bytes."""


# ------------------------------------------------------------------ shared memory


class SequenceBuffer:
    """Shared memory of one packed sequence: patches first, then its other tensors. It grows and never shrinks."""

    def __init__(self, fd: int | None = None) -> None:
        self._memory = SharedMemory(fd)
        self.fd = self._memory.fd
        self._mapping: mmap.mmap | None = None

    def write(self, collate: Callable[[Pixels], CollateResult], num_patches: int, patch_dim: int) -> dict[str, Any]:
        """Collate a sequence with its patches in place; return its description, which `read` takes."""
        end = num_patches * patch_dim
        if self.num_bytes() < max(end, 1):
            os.ftruncate(self.fd, max(end + end // 8, mmap.PAGESIZE))
        result = collate(np.frombuffer(self._map(end), np.uint8, end).reshape(num_patches, patch_dim))
        inputs = result.sequence.inputs
        fields = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
        tensors = {}
        for name, tensor in fields.items():
            if isinstance(tensor, Tensor):
                begin = 0 if name == "patches" else end + -end % _ALIGNMENT
                tensors[name] = (str(tensor.dtype).removeprefix("torch."), tensor.shape, begin, begin + tensor.nbytes)
                if name != "patches":
                    end = begin + self._memory.write(tensor.contiguous().numpy(), begin)
        return {
            "tensors": tensors,
            "others": {name: value for name, value in fields.items() if not isinstance(value, Tensor)},
            "sequence": {name: value for name, value in vars(result.sequence).items() if name != "inputs"},
            "bad": [dataclasses.asdict(sample) for sample in result.bad],
        }

    def read(self, description: dict[str, Any], on_free: Callable[[], object]) -> CollateResult:
        """The sequence, its tensors in place. `on_free` is called once all of them are freed."""
        array = np.frombuffer(self._map(max(end for _, _, _, end in description["tensors"].values())), np.uint8)
        weakref.finalize(array, on_free).atexit = False
        content = torch.from_numpy(array)
        tensors: dict[str, Any] = {
            name: content[begin:end].view(getattr(torch, dtype)).reshape(shape)
            for name, (dtype, shape, begin, end) in description["tensors"].items()
        }
        others = {
            name: tuple(value) if isinstance(value, list) else value for name, value in description["others"].items()
        }
        sequence = PackedSequence(inputs=ModelInputs(**(tensors | others)), **description["sequence"])
        return CollateResult(sequence, [BadSample(**bad) for bad in description["bad"]])

    def num_bytes(self) -> int:
        """Current size."""
        return self._memory.num_bytes()

    def _map(self, num_bytes: int) -> mmap.mmap:
        """A mapping of at least this many bytes."""
        if self._mapping is None or len(self._mapping) < num_bytes:
            self._mapping = mmap.mmap(self.fd, 0)
        return self._mapping


# ------------------------------------------------------------------ trainer's process


class _Buffers:
    """The buffers one worker writes to."""

    fds = ()

    def __init__(self) -> None:
        self.buffers: list[SequenceBuffer] = []
        self.free: list[int] = []
        """Indices of buffers without tensors."""
        self.storage = StorageCounters()
        """What the worker has read of remote files so far."""


class _CollateJob(Job[_Buffers, CollateResult]):
    """One packed sequence."""

    def __init__(self, sequence: SequenceRefs, sources: Sequence[IndexedSource]) -> None:
        super().__init__()
        self._refs, self._is_own, self._sources = sequence.samples, sequence.is_own, sources
        self._buffer = 0

    def send(self, worker: Worker[_Buffers]) -> None:
        channel, new = worker.channel, []
        if channel.free:
            self._buffer = channel.free.pop()
        else:
            self._buffer = len(channel.buffers)
            channel.buffers.append(SequenceBuffer())
            new = [channel.buffers[-1].fd]
        send(worker.connection, {"refs": self._refs, "is_own": self._is_own, "buffer": self._buffer}, new)

    def receive(self, message: dict[str, Any], worker: Worker[_Buffers]) -> CollateResult:
        channel = worker.channel
        channel.storage = StorageCounters(**message.pop("storage"))
        on_free = functools.partial(channel.free.append, self._buffer)
        return channel.buffers[self._buffer].read(message, on_free)

    def error(self, reason: str) -> DataError:
        return DataError(
            f"{self.num_crashes} worker processes crashed on the same packed sequence: {reason}. If memory ran out, "
            f"use fewer workers or a smaller max_seq_len; otherwise remove the sample that crashes them, one of: {self}"
        )

    def __str__(self) -> str:
        return ", ".join(self._sources[ref.source].sample_id(ref.shard, ref.kept_row) for ref in self._refs)


class _PlanJob(Job[_Buffers, PackingBuffer]):
    """One packing buffer."""

    def __init__(self, key: BufferId) -> None:
        super().__init__()
        self._key = key

    def send(self, worker: Worker[_Buffers]) -> None:
        send(worker.connection, {"plan": self._key})

    def receive(self, message: dict[str, Any], worker: Worker[_Buffers]) -> PackingBuffer:
        return PackingBuffer.from_bytes(b64decode(message["planned"]))

    def error(self, reason: str) -> DataError:
        return DataError(f"{self.num_crashes} worker processes crashed on {self}: {reason}. Use fewer workers")

    def __str__(self) -> str:
        return f"the plan of round {self._key.round}, lane {self._key.lane}"


class CollatorPool:
    """Plans and collates packed sequences in `num_workers` processes, which start with the first `collate`."""

    def __init__(self, sources: Sequence[IndexedSource], config: StreamConfig) -> None:
        self._sources, self._config = sources, config
        self._pool: WorkerPool[_Buffers] | None = None
        self._channels: list[_Buffers] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return self._pool.pids if self._pool else []

    @property
    def storage_counters(self) -> StorageCounters:
        """Counters of the remote files that the workers have read."""
        total = StorageCounters()
        for channel in self._channels:
            total = total.plus(channel.storage)
        return total

    def _open_channel(self) -> _Buffers:
        self._channels.append(_Buffers())
        return self._channels[-1]

    def plan(self, key: BufferId) -> Future[PackingBuffer]:
        """Compute a packing buffer, after what was submitted before. `collate` has begun."""
        assert self._pool is not None, "collate starts the workers"
        return self._pool.submit(_PlanJob(key))

    def collate(self, sequences: Iterable[SequenceRefs]) -> Generator[CollateResult]:
        """The packed sequences in order. At most two per worker are running or waiting to be taken."""
        num_workers = self._config.num_workers
        content = {"config": encode(self._config), "sources": [source.to_json() for source in self._sources]}
        self._pool = WorkerPool(
            ForkServer(initialize, content), num_workers, self._open_channel, queue_depth=_QUEUE_DEPTH
        )
        pending: deque[Future[CollateResult]] = deque()
        try:
            for sequence in sequences:
                pending.append(self._pool.submit(_CollateJob(sequence, self._sources)))
                if len(pending) == _QUEUE_DEPTH * num_workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except PoolClosedError as error:
            raise DataError("the stream was closed") from error
        except DataError:
            raise
        except (ForkServerError, UserError) as error:
            raise DataError(str(error)) from error
        finally:
            self.close()

    def close(self) -> None:
        """Kill all processes. A thread waiting in `collate` gets an error."""
        if self._pool:
            self._pool.close()


# ------------------------------------------------------------------ worker processes


def initialize(content: Any) -> tuple[RunWorker, None]:
    """Load what all workers share."""
    torch.set_num_threads(1)
    keep_freed_memory()
    config = decode(StreamConfig, content["config"])
    sources = [IndexedSource.from_json(source, config.storage) for source in content["sources"]]
    return functools.partial(_run_worker, sources, Collator(sources, config), config), None


def _run_worker(
    sources: Sequence[IndexedSource], collator: Collator, config: StreamConfig, connection: socket.socket
) -> None:
    """Plan packing buffers and collate sequences, one after the other, until the connection is closed."""
    buffers: list[SequenceBuffer] = []
    ahead = ReadAhead(config.storage)
    sampler: BatchSampler | None = None  # made here: reading its tables starts threads, which a fork would not copy
    while True:
        message, fds = receive_with_fds(connection)
        if message is None:
            return
        buffers += map(SequenceBuffer, fds)
        reply: dict[str, Any]
        try:
            if "plan" in message:
                sampler = sampler or BatchSampler(sources, config)
                planned = sampler.packing_buffer(*message["plan"])
                reply = {"planned": b64encode(planned.to_bytes()).decode()}
                ahead.add(chunks_of(planned, sources, config))
            else:
                reply = _collate(collator, message, buffers)
                reply["storage"] = vars(storage.storage(config.storage).counters)
        except Exception as error:
            reply = encode_error(error)
        try:
            send(connection, reply)
        except OSError:
            return


def _collate(collator: Collator, message: dict[str, Any], buffers: Sequence[SequenceBuffer]) -> dict[str, Any]:
    """Collate one sequence into the buffer that the message names."""
    refs = [SampleRef(*ref) for ref in message["refs"]]
    num_patches = sum(ref.patches for ref in refs)
    collate = functools.partial(collator.make, refs, is_own=message["is_own"])
    buffer: SequenceBuffer = buffers[message["buffer"]]
    return buffer.write(collate, num_patches, collator.patch_dim)

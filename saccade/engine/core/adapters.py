"""LoRA adapters of a core: their slots, the requests that use them, and how they are added and removed. No torch.

    reserve a slot -> activate (its matrices are on the device) -> acquire and release by requests -> remove

A removed adapter takes no new requests; running requests keep it until they end. Its name can be used again at once,
its slot once the last of these requests has ended.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from saccade.engine.core.messages import AdapterRead, AddAdapter, RemoveAdapter
from saccade.engine.core.step_runner import Adapter, StepRunner
from saccade.engine.request import Failure, FailureKind, Request, RequestOutput
from saccade.errors import RequestError, UserError

logger = logging.getLogger(__name__)


@dataclass
class AdapterEntry:
    """An adapter in a slot."""

    name: str
    """Name that requests use."""
    slot: int
    """Index of the slot, from 0."""
    digest: bytes = b""
    """Hash of the adapter's matrices and settings; empty until it is loaded."""
    num_requests: int = 0
    """Number of open requests that use it."""
    is_removed: bool = False

    @property
    def is_loaded(self) -> bool:
        """Whether requests can use it."""
        return bool(self.digest) and not self.is_removed

    def salt(self, salt: bytes) -> bytes:
        """The salt of a request with this adapter. Its KV depends on the adapter, so others may not share it."""
        return hashlib.sha256(b"adapter:" + self.digest + salt).digest()


class AdapterTable:
    """Assigns slots to adapters and counts the requests that use them."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))
        self._num_slots = num_slots
        self._entries: dict[str, AdapterEntry] = {}
        self._leaving: list[AdapterEntry] = []

    @property
    def names(self) -> list[str]:
        """Names of the loaded adapters."""
        return [name for name, entry in self._entries.items() if entry.is_loaded]

    def reserve(self, name: str) -> AdapterEntry:
        """Reserve a slot for a new adapter. RequestError: the name is taken, or no slot is free."""
        if name in self._entries:
            raise RequestError(f"there is an adapter {name!r} already. Remove it first, or choose another name")
        if not self._num_slots:
            raise RequestError("this engine has no slots for adapters. Load it with max_adapters = 8, say")
        if not self._free:
            waits = f", {len(self._leaving)} of them until their last requests end" if self._leaving else ""
            raise RequestError(
                f"all {self._num_slots} slots for adapters are taken{waits}. Remove one, or raise max_adapters"
            )
        entry = self._entries[name] = AdapterEntry(name, self._free.pop())
        return entry

    def activate(self, entry: AdapterEntry, digest: bytes) -> None:
        """Let requests use an adapter whose matrices are on the device."""
        entry.digest = digest

    def find(self, name: str) -> AdapterEntry:
        """The loaded adapter with this name. RequestError: there is none."""
        entry = self._entries.get(name)
        if entry is None or not entry.is_loaded:
            known = ", ".join(self.names) or "none"
            raise RequestError(f"adapter {name!r} is not loaded. Loaded: {known}")
        return entry

    def acquire(self, entry: AdapterEntry) -> None:
        """Count a request that starts using an adapter."""
        entry.num_requests += 1

    def release(self, entry: AdapterEntry) -> None:
        """Stop counting a request that has ended."""
        entry.num_requests -= 1
        assert entry.num_requests >= 0, "every release follows an acquire"
        self._free_if_unused(entry)

    def remove(self, entry: AdapterEntry) -> None:
        """Take no new requests for an adapter. Its slot is free when no request uses it."""
        del self._entries[entry.name]
        entry.is_removed = True
        self._leaving.append(entry)
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: AdapterEntry) -> None:
        if entry.is_removed and entry.num_requests == 0:
            self._leaving.remove(entry)
            self._free.append(entry.slot)

    def check(self) -> None:
        """Check that every slot is free or has one adapter."""
        slots = sorted([*self._free, *(entry.slot for entry in self._all())])
        assert slots == list(range(self._num_slots)), f"slots of adapters are lost or owned twice: {slots}"

    def _all(self) -> Iterator[AdapterEntry]:
        yield from self._entries.values()
        yield from self._leaving


class Adapters:
    """Handles messages that add and remove adapters, and assigns adapters to requests."""

    def __init__(self, num_slots: int, runner: StepRunner, post: Callable[[AdapterRead], None]) -> None:
        """`post` sends a message to the core from another thread."""
        self._table = AdapterTable(num_slots)
        self._runner, self._post = runner, post
        self._of_request: dict[str, AdapterEntry] = {}
        self._reading: dict[str, tuple[AdapterEntry, Future[Adapter]]] = {}  # by reply id
        self._reader = ThreadPoolExecutor(
            1, thread_name_prefix="saccade-adapters"
        )  # its thread starts with the first submit

    def add(self, message: AddAdapter) -> list[RequestOutput]:
        """Read and check an adapter folder in another thread, while requests are served."""

        def read() -> None:
            entry = self._table.reserve(message.name)
            reading = self._reader.submit(self._runner.read_adapter, message.folder)
            self._reading[message.reply_id] = entry, reading
            reading.add_done_callback(lambda _: self._post(AdapterRead(reply_id=message.reply_id)))

        failed = _failure_of(read, message.reply_id)
        return [] if failed is None else [failed]

    def activate(self, message: AdapterRead) -> list[RequestOutput]:
        """Move an adapter that was read to the device."""
        entry, reading = self._reading.pop(message.reply_id)

        def move() -> None:
            try:
                adapter = reading.result()
                self._runner.set_adapter(entry.slot, adapter)
            except BaseException:
                self._table.remove(entry)
                raise
            self._table.activate(entry, adapter.digest)

        return [_failure_of(move, message.reply_id) or _done(message.reply_id)]

    def remove(self, message: RemoveAdapter) -> list[RequestOutput]:
        """Remove an adapter: new requests cannot use it."""
        failed = _failure_of(lambda: self._table.remove(self._table.find(message.name)), message.reply_id)
        return [failed or _done(message.reply_id)]

    def find(self, request: Request) -> AdapterEntry | None:
        """The adapter of a request; None for the base model. RequestError: it is not loaded."""
        return None if request.adapter is None else self._table.find(request.adapter)

    def salted(self, request: Request, entry: AdapterEntry | None) -> Request:
        """The request with a salt that depends on its adapter."""
        return request if entry is None else replace(request, salt=entry.salt(request.salt))

    def acquire(self, request_id: str, entry: AdapterEntry | None) -> int | None:
        """Keep a request's adapter until the request ends; returns its slot."""
        if entry is None:
            return None
        self._table.acquire(entry)
        self._of_request[request_id] = entry
        return entry.slot

    def forget(self, request_id: str) -> None:
        """Release the adapter of an ended request."""
        if (entry := self._of_request.pop(request_id, None)) is not None:
            self._table.release(entry)

    def check(self) -> None:
        """Check that every slot is free or has one adapter."""
        self._table.check()

    def close(self) -> None:
        """Stop the thread that reads folders."""
        self._reader.shutdown(wait=False, cancel_futures=True)


def _failure_of(action: Callable[[], None], reply_id: str) -> RequestOutput | None:
    """Run an action; returns the reply to its message if it fails."""
    try:
        action()
    except UserError as error:
        return _failed(reply_id, str(error), "invalid_request")
    except Exception as error:
        logger.warning("an adapter was not loaded: %r", error, exc_info=error)
        return _failed(reply_id, "the adapter could not be loaded", "internal_error")
    return None


def _done(reply_id: str) -> RequestOutput:
    return RequestOutput(request_id=reply_id, finish_reason="stop")


def _failed(reply_id: str, message: str, kind: FailureKind) -> RequestOutput:
    return RequestOutput(request_id=reply_id, finish_reason="failed", failure=Failure("waiting", message, kind))

"""One engine replica without Ray: what fronts call. It knows no HTTP, no keys and no text.

    front -> submit(message, media) -> EngineHost -> outputs -> the front's channel
                        '-> EncoderPool -> features ---^

Fronts open a channel each. A front that has not called for a few seconds is dead: its requests are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from saccade.engine.host import EngineHost
from saccade.engine.media import EncodedImage, MediaMissingError
from saccade.engine.request import Request, RequestOutput
from saccade.engine.transport.wire import SentRequest
from saccade.fleet.cluster.encoder_pool import EncoderPool
from saccade.fleet.cluster.front_channel import FrontChannel
from saccade.fleet.cluster.messages import Hello, load_to_plain, pack
from saccade.fleet.cluster.replica_tracing import ReplicaTracer
from saccade.fleet.config import VersionConfig
from saccade.fleet.costs import H200_8B, CostModel, measured_costs
from saccade.fleet.describe import ExpectedLength, routed
from saccade.fleet.expected_work import ExpectedWork
from saccade.fleet.replicas import REPORT_S, Replica, ReplicaStatistics

logger = logging.getLogger(__name__)

_FRONT_TIMEOUT_S = 3.5
"""Seconds without a call after which a front is dead."""
_KEEP_ALIVE_S = 1.0
"""Seconds after which the load is reported although it has not changed."""
_MAX_NEWS = 256
"""Images and prefix blocks that a report may have."""
_PATCHES_PER_TOKEN = 4
_WEIGHT = 0.05
"""Weight of the newest request in the mean time of a request."""


class _News:
    """What has become resident, for reports to several fronts."""

    def __init__(self) -> None:
        self._items: deque[tuple[int, Any]] = deque(maxlen=_MAX_NEWS)
        self.number = 0

    def add(self, item: Any) -> None:
        self.number += 1
        self._items.append((self.number, item))

    def since(self, number: int) -> tuple[Any, ...]:
        return tuple(item for each, item in self._items if each > number)


class _Reports:
    """The reports to one front: what has changed since the last one."""

    def __init__(self, images: _News, prefixes: _News, channel: FrontChannel) -> None:
        self._images, self._prefixes, self._channel = images, prefixes, channel
        self._seen = 0, 0
        self._last: ReplicaStatistics | None = None
        self._reported_at = 0.0

    def next(self, load: ReplicaStatistics) -> bytes | None:
        """The next report, given the present load. None: nothing has changed."""
        now, accepted = time.monotonic(), self._channel.take_accepted()
        news = self._images.since(self._seen[0]), self._prefixes.since(self._seen[1])
        unchanged = self._last is not None and replace(load, as_of=self._last.as_of) == self._last
        if unchanged and not any((accepted, *news)) and now - self._reported_at < _KEEP_ALIVE_S:
            return None
        self._seen = self._images.number, self._prefixes.number
        self._last, self._reported_at = load, now
        return pack("load", load_to_plain(replace(load, accepted=accepted, images=news[0], prefixes=news[1])))


class _Traced:
    """The span of a request, if there is a collector."""

    def __init__(self, tracer: ReplicaTracer | None, sent: SentRequest) -> None:
        self._span = None if tracer is None else tracer.begin("engine", sent.request.traceparent)
        self._num_known, self._num_tokens = len(sent.request.output_ids), 0

    @property
    def traceparent(self) -> str | None:
        """The span in W3C form."""
        return None if self._span is None else self._span.traceparent

    def end_stage(self, name: str) -> None:
        """End a stage of the request."""
        if self._span is not None:
            self._span.end_stage(name)

    def observe(self, output: RequestOutput) -> RequestOutput:
        """Follow an output, and return it."""
        if self._span is None:
            return output
        if output.token_ids and not self._num_tokens:
            self._span.end_stage("prefill")
        self._num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            if self._num_tokens:
                self._span.end_stage("decode")
            counts = {"gen_ai.usage.output_tokens": self._num_tokens, "saccade.known_tokens": self._num_known}
            failure = None if output.failure is None else output.failure.kind
            self._span.end(counts | {"gen_ai.response.finish_reasons": (output.finish_reason,)}, failure)
        return output


class ReplicaService:
    """Serves the fronts from one engine. Everything but the outputs runs in one event loop."""

    def __init__(
        self, name: str, version: VersionConfig, host: EngineHost, *,
        open_pool: Callable[[], EncoderPool] | None = None, tracer: ReplicaTracer | None = None,
        report_s: float = REPORT_S,
    ) -> None:  # fmt: skip
        """`open_pool` connects to the encoder replicas; it is called in the event loop. The load is reported every
        `report_s` seconds, and when requests of other fronts come.
        """
        self.name, self._version, self._host = name, version, host
        self._open_pool, self._tracer, self._report_s = open_pool, tracer, report_s
        self._pool: EncoderPool | None = None
        self._preparing: set[str] = set()
        """Requests that wait for their media."""
        self._fronts: dict[str, FrontChannel] = {}
        self._images, self._prefixes, self._expected = _News(), _News(), ExpectedLength()
        self._queued = ExpectedWork(self._replica())
        self._arrived_s = 0.0
        self._started_at: dict[str, float] = {}
        self._request_s = 0.0
        self._watching: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------ calls of fronts

    async def channel(self, front: str) -> AsyncGenerator[bytes, None]:
        """Messages for a front, until it leaves."""
        channel = self._front(front)
        reports = _Reports(self._images, self._prefixes, channel)
        yield pack("hello", self._hello().to_plain())
        try:
            async for message in channel.messages(lambda: reports.next(self._statistics()), self._report_s):
                yield message
        finally:
            if self._fronts.get(front) is channel:
                self._leave(front)

    async def hold(self, front: str) -> None:
        """Wait until a front has left, or did not connect in time."""
        await self._front(front).closed.wait()

    async def submit(self, front: str, sent: SentRequest, media: Sequence[Awaitable[bytes]]) -> None:
        """Take a request. Media are awaited only if they are not cached here, and no encoder replica encodes them."""
        channel, request_id = self._front(front), sent.request.id
        traced = _Traced(self._tracer, sent)
        channel.request_ids.add(request_id)
        self._preparing.add(request_id)
        self._started_at[request_id] = time.monotonic()
        try:
            parts = await self._parts(sent, media, traced)
            if request_id not in self._preparing:  # cancelled meanwhile
                channel.put(traced.observe(RequestOutput(request_id=request_id, finish_reason="cancelled")))
                return
            self._count(sent.request, parts)
            await self._submit(sent, parts, media, lambda output: self._pass_on(channel, traced.observe(output)))
            channel.accepted.append(request_id)
            for other in self._fronts.values():
                if other is not channel:  # this front has reserved the request
                    other.report_soon()
        except BaseException:
            channel.request_ids.discard(request_id)
            self._started_at.pop(request_id, None)
            self._queued.end(request_id, time.monotonic())
            raise
        finally:
            self._preparing.discard(request_id)

    async def _parts(
        self, sent: SentRequest, media: Sequence[Awaitable[bytes]], traced: _Traced
    ) -> list[bytes | EncodedImage | None]:
        """Media that are needed: the encoded image if the pool has it in time, else the data."""
        missing = self._host.missing_media(sent)
        encoded: Mapping[int, EncodedImage] = {}
        if self._pool is not None and missing:
            encoded = await self._pool.encode(sent, missing, media, self._own_s, traced.traceparent)
            traced.end_stage("features")
        own = [number for number in missing if number not in encoded]
        data = await asyncio.gather(*(media[number] for number in own))
        parts: dict[int, bytes | EncodedImage] = {**encoded, **dict(zip(own, data, strict=True))}
        return [parts.get(number) for number in range(len(media))]

    async def _submit(
        self, sent: SentRequest, parts: list[bytes | EncodedImage | None], media: Sequence[Awaitable[bytes]],
        on_output: Callable[[RequestOutput], None],
    ) -> None:  # fmt: skip
        while True:
            try:
                return self._host.submit(sent, parts, on_output)
            except MediaMissingError as error:  # evicted since, or features of another model
                for number in error.numbers:
                    parts[number] = await media[number]

    def _pass_on(self, channel: FrontChannel, output: RequestOutput) -> None:
        """Send an output to its front; called from the engine's thread."""
        if output.token_ids or output.finish_reason is not None:
            self._queued.end(output.request_id, time.monotonic())
        if output.finish_reason is not None:
            self._count_end(output.request_id)
        channel.put(output)

    def _own_s(self, num_patches: int) -> float:
        """Seconds in which this engine would have encoded so many patches."""
        share = self._costs.prompt_share(self._host.num_open)
        return self._statistics().queued_s + num_patches * self._costs.patch_s / share

    def cancel(self, front: str, request_ids: Sequence[str]) -> None:
        """Cancel requests of a front."""
        self._front(front)
        self._cancel(request_ids)

    def _cancel(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self._preparing:
                self._preparing.discard(request_id)
            else:
                self._host.cancel(request_id)

    def heartbeat(self, front: str) -> None:
        """Note that a front is alive."""
        self._front(front)

    # ------------------------------------------------------------------ the replica

    @property
    def has_failed(self) -> bool:
        """Whether the engine core has stopped. Its requests have ended, and their last outputs say why."""
        return self._host.has_failed

    def scaling_load(self) -> dict[str, float]:
        """Load of this replica for the scaling of its pool, as `saccade.fleet.scaling` counts it."""
        info, statistics = self._host.info, self._host.statistics
        return {
            "arrived_s": self._arrived_s,
            "waiting_s": self._statistics().queued_s,
            "num_running": float(self._host.num_open),
            "slots": float(info.max_requests),
            "request_s": self._request_s,
            "pages_used": float(info.num_pages - statistics.num_free_pages),
            "pages": float(info.num_pages),
        }

    def close(self) -> None:
        """Stop the engine."""
        if self._watching is not None:
            self._watching.cancel()
        if self._pool is not None:
            self._pool.close()
        self._host.close()
        if self._tracer is not None:
            self._tracer.close()

    # ------------------------------------------------------------------ what is counted

    def _front(self, front: str) -> FrontChannel:
        """The channel of a front that has just called."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_fronts())
            self._pool = None if self._open_pool is None else self._open_pool()
        if front not in self._fronts:
            self._fronts[front] = FrontChannel(asyncio.get_running_loop())
        self._fronts[front].heard_at = time.monotonic()
        return self._fronts[front]

    async def _watch_fronts(self) -> None:
        """Cancel the requests of fronts that have died."""
        while True:
            await asyncio.sleep(_FRONT_TIMEOUT_S / 4)
            for front, channel in list(self._fronts.items()):
                if time.monotonic() - channel.heard_at > _FRONT_TIMEOUT_S:
                    logger.warning("front %s is gone: %d requests are cancelled", front, len(channel.request_ids))
                    self._leave(front)

    def _leave(self, front: str) -> None:
        channel = self._fronts.pop(front)
        channel.close()
        self._cancel(channel.request_ids)

    def _hello(self) -> Hello:
        return Hello(replica=self._replica(), info=self._host.info)

    def _replica(self) -> Replica:
        version, info = self._version, self._host.info
        engine = version.engine
        return Replica(
            name=self.name, version=version.name, costs=self._costs,
            cached_patches=engine.encoder_cache_tokens * _PATCHES_PER_TOKEN if engine.encoder_cache else 0,
            cached_tokens=info.num_pages * info.page_size if engine.prefix_cache else 0,
            adapters=frozenset(self._host.adapters),
        )  # fmt: skip

    @property
    def _costs(self) -> CostModel:
        """Times that the file states, else those that the engine has measured, else those of an 8B model."""
        if self._version.costs is not None:
            return self._version.costs
        return measured_costs(self._host.statistics, self._version.engine.target_step_ms, H200_8B)

    def _statistics(self) -> ReplicaStatistics:
        costs, pool, num_open = self._costs, self._pool, self._host.num_open
        num_decoding = max(0, num_open - len(self._queued))
        return ReplicaStatistics(
            as_of=time.time(), state="unhealthy" if self._host.has_failed else "ready",
            queued_s=self._queued.queued_s(costs, num_decoding, time.monotonic()), num_running=num_open, costs=costs,
            pooled_patches=0 if pool is None else pool.num_patches,
            late_patches=0 if pool is None else pool.num_late_patches,
        )  # fmt: skip

    def _count(self, request: Request, parts: Sequence[bytes | EncodedImage | None]) -> None:
        """Count the work of a request, and what it brings to the caches. Other replicas have encoded some images."""
        described, costs = routed(request, self._version.name, self._expected), self._costs
        share = sum(not isinstance(part, EncodedImage) for part in parts) / max(1, len(parts))
        work = self._queued.add(described, time.monotonic(), encoded_share=share)
        slots = self._host.info.max_requests
        prompt_s = costs.work_s(round(work.patches), work.tokens) / costs.prompt_share(slots)
        self._arrived_s += prompt_s + described.output_tokens * costs.decode_step_s(slots) / slots
        for image in described.images:
            self._images.add(image)
        for key in reversed(described.prefix):
            self._prefixes.add(key)

    def _count_end(self, request_id: str) -> None:
        """Count the time that a request took; called from the engine's thread."""
        began = self._started_at.pop(request_id, None)
        if began is not None:
            elapsed_s = time.monotonic() - began
            self._request_s += (elapsed_s - self._request_s) * (_WEIGHT if self._request_s else 1.0)

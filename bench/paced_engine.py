"""Engines that work in real time as a cost model says, for `bench.fleet_routers` and `bench.fleet_step`.

The work of a request takes as long as the model says, however busy the machine is; only messages are late.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from saccade.engine import SamplingParams
from saccade.engine.core.messages import AddRequest, CoreInfo
from saccade.engine.core.statistics import Statistics
from saccade.engine.prompt import PromptSources, TokenPrompt
from saccade.engine.request import ImageSpan, Request, RequestOutput
from saccade.engine.transport.wire import SentRequest
from saccade.fleet.costs import CostModel
from saccade.fleet.describe import ExpectedLength, routed
from saccade.fleet.replicas import PREFIX_BLOCK, Replica, RoutedRequest
from saccade.fleet.simulated_engine import Progress, SimulatedEngine
from saccade.fleet.workloads import PATCHES_PER_TOKEN, VERSION

_PAGE_SIZE, _MAX_REQUESTS = 16, 256


class Timing(NamedTuple):
    """What an engine knows of a request that has ended."""

    first_token_s: float
    """Seconds on the engine until the first token."""
    last_token_s: float
    """Seconds on the engine until the last."""
    resident_images: int
    """Images that were not encoded."""


def timing_of(progress: Progress) -> Timing:
    """Times of a request that has ended."""
    times = progress.first_token - progress.arrived, progress.end - progress.arrived
    return Timing(*times, progress.resident_images)


class PacedEngine:
    """A simulated engine that works in real time. Work is never late; what it delivers is, if the process is busy."""

    def __init__(self, replica: Replica, deliver: Callable[[Progress], None]) -> None:
        self.engine, self._deliver = SimulatedEngine(replica), deliver
        self._timer: asyncio.TimerHandle | None = None

    def accept(self, request: RoutedRequest) -> None:
        """Begin a request now."""
        self.catch_up()
        self.engine.accept(Progress(request, self.engine.now))
        self.catch_up()

    def catch_up(self) -> None:
        """Do the work that is due, and wake up for the next event."""
        now = time.monotonic()
        while (when := self.engine.next_event()) <= now:
            self._advance(when)
        self._advance(now)
        if self._timer is not None:
            self._timer.cancel()
        if (when := self.engine.next_event()) < float("inf"):
            self._timer = asyncio.get_running_loop().call_later(max(0.0, when - time.monotonic()), self.catch_up)

    def _advance(self, when: float) -> None:
        for progress in self.engine.advance(max(when, self.engine.now)):
            self._deliver(progress)


class PacedHost:
    """What `ReplicaService` asks of an `EngineHost`. A request has two outputs: the first token, and the others."""

    adapters: dict[str, str] = {}
    has_failed = False

    def __init__(self, replica: Replica) -> None:
        self.info = CoreInfo(
            max_length=1 << 20, vocab_size=1 << 20, num_pages=replica.cached_tokens // _PAGE_SIZE,
            page_size=_PAGE_SIZE, max_requests=_MAX_REQUESTS,
        )  # fmt: skip
        self.statistics = Statistics(num_free_pages=self.info.num_pages)
        self._paced, self._expected = PacedEngine(replica, self._deliver), ExpectedLength()
        self._on_output: dict[str, Callable[[RequestOutput], None]] = {}
        self.timings: dict[str, Timing] = {}
        """Requests that have ended."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._on_output)

    def missing_media(self, sent: SentRequest) -> list[int]:
        """No media are sent."""
        return []

    def submit(self, sent: SentRequest, media: Sequence[None], on_output: Callable[[RequestOutput], None]) -> None:
        """Begin a request now."""
        described = routed(sent.request, VERSION, self._expected)
        self._on_output[described.id] = on_output
        self._paced.accept(replace(described, output_tokens=sent.request.sampling.max_tokens))

    def close(self) -> None:
        """Nothing has to be closed."""

    def _deliver(self, progress: Progress) -> None:
        request = progress.request
        if not progress.end:
            self._on_output[request.id](RequestOutput(request_id=request.id, token_ids=(0,)))
            return
        self.timings[request.id] = timing_of(progress)
        rest = (0,) * (request.output_tokens - 1)
        self._on_output.pop(request.id)(RequestOutput(request_id=request.id, token_ids=rest, finish_reason="length"))


def message_of(request: RoutedRequest) -> AddRequest:
    """A request of a front end that has the sizes and shares the blocks of a simulated one."""
    ids: list[int] = []
    for key in request.prefix:
        ids += _token_ids(key.decode(), PREFIX_BLOCK)
    ids += _token_ids(f"request {request.id}", request.prompt_tokens - len(ids))
    sizes = [(image, image.patches // PATCHES_PER_TOKEN) for image in request.images]
    images = tuple(
        ImageSpan(key=image.key, start=image.end - tokens, num_tokens=tokens, num_patches=image.patches)
        for image, tokens in sizes
    )
    sampling = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
    prompt = TokenPrompt(token_ids=ids, positions=np.empty((3, 0), np.int64), sources=PromptSources(token_ids=ids))
    return AddRequest(request=Request(id=request.id, token_ids=ids, images=images, sampling=sampling), prompt=prompt)


def _token_ids(key: str, count: int) -> list[int]:
    return random.Random(key).choices(range(100_000), k=count)


def slower(costs: CostModel, slowdown: float) -> CostModel:
    """All times of a cost model, multiplied."""
    return replace(costs, **{name: slowdown * value for name, value in vars(costs).items()})

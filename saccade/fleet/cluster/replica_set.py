"""The replicas of one version as a front sees them, and the requests that it has sent to them.

    send -> choose (routing.Router) -> submit -> outputs of the replica -> on_outputs
                 ^------------------- replica lost: continue elsewhere ---'

Everything here runs in one event loop. Requests keep their place in the front: what a client sees of a lost replica is
a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from saccade.engine.core.messages import AddRequest, CoreInfo
from saccade.engine.request import Failure, FinishReason, RequestOutput, merge_outputs
from saccade.engine.transport.wire import encode_request, media_of
from saccade.fleet.cluster.messages import Hello
from saccade.fleet.cluster.replica_link import Calls, ReplicaLink
from saccade.fleet.continuation import EXHAUSTED, NOT_STARTED, POISONOUS, Continuation, RetryBudget, digest_of
from saccade.fleet.describe import ExpectedLength, routed
from saccade.fleet.poison import PoisonList
from saccade.fleet.replicas import ReplicaStatistics
from saccade.fleet.routing import Router, RoutingPolicy

logger = logging.getLogger(__name__)

_WAIT_STEP_S = 0.05
"""Seconds between two looks for a replica while none is ready."""
_REOPEN_S = 1.0
"""Seconds after a lost connection until another is opened, if the replica still runs."""
_DEFAULT_WAIT_S = 60.0
"""Seconds that a request without limits of its own waits for a replica."""
_MAX_ENDED = 4096
"""Ended requests whose replicas are remembered until someone asks."""

OnOutputs = Callable[[Sequence[RequestOutput]], None]


class ReplicaLoad(NamedTuple):
    """Load of a replica, as far as this front knows."""

    name: str
    num_running: int
    queued_s: float
    is_draining: bool
    pooled_patches: int
    late_patches: int


class _Sent:
    """A request that has not ended."""

    def __init__(self, message: AddRequest, front: str, now: float) -> None:
        self.message = message
        self.continuation = Continuation(message.request, front, now)
        self.held: RequestOutput | None = None
        """Log-probabilities of the prompt, until the first token: another replica would compute all of them again."""
        self.id = ""
        """Id on the replica; another one on each replica."""
        self.link: ReplicaLink | None = None
        self.waiting: asyncio.Task[None] | None = None
        """Waits for a replica, if none was ready."""
        self.replicas: list[str] = []
        """Replicas that it was sent to, in order."""

    def merged(self, output: RequestOutput) -> RequestOutput:
        """An output after the one that is held."""
        held, self.held = self.held, None
        return output if held is None else merge_outputs(held, output)

    def holds(self, output: RequestOutput) -> bool:
        """Hold an output that only has log-probabilities of the prompt."""
        if output.prompt_logprobs and not output.token_ids:
            self.held = output
        return self.held is not None


class ReplicaSet:
    """Sends requests to the replicas of one version. Used in one event loop."""

    def __init__(
        self, version: str, front: str, calls: Calls, *, poison: PoisonList, budget: RetryBudget,
        policy: RoutingPolicy | None = None, clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """`front` is the id of this front's process, which makes the ids of its requests unique on a replica."""
        self.version, self._front = version, front
        self._calls, self._poison, self._budget = calls, poison, budget
        self._clock = clock
        self._router, self._expected = Router(policy), ExpectedLength()
        self._links: dict[str, ReplicaLink] = {}
        self._running: frozenset[str] = frozenset()
        """Replicas that run, as Ray says."""
        self._is_closed = False
        self._sent: dict[str, _Sent] = {}
        """Requests by the id that the front end gave them."""
        self._by_replica_id: dict[str, _Sent] = {}
        """Requests on replicas, by their id there."""
        self._replicas_of_ended: dict[str, list[str]] = {}
        self.info: CoreInfo | None = None
        """Limits and sizes of the replicas' cores; None until the first replica was there."""
        self.on_outputs_of_front: OnOutputs = lambda outputs: None
        """Called with outputs of requests; the last one of each has a finish reason."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the first replica is there."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when another number of replicas is ready."""
        self.num_continued = self.num_lost = 0
        """Requests that continued on another replica, and those that could not."""
        self.num_media_sent = 0
        """Images and videos that replicas asked for."""
        self._sending: set[asyncio.Task[None]] = set()
        self.num_patches = self.num_resident_patches = 0
        """Patches of images, and those of images that the chosen replica had."""

    # ------------------------------------------------------------------ replicas

    @property
    def num_ready(self) -> int:
        """Replicas that get requests."""
        return sum(link.hello is not None and not link.is_stopping for link in self._links.values())

    def loads(self) -> list[ReplicaLoad]:
        """Load of each replica that is connected. Any thread may ask."""
        now, loads = self._clock(), []
        for name, link in list(self._links.items()):
            with contextlib.suppress(KeyError):  # it has just gone, or is not ready yet
                running, queued_s = self._router.num_running(name), self._router.queued_s(name, now)
                pooled, late = link.pooled_patches
                loads.append(ReplicaLoad(name, running, queued_s, link.is_stopping, pooled, late))
        return loads

    def set_replicas(self, names: frozenset[str]) -> None:
        """Connect to new replicas; send nothing more to those that Ray stops."""
        self._running = names
        for name in names - self._links.keys():
            self._open(name)
        for name, link in list(self._links.items()):
            if name not in names and not link.is_stopping:
                link.is_stopping = True
                if link.hello is not None:
                    self._router.set_state(name, "draining")
                self._close_if_unused(link)
        self.on_change()

    def _open(self, name: str) -> None:
        """Connect to a replica that runs, unless it is connected."""
        if name in self._running and name not in self._links and not self._is_closed:
            self._links[name] = ReplicaLink(name, self._front, self._calls, self)

    def on_hello(self, link: ReplicaLink, hello: Hello) -> None:
        """Add a replica to those that are chosen from."""
        self._router.add(hello.replica)
        if link.is_stopping:
            self._router.set_state(link.name, "draining")
        is_first, self.info = self.info is None, hello.info
        if is_first:
            self.on_ready()
        self.on_change()

    def on_load(self, link: ReplicaLink, load: ReplicaStatistics) -> None:
        """Update what routing knows of a replica. Its report is as old as this front's clock says."""
        link.pooled_patches = load.pooled_patches, load.late_patches
        self._router.update(link.name, replace(load, as_of=self._clock()))
        if link.is_stopping:
            self._router.set_state(link.name, "draining")

    def on_lost(self, link: ReplicaLink) -> None:
        """Continue the requests of a replica that died elsewhere."""
        del self._links[link.name]
        if link.hello is not None:
            self._router.remove(link.name)
        for sent in [one for one in self._sent.values() if one.link is link]:
            self._retry(sent)
        asyncio.get_running_loop().call_later(_REOPEN_S, self._open, link.name)
        self.on_change()

    def close(self) -> None:
        """Leave all replicas."""
        self._is_closed = True
        for link in self._links.values():
            link.close()

    def _close_if_unused(self, link: ReplicaLink) -> None:
        if link.is_stopping and not any(sent.link is link for sent in self._sent.values()):
            link.close()
            self._links.pop(link.name, None)
            if link.hello is not None:
                self._router.remove(link.name)

    # ------------------------------------------------------------------ requests

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._sent)

    @property
    def num_waiting(self) -> int:
        """Requests that are on no replica, because none is ready. Any thread may ask."""
        return sum(sent.link is None for sent in list(self._sent.values()))

    def take_replicas(self, request_id: str) -> Sequence[str]:
        """Replicas that an ended request was sent to, in order; known once, and not for long."""
        return self._replicas_of_ended.pop(request_id, ())

    def send(self, message: AddRequest) -> None:
        """Send a request to a replica."""
        if self._poison.has_any and self._poison.has(digest_of(message.request)):
            self.on_outputs_of_front([_failed(message.request.id, POISONOUS)])
            return
        sent = self._sent[message.request.id] = _Sent(message, self._front, self._clock())
        self._budget.count_request()
        self._place(sent)

    def end(self, request_id: str, reason: FinishReason) -> None:
        """End a request that was cancelled or has a stop string. No effect if it has ended."""
        if (sent := self._sent.get(request_id)) is not None:
            self._forget_on_replica(sent, cancels=True)
            self._end(sent, RequestOutput(request_id=request_id, finish_reason=reason))

    def _place(self, sent: _Sent) -> None:
        """Send a request to a replica now, or as soon as one is ready."""
        if not self._submit(sent):
            sent.waiting = asyncio.create_task(self._wait(sent))

    async def _wait(self, sent: _Sent) -> None:
        """Send a request when a replica is ready, unless that takes too long."""
        try:
            async with asyncio.timeout(sent.message.request.queue_timeout_s or _DEFAULT_WAIT_S):
                while not self._submit(sent):
                    if not self.num_ready:
                        self._calls.wake()
                    await asyncio.sleep(_WAIT_STEP_S)
        except TimeoutError:
            self._end(sent, _failed(sent.message.request.id, NOT_STARTED))

    def _submit(self, sent: _Sent) -> bool:
        """Choose a replica and send a request there. False: none is ready."""
        now = self._clock()
        request = sent.continuation.next_request(now)
        choice = self._router.choose(routed(request, self.version, self._expected), now)
        if choice is None:
            return False
        self.num_patches += sum(image.num_patches for image in request.images)
        self.num_resident_patches += choice.resident_patches
        sent.id, sent.link = request.id, self._links[choice.replica]
        sent.replicas.append(choice.replica)
        self._by_replica_id[sent.id] = sent
        sent.link.connection.submit(sent.id, encode_request(request, sent.message.prompt))
        return True

    def on_need(self, link: ReplicaLink, request_id: str, number: int) -> None:
        """Send an image or video of a request."""
        sent = self._by_replica_id.get(request_id)
        data = None if sent is None or sent.link is not link else media_of(sent.message.prompt)[number]
        self.num_media_sent += data is not None
        sending = asyncio.create_task(link.connection.send_media(request_id, number, data))
        self._sending.add(sending)
        sending.add_done_callback(self._forget_sending)

    def _forget_sending(self, sending: asyncio.Task[None]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled() and (error := sending.exception()) is not None:
            logger.debug("an image was not sent, since the replica is lost: %r", error)

    def on_refused(self, link: ReplicaLink, request_id: str, reason: str) -> None:
        """Try another replica."""
        sent = self._by_replica_id.get(request_id)
        if sent is not None and sent.link is link:
            logger.warning("request %s was not accepted by replica %s: %s", request_id, link.name, reason)
            self._router.set_state(link.name, "unhealthy")  # until it reports again
            self._forget_on_replica(sent, cancels=True)
            self._retry(sent, is_suspect=False)

    def on_outputs(self, link: ReplicaLink, outputs: Sequence[RequestOutput]) -> None:
        """Pass outputs on to the requests that wait for them; those of an earlier attempt are dropped."""
        passed: list[RequestOutput] = []
        for output in outputs:
            sent = self._by_replica_id.get(output.request_id)
            if sent is None or sent.link is not link:
                continue
            if _is_stopped(output):
                self._router.set_state(link.name, "unhealthy")
                self._forget_on_replica(sent)
                self._retry(sent)
                continue
            sent.continuation.extend(output)
            output = sent.merged(output._replace(request_id=sent.message.request.id))
            if output.finish_reason is None:
                if not sent.holds(output):
                    passed.append(output)
                continue
            if output.finish_reason in ("stop", "length"):
                self._expected.observe(len(sent.continuation.output_ids))
            self._forget_on_replica(sent)
            self._forget(sent)
            passed.append(output)
        if passed:
            self.on_outputs_of_front(passed)

    # ------------------------------------------------------------------ a replica that is lost, the end

    def _retry(self, sent: _Sent, *, is_suspect: bool = True) -> None:
        """Continue a request on another replica, or end it."""
        self._by_replica_id.pop(sent.id, None)
        self._router.finish(sent.id)
        sent.link = sent.held = None
        verdict = sent.continuation.lose(is_suspect=is_suspect)
        if verdict == "poison":
            self._poison.add(digest_of(sent.message.request))
        if verdict == "retry" and self._budget.take():
            self.num_continued += 1
            self._place(sent)
            return
        self.num_lost += 1
        logger.warning("request %s ends: %s", sent.message.request.id, verdict)
        self._end(sent, _failed(sent.message.request.id, POISONOUS if verdict == "poison" else EXHAUSTED))

    def _forget_on_replica(self, sent: _Sent, *, cancels: bool = False) -> None:
        """Forget where a request is; `cancels`: it is cancelled there."""
        link, sent.link = sent.link, None
        if link is None:
            return
        self._by_replica_id.pop(sent.id, None)
        self._router.finish(sent.id)
        if cancels:
            link.connection.cancel([sent.id])
        self._close_if_unused(link)

    def _end(self, sent: _Sent, output: RequestOutput) -> None:
        """End a request by this output."""
        self._forget(sent)
        self.on_outputs_of_front([output])

    def _forget(self, sent: _Sent) -> None:
        """Forget a request that has ended."""
        del self._sent[sent.message.request.id]
        if sent.waiting is not None:
            sent.waiting.cancel()  # no effect if it calls this
        self._replicas_of_ended[sent.message.request.id] = sent.replicas
        while len(self._replicas_of_ended) > _MAX_ENDED:
            del self._replicas_of_ended[next(iter(self._replicas_of_ended))]


def _is_stopped(output: RequestOutput) -> bool:
    """Whether the output says that the replica's engine has stopped, so that another one can continue."""
    return output.failure is not None and output.failure.kind == "engine_stopped"


def _failed(request_id: str, failure: Failure) -> RequestOutput:
    return RequestOutput(request_id=request_id, finish_reason="failed", failure=failure)

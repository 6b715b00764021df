"""The engine loop. It handles tokens and images, never text.

    messages -> EngineCore: decide -> plan -> run -> update -> outputs

While the device computes a step, the host plans and launches the next one, and only then reads the tokens of the
first. A request with drafts in flight waits until its tokens are read; other requests do not wait with it. A step
whose grammar masks are not computed yet is launched without sampling, and sampled once they are.

Messages and outputs are plain data, so that the core can run in a thread or in a process of its own (`transport/`).
"""

from __future__ import annotations

import logging
import math
import queue
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from saccade.engine.config import EngineConfig
from saccade.engine.core.adapters import Adapters
from saccade.engine.core.deadlines import RequestDeadlines
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.grammar.grammars import Grammars
from saccade.engine.core.grammar_requests import GrammarRequests
from saccade.engine.core.image_policy import EncoderTurn
from saccade.engine.core.messages import (
    AdapterRead,
    AddAdapter,
    AddRequest,
    CoreInfo,
    EndRequest,
    FlushCaches,
    GrammarCompiled,
    Message,
    OwnMessage,
    RemoveAdapter,
    StartProfile,
    StopProfile,
)
from saccade.engine.core.pages import PagePool
from saccade.engine.core.prompt_lookup import Drafting
from saccade.engine.core.scheduler import Limits, Scheduler
from saccade.engine.core.statistics import Statistics, StatisticsCounter
from saccade.engine.core.step import MAX_CHUNKS, MAX_PREFILL, StepPlan
from saccade.engine.core.step_budget import StepBudget, StepShare, prefill_with_decode
from saccade.engine.core.step_runner import DeviceError, DeviceInfo, StepHandle, StepRunner
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Failure, FinishReason, Request, RequestOutput
from saccade.errors import RequestError

logger = logging.getLogger(__name__)

Inbox = queue.SimpleQueue[Message | OwnMessage | RequestOutput | None]
"""Messages for the core, outputs of requests that failed before they reached it, and None at the end."""

_SHORT_PASS = 3200
"""Maximum patches of a vision encoder pass without a backlog: a longer pass delays the first of its images."""
_POLLED = 0.6
"""Share of a decode step in which messages are polled. Then the host blocks in `read`, which returns sooner."""
_LAUNCH_WEIGHT, _LAUNCH_FACTOR, _LAUNCH_SLACK_S = 0.1, 2.0, 0.0005
"""The next step is planned `factor * mean launch time + slack` before a decode step ends; the slack covers one poll.
The weight is that of the newest step in the mean."""
_IDLE_S = 1.0
"""The core checks its invariants after it has been idle for this long."""
_PREPARE_S = 0.2
"""The runner continues its start-up after the core has been idle for this long. A request that arrives then waits for
one CUDA graph capture, 30 ms: under load that would happen in every short pause."""

_FULL = Failure("waiting", "the engine's queue is full; try again later", "overloaded")


class EngineError(Exception):
    """The device failed: every request has failed, and the process must be restarted."""


class StepDecision(NamedTuple):
    """What the next step may compute."""

    num_prompt_tokens: int
    turn: EncoderTurn


class _InFlight:
    """A step that is launched and whose result is not read yet."""

    __slots__ = ("forward", "handle", "num_decode_tokens", "num_prompt_tokens", "plan", "started_at")

    def __init__(self, plan: StepPlan, forward: Any, started_at: float) -> None:
        self.plan, self.forward, self.started_at = plan, forward, started_at
        self.handle: StepHandle | None = None  # None until it is sampled
        self.num_prompt_tokens = sum([chunk.num_tokens for chunk in plan.chunks if not chunk.reads_last_token])
        self.num_decode_tokens = sum([chunk.num_tokens for chunk in plan.chunks]) - self.num_prompt_tokens

    @property
    def only_decodes(self) -> bool:
        """Whether the step has neither prompts nor images."""
        return not self.num_prompt_tokens and not self.plan.encoder_parts


class EngineCore:
    """Serves requests: messages in, outputs out. One thread uses it; any thread may put messages into `inbox`."""

    def __init__(
        self, runner: StepRunner, *, grammars: Grammars | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        config, device = runner.config, runner.info
        self.info = CoreInfo(
            max_length=device.max_length,
            vocab_size=device.vocab_size,
            num_pages=device.num_pages,
            page_size=config.page_size,
            max_requests=config.max_requests,
            feature_bytes=device.feature_bytes,
        )
        self.inbox: Inbox = queue.SimpleQueue()
        self._runner, self._clock = runner, clock
        self._max_waiting = config.max_waiting_requests
        self._drafting: Drafting | None = None
        if device.max_draft_tokens:
            self._drafting = Drafting(device.max_draft_tokens, is_cpu=device.is_cpu)
        self.scheduler = Scheduler(
            limits_of(config, device),
            PagePool(device.num_pages, config.page_size, keeps_prefixes=config.prefix_cache),
            EncoderCache(config.encoder_cache_tokens, keeps_unused=config.encoder_cache),
            None if self._drafting is None else self._drafting.lookup,
        )
        self._step_budget = StepBudget(config.target_step_ms, min(config.max_step_tokens, MAX_PREFILL))
        self._grammars = GrammarRequests(grammars, self.inbox.put, clock)
        self._adapters = Adapters(config.max_adapters, runner, self.inbox.put)
        self._deadlines = RequestDeadlines()
        self._counter = StatisticsCounter(device.num_pages, clock)
        self._handlers: dict[type, Callable[[Any], list[RequestOutput]]] = {
            AddRequest: self._open,
            EndRequest: self._end,
            GrammarCompiled: self._open_compiled,
            AddAdapter: self._adapters.add,
            AdapterRead: self._adapters.activate,
            RemoveAdapter: self._adapters.remove,
            FlushCaches: self._flush,
            StartProfile: self._start_profile,
            StopProfile: self._stop_profile,
        }
        self._in_flight: _InFlight | None = None
        self._last_read_at = self._last_step_s = self._launch_s = 0.0
        self._is_checked, self._is_closed = True, False
        self._is_prepared = device.is_cpu  # there the runner has nothing to continue

    @property
    def has_work(self) -> bool:
        """Whether a request is open, a step is in flight or an image is being encoded."""
        return self.scheduler.has_work or self._in_flight is not None or self.scheduler.images.is_encoding

    @property
    def statistics(self) -> Statistics:
        """Counters since the start, and the current state. Any thread may read them."""
        if self._is_closed:
            return self._counter.statistics
        return self._counter.read(self.scheduler, len(self._grammars.compiling), self._step_budget, self._runner)

    # -------------------------------------------------------------- a step

    def step(self, handle_messages: Callable[[], None] | None = None) -> list[RequestOutput]:
        """Plan and launch the next step, then read the previous one. Returns the new output of each request.

        `handle_messages` is called repeatedly while the previous step runs. It may block briefly, and passes new
        messages to `handle`.
        """
        try:
            return self._finish([*self._expire(), *self._fail_grammars(), *self._step(handle_messages)])
        except DeviceError as error:
            logger.exception("the device failed")
            raise EngineError(str(error)) from error

    def _step(self, handle_messages: Callable[[], None] | None) -> list[RequestOutput]:
        """Overlap two steps: plan and launch the next one while the previous one runs.

        The next step includes a request only if the request arrives before it is planned. So during a decode step
        planning is delayed until just enough time is left for it.
        """
        if self._in_flight is not None and self._in_flight.only_decodes:
            self._poll(self._in_flight, handle_messages, self._step_budget.decode_ms / 1e3 - self._lead_s)
        begin = self._clock()
        plan = self._plan(self._decide())
        previous, self._in_flight = self._in_flight, None
        if previous is not None:
            self._sample(previous)  # no effect if it is sampled already
        if plan is not None:
            self._in_flight = self._run(plan)
            self._launch_s += _LAUNCH_WEIGHT * (self._clock() - begin - self._launch_s)
        outputs: list[RequestOutput] = []
        if previous is not None:
            self._wait(previous, handle_messages)
            outputs = self._update(previous)
        self._start_masks(previous, self._in_flight)
        return outputs

    @property
    def _lead_s(self) -> float:
        """Seconds before the end of a decode step at which the next step is planned."""
        return _LAUNCH_FACTOR * self._launch_s + _LAUNCH_SLACK_S

    def _decide(self) -> StepDecision:
        """Decide what the next step may compute. Without decoding requests there is no inter-token latency to bound."""
        scheduler, budget, encode_ms = self.scheduler, self._step_budget, self._runner.encode_ms
        num_decoding = scheduler.num_decoding
        if not num_decoding:
            return StepDecision(MAX_PREFILL, EncoderTurn())
        work = scheduler.work_left()
        queued_ms = encode_ms(work.num_patches) if work.num_patches else 0.0
        budget.observe_queue(work.num_requests, work.num_prompt_tokens, queued_ms)
        max_patches = scheduler.limits.max_encoder_patches if budget.has_backlog else _SHORT_PASS
        part_ms, parts_left = 0.0, 0
        if (next_pass := scheduler.next_pass(max_patches)) is not None:
            part_ms, parts_left = encode_ms(next_pass.num_patches) / next_pass.num_parts, next_pass.parts_left
        share = budget.share(work.num_ready_tokens, part_ms=part_ms, parts_left=parts_left)
        if share is None:
            share = StepShare(MAX_PREFILL, encoder_parts=1)
        num_prompt_tokens = prefill_with_decode(share.num_tokens, num_decoding)
        return StepDecision(num_prompt_tokens, EncoderTurn(share.encoder_parts, max_patches))

    def _plan(self, decision: StepDecision) -> StepPlan | None:
        """Plan the next step. None: nothing can be computed before the step in flight is read."""
        scheduler = self.scheduler
        deferred: Collection[str] = ()
        if self._grammars.states:
            deferred = self._grammars.deferred(self._last_step_s, scheduler.num_decoding, scheduler.find)
        return scheduler.plan(decision.num_prompt_tokens, deferred, decision.turn)

    def _run(self, plan: StepPlan) -> _InFlight:
        """Launch a step, and its sampling unless that has to wait for masks."""
        step = _InFlight(plan, self._runner.forward(plan), self._clock())
        if not self._grammars.states or self._grammars.are_masks_ready(plan):
            self._sample(step)
        statistics = self._counter.statistics
        statistics.num_steps += 1
        statistics.num_prompt_tokens += step.num_prompt_tokens
        if plan.images or plan.started:
            self._counter.count_starts(plan)
        return step

    def _sample(self, step: _InFlight) -> None:
        if step.handle is None:
            masks = self._grammars.take_masks(step.plan) if self._grammars.states else None
            step.handle = self._runner.sample(step.forward, masks)

    def _wait(self, step: _InFlight, handle_messages: Callable[[], None] | None) -> None:
        """Handle messages while a step runs."""
        duration_s = _POLLED * self._step_budget.decode_ms / 1e3 if step.only_decodes else math.inf
        self._poll(step, handle_messages, duration_s)

    def _poll(self, step: _InFlight, handle_messages: Callable[[], None] | None, duration_s: float) -> None:
        """Handle messages while a step runs, until `duration_s` after its start."""
        if handle_messages is None:
            return
        polls_until = max(step.started_at, self._last_read_at) + duration_s
        while step.handle is not None and not step.handle.is_done and self._clock() < polls_until:
            handle_messages()

    def _update(self, step: _InFlight) -> list[RequestOutput]:
        """Read a step and update requests, the step budget, grammars, drafting and statistics."""
        assert step.handle is not None, "a step is sampled before the next one is launched"
        result = step.handle.read()
        outputs = self.scheduler.update(step.plan, result)
        previous, self._last_read_at = self._last_read_at, self._clock()
        if step.plan.chunks:
            self._last_step_s = self._last_read_at - max(step.started_at, previous)
            self._step_budget.observe(result.duration_s * 1e3, step.num_prompt_tokens, step.num_decode_tokens)
        if result.images:
            self._counter.count_encoded(result.images)
        if self._drafting is not None:
            statistics, token_cost = self._counter.statistics, self._step_budget.token_cost
            self._drafting.learn(step.plan, result, self.scheduler, statistics, token_cost)
        return self._grammars.update(result, outputs) if self._grammars.states else outputs

    def _start_masks(self, read: _InFlight | None, launched: _InFlight | None) -> None:
        """Start computing the masks after the tokens just read, and the masks that the step in flight waits for."""
        if self._grammars.states:
            plans = [] if launched is None or launched.handle is not None else [launched.plan]
            self._grammars.start_masks(plans + ([] if read is None else [read.plan]), self.scheduler.find)

    # -------------------------------------------------------------- messages

    def handle(self, message: Message | OwnMessage) -> list[RequestOutput]:
        """Handle a message. Returns the last output of a request that it ends, or the reply to the message."""
        return self._handlers[type(message)](message)

    def _open(self, message: AddRequest) -> list[RequestOutput]:
        """Open a request. A request with a grammar is added to the scheduler once the grammar is compiled."""
        request = message.request
        num_open = self.scheduler.num_running + self.scheduler.num_waiting + len(self._grammars.compiling)
        self._deadlines.add_request(request, self._clock(), num_open, self._is_open)
        vocab_size = self.info.vocab_size
        unknown = next((token_id for token_id in request.output_ids if not 0 <= token_id < vocab_size), None)
        if unknown is not None:
            reason = f"output_ids has token {unknown}, but the model has tokens 0 to {vocab_size - 1}"
            return self._refuse(request, Failure("waiting", reason, "invalid_request"))
        if request.sampling.structured is None:
            return self._add(request, message.prompt)
        failure = _FULL if self._is_full else self._grammars.compile(message)
        return [] if failure is None else self._refuse(request, failure)

    def _open_compiled(self, message: GrammarCompiled) -> list[RequestOutput]:
        opened = self._grammars.take_compiled(message.request_id)
        if opened is None:
            return []
        add, failure = opened
        return self._add(add.request, add.prompt) if failure is None else self._refuse(add.request, failure)

    def _is_open(self, request_id: str) -> bool:
        return request_id in self._grammars.compiling or self.scheduler.find(request_id) is not None

    @property
    def _is_full(self) -> bool:
        return self.scheduler.num_waiting + len(self._grammars.compiling) >= self._max_waiting

    def _add(self, request: Request, prompt: TokenPrompt) -> list[RequestOutput]:
        if self._is_full:
            return self._refuse(request, _FULL)
        self._is_checked = False
        try:
            adapter = self._adapters.find(request)
            request = self._adapters.salted(request, adapter)
            ended = self.scheduler.add(request)
            if ended is not None:
                return self._finish([ended])
            self._runner.register(request, prompt, self._adapters.acquire(request.id, adapter))
        except RequestError as error:
            return self._refuse(request, Failure("waiting", str(error), "invalid_request"))
        except Exception as error:
            logger.warning("request %s could not be added: %r", request.id, error, exc_info=error)
            return self._refuse(request, Failure("waiting", "the request could not be added; other requests continue"))
        self._counter.count_added(request.id)
        return []

    def _refuse(self, request: Request, failure: Failure) -> list[RequestOutput]:
        output = self.scheduler.end(request.id, "failed", failure)
        return self._finish([output or RequestOutput(request_id=request.id, finish_reason="failed", failure=failure)])

    def _end(self, message: EndRequest) -> list[RequestOutput]:
        return self._finish(self._end_request(message.request_id, message.reason))

    def _end_request(
        self, request_id: str, reason: FinishReason, failure: Failure | None = None
    ) -> list[RequestOutput]:
        """End a request in any state. Returns its last output, or nothing if it has already ended."""
        if self._grammars.cancel(request_id):
            return [RequestOutput(request_id=request_id, finish_reason=reason, failure=failure)]
        output = self.scheduler.end(request_id, reason, failure)
        return [] if output is None else [output]

    def _expire(self) -> list[RequestOutput]:
        """End requests whose deadline has passed."""
        now = self._clock()
        if self._deadlines.next_at > now:
            return []
        due = self._deadlines.pop_failures(now, self.scheduler.find)
        return [output for request_id, failure in due for output in self._end_request(request_id, "failed", failure)]

    def _fail_grammars(self) -> list[RequestOutput]:
        """End requests whose grammar cannot continue."""
        return [
            output
            for request_id, failure in (self._grammars.failed() if self._grammars.states else ())
            for output in self._end_request(request_id, "failed", failure)
        ]

    def fail_all(self, failure: Failure) -> list[RequestOutput]:
        """End every open request as failed."""
        self._in_flight = None
        open_ids = [*self.scheduler.request_ids(), *self._grammars.compiling]
        return self._finish(
            [output for request_id in open_ids for output in self._end_request(request_id, "failed", failure)]
        )

    def _finish(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Count outputs, and drop the state of requests that ended."""
        statistics = self._counter.statistics
        for output in outputs:
            statistics.num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._forget(output)
        return list(outputs)

    def _forget(self, output: RequestOutput) -> None:
        """Drop the state of a request that ended, given its last output."""
        self._counter.count_ended(output)
        self._runner.unregister(output.request_id)
        self._grammars.forget(output.request_id)
        self._adapters.forget(output.request_id)
        if self._drafting is not None:
            self._drafting.lookup.forget(output.request_id)

    def _flush(self, message: FlushCaches) -> list[RequestOutput]:
        self.scheduler.pages.flush()
        self.scheduler.encoder_cache.flush()
        return []

    def _start_profile(self, message: StartProfile) -> list[RequestOutput]:
        self._runner.start_profile(Path(message.begun))
        return []

    def _stop_profile(self, message: StopProfile) -> list[RequestOutput]:
        self._runner.stop_profile(Path(message.path))
        return []

    # -------------------------------------------------------------- without work

    def idle_s(self) -> float | None:
        """Seconds to wait for messages before calling `idle`, while there is no work. None: wait without limit."""
        waits = [_IDLE_S] if self.wants_check else []
        if not self._is_prepared:
            waits.append(_PREPARE_S)
        if self._grammars.compiling and self._deadlines.next_at < math.inf:
            waits.append(max(0.0, self._deadlines.next_at - self._clock()))
        return min(waits, default=None)

    def idle(self) -> list[RequestOutput]:
        """End requests whose deadline passed while their grammar was compiled, then do what waits for an idle moment.

        The runner continues its start-up, and after it the invariants are checked.
        """
        outputs = self._finish(self._expire())
        if not self._is_prepared:
            self._is_prepared = not self._runner.prepare_more()
        elif self.wants_check:
            self.check()
        return outputs

    @property
    def wants_check(self) -> bool:
        """Whether the core is idle and has not checked its invariants since it was busy."""
        return not self.has_work and not self._is_checked

    def check(self) -> None:
        """Check the invariants: no page, image, slot or adapter is lost or owned twice."""
        if self.scheduler.has_work:
            self.scheduler.check()
        else:
            assert self.scheduler.is_idle_clean(), "no request is open, but pages are owned"
            assert self._runner.num_registered == 0, "no request is open, but inputs are kept"
        self._adapters.check()
        self._is_checked = True

    def close(self) -> None:
        """Free the device memory. The core cannot be used any more."""
        self._in_flight = None
        _ = self.statistics  # the last state of the runner
        self._is_closed = True
        self._adapters.close()
        self._runner.close()
        self._grammars.close()


def limits_of(config: EngineConfig, device: DeviceInfo) -> Limits:
    """The scheduler's limits for this configuration and device."""
    return Limits(
        max_requests=config.max_requests,
        max_step_tokens=config.max_step_tokens,
        max_step_chunks=MAX_CHUNKS,
        max_encoder_patches=device.max_pass_patches,
        max_length=device.max_length,
        max_draft_tokens=device.max_draft_tokens,
    )

"""The engine loop: plan a step, launch it, process the result of the previous one. It handles tokens and images, never text.

    AddRequest, EndRequest  ->  EngineCore  ->  RequestOutput

While the device computes a step, the host plans and launches the next one and only then reads the tokens of the first. A request with
drafts in flight waits for its tokens; the others do not wait with it. The masks of requests with a grammar are computed when their
tokens are read, during the forward pass that is sampled with them. Where that is too short and other requests are decoding, they are
computed during a step without those requests.

Messages in and out are plain data, so that the core runs in a thread or in a process of its own (`core_thread.py`,
`core_process.py`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from saccade.engine.config import EngineConfig
from saccade.engine.core.adapters import AdapterEntry, AdapterTable
from saccade.engine.core.deadlines import Deadlines
from saccade.engine.core.encoder_cache import EncoderCache
from saccade.engine.core.grammar import Grammars, GrammarState, NextMasks
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
from saccade.engine.core.prompt_lookup import WEIGHT, WEIGHT_ON_CPU, PromptLookup
from saccade.engine.core.scheduler import EncoderTurn, Limits, NextPass, Scheduler
from saccade.engine.core.statistics import Statistics
from saccade.engine.core.step import ENCODER_PARTS, EncodeResult, StepPlan, StepResult
from saccade.engine.core.step_budget import StepBudget, StepShare
from saccade.engine.core.time_histogram import TimeHistogram
from saccade.engine.device.cuda_graphs import MAX_CHUNKS, MAX_DRAFTING, MAX_PREFILL, prefill_beside_decode
from saccade.engine.device.profiler import CoreProfiler
from saccade.engine.device.runner import DeviceError, Runner, StepForward, StepHandle
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Failure, FailureKind, FinishReason, Request, RequestOutput
from saccade.errors import RequestError, UserError
from saccade.model.adapters import Adapter

logger = logging.getLogger(__name__)

_SLOWDOWN_BESIDE_ENCODER, _ENCODER_SPEED_BESIDE_DECODE = 2.4, 0.72
"""How many times as long a decode step takes beside the vision encoder, and the encoder's speed then (H200, 3B)."""

_SHORT_PASS = 3200
"""Patches in a pass of the vision encoder without a backlog: a longer one delays the first of its images."""

_POLLED = 0.6
"""Share of a decode step in which messages are handled."""

_LONG_MASKS = 0.1
"""Share of a step's time above which computing masks delays the step: the host also has to plan and launch the next one, and hands on the
tokens of all requests. 64 requests beside 64 with a JSON schema keep their speed at 0.1, and 0.92 to 0.95 of it at 0.5 (H200)."""

_IDLE_S = 1.0
"""After this long without work the core checks its invariants."""

_FULL = Failure("waiting", "the engine's queue is full; try again later", "overloaded")


class EngineError(Exception):
    """The device failed: every request has failed, and the process must be restarted."""


class _InFlight:
    """A step between its launch and the reading of its result."""

    __slots__ = ("forward", "handle", "is_beside", "num_decode_tokens", "num_prompt_tokens", "plan", "started_at")

    def __init__(self, plan: StepPlan, forward: StepForward, started_at: float) -> None:
        self.plan, self.forward, self.started_at = plan, forward, started_at
        self.is_beside = False  # the encoder runs beside it
        self.handle: StepHandle | None = None  # None: it is sampled when its masks are computed
        self.num_prompt_tokens = sum([chunk.num_tokens for chunk in plan.chunks if not chunk.reads_last_token])
        self.num_decode_tokens = sum([chunk.num_tokens for chunk in plan.chunks]) - self.num_prompt_tokens


class EngineCore:
    """Messages in, outputs out. Used by one thread."""

    def __init__(
        self,
        runner: Runner,
        *,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = runner.config
        self.info = CoreInfo(
            max_length=runner.max_length,
            vocab_size=runner.model.config.language.vocab_size,
            num_pages=runner.cache.num_pages,
            page_size=config.page_size,
            max_requests=config.max_requests,
        )
        self._runner, self._clock = runner, clock
        self._max_waiting = config.max_waiting_requests
        self._is_on_cpu = runner.model.device.type == "cpu"
        weight = WEIGHT_ON_CPU if self._is_on_cpu else WEIGHT
        self._lookup = PromptLookup(weight=weight) if runner.max_draft_tokens else None
        self.scheduler = Scheduler(
            limits_of(config, runner.max_length, runner.max_draft_tokens, runner.max_patches_in_turn),
            PagePool(runner.cache.num_pages, config.page_size, keeps_prefixes=config.prefix_cache),
            EncoderCache(config.encoder_cache_tokens, keeps_unused=config.encoder_cache),
            self._lookup,
        )
        self._step_budget = StepBudget(config.target_step_ms, min(config.max_step_tokens, MAX_PREFILL))
        self._grammars = grammars
        self._grammar_states: dict[str, GrammarState] = {}
        self._masks = None if grammars is None else NextMasks(grammars, clock)
        self._compiling: dict[str, tuple[AddRequest, Future[GrammarState]]] = {}
        self._adapters = AdapterTable(config.max_adapters)
        self._adapter_of_request: dict[str, AdapterEntry] = {}
        self._reading: dict[str, tuple[AdapterEntry, Future[Adapter]]] = {}  # adapters, by reply id
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="saccade-adapters")  # its thread starts with the first
        self.post: Callable[[OwnMessage], None] = lambda message: None
        """Sends a message to this core from another thread; set by the loop that runs it."""
        self._profiler = CoreProfiler()
        self._deadlines = Deadlines()
        self._added_at: dict[str, float] = {}  # of requests that have not started
        self._encoding_since: dict[bytes, float] = {}
        self._encoder_until = 0.0  # when the encoder, beside the steps, is expected to be done
        self._queue_times, self._encode_times = TimeHistogram(), TimeHistogram()
        self._in_flight: _InFlight | None = None
        self._is_checked = True
        self._num_added = 0
        self._last_read_at = self._last_step_s = 0.0
        self.statistics = Statistics(num_free_pages=self.scheduler.pages.num_free)

    @property
    def has_work(self) -> bool:
        """Whether a request is open, or a step or an encoding is in flight."""
        return self.scheduler.has_work or self._in_flight is not None or self.scheduler.is_encoding

    # -------------------------------------------------------------- messages

    def handle(self, message: Message | OwnMessage) -> list[RequestOutput]:
        """Handle a message. Returns the last output of a request that it ends."""
        if isinstance(message, EndRequest):
            return self._finish(self._end(message))
        if isinstance(message, GrammarCompiled):
            return self._add_compiled(message.request_id)
        if isinstance(message, AddAdapter | AdapterRead | RemoveAdapter):
            return self._change_adapters(message)
        if not isinstance(message, AddRequest):
            self._administer(message)
            return []
        self._set_deadlines(message.request)
        if message.request.sampling.structured is not None:
            return self._compile(message)
        return self._add(message.request, message.prompt)

    def _administer(self, message: FlushCaches | StartProfile | StopProfile) -> None:
        if isinstance(message, FlushCaches):
            self.scheduler.pages.flush()
            self.scheduler.encoder_cache.flush()
        elif isinstance(message, StartProfile):
            self._profiler.start(Path(message.begun))
        else:
            self._profiler.stop(Path(message.path))

    # -------------------------------------------------------------- adapters

    def _change_adapters(self, message: AddAdapter | AdapterRead | RemoveAdapter) -> list[RequestOutput]:
        try:
            if isinstance(message, AddAdapter):
                self._read_adapter(message)
                return []
            if isinstance(message, RemoveAdapter):
                self._adapters.remove(self._adapters.find(message.name))
            else:
                self._place_adapter(message.reply_id)
        except UserError as error:
            return [_adapter_failed(message.reply_id, str(error), "invalid_request")]
        except Exception as error:
            logger.warning("an adapter was not loaded: %r", error, exc_info=error)
            return [_adapter_failed(message.reply_id, "the adapter could not be loaded", "internal_error")]
        return [RequestOutput(request_id=message.reply_id, finish_reason="stop")]

    def _read_adapter(self, message: AddAdapter) -> None:
        """Read and check the folder off this thread; requests are served meanwhile."""
        entry = self._adapters.reserve(message.name)
        reading = self._reader.submit(self._runner.read_adapter, message.folder)
        self._reading[message.reply_id] = entry, reading
        reading.add_done_callback(lambda _: self.post(AdapterRead(reply_id=message.reply_id)))

    def _place_adapter(self, reply_id: str) -> None:
        entry, reading = self._reading.pop(reply_id)
        try:
            adapter = reading.result()
            self._runner.set_adapter(entry.slot, adapter)
        except BaseException:
            self._adapters.remove(entry)
            raise
        self._adapters.activate(entry, adapter.digest)

    # -------------------------------------------------------------- requests

    @property
    def _is_full(self) -> bool:
        return self.scheduler.num_waiting + len(self._compiling) >= self._max_waiting

    def _end(self, message: EndRequest) -> list[RequestOutput]:
        output = self._end_request(message.request_id, message.reason)
        return [output] if output is not None else []

    def _end_request(
        self, request_id: str, reason: FinishReason, failure: Failure | None = None
    ) -> RequestOutput | None:
        """End a request in any state; its last output, or None if it has ended."""
        _, compiled = self._compiling.pop(request_id, (None, None))
        if compiled is None:
            return self.scheduler.end(request_id, reason, failure)
        compiled.cancel()
        return RequestOutput(request_id=request_id, finish_reason=reason, failure=failure)

    def _compile(self, message: AddRequest) -> list[RequestOutput]:
        """Compile the grammar of a request off this thread; it is added when that is done."""
        request, structured = message.request, message.request.sampling.structured
        if self._is_full:
            return self._refuse(request, _FULL)
        if self._grammars is None or structured is None:
            return self._refuse(
                request, Failure("waiting", "structured output is not available here", "invalid_request")
            )
        compiled = self._grammars.compile(structured)
        self._compiling[request.id] = message, compiled
        compiled.add_done_callback(lambda _: self.post(GrammarCompiled(request_id=request.id)))
        return []

    def _add_compiled(self, request_id: str) -> list[RequestOutput]:
        message, compiled = self._compiling.pop(request_id, (None, None))
        if message is None or compiled is None:  # it was ended meanwhile
            return []
        try:
            state = compiled.result()
        except UserError as error:
            return self._refuse(message.request, Failure("waiting", str(error), "invalid_request"))
        except Exception as error:
            logger.warning("request %s: its grammar could not be compiled: %r", request_id, error, exc_info=error)
            return self._refuse(message.request, Failure("waiting", "the grammar could not be compiled"))
        outputs = self._add(message.request, message.prompt)
        if not outputs:
            self._grammar_states[request_id] = state
        return outputs

    def _refuse(self, request: Request, failure: Failure) -> list[RequestOutput]:
        return self._finish([RequestOutput(request_id=request.id, finish_reason="failed", failure=failure)])

    def _add(self, request: Request, prompt: TokenPrompt) -> list[RequestOutput]:
        self._is_checked = False
        try:
            if self._is_full:
                raise _RefusedError(_FULL)
            entry = None if request.adapter is None else self._adapters.find(request.adapter)
            if entry is not None:
                request = replace(request, salt=entry.salt(request.salt))
            self.scheduler.add(request)
            if entry is not None:
                self._adapters.acquire(entry)
                self._adapter_of_request[request.id] = entry
            self._runner.register(request, prompt, None if entry is None else entry.slot)
            self._num_added += 1
            self._added_at[request.id] = self._clock()
        except _RefusedError as refused:
            failure = refused.failure
        except RequestError as error:
            failure = Failure("waiting", str(error), "invalid_request")
        except Exception as error:
            logger.warning("request %s could not be added: %r", request.id, error, exc_info=error)
            failure = Failure("waiting", "the request could not be added; other requests continue")
        else:
            return []
        self._forget(request.id)
        output = self.scheduler.end(request.id, "failed", failure)
        return self._finish([output or RequestOutput(request_id=request.id, finish_reason="failed", failure=failure)])

    def _set_deadlines(self, request: Request) -> None:
        now = self._clock()
        for kind, seconds in (("queue", request.queue_timeout_s), ("total", request.timeout_s)):
            if seconds is not None:
                self._deadlines.add(now + seconds, request.id, kind)
        self._deadlines.prune(len(self.scheduler.request_ids()) + len(self._compiling), self._is_open)

    def _is_open(self, request_id: str) -> bool:
        return request_id in self._compiling or self.scheduler.find(request_id) is not None

    def _expire(self) -> list[RequestOutput]:
        """End requests whose deadline has passed: in the queue, or in all."""
        outputs = []
        for request_id, kind in self._deadlines.pop_due(self._clock()):
            state = self.scheduler.find(request_id)
            if kind == "queue" and state is not None and (state.slot is not None or state.num_preemptions):
                continue
            what = "did not start" if kind == "queue" else "was not complete"
            failure = Failure(
                "waiting" if kind == "queue" else "running", f"the request {what} within its time limit", "timeout"
            )
            output = self._end_request(request_id, "failed", failure)
            outputs += [output] if output is not None else []
        return outputs

    # -------------------------------------------------------------- without work

    def idle_s(self) -> float | None:
        """Seconds until `idle` has something to do while no request runs; None: nothing."""
        waits = [_IDLE_S] if self.wants_check else []
        if self._compiling and (next_at := self._deadlines.next_at) is not None:
            waits.append(max(0.0, next_at - self._clock()))
        return min(waits, default=None)

    def idle(self) -> list[RequestOutput]:
        """End requests that wait for a grammar and whose deadline has passed; check the invariants if that is due."""
        outputs = self._finish(self._expire())
        if self.wants_check:
            self.check()
        return outputs

    # -------------------------------------------------------------- a step

    def step(self, handle_messages: Callable[[], None] = lambda: None) -> list[RequestOutput]:
        """Plan and launch the next step, then process the previous one. Returns what is new of each request.

        `handle_messages` is called repeatedly while the previous step runs, but for the end of a decode step: it may block briefly, and
        passes new messages to `handle`. The images of new requests are encoded at once.
        """
        try:
            return self._finish([*self._expire(), *self._fail_grammars(), *self._step(handle_messages)])
        except DeviceError as error:
            logger.exception("the device failed")
            raise EngineError(str(error)) from error

    def _step(self, handle_messages: Callable[[], None]) -> list[RequestOutput]:
        outputs = self._finish_encoding(self._runner.finished_encodings())
        self._encode_beside(self._in_flight)
        outputs += self._finish_encoding(self._runner.finished_encodings())  # those that failed at once are not read
        plan = self._plan()  # while masks are computed
        previous, self._in_flight = self._in_flight, None
        if previous is not None and previous.handle is None:
            self._sample(previous)
        if plan is not None:
            self._in_flight = self._launch(plan)
            if previous is not None and plan.encodes_beside:
                previous.is_beside = True
        if previous is not None:
            self._wait(previous, handle_messages)
            outputs += self._process(previous)
        elif plan is None:
            outputs += self._finish_encoding(self._runner.finished_encodings(waits=True))
        self._start_masks(previous, self._in_flight)
        return outputs

    def _wait(self, step: _InFlight, handle_messages: Callable[[], None]) -> None:
        """Handle messages while a step runs. The last part of a decode step is left to `read`, which wakes up sooner."""
        polls_until = math.inf
        if not step.num_prompt_tokens and not step.plan.encoder_parts:
            polls_until = max(step.started_at, self._last_read_at) + _POLLED * self._step_budget.decode_ms / 1e3
        while step.handle is not None and not step.handle.is_done and self._clock() < polls_until:
            num_added = self._num_added
            handle_messages()
            if self._num_added > num_added:
                self._encode_beside(step, self._in_flight)

    def _encode_beside(self, *steps: _InFlight | None) -> None:
        """Encode images of new requests at once if the steps in flight, `steps`, only decode."""
        in_flight = [step for step in steps if step is not None]
        if not in_flight or any(step.num_prompt_tokens for step in in_flight):
            return
        unsampled = next((step.plan for step in in_flight if step.handle is None), None)
        plan = self.scheduler.plan_encodings(_SHORT_PASS, unsampled)
        if plan is None:
            return
        self._runner.start_encodings(plan)
        self._count_starts(plan)
        if plan.images:
            encode_s = self._runner.encode_ms(self.scheduler.num_patches_encoding) / 1e3
            self._encoder_until = self._clock() + encode_s / _ENCODER_SPEED_BESIDE_DECODE
            for step in in_flight:
                step.is_beside = True

    def _plan(self) -> StepPlan | None:
        """Plan the next step. While no request is decoding there is no gap between tokens to bound."""
        scheduler, budget = self.scheduler, self._step_budget
        num_decoding, deferred = scheduler.num_decoding(), self._deferred()
        if not num_decoding:
            return scheduler.plan(MAX_PREFILL, deferred)
        work, encode_ms = scheduler.work_left(), self._runner.encode_ms
        budget.observe_queue(work.num_requests, work.num_prompt_tokens, encode_ms(work.num_patches))
        max_patches = scheduler.limits.max_encoder_patches if budget.has_backlog else _SHORT_PASS
        next_pass = scheduler.next_pass(max_patches) or NextPass(0, 0)
        share = budget.share(
            work.num_ready_tokens,
            part_ms=encode_ms(next_pass.num_patches) / ENCODER_PARTS,
            parts_left=next_pass.parts_left,
            busy_ms=max(0.0, self._encoder_until - self._free_at()) * 1e3,
        )
        if share is None:
            share = StepShare(MAX_PREFILL, encoder_parts=1)
        turn = EncoderTurn(share.encoder_parts, max_patches)
        return scheduler.plan(prefill_beside_decode(share.num_tokens, num_decoding), deferred, turn)

    def _free_at(self) -> float:
        """When the step in flight is expected to end."""
        step, now = self._in_flight, self._clock()
        if step is None:
            return now
        step_ms = self._step_budget.expected_ms(step.num_prompt_tokens + step.num_decode_tokens)
        slowdown = _SLOWDOWN_BESIDE_ENCODER if step.is_beside else 1.0
        return max(now, max(step.started_at, self._last_read_at) + slowdown * step_ms / 1e3)

    def _launch(self, plan: StepPlan) -> _InFlight:
        launched = _InFlight(plan, self._runner.forward(plan), self._clock())
        launched.is_beside = self.scheduler.is_encoding_beside or self._encoder_until > launched.started_at
        if self._masks is None or self._masks.are_ready(self._with_grammar(plan)):
            self._sample(launched)
        self._count_launch(launched)
        return launched

    def _sample(self, step: _InFlight) -> None:
        masks = None if self._masks is None else self._masks.take(self._with_grammar(step.plan))
        step.handle = self._runner.sample(step.forward, masks)

    def _process(self, step: _InFlight) -> list[RequestOutput]:
        assert step.handle is not None, "a step is sampled before the next one is launched"
        result = step.handle.read()
        outputs = [self._with_grammar_failure(output) for output in self.scheduler.update(step.plan, result)]
        self._observe_encodings(result.images)
        self._observe(step, result)
        return outputs

    def _finish_encoding(self, results: Sequence[EncodeResult]) -> list[RequestOutput]:
        outputs = self.scheduler.finish_encoding(results)
        self._observe_encodings(results)
        return outputs

    def _observe_encodings(self, results: Sequence[EncodeResult]) -> None:
        """Count how long encodings took."""
        if not results:
            return
        now = self._clock()
        if not self.scheduler.is_encoding:
            self._encoder_until = now
        self._encode_times.observe_all(now - self._encoding_since.pop(result.key, now) for result in results)
        self.statistics.encode_counts = self._encode_times.counts
        self.statistics.encode_total_s = self._encode_times.total_s

    def _count_starts(self, plan: StepPlan) -> None:
        """Count requests that got a slot and images whose encoding has begun."""
        now = self._clock()
        if plan.images:
            self.statistics.num_images_encoded += len(plan.images)
            self._encoding_since |= {image.key: now for image in plan.images}
        waited = [
            now - self._added_at.pop(start.request_id) for start in plan.started if start.request_id in self._added_at
        ]
        if waited:
            self._queue_times.observe_all(waited)
            self.statistics.queue_counts, self.statistics.queue_total_s = (
                self._queue_times.counts,
                self._queue_times.total_s,
            )

    def _observe(self, step: _InFlight, result: StepResult) -> None:
        """Learn from a step: its time, its drafts, the tokens that grammars advance by."""
        now, previous = self._clock(), self._last_read_at
        self._last_read_at = now
        if step.plan.chunks:
            self._last_step_s = now - max(step.started_at, previous)
            if not step.is_beside:
                self._step_budget.observe(result.duration_s * 1e3, step.num_prompt_tokens, step.num_decode_tokens)
        for given in result.chunks if self._grammar_states else ():
            if given.request_id in self._grammar_states and given.token_ids:
                self._grammar_states[given.request_id].accept(given.token_ids)
        if self._lookup is not None:
            self._learn_drafts(self._lookup, step.plan, result)

    def _learn_drafts(self, lookup: PromptLookup, plan: StepPlan, result: StepResult) -> None:
        """Count accepted drafts; compare new tokens with those looked up, while drafts may pay."""
        for chunk, given in zip(plan.chunks, result.chunks, strict=True):
            if chunk.drafts:
                self.statistics.num_accepted_draft_tokens += max(0, len(given.token_ids) - 1)
        if self._is_on_cpu:
            num_decoding = sum([chunk.reads_last_token for chunk in plan.chunks])
            lookup.set_cost(self._step_budget.token_cost(num_decoding), self._runner.max_draft_tokens)
        elif self.scheduler.num_running > MAX_DRAFTING:
            lookup.pause()
            return
        for chunk, given in zip(plan.chunks, result.chunks, strict=True):
            state = self.scheduler.find(chunk.request_id)
            if state is not None:
                lookup.observe(state, len(given.token_ids), len(chunk.drafts))

    # -------------------------------------------------------------- grammars

    def _with_grammar(self, plan: StepPlan) -> list[str]:
        """Open requests with a grammar that the step samples a token of."""
        if not self._grammar_states:
            return []
        return [chunk.request_id for chunk in plan.chunks if chunk.samples and chunk.request_id in self._grammar_states]

    def _start_masks(self, read: _InFlight | None, launched: _InFlight | None) -> None:
        """Compute the allowed next tokens of requests with a grammar: of those whose tokens were just read, and of those that the step
        in flight waits for."""
        if self._masks is None or not self._grammar_states:
            return
        awaited = [] if launched is None or launched.handle is not None else self._with_grammar(launched.plan)
        sampled = [] if read is None else self._with_grammar(read.plan)
        is_open = self.scheduler.find
        self._masks.start({one: self._grammar_states[one] for one in awaited + sampled if is_open(one) is not None})

    def _deferred(self) -> Collection[str]:
        """Requests with a grammar, if computing their masks would hold up others that are decoding: those with a token in flight are
        left out of a step, during which their masks are computed."""
        if not self._grammar_states or self._masks is None:
            return ()
        if self._masks.last_duration_s < _LONG_MASKS * self._last_step_s:
            return ()
        states = [self.scheduler.find(request_id) for request_id in self._grammar_states]
        num_decoding = sum([state is not None and state.is_decoding for state in states])
        return self._grammar_states.keys() if self.scheduler.num_decoding() > num_decoding else ()

    def _with_grammar_failure(self, output: RequestOutput) -> RequestOutput:
        """A grammar that failed allows the end of the sequence alone: an output that ends so has failed, not stopped."""
        state = self._grammar_states.get(output.request_id) if output.finish_reason == "stop" else None
        if state is None or state.error is None:
            return output
        return output._replace(finish_reason="failed", failure=Failure("running", state.error, "invalid_request"))

    def _fail_grammars(self) -> list[RequestOutput]:
        """End requests whose grammar cannot continue because it exceeded a limit."""
        failed = [(request_id, state.error) for request_id, state in self._grammar_states.items() if state.error]
        outputs = []
        for request_id, error in failed:
            output = self.scheduler.end(request_id, "failed", Failure("running", str(error), "invalid_request"))
            outputs += [output] if output is not None else []
        return outputs

    # -------------------------------------------------------------- ends, counters, invariants

    def fail_all(self, failure: Failure) -> list[RequestOutput]:
        """End every open request as failed."""
        self._in_flight = None
        open_ids = [*self.scheduler.request_ids(), *self._compiling]
        ended = [self._end_request(request_id, "failed", failure) for request_id in open_ids]
        return self._finish([output for output in ended if output is not None])

    def _finish(self, outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
        """Count outputs, and drop what is kept of requests that ended."""
        statistics = self.statistics
        for output in outputs:
            statistics.num_output_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                self._forget(output.request_id)
                statistics.num_failures += output.failure is not None
                statistics.num_cached_tokens += output.num_cached_tokens
                statistics.finished[output.finish_reason] = statistics.finished.get(output.finish_reason, 0) + 1
        self._count_queues()
        return list(outputs)

    def _forget(self, request_id: str) -> None:
        self._runner.unregister(request_id)
        self._added_at.pop(request_id, None)
        self._grammar_states.pop(request_id, None)
        if self._masks is not None:
            self._masks.forget(request_id)
        if (entry := self._adapter_of_request.pop(request_id, None)) is not None:
            self._adapters.release(entry)
        if self._lookup is not None:
            self._lookup.forget(request_id)

    def _count_queues(self) -> None:
        """Requests and free pages now, after some have ended."""
        statistics, scheduler = self.statistics, self.scheduler
        statistics.num_running = scheduler.num_running
        statistics.num_waiting = scheduler.num_waiting + len(self._compiling)
        statistics.num_free_pages = scheduler.pages.num_free

    def _count_launch(self, step: _InFlight) -> None:
        statistics, scheduler = self.statistics, self.scheduler
        statistics.num_steps += 1
        self._count_starts(step.plan)
        statistics.num_preemptions = scheduler.num_preemptions
        statistics.num_encoder_cache_queries = scheduler.encoder_cache.num_queries
        statistics.num_encoder_cache_hits = scheduler.encoder_cache.num_hits
        statistics.num_late_captures, statistics.num_eager_steps = self._runner.graph_counters()
        statistics.num_late_compiles = self._runner.num_late_compiles()
        statistics.num_prompt_tokens += step.num_prompt_tokens
        if self._lookup is not None:
            statistics.num_draft_tokens += sum([len(chunk.drafts) for chunk in step.plan.chunks])

    def close(self) -> None:
        """Free the device memory. The core cannot be used any more."""
        self._in_flight = None
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._runner.close()
        if self._grammars is not None:
            self._grammars.close()

    @property
    def wants_check(self) -> bool:
        """Whether the core is idle and has not checked its invariants since it was busy."""
        return not self.has_work and not self._is_checked

    def check(self) -> None:
        """Check the invariants: nothing is lost or owned twice."""
        if self.scheduler.has_work:
            self.scheduler.check()
        else:
            assert self.scheduler.is_idle_clean(), "no request is open, but pages are owned"
            assert self._runner.num_registered == 0, "no request is open, but inputs are kept"
        self._adapters.check()
        self._is_checked = True


class _RefusedError(Exception):
    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _adapter_failed(reply_id: str, message: str, kind: FailureKind) -> RequestOutput:
    return RequestOutput(request_id=reply_id, finish_reason="failed", failure=Failure("waiting", message, kind))


def limits_of(config: EngineConfig, max_length: int, max_draft_tokens: int, max_patches_in_turn: int) -> Limits:
    """The scheduler's limits."""
    return Limits(
        max_requests=config.max_requests,
        max_step_tokens=config.max_step_tokens,
        max_step_chunks=MAX_CHUNKS,
        max_encoder_patches=config.max_encoder_patches,
        max_patches_in_turn=max_patches_in_turn,
        max_length=max_length,
        max_draft_tokens=max_draft_tokens,
    )

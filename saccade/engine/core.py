"""The engine loop: plan a step, launch it, process the output of the previous one. It handles tokens and images, never text.

While the device computes a step, the host plans and launches the next one and only then reads the tokens of the first. A step with
drafts is read at once, since the next drafts depend on its tokens.

When encoding or running fails, the failing request is isolated: the images, then the chunks, of the step are retried in halves until
one is left. That request fails and its resources are freed; the others continue with the tokens they would have had. An image that
could not be encoded is quarantined: later requests with it are refused.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from saccade.engine.config import EngineConfig
from saccade.engine.encoder_cache import EncoderCache
from saccade.engine.pages import PagePool
from saccade.engine.prompt import TokenPrompt
from saccade.engine.prompt_lookup import PromptLookup
from saccade.engine.request import Failure, Request, Stage, TokenLogprobs
from saccade.engine.runner import Runner, StepHandle, StepTokens
from saccade.engine.scheduler import Scheduler
from saccade.engine.step_budget import StepBudget
from saccade.engine.step_plan import Chunk, ImageToEncode, Limits, StepPlan
from saccade.errors import RequestError

logger = logging.getLogger(__name__)

_MAX_QUARANTINED = 4096

NON_FINITE_LOGITS = Failure(
    "running",
    "the model's logits are not finite (NaN or inf). Check the weights, or use dtype bf16 or fp32",
    "non_finite_logits",
)


class EngineError(Exception):
    """The device failed: every request has failed, and the process must be restarted."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """Output of one step for one request. The last one has the finish reason."""

    request: Request
    """Whose output it is."""
    token_ids: Sequence[int] = ()
    """New output tokens."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of these, if requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of prompt tokens computed in the step, if requested."""

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.request.finish_reason is not None


OnUpdate = Callable[[Update], None]


@dataclass
class Statistics:
    """Counters since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Computed, without cached ones."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_images_encoded: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_failures: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""


@dataclass(frozen=True, eq=False)
class _InFlight:
    plan: StepPlan
    handles: list[StepHandle]
    started_at: float


class EngineCore:
    """Requests in, updates out. Used by one thread."""

    def __init__(self, runner: Runner, *, clock: Callable[[], float] = time.perf_counter) -> None:
        config = runner.config
        self._runner, self._clock = runner, clock
        self._lookup = PromptLookup() if config.max_draft_tokens else None
        self._quarantine: OrderedDict[bytes, None] = OrderedDict()
        self.scheduler = Scheduler(
            limits_of(config, runner.max_length),
            PagePool(runner.cache.num_pages, config.page_size, keeps_prefixes=config.prefix_cache),
            EncoderCache(config.encoder_cache_tokens, keeps_unused=config.encoder_cache),
            self._lookup.propose if self._lookup else None,
            self._quarantine,
        )
        self._step_budget = StepBudget(config.target_step_ms, config.max_step_tokens)
        self._callbacks: dict[str, OnUpdate] = {}
        self._num_reported: dict[str, int] = {}  # prompt tokens whose log-probabilities were reported, by request
        self._in_flight: _InFlight | None = None
        self._is_checked = True
        self._last_read_at = 0.0
        self.statistics = Statistics()

    @property
    def has_work(self) -> bool:
        """Whether a request is open or a step is in flight."""
        return self.scheduler.has_work or self._in_flight is not None

    # -------------------------------------------------------------- add and end requests

    def add(self, request: Request, prompt: TokenPrompt, seed: int, on_update: OnUpdate) -> None:
        """Add a request; `step` calls `on_update` with its output. RequestError: it can never run."""
        if request.num_prompt_tokens == 0:
            raise RequestError("The prompt is empty; give it at least one token")
        self._runner.register(request, prompt, seed)
        try:
            self.scheduler.add(request)
        except BaseException:
            self._runner.unregister(request)
            raise
        self._callbacks[request.id] = on_update
        self._is_checked = False

    def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        self._end(request_id, self.scheduler.cancel)

    def finish(self, request_id: str) -> None:
        """End a request that is complete for a reason only its text shows."""
        self._end(request_id, self.scheduler.finish)

    def _end(self, request_id: str, end: Callable[[str], bool]) -> None:
        request = self.scheduler.find(request_id)
        if request is not None and end(request_id):
            self._notify_end([request])

    # -------------------------------------------------------------- a step

    def step(self) -> None:
        """Plan and launch the next step, then process the output of the previous one."""
        plan = self.scheduler.plan(self._step_budget.num_tokens())
        previous, self._in_flight = self._in_flight, None
        if plan is not None:
            self._in_flight = self._launch(plan)
        if previous is not None:
            self._process_output(previous)
        if self._lookup is not None and self._in_flight is not None:
            current, self._in_flight = self._in_flight, None
            self._process_output(current)

    @property
    def wants_check(self) -> bool:
        """Whether the engine is idle and has not checked its invariants since it had work."""
        return not self.has_work and not self._is_checked

    def check(self) -> None:
        """Check the invariants: nothing is leaked or owned twice."""
        if self.scheduler.has_work:
            self.scheduler.check()
        else:
            assert self.scheduler.is_idle_clean(), "no request is open, but pages are owned"
        assert self.scheduler.has_work or self._runner.num_registered == 0, "no request is open, but prompts are kept"
        self._is_checked = True

    # -------------------------------------------------------------- launch a step, and isolate what fails

    def _launch(self, plan: StepPlan) -> _InFlight:
        started_at = self._clock()
        # Callbacks come after encoding: the inputs of a failed request may be needed for images it shares with others.
        self._notify_end(self._copy_pages(plan, plan.page_copies) + self._encode(plan, plan.images))
        handles = self._run([chunk for chunk in plan.chunks if chunk.request.finish_reason is None], plan.started)
        self._count(plan)
        return _InFlight(plan, handles, started_at)

    def _copy_pages(self, plan: StepPlan, copies: Sequence[tuple[int, int]]) -> list[Request]:
        """Copy pages; returns the requests that failed."""
        try:
            self._runner.copy_pages(copies)
        except Exception as error:
            self._check_alive(error)
            if len(copies) > 1:
                return [request for pair in copies for request in self._copy_pages(plan, [pair])]
            [(_, target)] = copies
            requests = [chunk.request for chunk in plan.chunks if target in chunk.pages]
            return [request for request in requests if self._fail("running", request, error)]
        return []

    def _encode(self, plan: StepPlan, images: Sequence[ImageToEncode]) -> list[Request]:
        """Encode images; returns the requests that failed."""
        if not images:
            return []
        try:
            self._runner.encode(images)
        except Exception as error:
            self._check_alive(error)
            if len(images) > 1:
                halves = (images[: len(images) // 2], images[len(images) // 2 :])
                return [request for half in halves for request in self._encode(plan, half)]
            if not isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
                self._quarantine_image(images[0].span.key)
            failure = self._failure("encoding", images[0].request, error)
            return self.scheduler.fail_image(plan, images[0].key, failure)
        return []

    def _run(self, chunks: Sequence[Chunk], started: Sequence[Request]) -> list[StepHandle]:
        if not chunks:
            return []
        try:
            return [self._runner.run(chunks, started)]
        except Exception as error:
            self._check_alive(error)
            if len(chunks) > 1:
                halves = (chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :])
                return [handle for half in halves for handle in self._run(half, started)]
            if self._fail("running", chunks[0].request, error):
                self._notify_end([chunks[0].request])
            return []

    def _fail(self, stage: Stage, request: Request, error: Exception) -> bool:
        return self.scheduler.fail(request, self._failure(stage, request, error))

    def _failure(self, stage: Stage, request: Request, error: Exception) -> Failure:
        """The failure shown to the user. The exception text goes to the log only: it may contain other users' data."""
        self.statistics.num_failures += 1
        logger.warning("request %s failed while %s: %r", request.id, stage, error, exc_info=error)
        if isinstance(error, RequestError):
            return Failure(stage, str(error), "invalid_request")
        return Failure(stage, f"the request failed while {stage}; other requests are not affected")

    def _quarantine_image(self, key: bytes) -> None:
        self._quarantine[key] = None
        while len(self._quarantine) > _MAX_QUARANTINED:
            self._quarantine.popitem(last=False)

    def _check_alive(self, error: Exception) -> None:
        """Isolating a request makes sense only while the device works."""
        if not self._runner.is_alive():
            self.fail_all(Failure("running", "the device failed; restart the engine", "engine_stopped"))
            raise EngineError(f"the device failed: {error}") from error

    def fail_all(self, failure: Failure) -> None:
        """Fail every open request."""
        self._in_flight = None
        self._notify_end([request for request in self.scheduler.requests() if self.scheduler.fail(request, failure)])

    # -------------------------------------------------------------- process the output of a step

    def _process_output(self, step: _InFlight) -> None:
        plan, outputs = step.plan, [self._read(handle) for handle in step.handles]
        sampled: dict[str, Sequence[int]] = {}
        for output in outputs:
            sampled.update(output.token_ids)
            for request in output.non_finite:
                if self.scheduler.fail(request, NON_FINITE_LOGITS):
                    self.statistics.num_failures += 1
                    logger.warning("request %s failed: its logits are not finite", request.id)
                    self._notify_end([request])
        chunks = [chunk for chunk in plan.chunks if chunk.request.finish_reason is None]
        num_known = [len(chunk.request.token_ids) for chunk in chunks]
        self.scheduler.update(plan, sampled)
        for chunk, first in zip(chunks, num_known, strict=True):
            self._notify(chunk, first, outputs)
        self._observe_time(plan, step.started_at)

    def _read(self, handle: StepHandle) -> StepTokens:
        try:
            return handle.read()
        except Exception as error:
            self._check_alive(error)
            raise

    def _observe_time(self, plan: StepPlan, started_at: float) -> None:
        """A step is timed from when the previous one was read: until then the device was busy with that one."""
        now, previous = self._clock(), self._last_read_at
        self._last_read_at = now
        if not plan.images:  # encoding time says nothing about tokens
            num_decode = sum([chunk.num_tokens for chunk in plan.chunks if _is_decode(chunk)])
            num_prompt = sum([chunk.num_tokens for chunk in plan.chunks]) - num_decode
            self._step_budget.observe((now - max(started_at, previous)) * 1e3, num_prompt, num_decode)

    def _notify(self, chunk: Chunk, num_known: int, outputs: Sequence[StepTokens]) -> None:
        """Call back with the output of a chunk, whose request had `num_known` tokens before."""
        request = chunk.request
        token_ids = request.token_ids[num_known:]
        self.statistics.num_output_tokens += len(token_ids)
        if chunk.drafts and self._lookup is not None:
            num_accepted = max(0, len(token_ids) - 1)
            self.statistics.num_accepted_draft_tokens += num_accepted
            self._lookup.observe(request, len(chunk.drafts), num_accepted)
        logprobs = _of(request, [output.logprobs for output in outputs])[: len(token_ids)]
        prompt_logprobs = self._unreported(chunk, _of(request, [output.prompt_logprobs for output in outputs]))
        if token_ids or prompt_logprobs or request.finish_reason is not None:
            update = Update(request=request, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
            self._callbacks[request.id](update)
        if request.finish_reason is not None:
            self._forget(request)

    def _unreported(self, chunk: Chunk, prompt_logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those of tokens not reported yet: a preempted request computes its prompt again."""
        first = chunk.start + 1
        num_reported = self._num_reported.get(chunk.request.id, 1)
        if not prompt_logprobs or first + len(prompt_logprobs) <= num_reported:
            return []
        self._num_reported[chunk.request.id] = first + len(prompt_logprobs)
        return prompt_logprobs[num_reported - first :]

    def _notify_end(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._callbacks[request.id](Update(request=request))
            self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._callbacks[request.id]
        self._num_reported.pop(request.id, None)
        self._runner.unregister(request)
        if self._lookup is not None:
            self._lookup.forget(request)
        finished, reason = self.statistics.finished, str(request.finish_reason)
        finished[reason] = finished.get(reason, 0) + 1

    def _count(self, plan: StepPlan) -> None:
        statistics = self.statistics
        statistics.num_steps += 1
        statistics.num_images_encoded += len(plan.images)
        statistics.num_preemptions += len(plan.preempted)
        started = [request for request in plan.started if not request.num_preemptions]
        statistics.num_cached_tokens += sum(request.num_cached_tokens for request in started)
        for chunk in plan.chunks:
            statistics.num_draft_tokens += len(chunk.drafts)
            if not _is_decode(chunk):
                statistics.num_prompt_tokens += chunk.num_tokens


def limits_of(config: EngineConfig, max_length: int) -> Limits:
    """The scheduler's limits."""
    return Limits(
        max_requests=config.max_requests,
        max_step_tokens=config.max_step_tokens,
        max_step_patches=config.max_step_patches,
        max_length=max_length,
        max_draft_tokens=config.max_draft_tokens,
    )


def _is_decode(chunk: Chunk) -> bool:
    """Whether the chunk computes output tokens, not prompt tokens."""
    return chunk.start >= chunk.request.num_prompt_tokens


def _of(request: Request, found: Sequence[dict[str, list[TokenLogprobs]]]) -> list[TokenLogprobs]:
    return [entry for part in found for entry in part.get(request.id, ())]

"""Schedule engine steps: choose the tokens that the next step computes. Plain Python over integers, no torch, no clock.

    plan = scheduler.plan()             the next step (`planner.py`)
    scheduler.update(plan, result)      append its tokens

Chunked prefill and decode share every step. A step computes one token of each decoding request, then fills its token
budget with prompt chunks. The next plan may be made before the previous step's tokens are read: a token that is sampled
but not read is pending, and can be computed because the device has it.

Order. Requests are served by arrival, plus some arrivals per level of priority and for long work (`admission.py`). A
running prompt leaves up to half of a step to waiting requests that are before it in order. Only finitely many requests
ever precede a given one, and each is finite, so no request starves even if the budget is below one token per request.

Pages are allocated on demand. When no page is free, the running request last in order is preempted; its pages stay in
the prefix cache until they are needed. A request starts only if there are pages for all its known tokens in addition to
those that running prompts still need, and no later request starts before it.

Images are encoded in passes of the vision encoder. A pass is divided into parts, which steps run before their chunks
(`image_policy.py`).

No deadlock. `Scheduler.add` accepts only requests that can run alone. The first running request can always get pages,
because all others can be preempted. A request acquires its images in order, from the first that is not computed, and
releases each when a chunk passes its end. So a request that uses images can compute all of them without acquiring
another one. When the encoder cache has no free slots for one request, no later request acquires an image in that step,
not even a cached one: otherwise a popular image could stay in use forever.

Order on the device. Steps run one after another: each copies pages, runs its parts of the encoder, then its chunks. So
the next plan may write what a plan frees, even while the step is in flight. The plan itself may not: pages that it
copies from and images that it reads last are freed when the plan is complete. A step is sampled by a second launch,
with the settings and token counts that its slots have at that time. So a slot is not reused while a launched step that
names it is not sampled: the runner samples a step before it launches the next plan.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache
from saccade.engine.core.image_policy import EncoderTurn, ImagePolicy, NextPass
from saccade.engine.core.pages import PagePool
from saccade.engine.core.planner import Drafter, PlannedChunk, StepLimits, StepPlanner
from saccade.engine.core.request_state import Queues, RequestState
from saccade.engine.core.step import Chunk, ChunkResult, EncodeResult, StepPlan, StepResult
from saccade.engine.request import Failure, FinishReason, Request, RequestOutput, TokenLogprobs, new_output
from saccade.errors import ConfigError, ImageError, RequestError

_MAX_COUNTED = 64
"""Maximum requests that `work_left` counts."""


class WorkLeft(NamedTuple):
    """Work that remains before all open requests decode."""

    num_requests: int
    """Requests that do not decode yet."""
    num_prompt_tokens: int
    """Prompt tokens of these requests that are not computed."""
    num_ready_tokens: int
    """Prompt tokens that the next step can compute: those before the first image whose features it cannot read."""
    num_patches: int
    """Patches of their images whose encoding has not started."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the scheduler."""

    max_requests: int
    """Maximum running requests; slots are numbered from 0 to one less."""
    max_step_tokens: int
    """Maximum tokens of a step."""
    max_step_chunks: int
    """Maximum requests with more than one token in a step."""
    max_encoder_patches: int
    """Maximum patches of a vision encoder pass; an image with more is encoded alone."""
    max_length: int
    """Maximum tokens of prompt and output together."""
    max_draft_tokens: int = 0
    """Maximum draft tokens per request and step."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_step_tokens", "max_step_chunks", "max_encoder_patches", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 1 or more")


class _InFlight(NamedTuple):
    plan: StepPlan
    planned: Sequence[PlannedChunk]
    """One entry for each chunk of the plan."""


class Scheduler:
    """Plans steps over all open requests."""

    def __init__(
        self,
        limits: Limits,
        pages: PagePool,
        encoder_cache: EncoderCache,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.pages = pages
        self.encoder_cache = encoder_cache
        self.images = ImagePolicy(encoder_cache, limits.max_encoder_patches)
        self._drafter = drafter if limits.max_draft_tokens else None
        self._queues = Queues(limits.max_requests, pages, encoder_cache)
        self._in_flight: list[_InFlight] = []
        self._num_planned = 0
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return len(self._queues) > 0

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot, including preempted ones."""
        return len(self._queues.waiting)

    @property
    def num_preemptions(self) -> int:
        """Number of preemptions so far."""
        return self._queues.num_preemptions

    @property
    def num_decoding(self) -> int:
        """Running requests that wait for their next output token."""
        return [state.num_computed_tokens >= state.num_prompt_tokens for state in self._queues.running].count(True)

    def work_left(self) -> WorkLeft:
        """Count the work of requests that do not decode, up to `_MAX_COUNTED`: more make no difference to a step."""
        num_requests = num_tokens = num_patches = 0
        seen: set[bytes] = set()
        num_ready: int | None = None
        for state in self._queues.in_order():
            start, end = state.num_computed_tokens, state.num_prompt_tokens
            if start >= end:
                continue
            if num_requests == _MAX_COUNTED:
                break
            if state.first_image < len(state.image_keys):
                num_patches += sum([image.num_patches for image in self.images.new_images(state, seen)])
                if num_ready is None and (first := self.images.first_unreadable(state)) is not None:
                    num_ready = num_tokens + max(0, first - start)
            num_requests += 1
            num_tokens += end - start
        return WorkLeft(num_requests, num_tokens, num_tokens if num_ready is None else num_ready, num_patches)

    def next_pass(self, max_patches: int) -> NextPass | None:
        """The encoder pass in progress, or the one that could begin with up to `max_patches` patches."""
        states = self._queues.in_order()
        if self.images.current_pass is None and not any(state.next_image < len(state.image_keys) for state in states):
            return None
        return self.images.next_pass(self._queues.in_order(), max_patches)

    def find(self, request_id: str) -> RequestState | None:
        """The state of the open request with this id."""
        return self._queues.find(request_id)

    def request_ids(self) -> list[str]:
        """Ids of all open requests, in order of arrival."""
        return [state.request.id for state in self._queues]

    # ---- add and end requests

    def add(self, request: Request) -> RequestOutput | None:
        """Add a request to the waiting queue. RequestError: it could not run even if it were alone.

        Returns the last output if the request's known output tokens end it. Then it is not added.
        """
        assert request.id not in self._queues, f"request {request.id} was added before"
        self._check_can_run(request)
        state = RequestState(request, self._num_added, self.limits.max_length)
        reason = _continue(state)
        if reason is not None:
            return _output(state, reason)
        self._queues.add(state)
        self._num_added += 1
        return None

    def _check_can_run(self, request: Request) -> None:
        """Raise RequestError, saying what to change, unless the request could run alone."""
        limits, pages, num_prompt = self.limits, self.pages, request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("The prompt is empty; give it at least one token")
        if num_prompt >= limits.max_length:
            raise RequestError(
                f"The prompt has {num_prompt} tokens; prompt and output together may have {limits.max_length}. "
                "Shorten it, use smaller images, or raise max_length"
            )
        # The last token is never computed.
        num_pages = pages.num_pages_for(min(num_prompt + request.sampling.max_tokens, limits.max_length) - 1)
        if num_pages > pages.num_pages:
            raise RequestError(
                f"A prompt of {num_prompt} tokens with up to {request.sampling.max_tokens} output tokens needs "
                f"{num_pages} pages; the KV cache has {pages.num_pages}. Lower max_tokens, shorten the prompt, "
                "or raise num_pages"
            )
        for image in request.images:
            if not self.encoder_cache.fits(image.num_tokens):
                raise ImageError(
                    f"An image takes {image.num_tokens} tokens; the encoder cache has "
                    f"{self.encoder_cache.num_slots * ENCODER_SLOT_TOKENS}. "
                    "Use a smaller image, or raise encoder_cache_tokens"
                )
            if self.images.is_quarantined(image.key):
                raise ImageError("An image of this request could not be encoded before; send another one")

    def end(self, request_id: str, reason: FinishReason, failure: Failure | None = None) -> RequestOutput | None:
        """End a request at once, even while a step computes it. None: no such open request.

        It is cancelled, failed, or complete for a reason outside the scheduler such as a stop string.
        """
        state = self._queues.find(request_id)
        return None if state is None else self._end(state, reason, failure)

    def _end(self, state: RequestState, reason: FinishReason, failure: Failure | None = None) -> RequestOutput:
        self._queues.remove(state)
        return _output(state, reason, failure)

    # ---- steps

    def plan(
        self,
        token_budget: int | None = None,
        deferred: Container[str] = (),
        turn: EncoderTurn = EncoderTurn(),  # noqa: B008, immutable
    ) -> StepPlan | None:
        """Schedule the next step. None: nothing can be computed before a step in flight is read, or at all.

        `token_budget` limits the prompt tokens of the step, with a minimum of one; decode tokens are not limited by it.
        `deferred` requests are left out while one of their tokens is not read. `turn` limits the encoder while requests
        decode.
        """
        while True:
            num_running = self.num_running
            planner = self._planner(token_budget, deferred)
            plan = planner.make(self._num_planned, turn if self._is_decoding else EncoderTurn())
            if plan.chunks or plan.encoder_parts or plan.loads or plan.started:
                self._num_planned += 1
                self._in_flight.append(_InFlight(plan, planner.planned))
                return plan
            if self.num_running == num_running:
                break
            # A request was preempted, which may have released an image that others wait for.
        assert self._in_flight or self.images.is_encoding or not self.has_work, (
            "there is work and nothing in flight, but nothing can be computed"
        )
        return None

    @property
    def _is_decoding(self) -> bool:
        return any(state.is_decoding for state in self._queues.running)

    def _planner(self, token_budget: int | None, deferred: Container[str]) -> StepPlanner:
        limits = self.limits
        num_prompt_tokens = limits.max_step_tokens if token_budget is None else max(1, token_budget)
        step = StepLimits(limits.max_step_tokens, num_prompt_tokens, limits.max_step_chunks, limits.max_draft_tokens)
        return StepPlanner(self._queues, self.images, step, self._drafter, deferred)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Append the sampled tokens; returns the new output of each request, except of those that ended meanwhile.

        Results are passed in the order of their plans.
        """
        in_flight = self._in_flight.pop(0)
        assert in_flight.plan is plan, "steps are read in the order in which they were planned"
        outputs = self.finish_encoding(result.images)
        find = self._queues.find
        for chunk, given, (state, num_preemptions) in zip(plan.chunks, result.chunks, in_flight.planned, strict=True):
            if find(chunk.request_id) is not state:
                continue
            if given.failure is not None:
                outputs.append(self._end(state, "failed", given.failure))
                continue
            is_current = state.num_preemptions == num_preemptions
            output = self._update_request(state, chunk, given, is_current=is_current)
            if output is not None:
                outputs.append(output)
        return outputs

    def finish_encoding(self, results: Iterable[EncodeResult]) -> list[RequestOutput]:
        """Mark images as encoded; returns the last outputs of requests with an image that failed.

        Later requests with that image are refused.
        """
        outputs = []
        for key, failure in self.images.finish(results) if results else ():
            users = [state for state in self._queues.running if key in state.images_in_use]
            outputs += [self._end(state, "failed", failure) for state in users]
            self.encoder_cache.evict(key)
        return outputs

    def _update_request(
        self, state: RequestState, chunk: Chunk, given: ChunkResult, *, is_current: bool
    ) -> RequestOutput | None:
        if chunk.samples:
            _settle_pending(state, chunk)
        num_known = len(state.token_ids)
        reason = _append(state, given.token_ids)
        if is_current:
            end = chunk.start + chunk.num_tokens
            if chunk.drafts:
                end = state.num_computed_tokens = chunk.start + len(given.token_ids)
            if end >= (state.num_registered + 1) * self.pages.page_size:
                self._register_pages(state, min(end, len(state.token_ids)))
        if reason is not None:
            self._queues.remove(state)
        elif len(state.token_ids) < state.next_output_at and not given.logprobs and not given.prompt_logprobs:
            return None
        logprobs = given.logprobs[: len(state.token_ids) - num_known]
        prompt_logprobs = self._unsent_prompt_logprobs(state, chunk, given) if given.prompt_logprobs else ()
        return _output(state, reason, None, logprobs, prompt_logprobs)

    @staticmethod
    def _unsent_prompt_logprobs(state: RequestState, chunk: Chunk, given: ChunkResult) -> tuple[TokenLogprobs, ...]:
        """Prompt log-probabilities that were not sent before: a preempted request computes its prompt again."""
        first, sent = chunk.start + 1, state.num_prompt_logprobs_sent
        if first + len(given.prompt_logprobs) <= sent:
            return ()
        state.num_prompt_logprobs_sent = first + len(given.prompt_logprobs)
        return given.prompt_logprobs[sent - first :]

    def _register_pages(self, state: RequestState, num_tokens: int) -> None:
        """Register the request's full pages, up to `num_tokens` computed and known tokens, in the prefix cache."""
        page_size = self.pages.page_size
        if self.pages.keeps_prefixes:
            for index in range(state.num_registered, num_tokens // page_size):
                self.pages.register(state.pages[index], state.page_key(index, page_size))
        state.num_registered = max(state.num_registered, num_tokens // page_size)

    # ---- invariants

    def check(self) -> None:
        """Check the invariants: pages, images, slots and queues agree with what the requests hold."""
        self._queues.check()

    def is_idle_clean(self) -> bool:
        """Whether no request is open and ended requests hold no pages."""
        self.check()
        return not self.has_work and self.pages.num_free == self.pages.num_pages


def _append(state: RequestState, tokens: Sequence[int]) -> FinishReason | None:
    """Append tokens up to the one that ends the request; drop later ones."""
    request, known = state.request, state.token_ids
    for token in tokens:
        known.append(token)
        if token in request.stop_ids and len(known) - request.num_prompt_tokens > request.sampling.min_tokens:
            return "stop"
        if len(known) >= state.token_limit:
            return "length"
    return None


def _continue(state: RequestState) -> FinishReason | None:
    """Append the output tokens of a new request that are known already; they are not sent again."""
    output_ids = state.request.output_ids
    reason = _append(state, output_ids)
    num_output = len(state.token_ids) - state.num_prompt_tokens
    if num_output < len(output_ids):
        raise RequestError(
            f"output_ids has {len(output_ids)} tokens, but the output ends after {num_output}, by a stop token, "
            "max_tokens or max_length. Leave out the later tokens"
        )
    state.num_sent += num_output
    state.next_output_at += num_output
    return reason


def _settle_pending(state: RequestState, chunk: Chunk) -> None:
    """Stop counting the chunk's sampled tokens as pending: they are known now, or rejected drafts."""
    state.num_pending -= 1 + len(chunk.drafts)
    state.has_drafts_in_flight = False


def _output(
    state: RequestState,
    reason: FinishReason | None = None,
    failure: Failure | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> RequestOutput:
    """The tokens of a request that were not sent yet, as an output."""
    token_ids = tuple(state.token_ids[state.num_sent :])
    if token_ids:
        state.num_sent += len(token_ids)
        state.next_output_at = state.num_sent + state.request.stream_interval
    num_cached, num_preemptions = state.num_cached_tokens, state.num_preemptions
    return new_output(
        (state.request.id, token_ids, logprobs, prompt_logprobs, reason, failure, num_cached, num_preemptions)
    )

"""Schedule engine steps: which tokens of which requests the next step computes. Plain Python over integers: no torch, no clock.

    plan = scheduler.plan()             the next step
    scheduler.update(plan, result)      what it gave

Chunked prefill and decode share every step. A step computes one token of each decoding request, then fills its token budget with
prompt chunks. The next plan may be made before the previous step's tokens are read: a token that was sampled but not read is pending,
and can be computed because the device has it.

Order. Requests are served by arrival, plus `AGEING` arrivals per level of priority. Only finitely many requests ever precede a given
one, and each is finite, so no request starves even if the budget is below one token per request.

Pages are allocated on demand. When none is free, the running request last in order is preempted; its pages stay in the prefix cache
until they are needed. A request starts only if there are pages for all its known tokens beside those that running prompts still
need, and no later request starts before it.

Images are encoded in passes of the vision encoder, one after another, which take turns with the steps: a plan runs parts of a pass before
its chunks, as many as the caller says. Chunks can read the images of a pass when its last part has run or runs in this plan. So a pass
delays the output of other requests by a part or a few. A pass that cannot be divided, of an image larger than a pass say, runs alone and
beside the steps; the chunks that read it wait on the host while other requests decode.

No deadlock. `Scheduler.add` accepts only requests that can run alone. The first running request can always get pages, because all
others can be preempted. A request acquires its images in order, from the first that is not computed, and releases each when a chunk
leaves it. So a request that uses images can compute all of them without acquiring another one. When the encoder cache has no free
slots for one request, no later request acquires an image in that step, not even a cached one: otherwise a popular image could
stay in use forever.

Order on the device. Steps run one after another, each copying pages first. So what a plan frees may be written by the next plan,
even while the step is in flight, but not by the plan itself: pages copied from and images left behind are freed when the plan is
complete. The runner orders encodings behind the steps that read their slots before. A step is sampled by a second launch, with the
settings and token counts that its slots have at that time. So a slot is not reused while a launched step that names it is not sampled:
the runner samples a step before it launches the next plan, and `plan_encodings`, whose plan is launched at once, waits.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from saccade.engine.core.encoder_cache import ENCODER_SLOT_TOKENS, EncoderCache
from saccade.engine.core.pages import PagePool
from saccade.engine.core.request_state import Queues, RequestState
from saccade.engine.core.step import (
    ENCODER_PARTS,
    Chunk,
    ChunkResult,
    EncodeResult,
    ImageFeatures,
    ImageToEncode,
    SlotStart,
    StepPlan,
    StepResult,
    new_chunk,
)
from saccade.engine.request import Failure, FinishReason, ImageSpan, Request, RequestOutput, TokenLogprobs, new_output
from saccade.errors import ConfigError, ImageError, RequestError

_MAX_QUARANTINED = 4096
_MAX_COUNTED = 64


class Drafter(Protocol):
    """Proposes draft tokens (`prompt_lookup.py`)."""

    def is_drafting(self, state: RequestState) -> bool:
        """Whether the request has to wait until all its tokens are known."""

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        """Up to this many draft tokens that follow the known ones."""


class EncoderTurn(NamedTuple):
    """What the vision encoder may do in a step."""

    num_parts: int = ENCODER_PARTS
    """Parts of the pass in progress, or of the next one."""
    max_patches: int | None = None
    """Patches of a pass that begins, unless its first image has more. None: as many as a pass may have."""


class WorkLeft(NamedTuple):
    """Work before all open requests decode."""

    num_requests: int
    """That do not."""
    num_prompt_tokens: int
    """That are not computed."""
    num_ready_tokens: int
    """Of these, the ones that come before the first image, in the order of requests, that a chunk cannot read."""
    num_patches: int
    """Of images whose encoding has not started."""


class NextPass(NamedTuple):
    """The pass of the vision encoder that is in progress, or could begin."""

    num_patches: int
    parts_left: int


class _Encoding(NamedTuple):
    """An image being encoded."""

    image_key: bytes
    """Not salted."""
    num_patches: int
    pass_number: int
    """Of the plan that started it."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the scheduler."""

    max_requests: int
    """Requests that run at once; slots are numbered below it."""
    max_step_tokens: int
    """Tokens computed in a step."""
    max_step_chunks: int
    """Requests with more than one token in a step."""
    max_encoder_patches: int
    """Patches in one pass of the vision encoder; an image with more is encoded alone."""
    max_patches_in_turn: int | None = None
    """Patches in a pass that takes turns with the steps; one with more runs beside them. None: as many as a pass has."""
    max_length: int
    """Tokens of prompt and output together."""
    max_draft_tokens: int = 0
    """Draft tokens per request and step."""

    @property
    def patches_in_turn(self) -> int:
        """Patches in a pass that takes turns with the steps."""
        most = self.max_patches_in_turn
        return self.max_encoder_patches if most is None else min(most, self.max_encoder_patches)

    @property
    def pass_patches(self) -> int:
        """Patches in a pass of several images: those that can take turns, or all, if none can."""
        return self.patches_in_turn or self.max_encoder_patches

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_step_tokens", "max_step_chunks", "max_encoder_patches", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 1 or more")


class _Pass:
    """A pass of the vision encoder in progress."""

    def __init__(self, number: int, num_patches: int) -> None:
        self.number, self.num_patches, self.parts_left = number, num_patches, ENCODER_PARTS


class _InFlight(NamedTuple):
    plan: StepPlan
    states: tuple[RequestState, ...]
    """Of each chunk."""
    num_preemptions: tuple[int, ...]
    """Of each when it was planned: a request preempted since has other pages."""


class Scheduler:
    """All open requests."""

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
        self._drafter = drafter if limits.max_draft_tokens else None
        self._quarantine: dict[bytes, None] = {}  # keys of images that could not be encoded, oldest first
        self._queues = Queues(limits.max_requests, pages, encoder_cache)
        self._in_flight: list[_InFlight] = []
        self._encoding: dict[bytes, _Encoding] = {}  # by salted key
        self._pass: _Pass | None = None  # the pass in progress
        self._beside: int | None = None  # number of the pass that runs beside the steps
        self._num_planned = 0
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether any request is open."""
        return len(self._queues) > 0

    @property
    def is_encoding(self) -> bool:
        """Whether an encoding is in flight."""
        return bool(self._encoding)

    @property
    def is_encoding_beside(self) -> bool:
        """Whether a pass that cannot be divided runs beside the steps."""
        return self._beside is not None

    @property
    def num_patches_encoding(self) -> int:
        """Patches of the images being encoded."""
        return sum([image.num_patches for image in self._encoding.values()])

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        """Requests that have none, including preempted ones."""
        return len(self._queues.waiting)

    @property
    def num_preemptions(self) -> int:
        """Requests preempted so far."""
        return self._queues.num_preemptions

    def num_decoding(self) -> int:
        """Running requests that wait for their next output token."""
        return [state.num_computed_tokens >= state.num_prompt_tokens for state in self._queues.running].count(True)

    def work_left(self) -> WorkLeft:
        """What is left to do before all open requests decode, or the first 64 of those that do not: more make no difference to a step."""
        num_requests = num_tokens = num_patches = 0
        seen: set[bytes] = set()
        num_ready: int | None = None
        for state in (*self._queues.running, *self._queues.waiting):
            start, end = state.num_computed_tokens, state.num_prompt_tokens
            if start >= end:
                continue
            if num_requests == _MAX_COUNTED:
                break
            if state.first_image < len(state.image_keys):
                num_patches += sum([image.num_patches for image in self._new_images(state, seen)])
                if num_ready is None and (first := self._first_unreadable(state)) is not None:
                    num_ready = num_tokens + max(0, first - start)
            num_requests += 1
            num_tokens += end - start
        return WorkLeft(num_requests, num_tokens, num_tokens if num_ready is None else num_ready, num_patches)

    def _first_unreadable(self, state: RequestState) -> int | None:
        """Where the first image begins that is not encoded, and whose pass is not complete with what the device has to do."""
        blocked, cache = {self._beside, None if self._pass is None else self._pass.number}, self.encoder_cache
        for index in range(state.first_image, len(state.image_keys)):
            key = state.image_keys[index]
            if not cache.contains(key) or not (cache.is_ready(key) or self._encoding[key].pass_number not in blocked):
                return state.request.images[index].start
        return None

    def _new_images(self, state: RequestState, seen: set[bytes]) -> list[ImageSpan]:
        """Images of a request whose encoding has not started and whose keys are not among those `seen`, to which they are added."""
        found = []
        for index in range(state.next_image, len(state.image_keys)):
            key = state.image_keys[index]
            if key not in seen and not self.encoder_cache.contains(key):
                found.append(state.request.images[index])
                seen.add(key)
        return found

    def next_pass(self, max_patches: int) -> NextPass | None:
        """The pass in progress, or the next one if it may have so many patches. None: there is none, or it has to wait."""
        if self._pass is not None:
            return NextPass(self._pass.num_patches, self._pass.parts_left)
        num_patches, max_patches = 0, min(max_patches, self.limits.pass_patches)
        seen: set[bytes] = set()
        for state in (*self._queues.running, *self._queues.waiting) if self._beside is None else ():
            for image in self._new_images(state, seen) if state.next_image < len(state.image_keys) else ():
                if num_patches and num_patches + image.num_patches > max_patches:
                    return NextPass(num_patches, ENCODER_PARTS)
                num_patches += image.num_patches
        return NextPass(num_patches, ENCODER_PARTS) if num_patches else None

    def find(self, request_id: str) -> RequestState | None:
        """The open request with this id."""
        return self._queues.find(request_id)

    def request_ids(self) -> list[str]:
        """All open requests, in order of arrival."""
        return [state.request.id for state in self._queues]

    # ---- add and end requests

    def add(self, request: Request) -> None:
        """Add a request to the waiting queue. RequestError: it could not run even alone."""
        assert request.id not in self._queues, f"request {request.id} was added before"
        self._check_can_run(request)
        self._queues.add(RequestState(request, self._num_added, self.limits.max_length))
        self._num_added += 1

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
                f"A prompt of {num_prompt} tokens with up to {request.sampling.max_tokens} output tokens needs {num_pages} pages; "
                f"the KV cache has {pages.num_pages}. Lower max_tokens, shorten the prompt, or raise num_pages"
            )
        for image in request.images:
            if not self.encoder_cache.fits(image.num_tokens):
                raise ImageError(
                    f"An image takes {image.num_tokens} tokens; the encoder cache has "
                    f"{self.encoder_cache.num_slots * ENCODER_SLOT_TOKENS}. Use a smaller image, or raise encoder_cache_tokens"
                )
            if image.key in self._quarantine:
                raise ImageError("An image of this request could not be encoded before; send another one")

    def end(self, request_id: str, reason: FinishReason, failure: Failure | None = None) -> RequestOutput | None:
        """End a request at once, even while a step computes it: cancelled, failed, or complete for a reason outside the scheduler
        such as a stop string. None: no such open request."""
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
        """Schedule the next step. None: nothing can be computed before a step or an encoding in flight is read, or at all.

        `token_budget` limits the prompt tokens of the step (at least one is always allowed); decode tokens are not limited by it.
        Requests in `deferred` are left out while a token of theirs is not read. `turn` limits the encoder, while requests decode.
        """
        while True:
            if not any(state.is_decoding for state in self._queues.running):
                turn = EncoderTurn()
            num_running = self.num_running
            budget = self.limits.max_step_tokens if token_budget is None else max(1, token_budget)
            planner = self._planner(budget, deferred, turn)
            planner.run()
            if planner.chunks or planner.images or planner.started or (self._pass is not None and turn.num_parts):
                return self._launch(planner, turn.num_parts)
            if self.num_running == num_running:
                break
            # A request was preempted and may have released an image that others were waiting for.
        assert self._in_flight or self._encoding or not self.has_work, (
            "there is work and nothing in flight, but nothing can be computed"
        )
        return None

    def plan_encodings(self, max_patches: int, unsampled: StepPlan | None = None) -> StepPlan | None:
        """Start waiting requests with images and a whole pass of these, beside the steps in flight. The plan computes no tokens, and has
        no result to be read. None: no pass can begin, since one is in flight, say. A request whose image has more patches starts without.

        `unsampled` is the launched step that is not sampled yet, if there is one. While a slot that it names is free, no request starts:
        the step is sampled with the settings and the token counts that its slots have then.
        """
        if self._encoding or not any(state.request.images for state in self._queues.waiting):
            return None
        named: set[int] = set() if unsampled is None else {chunk.slot for chunk in unsampled.chunks}
        if not named <= {state.slot for state in self._queues.running}:
            return None
        planner = self._planner(0, (), EncoderTurn(max_patches=max_patches))
        planner.run_encodings()
        return self._number(planner, ENCODER_PARTS, is_beside=True) if planner.images or planner.started else None

    def _planner(self, token_budget: int, deferred: Container[str], turn: EncoderTurn) -> _Planner:
        decoding = any(state.is_decoding for state in self._queues.running)
        blocked, most = set(), 0
        if self._beside is not None:
            blocked |= {self._beside} if decoding else set()
        elif self._pass is None:
            most = self.limits.pass_patches if turn.max_patches is None else turn.max_patches
            most = min(most, self.limits.pass_patches) if turn.num_parts else 0
            blocked |= {self._num_planned} if turn.num_parts < ENCODER_PARTS else set()
        elif turn.num_parts < self._pass.parts_left:
            blocked.add(self._pass.number)
        return _Planner(
            self._queues, self.limits, token_budget, self._drafter, deferred, self._encoding, most, blocked, self._num_planned,
            waits_beside=not decoding,
        )  # fmt: skip

    def _launch(self, planner: _Planner, num_parts: int) -> StepPlan:
        plan = self._number(planner, ENCODER_PARTS if planner.is_beside else num_parts, is_beside=planner.is_beside)
        if planner.is_beside:
            self._beside = plan.number
        self._in_flight.append(_InFlight(plan, tuple(planner.states), tuple(planner.num_preemptions)))
        return plan

    def _number(self, planner: _Planner, num_parts: int, *, is_beside: bool) -> StepPlan:
        if planner.images:
            num_patches = sum([self._encoding[image.key].num_patches for image in planner.images])
            self._pass = _Pass(self._num_planned, num_patches)
        plan = StepPlan(
            number=self._num_planned,
            chunks=tuple(planner.chunks),
            images=tuple(planner.images),
            encoder_parts=self._advance_pass(num_parts),
            encodes_beside=is_beside,
            page_copies=tuple(planner.page_copies),
            started=tuple(planner.started),
        )
        self._num_planned += 1
        return plan

    def _advance_pass(self, num_parts: int) -> int:
        """Run parts of the pass in progress; returns how many."""
        if self._pass is None:
            return 0
        num_parts = min(num_parts, self._pass.parts_left)
        self._pass.parts_left -= num_parts
        if not self._pass.parts_left:
            self._pass = None
        return num_parts

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Append the sampled tokens; returns what is new of each request. Requests that ended meanwhile are skipped.

        Plans are updated in the order in which they were made.
        """
        in_flight = self._in_flight.pop(0)
        assert in_flight.plan is plan, "steps are read in the order in which they were planned"
        outputs = self.finish_encoding(result.images)
        find = self._queues.find
        updates = zip(plan.chunks, result.chunks, in_flight.states, in_flight.num_preemptions, strict=True)
        for chunk, given, state, num_preemptions in updates:
            if find(chunk.request_id) is not state:
                continue
            is_current = state.num_preemptions == num_preemptions
            if is_current and chunk.num_tokens == 1 and _append_plain(state, given):
                if len(state.token_ids) >= state.next_output_at:
                    outputs.append(_output(state))
            elif given.failure is not None:
                outputs.append(self._end(state, "failed", given.failure))
            elif (output := self._update_request(state, chunk, given, is_current=is_current)) is not None:
                outputs.append(output)
        return outputs

    def finish_encoding(self, results: Iterable[EncodeResult]) -> list[RequestOutput]:
        """Images whose encoding ended; returns the requests that failed by one. An image that failed is refused from then on."""
        outputs = []
        for key, failure in results:
            encoding = self._encoding.pop(key)
            if failure is None:
                self.encoder_cache.set_ready(key)
                continue
            if failure.kind != "out_of_memory":
                self._quarantine_image(encoding.image_key)
            users = [state for state in self._queues.running if key in state.images_in_use]
            outputs += [self._end(state, "failed", failure) for state in users]
            self.encoder_cache.evict(key)
        numbers = {encoding.pass_number for encoding in self._encoding.values()}
        if self._beside not in numbers:
            self._beside = None
        if self._pass is not None and self._pass.number not in numbers:  # it failed, or the runner could not divide it
            self._pass = None
        return outputs

    def _quarantine_image(self, key: bytes) -> None:
        self._quarantine[key] = None
        if len(self._quarantine) > _MAX_QUARANTINED:
            del self._quarantine[next(iter(self._quarantine))]

    def _update_request(
        self, state: RequestState, chunk: Chunk, given: ChunkResult, *, is_current: bool
    ) -> RequestOutput | None:
        _settle_pending(state, chunk)
        num_known = len(state.token_ids)
        reason = _append(state, given.token_ids)
        num_new = len(state.token_ids) - num_known
        if is_current:
            end = chunk.end
            if chunk.drafts:
                end = state.num_computed_tokens = chunk.start + len(given.token_ids)
            if end >= (state.num_registered + 1) * self.pages.page_size:
                self._register_pages(state, min(end, len(state.token_ids)))
            state.num_plain_tokens = min(state.token_limit - 1, (state.num_registered + 1) * self.pages.page_size)
        if reason is not None:
            self._queues.remove(state)
        elif len(state.token_ids) < state.next_output_at and not given.logprobs and not given.prompt_logprobs:
            return None
        prompt_logprobs = self._unsent_prompt_logprobs(state, chunk, given) if given.prompt_logprobs else ()
        return _output(state, reason, None, given.logprobs[:num_new], prompt_logprobs)

    @staticmethod
    def _unsent_prompt_logprobs(state: RequestState, chunk: Chunk, given: ChunkResult) -> tuple[TokenLogprobs, ...]:
        """Those of tokens not sent yet: a preempted request computes its prompt again."""
        first, sent = chunk.start + 1, state.num_prompt_logprobs_sent
        if first + len(given.prompt_logprobs) <= sent:
            return ()
        state.num_prompt_logprobs_sent = first + len(given.prompt_logprobs)
        return given.prompt_logprobs[sent - first :]

    def _register_pages(self, state: RequestState, num_tokens: int) -> None:
        """Put pages full of computed and known tokens into the prefix cache."""
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
        """Whether no request is open and nothing of ended ones is left."""
        self.check()
        return not self.has_work and self.pages.num_free == self.pages.num_pages


def _append(state: RequestState, tokens: Sequence[int]) -> FinishReason | None:
    """Append tokens up to one that ends the request; the rest is dropped."""
    request, known = state.request, state.token_ids
    for token in tokens:
        known.append(token)
        if token in request.stop_ids and len(known) - request.num_prompt_tokens > request.sampling.min_tokens:
            return "stop"
        if len(known) >= state.token_limit:
            return "length"
    return None


def _append_plain(state: RequestState, given: ChunkResult) -> bool:
    """Append the token of a decode request that neither ends nor fills a page by it, as most. False: there is more to do.

    The same as `_update_request`, in a fifth of its time.
    """
    known, token_ids = state.token_ids, given.token_ids
    if len(known) >= state.num_plain_tokens or len(token_ids) != 1 or given.logprobs:
        return False
    if token_ids[0] in state.request.stop_ids:
        return False
    known.append(token_ids[0])
    state.num_pending -= 1
    return True


def _settle_pending(state: RequestState, chunk: Chunk) -> None:
    """The chunk's pending tokens are known now, or rejected."""
    if chunk.samples:
        state.num_pending -= 1 + len(chunk.drafts)
        state.has_drafts_in_flight = False


def _output(
    state: RequestState,
    reason: FinishReason | None = None,
    failure: Failure | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs, ...] = (),
) -> RequestOutput:
    """All that is new of a request since its last output."""
    token_ids = tuple(state.token_ids[state.num_sent :])
    if token_ids:
        state.num_sent += len(token_ids)
        state.next_output_at = state.num_sent + state.request.stream_interval
    num_cached, num_preemptions = state.num_cached_tokens, state.num_preemptions
    return new_output(
        (state.request.id, token_ids, logprobs, prompt_logprobs, reason, failure, num_cached, num_preemptions)
    )


class _Prefix(NamedTuple):
    """Cached pages that a request starts with. The last one is copied if the request has to write into it."""

    pages: list[int]
    num_tokens: int
    """Tokens that need not be computed: all of the pages', minus one if the request has no more than those."""
    is_copied: bool = False

    def without_copy(self, page_size: int) -> _Prefix:
        """The same with the last page recomputed."""
        pages = self.pages[:-1]
        return _Prefix(pages, len(pages) * page_size)


class _Planner:
    """One plan while it is being made, and what is left of the step's budgets: running requests first, then waiting ones."""

    def __init__(
        self,
        queues: Queues,
        limits: Limits,
        token_budget: int,
        drafter: Drafter | None,
        deferred: Container[str],
        encoding: dict[bytes, _Encoding],
        max_patches: int,
        blocked: set[int],
        number: int,
        *,
        waits_beside: bool,
    ) -> None:
        """`max_patches`: of the pass that may begin, 0 if none may. `blocked`: passes whose images cannot be read by this step.
        `waits_beside`: whether it may wait for a pass that runs beside the steps."""
        self.chunks: list[Chunk] = []
        self.images: list[ImageToEncode] = []
        self.page_copies: list[tuple[int, int]] = []
        self.started: list[SlotStart] = []
        self.states: list[RequestState] = []
        self.num_preemptions: list[int] = []
        self._queues = queues
        self._drafter, self._deferred = drafter, deferred
        self._number = number
        self._limits = limits
        self._tokens_left = limits.max_step_tokens
        self._prompt_tokens_left = token_budget
        self._chunks_left = limits.max_step_chunks
        self._encoding, self._blocked, self._waits_beside = encoding, blocked, waits_beside
        self._patches_left = max_patches
        self._takes_larger_image = True
        self._num_decoding = (
            0  # requests that need one token and no image, not scheduled yet; one token is reserved for each
        )
        self._is_encoder_cache_full = False
        self._pages_to_free: list[int] = []
        self._images_to_release: list[bytes] = []

    def run(self) -> None:
        """Make the plan. No request starts while running ones are short of pages."""
        num_running = len(self._queues.running)
        self._schedule_running()
        if len(self._queues.running) == num_running:
            self._start_waiting()
        self._free_after_plan()

    def run_encodings(self) -> None:
        """Start the first waiting requests, as long as they have images, without computing anything of them. No image exceeds the pass."""
        queues, self._takes_larger_image = self._queues, False
        num_reserved = sum(self._num_pages_needed(state) for state in queues.running)
        while queues.waiting and queues.has_free_slot and queues.waiting[0].request.images:
            state = queues.waiting[0]
            if not self._start(state, num_reserved):
                break
            num_reserved += self._num_pages_needed(state)
        self._free_after_plan()

    # ---- running requests

    def _schedule_running(self) -> None:
        running = self._queues.running
        if self._drafter is None and not self._deferred:
            all_uncomputed = [state.num_uncomputed for state in running]
        else:
            all_uncomputed = [self._num_uncomputed(state) for state in running]
        in_images = [state.has_images_left for state in running]
        self._num_decoding = list(zip(all_uncomputed, in_images, strict=True)).count((1, False))
        for index, num_uncomputed in enumerate(all_uncomputed):
            if index >= len(running):  # only the request at `index` or later ones can have been preempted
                break
            if num_uncomputed and not (num_uncomputed == 1 and self._schedule_decode(running[index])):
                self._schedule(running[index], num_uncomputed)

    def _num_uncomputed(self, state: RequestState) -> int:
        """Tokens of a running request that can be computed now; one that drafts or is deferred waits until all its tokens are known."""
        if state.num_pending and (
            (self._drafter is not None and self._drafter.is_drafting(state)) or state.request.id in self._deferred
        ):
            return 0
        return state.num_uncomputed

    def _schedule_decode(self, state: RequestState) -> bool:
        """Schedule the token of a decoding request that has a page for it and needs nothing else, as most do. False: it does not.

        The same as `_schedule`, in a third of its time.
        """
        start, slot = state.num_computed_tokens, state.slot
        if start >= state.num_ready_tokens or self._tokens_left <= 0 or self._drafter is not None or slot is None:
            return False
        reads_last_token = start >= state.num_start_tokens
        self.chunks.append(new_chunk((state.request.id, slot, start, 1, (), (), reads_last_token, (), True)))
        self.states.append(state)
        self.num_preemptions.append(state.num_preemptions)
        self._num_decoding -= 1
        self._tokens_left -= 1
        state.num_computed_tokens = start + 1
        state.num_pending += 1
        return True

    def _schedule(self, state: RequestState, num_uncomputed: int) -> None:
        """Schedule a chunk of a running request; it may be preempted instead if there are no pages."""
        budget, is_one = self._tokens_left, num_uncomputed == 1 and not state.has_images_left
        if is_one:
            self._num_decoding -= 1
        else:
            budget = min(num_uncomputed, budget - self._num_decoding, self._prompt_budget)
        if budget <= 0:
            if self._patches_left > 0:  # its images are encoded all the same
                self._enter_images(state, state.num_computed_tokens)
            return
        start, num_images = state.num_computed_tokens, len(self.images)
        end = self._enter_images(state, start + min(num_uncomputed, budget))
        if end == start:
            return
        if not self._allocate_pages(state, end):
            self._undo_images(num_images)
        elif is_one:
            self._add_chunk(state, end, self._propose_drafts(state, end) if self._drafter else ())
        else:
            self._add_prompt_chunk(state, end)

    @property
    def _prompt_budget(self) -> int:
        return min(self._tokens_left, self._prompt_tokens_left) if self._chunks_left else 0

    def _allocate_pages(self, state: RequestState, end: int) -> bool:
        """Allocate pages up to token `end`, preempting the last running requests if needed. False: it was preempted itself."""
        pool = self._queues.pages
        num_pages = pool.num_pages_for(end) - len(state.pages)
        if num_pages <= 0:
            return True
        while not pool.can_allocate(num_pages):
            last = self._queues.running[-1]
            if last is not state and self._num_uncomputed(last) == 1 and not last.has_images_left:
                self._num_decoding -= 1
            self._queues.preempt(last)
            if last is state:
                return False
        state.pages += pool.allocate(num_pages)
        return True

    def _propose_drafts(self, state: RequestState, end: int) -> tuple[int, ...]:
        """Draft tokens after a known last token, within the budget, the request's token limit and the free pages."""
        pool = self._queues.pages
        most = min(
            self._limits.max_draft_tokens, state.token_limit - end - 1, self._tokens_left - self._num_decoding - 1
        )
        if self._drafter is None or state.num_pending or most <= 0 or not self._chunks_left:
            return ()
        drafts = tuple(self._drafter.propose(state, most))[:most]
        num_pages = pool.num_pages_for(end + len(drafts)) - len(state.pages)
        if num_pages > 0 and pool.can_allocate(num_pages):
            state.pages += pool.allocate(num_pages)
        return drafts[: len(state.pages) * pool.page_size - end]

    # ---- waiting requests

    def _start_waiting(self) -> None:
        queues = self._queues
        if not queues.waiting or not queues.has_free_slot or not self._can_serve(queues.waiting[0]):
            return
        num_reserved = sum(self._num_pages_needed(state) for state in queues.running)
        while queues.waiting and queues.has_free_slot and self._can_serve(queues.waiting[0]):
            state = queues.waiting[0]
            if not self._start(state, num_reserved):
                break  # no later request starts before it
            num_reserved += self._num_pages_needed(state)

    def _can_serve(self, state: RequestState) -> bool:
        """Whether budgets are left for a waiting request: tokens, or patches if it has images."""
        return self._prompt_budget > 0 or (self._patches_left > 0 and bool(state.image_keys))

    def _num_pages_needed(self, state: RequestState) -> int:
        """Pages that its current tokens still need."""
        num_tokens = min(state.num_tokens, state.token_limit - 1)  # its last token is never computed
        return max(0, self._queues.pages.num_pages_for(num_tokens) - len(state.pages))

    def _start(self, state: RequestState, num_reserved: int) -> bool:
        """Start a request if there are pages for it. It may have to wait for the encoder or its images; others start meanwhile."""
        request, pool = state.request, self._queues.pages
        if state.num_pending:  # it was preempted, and resumes when all its tokens are known
            return False
        prefix = self._find_prefix_that_fits(state, num_reserved)
        if prefix is None:
            return False
        state.start_at(prefix.num_tokens)
        end = self._enter_images(state, min(len(state.token_ids), prefix.num_tokens + self._prompt_budget))
        self._queues.start(state)
        assert state.slot is not None, "a started request has a slot"
        if state.num_preemptions == 0:
            state.num_cached_tokens = prefix.num_tokens
        self.started.append(SlotStart(request.id, state.slot, tuple(state.token_ids[request.num_prompt_tokens :])))
        self._share_prefix(state, prefix)
        if end > prefix.num_tokens:
            state.pages += pool.allocate(pool.num_pages_for(end) - len(state.pages))
            self._add_prompt_chunk(state, end)
        return True

    def _find_prefix(self, state: RequestState) -> _Prefix:
        """The longest cached prefix of a request's known tokens. Its last token is always computed, to sample after it."""
        pool, token_ids = self._queues.pages, state.token_ids
        if not pool.keeps_prefixes or state.request.sampling.prompt_logprobs is not None:
            return _Prefix([], 0)
        pages: list[int] = []
        for index in range(len(token_ids) // pool.page_size):
            page = pool.find(state.page_key(index, pool.page_size))
            if page is None:
                break
            pages.append(page)
        last = len(token_ids) - 1
        if len(pages) * pool.page_size <= last:
            return _Prefix(pages, len(pages) * pool.page_size)
        whole = _Prefix(pages, last, is_copied=True)
        return whole if last % pool.page_size else whole.without_copy(pool.page_size)

    def _find_prefix_that_fits(self, state: RequestState, num_reserved: int) -> _Prefix | None:
        """The cached prefix to start with; None unless all known tokens have pages beside those reserved for others.

        A copy needs one page more than the request will own. If that one is missing, the page is recomputed instead: a request that
        needs the whole pool would otherwise wait forever beside its own cached prefix.
        """
        prefix = self._find_prefix(state)
        if self._fits(state, prefix, num_reserved):
            return prefix
        if prefix.is_copied:
            shorter = prefix.without_copy(self._queues.pages.page_size)
            if self._fits(state, shorter, num_reserved):
                return shorter
        return None

    def _fits(self, state: RequestState, prefix: _Prefix, num_reserved: int) -> bool:
        pool = self._queues.pages
        num_shared = sum(pool.num_owners(page) == 0 for page in prefix.pages)  # free pages that are about to be shared
        num_new = pool.num_pages_for(len(state.token_ids)) - len(prefix.pages) + prefix.is_copied
        return pool.num_free - num_shared >= num_new + num_reserved

    def _share_prefix(self, state: RequestState, prefix: _Prefix) -> None:
        """Own the pages of a prefix, and a copy of the last one if it will be written to."""
        pool, pages = self._queues.pages, state.pages
        for page in prefix.pages:
            pool.share(page)
        pages += prefix.pages
        if prefix.is_copied:
            [copy] = pool.allocate(1)
            self.page_copies.append((pages[-1], copy))
            self._pages_to_free.append(pages[-1])
            pages[-1] = copy
        state.num_registered = len(pages) - prefix.is_copied

    # ---- images

    def _enter_images(self, state: RequestState, end: int) -> int:
        """Acquire the request's images and have them encoded. Returns the end of the chunk: before the first image that has to wait."""
        images, first = state.request.images, state.num_computed_tokens
        if state.next_image < len(images) and images[-1].end > first:
            while state.next_image < len(images) and self._enter_image(state):
                pass
        for index in range(state.first_image, len(images)):
            if images[index].start >= end:
                break
            if index >= state.next_image or not self._can_read(state.image_keys[index]):
                return max(images[index].start, first)
        return end

    def _can_read(self, key: bytes) -> bool:
        """Whether the step can read an image: it is encoded, or all that is left of its pass runs before the chunks."""
        return self._queues.encoder_cache.is_ready(key) or self._encoding[key].pass_number not in self._blocked

    def _enter_image(self, state: RequestState) -> bool:
        """Acquire the request's next image, within the cache and what may be encoded at once."""
        cache = self._queues.encoder_cache
        index = state.next_image
        span, key = state.request.images[index], state.image_keys[index]
        is_new = not cache.contains(key)
        if is_new and not self._may_encode(span.num_patches):
            self._patches_left = 0  # no later image overtakes it
            return False
        if self._is_encoder_cache_full or not cache.can_acquire(key, span.num_tokens):
            self._is_encoder_cache_full = True
            return False
        cache.acquire(key, span.num_tokens)
        state.next_image += 1
        if is_new:
            self._patches_left -= span.num_patches
            self._encoding[key] = _Encoding(span.key, span.num_patches, self._number)
            self.images.append(ImageToEncode(state.request.id, index, key, cache.slots(key)))
            if self.is_beside and not self._waits_beside:
                self._blocked.add(self._number)
        return True

    @property
    def is_beside(self) -> bool:
        """Whether the pass that begins runs beside the steps."""
        return sum([self._encoding[image.key].num_patches for image in self.images]) > self._limits.patches_in_turn

    def _may_encode(self, num_patches: int) -> bool:
        """Whether an image fits into the pass that begins; a larger one is encoded alone."""
        if num_patches <= self._patches_left:
            return True
        return self._takes_larger_image and self._patches_left > 0 and not self.images

    def _undo_images(self, num_images: int) -> None:
        """Do not encode images beyond the first `num_images`: the request that acquired them was preempted at once."""
        for planned in self.images[num_images:]:
            self._queues.encoder_cache.evict(planned.key)
            del self._encoding[planned.key]
        del self.images[num_images:]

    # ---- output

    def _add_prompt_chunk(self, state: RequestState, end: int) -> None:
        self._prompt_tokens_left -= end - state.num_computed_tokens
        self._chunks_left -= 1
        self._add_chunk(state, end)

    def _add_chunk(self, state: RequestState, end: int, drafts: tuple[int, ...] = ()) -> None:
        start, num_tokens = state.num_computed_tokens, end - state.num_computed_tokens + len(drafts)
        assert state.slot is not None, f"request {state.request.id} is scheduled without a slot"
        samples = end == len(state.token_ids) + state.num_pending
        self.chunks.append(
            Chunk(
                request_id=state.request.id,
                slot=state.slot,
                start=start,
                num_tokens=num_tokens,
                new_pages=tuple(state.pages[state.num_pages_sent :]),
                images=self._features(state, end) if state.first_image < state.next_image else (),
                reads_last_token=start >= state.num_start_tokens,
                drafts=drafts,
                samples=samples,
            )
        )
        self.states.append(state)
        self.num_preemptions.append(state.num_preemptions)
        state.num_pages_sent = len(state.pages)
        self._tokens_left -= num_tokens
        if drafts:
            self._chunks_left -= 1
        state.num_computed_tokens = start + num_tokens
        if samples:
            state.num_pending += 1 + len(drafts)
            state.has_drafts_in_flight = bool(drafts)
        while state.first_image < state.next_image and state.request.images[state.first_image].end <= end:
            self._images_to_release.append(state.image_keys[state.first_image])
            state.first_image += 1
        state.num_ready_tokens = 0 if state.has_images_left else len(state.pages) * self._queues.pages.page_size

    def _features(self, state: RequestState, end: int) -> tuple[ImageFeatures, ...]:
        """The images with a token in the chunk that ends at `end`."""
        keys, images, cache = state.image_keys, state.request.images, self._queues.encoder_cache
        in_chunk = [i for i in range(state.first_image, state.next_image) if images[i].start < end]
        return tuple([ImageFeatures(index, cache.slots(keys[index])) for index in in_chunk])

    def _free_after_plan(self) -> None:
        """Free what this step reads for the last time; the next step may write it."""
        self._queues.pages.free(self._pages_to_free)
        for key in self._images_to_release:
            self._queues.encoder_cache.release(key)

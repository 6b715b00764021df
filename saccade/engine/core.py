"""The loop: plan a step, launch it, take in the one before. It knows tokens and pictures, never text.

While the device computes a step, the host plans and launches the next; the tokens of the first are read after that. A step that
guesses tokens (drafts) is read at once, since the next guess needs to know them.

When encoding or running fails, the failure is narrowed to the request that caused it: the images, then the chunks, of the step are
tried again in halves until one is left. That one ends as failed, what it held is given back, and the others go on with the tokens
they would have had. An image that could not be encoded is refused from then on.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from saccade.engine.config import EngineConfig
from saccade.engine.drafts import PromptLookup
from saccade.engine.image_pool import ImagePool
from saccade.engine.pace import Pace
from saccade.engine.pages import PagePool
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Failure, Request, Stage, TokenLogprobs
from saccade.engine.runner import Launched, Runner, StepTokens
from saccade.engine.scheduler import Chunk, ImageToEncode, Limits, Scheduler, StepPlan
from saccade.errors import RequestError

logger = logging.getLogger(__name__)

_MAX_QUARANTINED = 4096


class EngineError(Exception):
    """The device cannot go on: every request has failed, and the process must be started again."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What became of a request in a step. The last one says how it ended."""

    request: Request
    """Whose it is; its `finish_reason` says whether it has ended."""
    token_ids: Sequence[int] = ()
    """New tokens of the answer."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of these, if asked for."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Of prompt tokens computed in the step, if asked for."""

    @property
    def is_last(self) -> bool:
        """Whether the request has ended."""
        return self.request.finish_reason is not None


Listener = Callable[[Update], None]


@dataclass
class Statistics:
    """Counters since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Computed, not counting those a cache had."""
    num_cached_tokens: int = 0
    num_answer_tokens: int = 0
    num_images_encoded: int = 0
    num_preemptions: int = 0
    num_drafted: int = 0
    num_drafts_accepted: int = 0
    num_failures: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""


@dataclass(frozen=True, eq=False)
class _UnderWay:
    plan: StepPlan
    parts: list[Launched]
    began_at: float


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
            ImagePool(config.image_pool_tokens, keeps_unused=config.image_cache),
            self._draft if self._lookup else None,
            self._quarantine,
        )
        self._pace = Pace(config.target_step_ms, config.max_step_tokens)
        self._listeners: dict[str, Listener] = {}
        self._num_told: dict[str, int] = {}  # prompt tokens whose log-probabilities were told, by request
        self._under_way: _UnderWay | None = None
        self._is_checked = True
        self._last_read = 0.0
        self.statistics = Statistics()

    @property
    def has_work(self) -> bool:
        """Whether a request is open or a step is under way."""
        return self.scheduler.has_work or self._under_way is not None

    # -------------------------------------------------------------- requests come and go

    def add(self, request: Request, prompt: TokenPrompt, seed: int, listener: Listener) -> None:
        """Take a request; `listener` is told what becomes of it, from `step`. RequestError: it can never run."""
        self._runner.admit(request, prompt, seed)
        try:
            self.scheduler.add(request)
        except BaseException:
            self._runner.forget(request)
            raise
        self._listeners[request.id] = listener
        self._is_checked = False

    def cancel(self, request_id: str) -> None:
        """End a request because nobody waits for it any more."""
        self._end_from_outside(request_id, self.scheduler.cancel)

    def finish(self, request_id: str) -> None:
        """End a request because its answer is complete, for a reason only its text shows."""
        self._end_from_outside(request_id, self.scheduler.finish)

    def _end_from_outside(self, request_id: str, end: Callable[[str], bool]) -> None:
        request = self.scheduler.find(request_id)
        if request is not None and end(request_id):
            self._tell_end(request)

    # -------------------------------------------------------------- a step

    def step(self) -> None:
        """Plan and launch the next step, then take in the one before."""
        plan = self.scheduler.plan(self._pace.budget())
        before, self._under_way = self._under_way, None
        if plan is not None:
            self._under_way = self._launch(plan)
        if before is not None:
            self._take_in(before)
        if self._lookup is not None and self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            self._take_in(under_way)

    @property
    def wants_check(self) -> bool:
        """Whether there is nothing to do, and the books have not been checked since there was."""
        return not self.has_work and not self._is_checked

    def check(self) -> None:
        """Raise AssertionError if anything was lost or is owned twice."""
        if self.scheduler.has_work:
            self.scheduler.check()
        else:
            assert self.scheduler.is_idle_clean(), "nobody is here, but pages are owned"
        assert self.scheduler.has_work or self._runner.num_admitted == 0, "nobody is here, but prompts are kept"
        self._is_checked = True

    def _draft(self, request: Request, num_tokens: int) -> Sequence[int]:
        assert self._lookup is not None, "drafts were switched on"
        return self._lookup.propose(request, num_tokens)

    # -------------------------------------------------------------- launching, and narrowing down what fails

    def _launch(self, plan: StepPlan) -> _UnderWay:
        began_at = self._clock()
        self._copy(plan, plan.copies)
        for request in self._encode(plan, plan.images):
            self._tell_end(request)
        parts = self._run([chunk for chunk in plan.chunks if chunk.request.finish_reason is None], plan.began)
        self._count(plan)
        return _UnderWay(plan, parts, began_at)

    def _copy(self, plan: StepPlan, copies: Sequence[tuple[int, int]]) -> None:
        try:
            self._runner.copy_pages(copies)
        except Exception as error:
            self._check_alive(error)
            if len(copies) > 1:
                for pair in copies:
                    self._copy(plan, [pair])
                return
            [(_, target)] = copies
            for chunk in plan.chunks:
                if target in chunk.pages:
                    self._fail("running", chunk.request, error)

    def _encode(self, plan: StepPlan, images: Sequence[ImageToEncode]) -> list[Request]:
        """The requests that failed. They are told, and forgotten, when all images were tried: others may share theirs."""
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
                self._quarantine_image(images[0].image.key)
            failure = self._failure("encoding", images[0].request, error)
            return self.scheduler.fail_image(plan, images[0].key, failure)
        return []

    def _run(self, chunks: Sequence[Chunk], began: Sequence[Request]) -> list[Launched]:
        if not chunks:
            return []
        try:
            return [self._runner.run(chunks, began)]
        except Exception as error:
            self._check_alive(error)
            if len(chunks) > 1:
                halves = (chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :])
                return [part for half in halves for part in self._run(half, began)]
            self._fail("running", chunks[0].request, error)
            return []

    def _fail(self, stage: Stage, request: Request, error: Exception) -> None:
        if self.scheduler.fail(request, self._failure(stage, request, error)):
            self._tell_end(request)

    def _failure(self, stage: Stage, request: Request, error: Exception) -> Failure:
        """What the one who asked is told. The error itself goes to the log: its text may hold what is not theirs to see."""
        self.statistics.num_failures += 1
        logger.warning("request %s failed while %s: %r", request.id, stage, error, exc_info=error)
        if isinstance(error, RequestError):
            return Failure(stage, str(error))
        return Failure(stage, f"the request failed while {stage}. It was ended; others go on")

    def _quarantine_image(self, key: bytes) -> None:
        self._quarantine[key] = None
        while len(self._quarantine) > _MAX_QUARANTINED:
            self._quarantine.popitem(last=False)

    def _check_alive(self, error: Exception) -> None:
        """Narrowing down makes sense only while the device still answers."""
        if not self._runner.is_alive():
            self.fail_all(Failure("running", "the device failed; the engine has to be started again"))
            raise EngineError(f"the device failed: {error}") from error

    def fail_all(self, failure: Failure) -> None:
        """End every open request as failed."""
        self._under_way = None
        for request in self.scheduler.requests():
            if self.scheduler.fail(request, failure):
                self._tell_end(request)

    # -------------------------------------------------------------- taking in

    def _take_in(self, under_way: _UnderWay) -> None:
        plan = under_way.plan
        steps = [self._read(part) for part in under_way.parts]
        sampled: dict[str, Sequence[int]] = {}
        for step in steps:
            sampled.update(step.token_ids)
        open_before = [chunk for chunk in plan.chunks if chunk.request.finish_reason is None]
        known_before = [len(chunk.request.token_ids) for chunk in open_before]
        self.scheduler.update(plan, sampled)
        for chunk, num_known in zip(open_before, known_before, strict=True):
            self._tell(chunk, num_known, steps)
        self._watch_pace(plan, under_way.began_at)

    def _watch_pace(self, plan: StepPlan, began_at: float) -> None:
        """A step counts from when the one before was read: until then the device was busy with that one."""
        now, before = self._clock(), self._last_read
        self._last_read = now
        if not plan.images:  # how long images take says nothing about tokens
            num_answers = sum([chunk.num_tokens for chunk in plan.chunks if _is_answering(chunk)])
            num_prompt = sum([chunk.num_tokens for chunk in plan.chunks]) - num_answers
            self._pace.observe((now - max(began_at, before)) * 1e3, num_prompt, num_answers)

    def _read(self, part: Launched) -> StepTokens:
        try:
            return part.read()
        except Exception as error:
            self._check_alive(error)
            raise

    def _tell(self, chunk: Chunk, num_known: int, steps: Sequence[StepTokens]) -> None:
        request = chunk.request
        token_ids = request.token_ids[num_known:]
        self.statistics.num_answer_tokens += len(token_ids)
        if chunk.drafts and self._lookup is not None:
            num_accepted = max(0, len(token_ids) - 1)
            self.statistics.num_drafts_accepted += num_accepted
            self._lookup.observe(request, len(chunk.drafts), num_accepted)
        logprobs = _of(request, [step.logprobs for step in steps])[: len(token_ids)]
        prompt_logprobs = self._untold(chunk, _of(request, [step.prompt_logprobs for step in steps]))
        if token_ids or prompt_logprobs or request.finish_reason is not None:
            update = Update(request=request, token_ids=token_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
            self._listeners[request.id](update)
        if request.finish_reason is not None:
            self._forget(request)

    def _untold(self, chunk: Chunk, prompt_logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        """Those of tokens not told yet: a preempted request computes its prompt again."""
        first = chunk.start + 1
        told = self._num_told.get(chunk.request.id, 1)
        if not prompt_logprobs or first + len(prompt_logprobs) <= told:
            return []
        self._num_told[chunk.request.id] = first + len(prompt_logprobs)
        return prompt_logprobs[told - first :]

    def _tell_end(self, request: Request) -> None:
        self._listeners[request.id](Update(request=request))
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._listeners[request.id]
        self._num_told.pop(request.id, None)
        self._runner.forget(request)
        if self._lookup is not None:
            self._lookup.forget(request)
        ended, reason = self.statistics.ended, str(request.finish_reason)
        ended[reason] = ended.get(reason, 0) + 1

    def _count(self, plan: StepPlan) -> None:
        statistics = self.statistics
        statistics.num_steps += 1
        statistics.num_images_encoded += len(plan.images)
        statistics.num_preemptions += len(plan.preempted)
        statistics.num_cached_tokens += sum(request.num_cached for request in plan.began if not request.num_preemptions)
        for chunk in plan.chunks:
            statistics.num_drafted += len(chunk.drafts)
            if not _is_answering(chunk):
                statistics.num_prompt_tokens += chunk.num_tokens


def limits_of(config: EngineConfig, max_length: int) -> Limits:
    """What the scheduler must keep to."""
    return Limits(
        max_requests=config.max_requests,
        max_step_tokens=config.max_step_tokens,
        max_step_patches=config.max_step_patches,
        max_length=max_length,
        max_draft_tokens=config.max_draft_tokens,
    )


def _is_answering(chunk: Chunk) -> bool:
    """Whether the chunk goes on with an answer, rather than reading a prompt."""
    return chunk.start >= chunk.request.num_prompt_tokens


def _of(request: Request, found: Sequence[dict[str, list[TokenLogprobs]]]) -> list[TokenLogprobs]:
    return [entry for part in found for entry in part.get(request.id, ())]

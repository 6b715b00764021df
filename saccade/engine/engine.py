"""The door: conversations in, answers out.

    engine = Engine.load("checkpoint")
    [answer] = engine.generate([conversation], SamplingParams(max_tokens=64))
    async for part in engine.stream(conversation): ...

A thread of its own runs the loop (`core.py`); whoever asks puts commands into its inbox and is called back. Conversations are made
into tokens and patches in worker processes (`preprocessing.py`) before the loop sees them, and its tokens into text behind it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import queue
import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from saccade.engine.answers import Answer
from saccade.engine.config import EngineConfig
from saccade.engine.core import EngineCore, Statistics, Update
from saccade.engine.loading import load_runner
from saccade.engine.preprocessing import Preprocessor
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Completion, Failure, Request, SamplingParams, TokenLogprobs
from saccade.engine.runner import PixelScale, Runner
from saccade.engine.sampler import check_sampling
from saccade.errors import RequestError
from saccade.processor import Processor
from saccade.processor.image import MediaLimits

logger = logging.getLogger(__name__)

_MAX_PRIORITY = 1000
_IDLE_S = 1.0
"""Without work for so long, the engine checks its books: pages, images, rows."""


@dataclass(frozen=True, kw_only=True)
class AnswerPart:
    """What is new of an answer. The last part has the whole of it as `completion`."""

    text: str
    """New text that is certain: no half character, no beginning of a stop string."""
    token_ids: Sequence[int]
    """New tokens; their text may come with a later part."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of these tokens, if asked for."""
    completion: Completion | None = None
    """The whole answer, in the last part."""


OnPart = Callable[[AnswerPart], None]
"""Called from the engine's thread; it must return at once."""


class Engine:
    """A model that answers many at once. Safe to use from several threads. Close it: its thread and processes live until then."""

    def __init__(self, runner: Runner, processor: Processor, preprocessor: Preprocessor) -> None:
        self._runner, self._processor, self._preprocessor = runner, processor, preprocessor
        self._core = EngineCore(runner)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._thread = threading.Thread(target=self._serve, name="saccade-engine", daemon=True)
        self._thread.start()

    @staticmethod
    def load(
        folder: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = None,
        config: EngineConfig | None = None,
        limits: MediaLimits | None = None,
    ) -> Engine:
        """The engine of a checkpoint folder. `limits` bound what images may be."""
        folder, config = Path(folder), config or EngineConfig()
        processor = Processor.load(folder, limits=limits)
        preprocessor = Preprocessor(
            folder,
            num_workers=_num_workers(config),
            processed_image_cache_bytes=config.processed_image_cache_bytes,
            limits=limits,
        )
        try:
            pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
            runner = load_runner(folder, config, pixels=pixels, device=device, dtype=dtype)
            return Engine(runner, processor, preprocessor)
        except BaseException:
            preprocessor.close()
            raise

    @property
    def statistics(self) -> Statistics:
        """Counters since the start."""
        return self._core.statistics

    @property
    def max_length(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return self._runner.max_length

    # -------------------------------------------------------------- asking

    def generate(
        self,
        conversations: Sequence[Sequence[dict[str, Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """The answers, in order. One that cannot be given has the finish reason `failed` and says why."""
        return self._answer([partial(self._preprocessor.submit, messages) for messages in conversations], sampling)

    def generate_tokens(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[Any]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """The same for token ids with their images; each image's placeholder stands once in the ids."""
        return self._answer([partial(self._preprocessor.submit_tokens, *prompt) for prompt in prompts], sampling)

    def _answer(
        self,
        prompts: Sequence[Callable[[], Future[TokenPrompt]]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Completion]:
        """Submit all, wait for all; whatever interrupts that cancels them."""
        samplings = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        if len(samplings) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(samplings)} sampling parameters: give one, or one for each"
            )
        for one in samplings:
            self._check_request(one, 0, b"")
        answers: list[Future[Completion]] = [Future() for _ in prompts]
        ids: list[str] = []
        try:
            for prompt, one, answer in zip(prompts, samplings, answers, strict=True):
                ids.append(self.submit(prompt(), one, partial(_complete, answer), streams=False))
            return [answer.result() for answer in answers]
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
            raise

    async def stream(
        self,
        messages: Sequence[dict[str, Any]],
        sampling: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
    ) -> AsyncIterator[AnswerPart]:
        """The answer as it is made. Leaving the loop early cancels the request."""
        loop = asyncio.get_running_loop()
        parts: asyncio.Queue[AnswerPart] = asyncio.Queue()
        sampling = sampling or SamplingParams()
        self._check_request(sampling, priority, salt)
        prompt = self._preprocessor.submit(messages)

        def post(part: AnswerPart) -> None:
            """Raises when the asyncio loop has ended, which cancels the request."""
            loop.call_soon_threadsafe(parts.put_nowait, part)

        request_id = self.submit(prompt, sampling, post, priority=priority, salt=salt)
        try:
            while True:
                part = await parts.get()
                yield part
                if part.completion is not None:
                    return
        finally:
            self.cancel(request_id)

    def submit(
        self,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        on_part: OnPart,
        *,
        priority: int = 0,
        salt: bytes = b"",
        streams: bool = True,
    ) -> str:
        """Answer a prompt as soon as it is prepared; its id. `on_part` gets every part if it `streams`, else the last alone.

        An `on_part` that raises is told no more, and its request is cancelled.
        """
        self._check_request(sampling, priority, salt)
        request_id = f"request-{next(self._numbers)}"
        opened = _Open(self, request_id, prompt, sampling, on_part, streams)
        with self._lock:
            self._refuse_if_stopped()
            self._open[request_id] = opened
        prompt.add_done_callback(lambda done: self._inbox.put(partial(self._begin, opened, done, priority, salt)))
        return request_id

    def _check_request(self, sampling: SamplingParams, priority: int, salt: bytes) -> None:
        """Refuse at the door what the loop could not bear."""
        self._refuse_if_stopped()
        if not isinstance(priority, int) or abs(priority) > _MAX_PRIORITY:
            raise RequestError(f"priority is {priority!r}; use a whole number from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
        if not isinstance(salt, bytes):
            raise RequestError(f"salt is {type(salt).__name__}; use bytes")
        check_sampling(sampling, self._runner.model.config.language.vocab_size)

    def _refuse_if_stopped(self) -> None:
        if self._failure is not None:
            raise RequestError(self._failure.message)

    def cancel(self, request_id: str) -> None:
        """End a request, wherever it is; its last part says `cancelled`. One that has ended stays as it is."""
        opened = self._open.get(request_id)
        if opened is not None:
            opened.is_cancelled = True
            opened.prompt.cancel()  # if it is still being prepared, it ends by this
            self._inbox.put(partial(self._core.cancel, request_id))

    # -------------------------------------------------------------- the engine's own thread

    def _serve(self) -> None:
        try:
            while True:
                if not self._take_commands(waits=not self._core.has_work):
                    return
                if self._core.has_work:
                    self._core.step()
        except BaseException:
            logger.exception("the engine has stopped")
            self._fail_all(Failure("running", "the engine has stopped. Start it again"))

    def _take_commands(self, *, waits: bool) -> bool:
        """Do what is in the inbox. False: the engine is to close."""
        while True:
            try:
                command = self._inbox.get(waits, _IDLE_S if self._core.wants_check else None)
            except queue.Empty:
                if waits:
                    self._core.check()
                    continue
                return True
            if command is None:
                return False
            command()
            waits = False

    def _begin(self, opened: _Open, prepared: Future[TokenPrompt], priority: int, salt: bytes) -> None:
        """Hand a prepared prompt to the loop."""
        if opened.is_cancelled:
            opened.end_early("cancelled", None)
            return
        try:
            prompt = prepared.result()
            self._check_ids(prompt.token_ids)
            request = opened.request_of(prompt, self._processor.eos_ids, priority, salt)
            self._core.add(request, prompt, opened.seed, opened.listen)
        except RequestError as error:
            opened.end_early("failed", Failure("preparing", str(error)))
        except CancelledError:
            opened.end_early("cancelled", None)
        except Exception as error:
            logger.warning("request %s failed while preparing: %r", opened.id, error, exc_info=error)
            opened.end_early("failed", Failure("preparing", "the request could not be prepared"))

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """An id without an embedding would take the device down, and all requests with it."""
        vocab_size = self._runner.model.config.language.vocab_size
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"token {token_id} is not among the {vocab_size} the model knows. Use its own tokenizer"
                )

    def _finish(self, request_id: str) -> None:
        """End a request whose text is complete. Not now: its listener is being called from inside a step."""
        self._inbox.put(partial(self._core.finish, request_id))

    def _closed(self, request_id: str) -> None:
        with self._lock:
            self._open.pop(request_id, None)

    def _fail_all(self, failure: Failure) -> None:
        with self._lock:
            self._failure = failure
            waiting = list(self._open.values())
        for opened in waiting:
            opened.end_early("failed", failure)

    # -------------------------------------------------------------- closing

    def close(self) -> None:
        """End everything; open requests fail."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine cannot be closed from inside one of its answers")
        self._inbox.put(None)
        self._thread.join()
        self._preprocessor.close()
        self._fail_all(Failure("running", "the engine was closed"))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Open:
    """A request from `submit` to its last part. All but `is_cancelled` is the engine thread's."""

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        on_part: OnPart,
        streams: bool,
    ) -> None:
        self.id, self.prompt, self.sampling = request_id, prompt, sampling
        self.seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        self.is_cancelled = False
        self._engine, self._on_part, self._streams = engine, on_part, streams
        self._answer = Answer(engine._processor.decode, sampling)
        self._unread: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._has_ended = False

    def request_of(self, prompt: TokenPrompt, eos_ids: frozenset[int], priority: int, salt: bytes) -> Request:
        sampling = self.sampling
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        return Request(
            id=self.id,
            token_ids=list(prompt.token_ids),
            num_prompt_tokens=len(prompt.token_ids),
            images=tuple(image.span for image in prompt.images),
            sampling=sampling,
            stop_ids=ends,
            priority=priority,
            salt=salt,
        )

    def listen(self, update: Update) -> None:
        """Called by the core for every step that gave something. What goes wrong with one answer must not reach the loop."""
        if self._has_ended:
            return
        try:
            self._listen(update)
        except Exception as error:
            logger.warning("request %s: its answer could not be given: %r", self.id, error, exc_info=error)
            self._has_ended = True
            self._engine._closed(self.id)
            if not update.is_last:
                self._engine._inbox.put(partial(self._engine._core.cancel, self.id))

    def _listen(self, update: Update) -> None:
        self._logprobs += update.logprobs
        self._prompt_logprobs += update.prompt_logprobs
        text, is_stopped = self._read(update)
        if is_stopped and not update.is_last:
            self._engine._finish(self.id)
        if update.is_last or is_stopped:
            self._end(update.request, update.token_ids, text, update.logprobs)
        elif self._streams:
            self._on_part(AnswerPart(text=text, token_ids=update.token_ids, logprobs=update.logprobs))

    def _read(self, update: Update) -> tuple[str, bool]:
        """New text, and whether a stop string is complete. Text nobody waits for is made at the end, all at once."""
        if not (self._streams or self.sampling.stop):
            self._unread += update.token_ids
            return "", False
        text, is_stopped = self._answer.push(update.token_ids)
        return text, is_stopped

    def _end(self, request: Request, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs]) -> None:
        if self._unread:
            text += self._answer.push(self._unread).text
        text += self._answer.finish()
        completion = self._answer.completion(
            request,
            logprobs=self._logprobs if self.sampling.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs if self.sampling.prompt_logprobs is not None else None,
        )
        self._give_last(AnswerPart(text=text, token_ids=token_ids, logprobs=logprobs, completion=completion))

    def end_early(self, reason: Any, failure: Failure | None) -> None:
        """End without having come to the loop, or after it has stopped."""
        if self._has_ended:
            return
        self._answer.push(self._unread)
        self._answer.finish()
        completion = Completion(
            text=self._answer.text,
            token_ids=list(self._answer.token_ids),
            finish_reason=reason,
            num_prompt_tokens=0,
            failure=failure,
        )
        self._give_last(AnswerPart(text="", token_ids=(), completion=completion))

    def _give_last(self, part: AnswerPart) -> None:
        self._has_ended = True
        self._engine._closed(self.id)
        try:
            self._on_part(part)
        except Exception as error:
            logger.warning("request %s: its last part could not be given: %r", self.id, error)


def _complete(answer: Future[Completion], part: AnswerPart) -> None:
    if part.completion is not None:
        answer.set_result(part.completion)


def _num_workers(config: EngineConfig) -> int:
    """Two cores stay for the loop and whoever feeds it."""
    if config.num_workers is not None:
        return config.num_workers
    return max(0, min(12, len(os.sched_getaffinity(0)) - 2))

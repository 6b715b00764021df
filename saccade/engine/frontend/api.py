"""Public API of the engine: conversations in, completions out.

    engine = Engine.load("checkpoint")
    [completion] = engine.generate(conversation, SamplingParams(max_tokens=64))
    async for delta in engine.stream(conversation): ...

The front end and the core exchange messages. Conversations are preprocessed into tokens and patches in worker processes
(`preprocessing.py`); the core (`core.py`), in a thread or a process of its own, makes tokens of them; a thread of the front end
detokenizes these, looks for stop strings and calls back.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import queue
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.core.deadlines import Deadlines
from saccade.engine.core.grammar import GrammarCompiler, Grammars
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import (
    AddAdapter,
    AddRequest,
    CoreInfo,
    EndRequest,
    FlushCaches,
    Message,
    RemoveAdapter,
    StartProfile,
    StopProfile,
)
from saccade.engine.core.statistics import Statistics
from saccade.engine.device.loading import load_runner
from saccade.engine.device.runner import PixelScale
from saccade.engine.device.sampler import check_sampling
from saccade.engine.frontend.beam_search import BeamSearch, BeamSearchParams
from saccade.engine.frontend.detokenizer import Detokenizer
from saccade.engine.frontend.preprocessing import PreprocessingStatistics, Preprocessor
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import (
    Completion,
    Failure,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Timings,
    TokenLogprobs,
    merge_outputs,
)
from saccade.engine.transport.thread import CoreThread, OnOutputs, OnStop
from saccade.errors import ConfigError, RequestError, UserError
from saccade.model.adapters import adapter_rank
from saccade.model.families import family_of, load_model_config
from saccade.processor import Processor
from saccade.processor.image import MediaLimits
from saccade.processor.tools import Tool

logger = logging.getLogger(__name__)

_MAX_PRIORITY = 1000
_NOTHING = object()
"""No item of the inbox."""
_LIVE_BEAMS = 2
"""Beams that are searched at once, per running request: one computes while the host extends the other."""
_UNSTREAMED_INTERVAL = 32
"""Tokens per output of a request that does not stream and has no stop strings: an output costs the host as much as scheduling the token."""
_PROFILE_S = 60.0
"""Time to write a profile."""
Conversation = Sequence[dict[str, Any]]
Sampling = SamplingParams | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompletionDelta:
    """New output of a request. The last delta has the whole `completion`."""

    text: str
    """New text that is final: no partial character, no beginning of a stop string."""
    token_ids: Sequence[int]
    """New tokens; their text may come with a later delta."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Of these tokens, if requested."""
    completion: Completion | None = None
    """The whole output, in the last delta."""


OnDelta = Callable[[CompletionDelta], None]
"""Called from the front end's thread; it must return at once."""


@dataclass(frozen=True)
class RequestOptions:
    """How a request is scheduled."""

    priority: int = 0
    """Lower is scheduled earlier; waiting makes up for it."""
    salt: bytes = b""
    """Caches are shared only with requests of equal salt."""
    queue_timeout_s: float | None = None
    """Fail the request (`timeout`) if it has not started so long after it was submitted, preprocessing included."""
    timeout_s: float | None = None
    """Fail the request (`timeout`) if it has not ended so long after it was submitted."""
    adapter: str | None = None
    """Serve it with this LoRA adapter."""

    def __post_init__(self) -> None:
        if not isinstance(self.adapter, str | None):
            raise RequestError(f"adapter is {self.adapter!r}; use the name of one")
        priority, salt = getattr(self, "priority"), getattr(self, "salt")  # noqa: B009  of any type, whatever is annotated
        if not isinstance(priority, Integral) or abs(int(priority)) > _MAX_PRIORITY:
            raise RequestError(f"priority is {priority!r}; use a whole number from {-_MAX_PRIORITY} to {_MAX_PRIORITY}")
        object.__setattr__(self, "priority", int(priority))
        if not isinstance(salt, bytes):
            raise RequestError(f"salt is {type(salt).__name__}; use bytes")
        for name in ("queue_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise RequestError(f"{name} is {value!r}; use a positive number of seconds")


class CoreClient(Protocol):
    """A running core, in a thread or a process."""

    info: CoreInfo

    @property
    def statistics(self) -> Statistics:
        """Counters since the start."""

    def send(self, message: Message) -> None:
        """Send a message to the core."""

    def close(self) -> None:
        """Stop the core and free its memory. Open requests get no more output."""


Connect = Callable[[OnOutputs, OnStop], CoreClient]


class Engine:
    """Serves many requests at once. Thread-safe. Close it to end its threads and processes and to free its memory."""

    def __init__(self, connect: Connect, processor: Processor, preprocessor: Preprocessor) -> None:
        """`connect` starts the core: see `load`."""
        self.processor = processor
        """The checkpoint's tokenizer, chat template and image processor."""
        self._preprocessor = preprocessor
        self._numbers = itertools.count()
        self._open: dict[str, _OpenRequest | _OpenAnswer] = {}
        self._wanted_adapters: dict[str, Path] = {}  # given to `load` or added, and not removed: every core loads them
        self._adapters: dict[str, Path] = {}  # of these, the ones that the core has loaded
        self.refused_adapters: dict[str, str] = {}
        """Adapters that the core refused when it started, and why. The next core tries again."""
        self._lock = threading.Lock()
        self._failure: Failure | None = None
        self._is_closed = False
        self._pid = os.getpid()
        self._inbox: queue.SimpleQueue[Callable[[], None] | Sequence[RequestOutput] | None] = queue.SimpleQueue()
        """Commands, outputs of the core, and None at the end."""
        self._deadlines = Deadlines()
        """Deadlines of requests in preprocessing, used by the front end's thread; the core has those of the others."""
        self._has_stopped = threading.Event()
        self._connect = partial(
            connect,
            self._inbox.put,
            lambda failure: self._inbox.put(partial(self._fail_all, failure)),
        )
        self._core = self._connect()
        self._thread = threading.Thread(target=self._serve, name="saccade-front", daemon=True)
        self._thread.start()

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self._core.info.max_length

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows."""
        return self._core.info.vocab_size

    @property
    def statistics(self) -> Statistics:
        """Counters since the start of the core."""
        return self._core.statistics

    @property
    def preprocessing_statistics(self) -> PreprocessingStatistics:
        """Counters since the start of the preprocessing workers."""
        return self._preprocessor.statistics

    @staticmethod
    def load(
        folder: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = "auto",
        config: EngineConfig | None = None,
        limits: MediaLimits | None = None,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> Engine:
        """Load a checkpoint folder. `dtype` auto or None: as stored. `limits` bound the images of a request.

        `adapters`: PEFT folders by the name that requests use. A broken one is refused alone, see `refused_adapters`; slots for more are in
        `config`.
        """
        folder, config = Path(folder), with_slots(config or EngineConfig(), adapters or {})
        dtype = None if dtype == "auto" else dtype
        family_of(folder)  # the true reason first, for a model of another kind
        processor = Processor.load(folder, limits=limits, chat_template=config.chat_template)
        preprocessor = Preprocessor(
            folder,
            num_workers=default_num_workers() if config.num_workers is None else config.num_workers,
            processed_image_cache_bytes=config.processed_image_cache_bytes,
            timeout_s=config.preprocess_timeout_s,
            max_images=config.max_images_per_request,
            limits=limits,
            chat_template=config.chat_template,
            patchifies_on_device=resolve_device(device).type == "cuda",
        )
        connect: Connect
        with contextlib.ExitStack() as opened:
            opened.callback(preprocessor.close)
            if config.core_process:
                from saccade.engine.transport.process import CoreProcess

                name = None if dtype is None else str(dtype).removeprefix("torch.")
                connect = partial(CoreProcess, folder, config, str(device), name)
            else:
                grammars = grammars_of(folder, processor)
                opened.callback(grammars.close)
                pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
                runner = load_runner(folder, config, pixels=pixels, device=device, dtype=dtype)
                connect = partial(CoreThread, EngineCore(runner, grammars=grammars))
            engine = Engine(connect, processor, preprocessor)
            opened.pop_all()  # the engine closes them
            opened.callback(engine.close)
            engine._wanted_adapters = {name: Path(path).absolute() for name, path in (adapters or {}).items()}
            engine._load_adapters()
            preprocessor.wait_until_ready()  # its workers started while the weights were loaded
            opened.pop_all()
        gc.freeze()  # until it is closed: a full collection over all that torch has imported would hold up outputs for 0.1 s
        atexit.register(gc.unfreeze)  # else Triton's bindings report leaks
        return engine

    # -------------------------------------------------------------- submit requests

    def generate(
        self,
        conversations: Sequence[Conversation] | Conversation,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        adapter: str | None = None,
        queue_timeout_s: float | None = None,
        timeout_s: float | None = None,
        progress: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[Completion]:
        """Generate completions of one or several conversations, in order; with `n` above 1, n consecutive ones for each.

        `sampling`: parameters (or a dict of them) for all conversations, or one for each. A request that cannot be served has the
        finish reason `failed` and says why in `failure`; the others are not affected. `adapter` names the LoRA adapter of all of them.
        `progress` shows a progress bar.
        `queue_timeout_s` and `timeout_s` limit how long a request may wait and take, from now on.
        `continue_final_message` continues a final assistant message instead of starting a new one. `tools` are functions that the model
        may call, in OpenAI's format; its calls are part of the text.
        """
        submits = [
            partial(self.preprocess, messages, continue_final_message=continue_final_message, tools=tools, salt=salt)
            for messages in _batch_of(conversations)
        ]
        options = RequestOptions(priority, salt, queue_timeout_s, timeout_s, adapter)
        return self._generate(submits, sampling, options, progress)

    def generate_tokens(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[Any]]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        adapter: str | None = None,
        queue_timeout_s: float | None = None,
        timeout_s: float | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """The same for (token ids, images); the ids contain one placeholder per image."""
        prompts = list(prompts) if isinstance(prompts, Iterable) else [prompts]
        if not all(isinstance(prompt, tuple | list) and len(prompt) == 2 for prompt in prompts):
            raise RequestError("prompts is a list of pairs (token ids, images), such as [([1, 2, 3], [])]")
        submits = [partial(self.preprocess_tokens, token_ids, images, salt=salt) for token_ids, images in prompts]
        options = RequestOptions(priority, salt, queue_timeout_s, timeout_s, adapter)
        return self._generate(submits, sampling, options, progress)

    def beam_search(
        self,
        conversations: Sequence[Conversation] | Conversation,
        *,
        num_beams: int,
        max_tokens: int = 256,
        length_penalty: float = 1.0,
        num_return_sequences: int = 1,
        priority: int = 0,
        salt: bytes = b"",
        adapter: str | None = None,
        progress: bool = False,
        continue_final_message: bool = False,
    ) -> list[Completion]:
        """The best completions of one or several conversations by beam search, `num_return_sequences` consecutive ones for each.

        Tokens are those of `transformers` with `early_stopping=False` (`beam_search.py`). `logprobs` of a completion has one entry per
        token, without the most likely others. Beams share the prompt through the prefix cache: without it every token computes the prompt
        again. A conversation that cannot be served has one completion, with its failure.
        """
        params = BeamSearchParams(
            num_beams=num_beams,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            num_return_sequences=num_return_sequences,
        )
        options = RequestOptions(priority, salt, None, None, adapter)
        batch = _batch_of(conversations)
        live = threading.Semaphore(max(1, _LIVE_BEAMS * self._core.info.max_requests // num_beams))
        searches: list[BeamSearch] = []
        try:
            with _progress_bar(len(batch), progress) as advance:
                for messages in batch:
                    live.acquire()
                    prompt = self.preprocess(messages, continue_final_message=continue_final_message, salt=salt)
                    searches.append(BeamSearch(self, prompt, params, options))
                    searches[-1].result.add_done_callback(advance)
                    searches[-1].result.add_done_callback(lambda _: live.release())
                return [completion for search in searches for completion in search.result.result()]
        except BaseException:
            for search in searches:
                search.cancel()
            raise

    def preprocess(
        self,
        messages: Conversation,
        *,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
        salt: bytes = b"",
    ) -> Future[TokenPrompt]:
        """Preprocess a conversation, for one or several calls of `submit`. Cancelling the future ends it.

        `tools` are functions that the model may call. Processed images are shared only with requests of equal `salt`.
        """
        return self._preprocessor.submit(
            messages, continue_final_message=continue_final_message, tools=tools, salt=salt
        )

    def encode_text(self, text: str) -> Future[list[int]]:
        """Token ids of a text that is no conversation, with those that the tokenizer puts before a prompt."""
        return self._preprocessor.encode(text)

    def preprocess_tokens(
        self, token_ids: Sequence[int], images: Sequence[Any] = (), *, salt: bytes = b""
    ) -> Future[TokenPrompt]:
        """The same for token ids with one placeholder per image."""
        return self._preprocessor.submit_tokens(token_ids, images, salt=salt)

    def _generate(
        self,
        submits: Sequence[Callable[[], Future[TokenPrompt]]],
        sampling: Sampling | Sequence[Sampling] | None,
        options: RequestOptions,
        progress: bool,
    ) -> list[Completion]:
        """Submit all, wait for all; any interruption cancels them."""
        samplings = [_completions_of(one) for one in _sampling_of_each(sampling, len(submits))]
        self._check_open()
        for one in itertools.chain.from_iterable(samplings):
            self._check_request(one)
        futures: list[Future[Completion]] = []
        ids: list[str] = []
        try:
            with _progress_bar(sum(map(len, samplings)), progress) as advance:
                for submit, each in zip(submits, samplings, strict=True):
                    prompt = submit()
                    for one in each:
                        futures.append(Future())
                        futures[-1].add_done_callback(advance)
                        on_delta = partial(_set_completion, futures[-1])
                        ids.append(self.submit(prompt, one, on_delta, options, streams=False))
                return [future.result() for future in futures]
        except BaseException:
            for request_id in ids:
                self.cancel(request_id)
            raise

    async def stream(
        self,
        messages: Conversation,
        sampling: Sampling | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        adapter: str | None = None,
        queue_timeout_s: float | None = None,
        timeout_s: float | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> AsyncIterator[CompletionDelta]:
        """Stream one completion. Leaving the iteration early cancels the request."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[CompletionDelta] = asyncio.Queue()
        [sampling] = _sampling_of_each(sampling, 1)
        options = RequestOptions(priority, salt, queue_timeout_s, timeout_s, adapter)
        self._check_request(sampling)
        prompt = self.preprocess(messages, continue_final_message=continue_final_message, tools=tools, salt=salt)

        def post(delta: CompletionDelta) -> None:
            """Raises when the asyncio loop has ended, which cancels the request."""
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        request_id = self.submit(prompt, sampling, post, options)
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.completion is not None:
                    return
        finally:
            self.cancel(request_id)

    def submit_tokens(
        self,
        token_ids: Sequence[int],
        images: Sequence[Any],
        sampling: Sampling | None,
        on_delta: OnDelta,
        *,
        priority: int = 0,
        salt: bytes = b"",
        adapter: str | None = None,
        queue_timeout_s: float | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Submit token ids with one placeholder per image; returns the request's id. `on_delta` gets every delta."""
        [one] = _sampling_of_each(sampling, 1)
        options = RequestOptions(priority, salt, queue_timeout_s, timeout_s, adapter)
        self._check_request(one)
        return self.submit(self.preprocess_tokens(token_ids, images, salt=salt), one, on_delta, options)

    def submit(
        self,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        on_delta: OnDelta,
        options: RequestOptions | None = None,
        *,
        streams: bool = True,
    ) -> str:
        """Submit a request that starts when its prompt is preprocessed; returns its id.

        `on_delta` gets every delta if it `streams`, else the last one only. If it raises, the request is cancelled and it is not
        called again.
        """
        self._check_request(sampling)
        options = options or RequestOptions()
        request_id = f"request-{next(self._numbers)}"
        opened = _OpenRequest(self, request_id, prompt, sampling, on_delta, streams)
        with self._lock:
            self._check_open()
            self._open[request_id] = opened
        timeouts = [limit for limit in (options.queue_timeout_s, options.timeout_s) if limit is not None]
        if timeouts and not prompt.done():
            self._inbox.put(partial(self._set_deadline, request_id, opened.submitted_at + min(timeouts)))
        prompt.add_done_callback(lambda done: self._inbox.put(partial(self._start, opened, done, options)))
        return request_id

    def _check_request(self, sampling: SamplingParams) -> None:
        self._check_open()
        if sampling.n > 1:
            raise RequestError(f"n is {sampling.n}: a stream has one completion. Use generate")
        check_sampling(sampling, self._core.info.vocab_size)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise RequestError("the engine was loaded before a fork, which its thread does not survive. Load one here")
        if self._failure is not None:
            raise RequestError(self._failure.message)

    def cancel(self, request_id: str) -> None:
        """Cancel a request in any state; its last delta has the finish reason `cancelled`. No effect if it has ended."""
        opened = self._open.get(request_id)
        if isinstance(opened, _OpenRequest):
            opened.is_cancelled.set()
            opened.prompt.cancel()  # ends preprocessing
            self._core.send(EndRequest(request_id=request_id, reason="cancelled"))

    # -------------------------------------------------------------- adapters

    @property
    def adapters(self) -> dict[str, Path]:
        """Folders of the adapters that requests can name."""
        with self._lock:
            return dict(self._adapters)

    def add_adapter(self, name: str, folder: str | Path, *, timeout_s: float | None = None) -> None:
        """Load a LoRA adapter from a PEFT folder while requests are served. RequestError: it is refused, and says why."""
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter is {name!r}; use a text")
        folder = Path(folder).absolute()
        self._change_adapters(lambda reply_id: AddAdapter(name=name, folder=str(folder), reply_id=reply_id), timeout_s)
        with self._lock:
            self._adapters[name] = self._wanted_adapters[name] = folder
            self.refused_adapters.pop(name, None)

    def remove_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Take no new requests for an adapter. Requests that run with it continue; then its slot is free."""
        if name not in self.refused_adapters:
            self._change_adapters(lambda reply_id: RemoveAdapter(name=name, reply_id=reply_id), timeout_s)
        with self._lock:
            for adapters in (self._adapters, self._wanted_adapters, self.refused_adapters):
                adapters.pop(name, None)

    def _change_adapters(self, message: Callable[[str], Message], timeout_s: float | None) -> None:
        """Send a message about adapters and wait for its answer."""
        answer: Future[None] = Future()
        reply_id = f"adapter-{next(self._numbers)}"
        with self._lock:
            self._check_open()
            self._open[reply_id] = _OpenAnswer(self, reply_id, answer)
        self._core.send(message(reply_id))
        answer.result(timeout_s)

    def _load_adapters(self) -> None:
        """Load the wanted adapters into a new core. Those that are broken are named in the log, and the others are served."""
        for name, folder in list(self._wanted_adapters.items()):
            try:
                self.add_adapter(name, folder)
            except RequestError as error:
                if self.has_failed:  # the next core loads them
                    return
                self.refused_adapters[name] = str(error)
                logger.error("adapter %s is refused: %s", name, error)

    # -------------------------------------------------------------- administration

    def flush_caches(self) -> None:
        """Forget cached prefixes, encoded and processed images. What running requests use stays until they end."""
        self._preprocessor.flush()
        self._core.send(FlushCaches())

    def profile(self, path: Path, seconds: float) -> bool:
        """Profile the core for this long and write a Chrome trace; whether the file is there. Waits, also for the file."""
        path = path.absolute()
        begun = path.with_name(f".{path.name}.begun")
        self._core.send(StartProfile(begun=str(begun)))
        if self._wait_for(begun):
            self._has_stopped.wait(seconds)
            begun.unlink(missing_ok=True)
        self._core.send(StopProfile(path=str(path)))
        return self._wait_for(path)

    def _wait_for(self, file: Path) -> bool:
        """Wait for a file that the core writes; whether it is there."""
        deadline = time.monotonic() + _PROFILE_S
        while not file.exists() and time.monotonic() < deadline and not self._has_stopped.is_set():
            time.sleep(0.02)
        return file.exists()

    # -------------------------------------------------------------- the front end's thread

    def _serve(self) -> None:
        item = self._next_item()
        while item is not None:
            following: Any = _NOTHING
            try:
                if callable(item):
                    item()
                else:
                    outputs, following = self._drain_outputs(item)
                    self._deliver(outputs)
            except BaseException:
                logger.exception("a command of the front end failed")
            item = self._next_item() if following is _NOTHING else following

    def _next_item(self) -> Callable[[], None] | Sequence[RequestOutput] | None:
        """Wait for a command or outputs. Requests whose deadline passes meanwhile are ended."""
        while (next_at := self._deadlines.next_at) is not None:
            wait_s = next_at - time.perf_counter()
            if wait_s <= 0:
                self._expire()
                continue
            with contextlib.suppress(queue.Empty):
                return self._inbox.get(timeout=wait_s)
        return self._inbox.get()

    def _set_deadline(self, request_id: str, at: float) -> None:
        self._deadlines.add(at, request_id, "preprocessing")
        self._deadlines.prune(len(self._open), self._open.__contains__)

    def _expire(self) -> None:
        """End requests that are still being preprocessed when their deadline passes."""
        for request_id, _ in self._deadlines.pop_due(time.perf_counter()):
            opened = self._open.get(request_id)
            if isinstance(opened, _OpenRequest) and opened.preprocessed_at is None:
                failure = Failure("preprocessing", "the request did not start within its time limit", "timeout")
                opened.end_early("failed", failure)
                opened.prompt.cancel()

    def _drain_outputs(self, first: Sequence[RequestOutput]) -> tuple[Iterable[RequestOutput], Any]:
        """All outputs that are in the inbox, those of one request merged, and the item behind them.

        When this thread is behind the core, it detokenizes and calls back once for several steps, and so catches up.
        """
        if self._inbox.empty():
            return first, _NOTHING
        merged = {output.request_id: output for output in first}
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return merged.values(), _NOTHING
            if item is None or callable(item):
                return merged.values(), item
            for output in item:
                earlier = merged.get(output.request_id)
                merged[output.request_id] = output if earlier is None else merge_outputs(earlier, output)

    def _start(self, opened: _OpenRequest, preprocessed: Future[TokenPrompt], options: RequestOptions) -> None:
        """Send a request to the core when its prompt is preprocessed."""
        opened.preprocessed_at = time.perf_counter()
        if opened.has_ended:  # failed with the core
            return
        if opened.is_cancelled.is_set():
            opened.end_early("cancelled", None)
            return
        try:
            prompt = preprocessed.result()
            self._check_ids(prompt.token_ids)
            if len(prompt.token_ids) >= self.max_length:
                opened.end_early("failed", self._too_long(len(prompt.token_ids)))
                return
            request = opened.request_of(prompt, self.processor.eos_ids, options)
            self._core.send(AddRequest(request=request, prompt=prompt))
        except RequestError as error:
            opened.end_early("failed", Failure("preprocessing", str(error), "invalid_request"))
        except CancelledError:
            opened.end_early("cancelled", None)
        except BaseException as error:
            logger.warning("request %s failed while preprocessing: %r", opened.id, error, exc_info=error)
            opened.end_early("failed", Failure("preprocessing", "the request could not be preprocessed"))
        else:
            if opened.is_cancelled.is_set():  # meanwhile, and before the core knew the request
                self._core.send(EndRequest(request_id=opened.id, reason="cancelled"))

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            opened = self._open.get(output.request_id)
            if opened is not None:
                opened.on_output(output)

    def _too_long(self, num_tokens: int) -> Failure:
        message = (
            f"This model's maximum context length is {self.max_length} tokens, prompt and output together; the prompt has {num_tokens}. "
            "Shorten it, or use smaller or fewer images"
        )
        return Failure("preprocessing", message, "context_length_exceeded")

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """An id without an embedding would crash the device, and all requests with it."""
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < self._core.info.vocab_size:
                raise RequestError(
                    f"token {token_id} is not in the model's vocabulary of {self._core.info.vocab_size}. Use its own tokenizer"
                )

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._open.pop(request_id, None)

    def _fail_all(self, failure: Failure) -> None:
        with self._lock:
            self._failure = failure
            opened = list(self._open.values())
        for request in opened:
            request.end_early("failed", failure)
        self._has_stopped.set()

    # -------------------------------------------------------------- restart, close

    @property
    def has_failed(self) -> bool:
        """Whether the core has died or the engine is closed. True before the first open request is failed for it."""
        return self._failure is not None

    def wait_until_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until the core has died or the engine is closed, and every request has ended; whether it has."""
        return self._has_stopped.wait(timeout_s)

    def restart(self) -> None:
        """Start a new core in place of one that died, with the same adapters; preprocessing workers and their caches stay.

        For a core in a process of its own (`core_process`). Call it from a thread that outlives the engine: the kernel kills the
        core process when the thread that started it exits.
        """
        if not self._has_stopped.is_set() or self._is_closed:
            raise RuntimeError("restart replaces a core that has stopped by itself")
        self._core.close()
        self._core = self._connect()
        with self._lock:
            self._failure = None
            self._has_stopped.clear()
            self._adapters = {}
        self._load_adapters()
        if self.has_failed:
            self._has_stopped.wait()  # until every request has ended
            raise RuntimeError("the engine core died while it loaded the adapters")

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""
        return self._core.info.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._core.info.page_size

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the image workers."""
        return self._preprocessor.worker_pids

    @property
    def core_pid(self) -> int | None:
        """Process id of the core; None if it runs in a thread."""
        return getattr(self._core, "pid", None)

    def close(self) -> None:
        """Stop the engine and free its memory; open requests fail. No effect in a forked child."""
        if self._is_closed or os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            raise RuntimeError("the engine cannot be closed from one of its callbacks")
        self._is_closed = True
        self._core.close()
        self._preprocessor.close()
        self._inbox.put(partial(self._fail_all, Failure("running", "the engine was closed", "engine_stopped")))
        self._inbox.put(None)
        self._thread.join()
        gc.unfreeze()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _OpenAnswer:
    """What the core is asked and has not answered yet."""

    def __init__(self, engine: Engine, reply_id: str, answer: Future[None]) -> None:
        self._engine, self._id, self._answer = engine, reply_id, answer

    def on_output(self, output: RequestOutput) -> None:
        self.end_early("stop", output.failure)

    def end_early(self, reason: FinishReason, failure: Failure | None) -> None:
        self._engine._forget(self._id)
        if failure is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(RequestError(failure.message))


class _OpenRequest:
    """A request from `submit` to its last delta. Only the front end's thread uses it, except for `is_cancelled`."""

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        on_delta: OnDelta,
        streams: bool,
    ) -> None:
        self.id, self.prompt, self.sampling = request_id, prompt, sampling
        self.seed = random.getrandbits(63) if sampling.seed is None else sampling.seed
        self.is_cancelled = threading.Event()
        self._engine, self._on_delta, self._streams = engine, on_delta, streams
        self._detokenizer = Detokenizer(engine.processor.decode, sampling)
        self._undecoded: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._num_prompt_tokens = 0
        self.has_ended = False
        self.submitted_at = time.perf_counter()
        self.preprocessed_at: float | None = None
        self._first_token_at: float | None = None

    def request_of(self, prompt: TokenPrompt, eos_ids: frozenset[int], options: RequestOptions) -> Request:
        sampling = self.sampling
        self._num_prompt_tokens = len(prompt.token_ids)
        stop_ids = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_ids)
        return Request(
            id=self.id,
            token_ids=prompt.token_ids,
            images=tuple(image.span for image in prompt.images),
            sampling=sampling,
            stop_ids=stop_ids,
            seed=self.seed,
            priority=options.priority,
            adapter=options.adapter,
            salt=options.salt,
            queue_timeout_s=self._remaining(options.queue_timeout_s),
            timeout_s=self._remaining(options.timeout_s),
            stream_interval=1 if self._reads_text else _UNSTREAMED_INTERVAL,
        )

    def _remaining(self, timeout_s: float | None) -> float | None:
        """What is left of a time limit that began when the request was submitted."""
        return None if timeout_s is None else max(0.0, timeout_s - (time.perf_counter() - self.submitted_at))

    @property
    def _reads_text(self) -> bool:
        """Whether text is needed before the end."""
        return self._streams or bool(self.sampling.stop)

    def on_output(self, output: RequestOutput) -> None:
        """Process what is new. No exception of a callback, not even SystemExit, may reach the front end's thread."""
        if self.has_ended:
            return
        try:
            self._process(output)
        except BaseException as error:
            logger.warning("request %s is cancelled, its callback failed: %r", self.id, error, exc_info=error)
            self.has_ended = True
            self._engine._forget(self.id)
            self._end_in_core(output, "cancelled")

    def _end_in_core(self, output: RequestOutput, reason: FinishReason) -> None:
        if output.finish_reason is None:
            self._engine._core.send(EndRequest(request_id=self.id, reason=reason))

    def _process(self, output: RequestOutput) -> None:
        if self._first_token_at is None and output.token_ids:
            self._first_token_at = time.perf_counter()
        self._logprobs += output.logprobs
        self._prompt_logprobs += output.prompt_logprobs
        num_known = len(self._detokenizer.token_ids)
        text, is_stopped = self._detokenize(output)
        if is_stopped:
            self._end_in_core(output, "stop")
            num_kept = len(self._detokenizer.token_ids) - num_known  # the stop string drops the tokens after these
            output = output._replace(token_ids=output.token_ids[:num_kept], logprobs=output.logprobs[:num_kept])
        if is_stopped or output.finish_reason is not None:
            self._end(output, text)
        elif self._streams:
            self._on_delta(CompletionDelta(text=text, token_ids=output.token_ids, logprobs=output.logprobs))

    def _detokenize(self, output: RequestOutput) -> tuple[str, bool]:
        """New text, and whether a stop string is complete. Without streaming or stop strings, text is decoded once at the end."""
        if not self._reads_text:
            self._undecoded += output.token_ids
            return "", False
        text, is_stopped = self._detokenizer.push(output.token_ids)
        return text, is_stopped

    def _end(self, last: RequestOutput, text: str) -> None:
        if self._undecoded:
            text += self._detokenizer.push(self._undecoded).text
        text += self._detokenizer.finish()
        completion = self._detokenizer.completion(
            last,
            num_prompt_tokens=self._num_prompt_tokens,
            logprobs=self._logprobs if self.sampling.logprobs is not None else None,
            prompt_logprobs=self._prompt_logprobs if self.sampling.prompt_logprobs is not None else None,
            timings=self._timings(),
        )
        self._send_last(
            CompletionDelta(text=text, token_ids=last.token_ids, logprobs=last.logprobs, completion=completion)
        )

    def end_early(self, reason: FinishReason, failure: Failure | None) -> None:
        """End a request that the core never had, or has no more."""
        if not self.has_ended:
            self._end(RequestOutput(request_id=self.id, finish_reason=reason, failure=failure), "")

    def _timings(self) -> Timings:
        def since_submitted(moment: float | None) -> float | None:
            return None if moment is None else moment - self.submitted_at

        return Timings(
            preprocessed_s=since_submitted(self.preprocessed_at), first_token_s=since_submitted(self._first_token_at)
        )

    def _send_last(self, delta: CompletionDelta) -> None:
        self.has_ended = True
        self._engine._forget(self.id)
        try:
            self._on_delta(delta)
        except BaseException as error:
            logger.warning("request %s: the callback of its last delta failed: %r", self.id, error)


def grammars_of(folder: Path, processor: Processor) -> Grammars:
    """Grammars over the tokens of a checkpoint, set up in a thread."""
    vocab_size = load_model_config(folder).language.vocab_size
    make = partial(GrammarCompiler, processor.tokenizer, eos_ids=processor.eos_ids, vocab_size=vocab_size)
    grammars = Grammars(make)
    grammars.prepare()
    return grammars


def _set_completion(future: Future[Completion], delta: CompletionDelta) -> None:
    if delta.completion is not None:
        future.set_result(delta.completion)


def with_slots(config: EngineConfig, adapters: Mapping[str, str | Path]) -> EngineConfig:
    """The configuration with a slot for each of these adapters."""
    ranks = [config.max_adapter_rank]
    for folder in adapters.values():
        with contextlib.suppress(UserError):  # a broken one is refused later, alone
            ranks.append(adapter_rank(folder))
    return replace(config, max_adapters=max(config.max_adapters, len(adapters)), max_adapter_rank=max(ranks))


def _batch_of(conversations: Any) -> list[Any]:
    """Conversations as a list, also of a single one."""
    if isinstance(conversations, str | Mapping) or not isinstance(conversations, Iterable):
        raise RequestError('a conversation is a list of messages, such as [{"role": "user", "content": "hello"}]')
    batch = list(conversations)
    return [batch] if batch and isinstance(batch[0], Mapping) else batch


def _sampling_of_each(sampling: Any, count: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt."""
    if sampling is None or isinstance(sampling, SamplingParams | Mapping):
        return [_sampling_params(sampling)] * count
    if not isinstance(sampling, Sequence) or isinstance(sampling, str):
        raise ConfigError(f"sampling is {sampling!r}; use SamplingParams, a dict of its fields, or a list of either")
    if len(sampling) != count:
        raise RequestError(f"{count} prompts but {len(sampling)} sampling parameters: give one, or one for each")
    return [_sampling_params(one) for one in sampling]


def _sampling_params(sampling: Any) -> SamplingParams:
    if isinstance(sampling, SamplingParams):
        return sampling
    fields = {} if sampling is None else sampling
    if not isinstance(fields, Mapping):
        raise ConfigError(f"sampling is {fields!r}; use SamplingParams, a dict of its fields, or a list of either")
    known = [field.name for field in dataclasses.fields(SamplingParams)]
    unknown = sorted(map(str, fields.keys() - set(known)))
    if unknown:
        raise ConfigError(f"{', '.join(unknown)}: no such sampling parameter. Use {', '.join(known)}")
    return SamplingParams(**fields)


def _completions_of(sampling: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of the `n` completions."""
    if sampling.n == 1:
        return [sampling]
    seeds = [None if sampling.seed is None else (sampling.seed + i) % 2**63 for i in range(sampling.n)]
    return [dataclasses.replace(sampling, n=1, seed=seed) for seed in seeds]


@contextlib.contextmanager
def _progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[Any], None]]:
    """A function that counts one completion."""
    if not is_shown:
        yield lambda _: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn("completions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("completions", total=total)
        yield lambda _: bar.advance(task)


def default_num_workers() -> int:
    """Preprocessing workers by the number of cores. Two are left for the engine loop and its clients."""
    return max(0, min(12, len(os.sched_getaffinity(0)) - 2))

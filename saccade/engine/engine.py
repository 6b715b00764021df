"""Public API of the engine: conversations in, completions out.

    engine = Engine.load("checkpoint")
    [completion] = engine.generate(conversation, SamplingParams(max_tokens=64))
    async for delta in engine.stream(conversation): ...

The front end (`frontend`) preprocesses conversations into tokens and patches in worker processes, and detokenizes the
output in a thread. The core (`core`), in a thread or a process of its own (`transport`), plans the steps that a runner
(`device`) computes. Front end and core exchange messages. This module joins the four.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import FlushCaches
from saccade.engine.frontend.adapters import with_slots
from saccade.engine.frontend.batch import Conversation, Sampling, complete_all, conversations_of, sampling_of
from saccade.engine.frontend.beam_search import BeamSearchParams, search_all
from saccade.engine.frontend.core_client import Connect
from saccade.engine.frontend.front_end import FrontEnd
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.frontend.preprocessing.statistics import PreprocessingStatistics
from saccade.engine.frontend.profile import write_profile
from saccade.engine.frontend.text_request import OnDelta
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Completion, CompletionDelta, RequestOptions
from saccade.engine.sampling_params import SamplingParams
from saccade.engine.start import RunningEngine, start
from saccade.engine.transport.spawn import spare_core
from saccade.errors import RequestError
from saccade.processor import Processor
from saccade.processor.families import vision_language_type
from saccade.processor.image import MediaLimits
from saccade.processor.tools import Tool

if TYPE_CHECKING:  # the core's process imports torch at the same time as this one
    import torch


class Engine(RunningEngine):
    """Serves many requests at once. Thread-safe. Close it to end its threads and processes and to free its memory."""

    def __init__(
        self,
        connect: Connect,
        processor: Processor,
        preprocessor: Preprocessor,
        adapters: Mapping[str, str | Path] | None = None,
    ) -> None:
        """Start the core with `connect`. `load` makes the arguments."""
        self.processor = processor
        """The checkpoint's tokenizer, chat template and image processor."""
        self._front_end = FrontEnd(connect, processor)
        super().__init__(self._front_end, preprocessor, adapters)

    @staticmethod
    def load(
        folder: str | Path,
        *,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype | None = "auto",
        config: EngineConfig | None = None,
        limits: MediaLimits | None = None,
        adapters: Mapping[str, str | Path] | None = None,
        tensor_parallel_size: int | None = None,
    ) -> Engine:
        """Load a checkpoint folder. `dtype` auto or None: as stored. `limits` bound the images of a request.

        `tensor_parallel_size`: GPUs that divide every matrix, instead of the number in `config`.
        `adapters` are PEFT folders by the name that requests use. A broken one is refused alone, see
        `refused_adapters`. `config` can have slots for more.
        """
        config = config or EngineConfig()
        if tensor_parallel_size is not None:
            config = replace(config, tensor_parallel_size=tensor_parallel_size)
        with spare_core(str(device), is_needed=config.has_core_process) as spare:
            folder, config = Path(folder), with_slots(config, adapters or {})
            vision_language_type(folder)  # a model of another kind is refused before anything starts
            processor = Processor.load(folder, limits=limits, chat_template=config.chat_template)
            return start(
                folder,
                config,
                lambda connect, preprocessor: Engine(connect, processor, preprocessor, adapters),
                device=device,
                dtype=dtype,
                limits=limits,
                spare=spare,
                processor=processor,
            )

    # -------------------------------------------------------------- completions

    def generate(
        self,
        conversations: Sequence[Conversation] | Conversation,
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | None = None,
        progress: bool = False,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> list[Completion]:
        """Generate completions of one or several conversations, in order; with `n` above 1, n consecutive ones for
        each.

        `sampling` is for all conversations, or a list with one for each; `options` are for all. A request that cannot
        be served has the finish reason `failed` and says why in `failure`; the others are not affected. `progress`
        shows a progress bar. `continue_final_message` continues a final assistant message instead of starting a new
        one. `tools` are functions that the model may call, in OpenAI's format; its calls are part of the text.
        """
        options = options or RequestOptions()
        more: dict[str, Any] = {"continue_final_message": continue_final_message, "tools": tools, "salt": options.salt}
        prompts = [partial(self.preprocess, messages, **more) for messages in conversations_of(conversations)]
        return complete_all(self._front_end, prompts, sampling, options, progress=progress)

    def generate_tokens(
        self,
        prompts: Sequence[tuple[Sequence[int], Sequence[Any]]],
        sampling: Sampling | Sequence[Sampling] | None = None,
        *,
        options: RequestOptions | None = None,
        progress: bool = False,
    ) -> list[Completion]:
        """Generate completions of pairs of token ids and images. The ids contain one placeholder per image."""
        pairs = list(prompts) if isinstance(prompts, Iterable) else [prompts]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise RequestError("prompts is a list of pairs (token ids, images), such as [([1, 2, 3], [])]")
        options = options or RequestOptions()
        starts = [partial(self.preprocess_tokens, *pair, salt=options.salt) for pair in pairs]
        return complete_all(self._front_end, starts, sampling, options, progress=progress)

    def beam_search(
        self,
        conversations: Sequence[Conversation] | Conversation,
        *,
        num_beams: int,
        max_tokens: int = 256,
        length_penalty: float = 1.0,
        num_return_sequences: int = 1,
        options: RequestOptions | None = None,
        progress: bool = False,
        continue_final_message: bool = False,
    ) -> list[Completion]:
        """Search the best completions of one or several conversations, `num_return_sequences` consecutive ones for
        each.

        The tokens are those of `transformers` with `early_stopping=False` (`beam_search.py`). `logprobs` has one entry
        per token, without the most likely others. Beams share the prompt through the prefix cache; without this cache
        every token computes the prompt again. A conversation that cannot be served has one completion, with its
        failure.
        """
        params = BeamSearchParams(
            num_beams=num_beams,
            max_tokens=max_tokens,
            length_penalty=length_penalty,
            num_return_sequences=num_return_sequences,
        )
        options = options or RequestOptions()
        more: dict[str, Any] = {"continue_final_message": continue_final_message, "salt": options.salt}
        prompts = [partial(self.preprocess, messages, **more) for messages in conversations_of(conversations)]
        return search_all(self._front_end, prompts, params, options, progress=progress)

    async def stream(
        self,
        messages: Conversation,
        sampling: Sampling | None = None,
        *,
        options: RequestOptions | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Tool] | None = None,
    ) -> AsyncIterator[CompletionDelta]:
        """Stream one completion. Leaving the iteration early cancels the request."""
        loop = asyncio.get_running_loop()
        deltas: asyncio.Queue[CompletionDelta] = asyncio.Queue()
        params, options = sampling_of(sampling), options or RequestOptions()
        self._front_end.check(params)  # before anything is preprocessed
        prompt = self.preprocess(
            messages, continue_final_message=continue_final_message, tools=tools, salt=options.salt
        )

        def post(delta: CompletionDelta) -> None:
            """Raises when the asyncio loop has ended, which cancels the request."""
            loop.call_soon_threadsafe(deltas.put_nowait, delta)

        request_id = self.submit(prompt, params, post, options=options)
        try:
            while True:
                delta = await deltas.get()
                yield delta
                if delta.completion is not None:
                    return
        finally:
            self.cancel(request_id)

    # -------------------------------------------------------------- the parts of a completion

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

    def preprocess_tokens(
        self, token_ids: Sequence[int], images: Sequence[Any] = (), *, salt: bytes = b""
    ) -> Future[TokenPrompt]:
        """Preprocess token ids with one placeholder per image."""
        return self._preprocessor.submit_tokens(token_ids, images, salt=salt)

    def encode_text(self, text: str) -> Future[list[int]]:
        """Token ids of plain text, after the ids that the tokenizer puts before a prompt."""
        return self._preprocessor.encode(text)

    def submit(
        self,
        prompt: Future[TokenPrompt],
        sampling: SamplingParams,
        on_delta: OnDelta,
        *,
        options: RequestOptions | None = None,
        streams: bool = True,
    ) -> str:
        """Submit a request that starts when its prompt is preprocessed; returns its id.

        `on_delta` gets every delta if the request `streams`, else the last one only. If it raises, the request is
        cancelled and `on_delta` is not called again.
        """
        return self._front_end.submit(prompt, sampling, on_delta, options or RequestOptions(), streams=streams)

    # -------------------------------------------------------------- adapters

    def add_adapter(self, name: str, folder: str | Path, *, timeout_s: float | None = None) -> None:
        """Load a LoRA adapter from a PEFT folder while requests are served. RequestError: it is refused."""
        if not isinstance(name, str) or not name:
            raise RequestError(f"the name of an adapter is {name!r}; use a text")
        self._adapters.add(name, Path(folder).absolute(), timeout_s)

    def remove_adapter(self, name: str, *, timeout_s: float | None = None) -> None:
        """Refuse new requests for an adapter. Its slot is free when the requests that run with it have ended."""
        self._adapters.remove(name, timeout_s)

    # -------------------------------------------------------------- administration

    @property
    def max_length(self) -> int:
        """Maximum tokens of prompt and output together."""
        return self._front_end.info.max_length

    @property
    def vocab_size(self) -> int:
        """Tokens the model knows."""
        return self._front_end.info.vocab_size

    @property
    def num_pages(self) -> int:
        """Pages of the KV cache."""
        return self._front_end.info.num_pages

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._front_end.info.page_size

    @property
    def preprocessing_statistics(self) -> PreprocessingStatistics:
        """Counters since the start of the preprocessing workers."""
        return self._preprocessor.statistics

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the image workers."""
        return self._preprocessor.worker_pids

    def flush_caches(self) -> None:
        """Empty the caches of prefixes, encoded and processed images, except for entries of running requests."""
        self._preprocessor.flush()
        self._front_end.send(FlushCaches())

    def profile(self, path: Path, seconds: float) -> bool:
        """Profile the core and write a Chrome trace. Waits for the file, and returns whether it exists."""
        return write_profile(self._front_end, path, seconds)

    # -------------------------------------------------------------- restart, close

    def wait_until_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait until the core has died or the engine is closed, and every request has ended. False: timeout."""
        return self._front_end.wait_until_stopped(timeout_s)

    def restart(self) -> None:
        """Replace a core that has died, with the same adapters. Preprocessing workers and their caches stay.

        The core must be in a process of its own (`core_process`). Call this from a thread that outlives the engine: the
        kernel kills the core process when the thread that started it exits.
        """
        self._front_end.restart()
        self.load_adapters()
        if self.has_failed:
            self._front_end.wait_until_stopped()
            raise RuntimeError("the engine core died while it loaded the adapters")

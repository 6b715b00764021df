"""One served model: its engine, its admission, and how a request is submitted to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import Request

from saccade import __version__
from saccade.engine import Engine, RequestOptions
from saccade.engine.config import EngineConfig
from saccade.engine.prompt import TokenPrompt
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import UserError
from saccade.processor import Processor
from saccade.serve.admission import Admission, AdmissionLimits, Demand
from saccade.serve.counted_request import CountedRequest, overloaded
from saccade.serve.engine_owner import EngineOwner
from saccade.serve.errors import ApiError, bad_request
from saccade.serve.front import Front
from saccade.serve.generation import DeltaHub, Generation, unless_disconnected
from saccade.serve.keys import salt_of
from saccade.serve.prompt_input import PromptInput, text_input
from saccade.serve.protocol.models import ServedModel
from saccade.serve.record import RequestRecord

_Result = TypeVar("_Result")
_MIN_TIMEOUT_S = 1e-3


@dataclass(kw_only=True)
class Service:
    """One served model, or one version of it. Used in the event loop."""

    front: Front
    """What it shares with other models."""
    engine_config: EngineConfig
    """Sizes of the engine."""
    model_name: str
    """Name of the model in requests and answers."""
    version: str | None = None
    """Version of the model. None: it has no versions."""
    owner: EngineOwner
    """Owner of the engine."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time since when it is served."""
    generations: set[Generation] = field(default_factory=set)
    """Generations in progress."""
    _hub: DeltaHub | None = None
    """Wakes generations; made in the event loop."""
    _admission: Admission | None = None
    """Counts open requests; made when the engine is loaded."""
    _num_engines: int = 1
    """Equal engines that serve it."""
    _num_fronts: int = 1
    """Processes like this one that send requests to them."""

    def __post_init__(self) -> None:
        self.front.metrics.add(self.model_name, self.version, self.owner, lambda: self._admission)

    def close(self) -> None:
        """Cancel all requests in progress, and export no metrics any more."""
        self.cancel_all()
        self.front.metrics.remove(self.model_name, self.version)

    @property
    def fingerprint(self) -> str:
        """A fingerprint that changes with the model and the version of either the model or the server."""
        names = [self.model_name, __version__] if self.version is None else [self.model_name, self.version, __version__]
        return "fp_" + hashlib.sha256(" ".join(names).encode()).hexdigest()[:10]

    @property
    def engine(self) -> Engine:
        """The engine. Raises an error for the client if requests cannot be served."""
        return self.owner.engine

    @property
    def processor(self) -> Processor:
        """The checkpoint's tokenizer and image processor."""
        engine = self.owner.loaded_engine
        if engine is None:
            raise self.owner.refusal()
        return engine.processor

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of prompt and output together; None before the engine is loaded."""
        engine = self.owner.loaded_engine
        return None if engine is None else engine.max_length

    @property
    def admission(self) -> Admission | None:
        """Counts of the open requests in each stage; None before the engine is loaded."""
        engine = self.owner.loaded_engine
        if self._admission is None and engine is not None:
            self._admission = Admission(self._admission_limits(engine))
        return self._admission

    def set_capacity(self, *, num_engines: int, num_fronts: int) -> None:
        """Admit this process's part of what so many equal engines can serve, with limits that all fronts share."""
        self._num_engines, self._num_fronts = num_engines, num_fronts
        engine = self.owner.loaded_engine
        if self._admission is not None and engine is not None:
            self._admission.set_limits(self._admission_limits(engine))

    def _admission_limits(self, engine: Engine) -> AdmissionLimits:
        config = self.front.config
        limits = AdmissionLimits(
            max_running=self.engine_config.max_requests,
            max_queued=config.max_queued_requests,
            max_pages=round(engine.num_pages * config.max_open_kv_caches),
            page_size=engine.page_size,
            max_image_tokens=round(self.engine_config.encoder_cache_tokens * config.max_open_kv_caches),
            max_media_bytes=config.max_media_bytes,
            max_wait_s=config.queue_timeout_s / 2,
        )
        return limits.part(num_engines=self._num_engines, num_fronts=self._num_fronts)

    @property
    def adapter_names(self) -> list[str]:
        """LoRA adapters that are served as models of their own."""
        engine = self.owner.loaded_engine
        return [] if engine is None else list(engine.adapters)

    def listed(self) -> list[ServedModel]:
        """Return the model and its adapters as `/v1/models` lists them."""
        common: dict[str, Any] = {
            "object": "model", "created": self.created, "owned_by": "saccade", "max_model_len": self.max_length
        }  # fmt: skip
        adapted = [ServedModel(id=name, parent=self.model_name, **common) for name in self.adapter_names]
        return [ServedModel(id=self.model_name, parent=None, **common), *adapted]

    @property
    def has_room(self) -> bool:
        """Whether the smallest request could be served now."""
        admission = self.admission
        return self.owner.state == "ready" and (admission is None or admission.is_full(time.monotonic()) is None)

    def check_room(self) -> None:
        """Refuse a request if not even the smallest one could be served now."""
        _ = self.engine
        if (admission := self.admission) is not None and (refusal := admission.is_full(time.monotonic())) is not None:
            raise overloaded(admission, refusal)

    # -------------------------------------------------------------- submit a request to the engine

    async def start(
        self,
        request: Request,
        prompts: Sequence[PromptInput],
        samplings: Sequence[SamplingParams],
        *,
        streams: bool,
        adapter: str | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        structured_field: str | None = None,
    ) -> Generation:
        """Admit a request and submit it to the engine; each prompt gets a completion per sampling."""
        engine, record, key = self.engine, request.state.record, request.state.key
        demand = _demand(prompts, samplings)
        opened = self._open(request, prompts, demand)
        record.is_streamed, record.max_tokens = streams, demand.max_tokens
        record.num_images = demand.num_images
        if self._hub is None:
            self._hub = DeltaHub(asyncio.get_running_loop())

        def end(ended: Generation) -> None:
            self.generations.discard(ended)
            opened.close()

        generation = Generation(
            engine,
            self._hub,
            record,
            max_unsent_tokens=self.front.config.max_unsent_tokens,
            on_end=end,
            structured_field=structured_field,
        )
        try:
            salt = salt_of(key, cache_salt)
            futures = await self._preprocess(request, opened, engine, prompts, salt)
            options = RequestOptions(
                priority=priority or 0,
                salt=salt,
                queue_timeout_s=_remaining(record, self.front.config.queue_timeout_s),
                timeout_s=_remaining(record, self.front.config.request_timeout_s),
                adapter=adapter,
                traceparent=None if self.front.tracer is None else self.front.tracer.begin(record),
            )
            generation.start(futures, samplings, options, streams=streams)
        except UserError as error:
            opened.close()
            if engine.has_failed:
                raise self.owner.refusal() from error
            raise bad_request(str(error)) from error
        except BaseException:
            opened.close()
            raise
        self.generations.add(generation)
        return generation

    async def encode(self, request: Request, text: str) -> list[int]:
        """Return the tokens of a plain text, for a request that generates nothing."""
        engine = self.engine
        with self._opened(request, text_input(engine, text)):
            return await self._in_time(request, asyncio.wrap_future(engine.encode_text(text)))

    async def preprocess(self, request: Request, prompt: PromptInput) -> TokenPrompt:
        """Return a preprocessed prompt, for a request that generates nothing."""
        engine, salt = self.engine, salt_of(request.state.key)
        with self._opened(request, prompt) as opened:
            [future] = await self._preprocess(request, opened, engine, [prompt], salt)
            return await self._in_time(request, asyncio.wrap_future(future))

    @contextlib.contextmanager
    def _opened(self, request: Request, prompt: PromptInput) -> Iterator[CountedRequest]:
        """Admit a request that generates nothing, until the block ends."""
        demand = Demand(
            num_completions=1,
            num_prompt_tokens=0,
            max_tokens=1,
            num_images=prompt.num_images,
            num_media_bytes=prompt.num_media_bytes,
        )
        opened = self._open(request, [prompt], demand)
        try:
            yield opened
        except UserError as error:
            raise bad_request(str(error)) from error
        finally:
            opened.close()

    def _open(self, request: Request, prompts: Sequence[PromptInput], demand: Demand) -> CountedRequest:
        """Admit a request, or refuse it."""
        for prompt in prompts:
            prompt.check_length(self.engine.max_length)
        key, admission, now = request.state.key, self.admission, time.monotonic()
        assert admission is not None, "there is an engine"
        if (refusal := admission.refusal(demand, now)) is not None:
            raise overloaded(admission, refusal)
        num_tokens = admission.estimated_tokens(demand)
        if key is not None and (wait_s := self.front.rates.take_tokens(key, num_tokens, now)):
            raise ApiError(
                429,
                f"the key {key.name} may use {key.tokens_per_minute} tokens per minute; try again in {wait_s:.1f} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        admitted, rates = admission.admit(demand), self.front.rates
        return CountedRequest(admission, admitted, rates, request.state.record, key, num_tokens)

    async def _preprocess(
        self, request: Request, opened: CountedRequest, engine: Engine, prompts: Sequence[PromptInput], salt: bytes
    ) -> list[Future[TokenPrompt]]:
        """Start preprocessing, after the preparations of the prompts."""
        if waits := [prompt.prepare(opened.add_media) for prompt in prompts if prompt.prepare is not None]:
            await self._in_time(request, asyncio.gather(*waits))
        futures = [prompt.preprocess(engine, salt) for prompt in prompts]
        opened.watch_preprocessing(futures)
        return futures

    async def _in_time(self, request: Request, work: asyncio.Future[_Result]) -> _Result:
        """Return the result of some work. It is cancelled when the client leaves or the request waited too long."""
        try:
            async with asyncio.timeout(_remaining(request.state.record, self.front.config.queue_timeout_s)):
                return await unless_disconnected(work, request.receive)
        except TimeoutError as error:
            raise ApiError(504, "the request did not start within its time limit", code="timeout") from error

    def cancel_all(self) -> None:
        """Cancel all requests in progress."""
        for generation in list(self.generations):
            generation.cancel()


def _demand(prompts: Sequence[PromptInput], samplings: Sequence[SamplingParams]) -> Demand:
    return Demand(
        num_completions=len(prompts) * len(samplings),
        num_prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
        max_tokens=samplings[0].max_tokens,
        num_images=sum(prompt.num_images for prompt in prompts),
        num_media_bytes=sum(prompt.num_media_bytes for prompt in prompts),
    )


def _remaining(record: RequestRecord, timeout_s: float) -> float:
    """Return the remaining time of a limit that began when the request arrived."""
    return max(_MIN_TIMEOUT_S, timeout_s - (time.perf_counter() - record.arrived_at))

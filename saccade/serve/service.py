"""What the routes share: the engine, the limits, and how a request is submitted to the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from saccade import __version__
from saccade.engine import Engine, RequestOptions
from saccade.engine.config import EngineConfig
from saccade.engine.prompt import TokenPrompt
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import UserError
from saccade.processor import Processor
from saccade.serve.admission import Admission, AdmissionLimits, Demand
from saccade.serve.body_limits import BodyLimits
from saccade.serve.config import ServeConfig
from saccade.serve.counted_request import CountedRequest, overloaded
from saccade.serve.errors import ApiError, bad_request
from saccade.serve.generation import DeltaHub, Generation, unless_disconnected
from saccade.serve.keys import ApiKey
from saccade.serve.metrics import ServerMetrics
from saccade.serve.metrics_history import MetricsHistory
from saccade.serve.prompt_input import PromptInput, text_input
from saccade.serve.rate_limit import RateLimiter
from saccade.serve.record import Observer, RequestRecord, log_request
from saccade.serve.remote_media import RemoteMedia
from saccade.serve.supervisor import Supervisor

_Result = TypeVar("_Result")
_MIN_TIMEOUT_S = 1e-3


@dataclass(kw_only=True)
class Service:
    """One served model. Used in the event loop."""

    config: ServeConfig
    """Limits of the server."""
    engine_config: EngineConfig
    """Sizes of the engine."""
    model_name: str
    """Name of the model in requests and answers."""
    supervisor: Supervisor
    """Owner of the engine."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix time of the start."""
    remote_media: RemoteMedia | None = None
    """Fetches images and videos by URL; None: such requests are refused."""
    rates: RateLimiter = field(default_factory=RateLimiter)
    """Rate limits of the keys."""
    observers: list[Observer] = field(default_factory=lambda: [log_request])
    """Called with every request that has ended."""
    metrics: ServerMetrics = field(init=False)
    """Counters and histograms."""
    history: MetricsHistory = field(default_factory=MetricsHistory)
    """Metrics of the last half hour."""
    generations: set[Generation] = field(default_factory=set)
    """Generations in progress."""
    _hub: DeltaHub | None = None
    """Wakes generations; made in the event loop."""
    _admission: Admission | None = None
    """Counts open requests; made when the engine is loaded."""

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.model_name, self.supervisor, lambda: self._admission)
        self.observers.append(self.metrics.observe)

    @property
    def fingerprint(self) -> str:
        """A fingerprint that changes with the model and the version of the server."""
        return "fp_" + hashlib.sha256(f"{self.model_name} {__version__}".encode()).hexdigest()[:10]

    @property
    def processor(self) -> Processor:
        """The checkpoint's tokenizer and image processor."""
        engine = self.supervisor.loaded_engine
        if engine is None:
            raise self.supervisor.refusal()
        return engine.processor

    @property
    def admission(self) -> Admission | None:
        """Counts of the open requests in each stage; None before the engine is loaded."""
        engine = self.supervisor.loaded_engine
        if self._admission is None and engine is not None:
            self._admission = Admission(self._admission_limits(engine))
        return self._admission

    def _admission_limits(self, engine: Engine) -> AdmissionLimits:
        config = self.config
        return AdmissionLimits(
            max_running=self.engine_config.max_requests,
            max_queued=config.max_queued_requests,
            max_pages=round(engine.num_pages * config.max_open_kv_caches),
            page_size=engine.page_size,
            max_image_tokens=round(self.engine_config.encoder_cache_tokens * config.max_open_kv_caches),
            max_media_bytes=config.max_media_bytes,
            max_wait_s=config.queue_timeout_s / 2,
        )

    @property
    def adapter_names(self) -> list[str]:
        """LoRA adapters that are served as models of their own."""
        engine = self.supervisor.loaded_engine
        return [] if engine is None else list(engine.adapters)

    def check_model(self, name: str) -> str | None:
        """Return the adapter that a model's name stands for; None: the base model. Other names are refused."""
        if name == self.model_name:
            return None
        if name in (adapters := self.adapter_names):
            return name
        known = ", ".join(repr(one) for one in [self.model_name, *adapters][:16])
        raise ApiError(
            404, f"the model {name[:100]!r} is not served here; use {known}", code="model_not_found", param="model"
        )

    async def close(self) -> None:
        """Close connections to other servers."""
        if self.remote_media is not None:
            await self.remote_media.close()

    def body_limits(self, path: str) -> BodyLimits:
        """Return the limits on the body of a request for this path."""
        engine = self.supervisor.loaded_engine
        return BodyLimits(
            max_depth=self.config.max_json_depth,
            max_length=None if engine is None else engine.max_length,
            max_prompts=self.config.max_completions if path == "/v1/completions" else 1,
        )

    def check_room(self) -> None:
        """Refuse a request before its body is read, if no request could be served now."""
        _ = self.supervisor.engine
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
        engine, record, key = self.supervisor.engine, request.state.record, request.state.key
        demand = _demand(prompts, samplings)
        opened = self._open(request, prompts, demand)
        record.is_streamed, record.max_tokens = streams, demand.max_tokens
        record.num_images, record.adapter = demand.num_images, adapter
        if self._hub is None:
            self._hub = DeltaHub(asyncio.get_running_loop())

        def end(ended: Generation) -> None:
            self.generations.discard(ended)
            opened.close()

        generation = Generation(
            engine,
            self._hub,
            record,
            max_unsent_tokens=self.config.max_unsent_tokens,
            on_end=end,
            structured_field=structured_field,
        )
        try:
            salt = _salt(key, cache_salt)
            futures = await self._preprocess(request, opened, engine, prompts, salt)
            options = RequestOptions(
                priority=priority or 0,
                salt=salt,
                queue_timeout_s=_remaining(record, self.config.queue_timeout_s),
                timeout_s=_remaining(record, self.config.request_timeout_s),
                adapter=adapter,
            )
            generation.start(futures, samplings, options, streams=streams)
        except UserError as error:
            opened.close()
            if engine.has_failed:
                raise self.supervisor.refusal() from error
            raise bad_request(str(error)) from error
        except BaseException:
            opened.close()
            raise
        self.generations.add(generation)
        return generation

    async def encode(self, request: Request, text: str) -> list[int]:
        """Return the tokens of a plain text, for a request that generates nothing."""
        engine = self.supervisor.engine
        with self._opened(request, text_input(engine, text)):
            return await self._in_time(request, asyncio.wrap_future(engine.encode_text(text)))

    async def preprocess(self, request: Request, prompt: PromptInput) -> TokenPrompt:
        """Return a preprocessed prompt, for a request that generates nothing."""
        engine, salt = self.supervisor.engine, _salt(request.state.key, None)
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
            prompt.check_length(self.supervisor.engine.max_length)
        key, admission, now = request.state.key, self.admission, time.monotonic()
        assert admission is not None, "there is an engine"
        if (refusal := admission.refusal(demand, now)) is not None:
            raise overloaded(admission, refusal)
        num_tokens = admission.estimated_tokens(demand)
        if key is not None and (wait_s := self.rates.take_tokens(key, num_tokens, now)):
            raise ApiError(
                429,
                f"the key {key.name} may use {key.tokens_per_minute} tokens per minute; try again in {wait_s:.1f} s",
                code="rate_limit_exceeded",
                retry_after_s=wait_s,
            )
        return CountedRequest(admission, admission.admit(demand), self.rates, request.state.record, key, num_tokens)

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
            async with asyncio.timeout(_remaining(request.state.record, self.config.queue_timeout_s)):
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


def _salt(key: ApiKey | None, cache_salt: str | None) -> bytes:
    """Return the salt of the caches, from those of the tenant and the request."""
    tenant = b"" if key is None else key.salt
    if cache_salt is None:
        return tenant
    return hashlib.sha256(tenant + b"\0" + cache_salt.encode()).digest()[:16]

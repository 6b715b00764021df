"""What the routes share: the engine, the limits, and how a request is handed to the engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from saccade import __version__
from saccade.engine.engine import Engine, RequestOptions
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import SamplingParams
from saccade.errors import UserError
from saccade.processor import Processor
from saccade.serve.config import ServeConfig
from saccade.serve.errors import ApiError, bad_request
from saccade.serve.generation import DeltaHub, Generation
from saccade.serve.keys import ApiKey
from saccade.serve.metrics import ServerMetrics
from saccade.serve.rate_limit import RateLimiter
from saccade.serve.record import Observer, RequestRecord, log_request
from saccade.serve.supervisor import Supervisor

Preprocess = Callable[[Engine], Future[TokenPrompt]]


@dataclass(kw_only=True)
class Service:
    """One served model."""

    config: ServeConfig
    """Limits."""
    model_name: str
    """Name of the model in requests and answers."""
    created: int
    """Unix time of the start."""
    supervisor: Supervisor
    """Owner of the engine."""
    rates: RateLimiter = field(default_factory=RateLimiter)
    """Rate limits of the keys."""
    observers: list[Observer] = field(default_factory=lambda: [log_request])
    """Called with every request that has ended."""
    metrics: ServerMetrics = field(init=False)
    """Counters and histograms."""
    _hub: DeltaHub | None = None
    """Made in the event loop."""

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.model_name, self.supervisor)
        self.observers.append(self.metrics.observe)

    @property
    def fingerprint(self) -> str:
        """Changes with the model and the version of the server."""
        return "fp_" + hashlib.sha256(f"{self.model_name} {__version__}".encode()).hexdigest()[:10]

    @property
    def processor(self) -> Processor:
        """The checkpoint's tokenizer and image processor."""
        engine = self.supervisor.loaded_engine
        if engine is None:
            raise self.supervisor.refusal()
        return engine.processor

    def check_model(self, name: str) -> None:
        """Refuse a request for another model."""
        if name != self.model_name:
            raise ApiError(
                404,
                f"the model {name[:100]!r} is not served here; use {self.model_name!r}",
                code="model_not_found",
                param="model",
            )

    def start(
        self,
        request: Request,
        preprocess: Preprocess,
        samplings: Sequence[SamplingParams],
        *,
        streams: bool,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """Hand a request to the engine."""
        engine = self.supervisor.engine
        record: RequestRecord = request.state.record
        record.is_streamed, record.max_tokens = streams, samplings[0].max_tokens
        options = RequestOptions(
            priority=priority or 0,
            salt=_salt(request.state.key, cache_salt),
            queue_timeout_s=self.config.queue_timeout_s,
            timeout_s=self.config.request_timeout_s,
        )
        if self._hub is None:
            self._hub = DeltaHub(asyncio.get_running_loop())
        generation = Generation(engine, self._hub, record, max_unsent_tokens=self.config.max_unsent_tokens)
        try:
            generation.start(preprocess(engine), samplings, options, streams=streams)
        except UserError as error:
            if engine.wait_until_stopped(0):
                raise self.supervisor.refusal() from error
            raise bad_request(str(error)) from error
        return generation


def _salt(key: ApiKey | None, cache_salt: str | None) -> bytes:
    """Of the tenant, and of the request if it has one."""
    tenant = b"" if key is None else key.salt
    if cache_salt is None:
        return tenant
    return hashlib.sha256(tenant + b"\0" + cache_salt.encode()).digest()[:16]


def usage_of(record: RequestRecord) -> dict[str, Any]:
    """Tokens of a request, as OpenAI's API reports them."""
    return {
        "prompt_tokens": record.num_prompt_tokens,
        "completion_tokens": record.num_output_tokens,
        "total_tokens": record.num_prompt_tokens + record.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": record.num_cached_tokens},
    }

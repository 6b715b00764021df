"""Facts about one request, for its log line, metrics and spans. The content is none of them."""

from __future__ import annotations

import json
import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request to an endpoint that needs the engine. Times are `time.perf_counter` seconds."""

    id: str
    route: str
    """Path of the endpoint."""
    model: str = ""
    """Name of the model that was chosen; empty: the request was refused before."""
    version: str | None = None
    """Version of the model; None: it has no versions."""
    experiment: str | None = None
    """Experiment that the user takes part in; None: in none."""
    variant: str | None = None
    """Variant of the experiment by which the user has the version; None: the version is not by the experiment."""
    key_name: str = ""
    """Name of the API key; empty without keys."""
    arrived_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0
    status: int = 0
    """Status of the HTTP response; 0 if the client left before it."""
    error_code: str | None = None
    """Typed code of the error, which may have been sent within a stream."""
    error_status: int = 0
    """HTTP status of that error, also if the stream had begun with another one; 0: none."""
    ending: str = ""
    """Worst ending of the completions: `stop`, `length`, `cancelled` or `failed`. Empty: none reached the engine."""
    is_streamed: bool = False
    num_completions: int = 0
    max_tokens: int = 0
    """Requested maximum per completion."""
    num_images: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    preprocess_s: float | None = None
    """Time from submitting until the prompt was ready: queue, decoding of images, tokenization."""
    first_token_s: float | None = None
    """Time from arrival to the first token."""
    decode_s: float = 0.0
    """Time from the first token to the last, of the longest completion."""
    token_gaps_s: array[float] = field(default_factory=lambda: array("d"))
    """Time between consecutive deltas of a streamed completion."""
    adapter: str | None = None
    """Name of the LoRA adapter; None: the base model."""
    user: str | None = None
    """User that the request names."""
    request_ids: Sequence[str] = ()
    """Ids of its completions in the engine."""
    replicas: tuple[str, ...] = ()
    """Engine replicas that had it, in order. Empty: the server has one engine."""
    num_continuations: int = 0
    """Times that one of its completions lost a replica and continued on another."""
    traceparent: str | None = None
    """Trace that the request belongs to, in W3C form."""

    @property
    def sticky_user(self) -> str:
        """Identity that always gets the same version: the named user, else the API key, else the request alone."""
        return self.user or self.key_name or self.id

    def fail(self, code: str, status: int) -> None:
        """Note the error that the client gets."""
        self.error_code, self.error_status = code, status

    @property
    def duration_s(self) -> float:
        """Time from arrival to the last byte."""
        return self.ended_at - self.arrived_at

    @property
    def ms_per_token(self) -> float | None:
        """Time per token after the first of each completion; None without a second token."""
        num_later = self.num_output_tokens / max(1, self.num_completions) - 1
        return self.decode_s * 1e3 / num_later if num_later > 0 and self.decode_s > 0 else None

    def log_fields(self) -> dict[str, Any]:
        """Return the fields of the log line: names and numbers only."""
        fields: dict[str, Any] = {
            "id": self.id,
            "route": self.route,
            "status": self.status,
            "ending": self.error_code or self.ending or "-",
            "key": self.key_name or "-",
            "in": self.num_prompt_tokens,
            "cached": self.num_cached_tokens,
            "out": self.num_output_tokens,
            "images": self.num_images,
            "ttft_ms": None if self.first_token_s is None else round(self.first_token_s * 1e3, 1),
            "ms_per_token": None if self.ms_per_token is None else round(self.ms_per_token, 2),
            "total_ms": round(self.duration_s * 1e3, 1),
        }
        chosen = {} if self.version is None else {"model": self.model, "version": self.version}
        named = chosen | {
            "experiment": self.experiment, "variant": self.variant, "adapter": self.adapter, "user": self.user
        }  # fmt: skip
        if self.replicas:
            fields |= {"replicas": ",".join(self.replicas), "continued": self.num_continuations}
        return fields | {name: value for name, value in named.items() if value is not None}


Observer = Callable[[RequestRecord], None]
"""Called once per request, in the event loop, when it has ended."""


def log_request(record: RequestRecord) -> None:
    """Log one line per request."""
    fields = record.log_fields()
    extra = {"fields": fields}
    line = "  ".join(f"{name} {_plain(value)}" for name, value in fields.items() if value is not None)
    logger.info("%s", line, extra=extra)


def _plain(value: Any) -> str:
    """Write a value as one word. A text of the client is quoted, so that it cannot fake a line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)

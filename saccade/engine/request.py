"""Requests, their options and their output. Plain Python, no torch.

A request has *known* tokens, which are its prompt and the output tokens read back from the device, and *computed*
tokens, whose keys and values are in its pages or will be when the steps in flight have run. Every step computes some
known tokens, so prefill and decode are the same arithmetic. A token that was sampled but not read back is *pending*:
its value is on the device only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral
from typing import Any, Literal, NamedTuple

from saccade.engine.sampling_params import SamplingParams
from saccade.errors import RequestError

FinishReason = Literal["stop", "length", "cancelled", "failed"]
Stage = Literal["preprocessing", "waiting", "encoding", "running"]
FailureKind = Literal[
    "invalid_request",
    "context_length_exceeded",
    "overloaded",
    "unavailable",
    "timeout",
    "non_finite_logits",
    "out_of_memory",
    "internal_error",
    "engine_stopped",
]
MAX_PRIORITY = 1000


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How a request is scheduled."""

    priority: int = 0
    """A lower number is scheduled earlier. Waiting compensates for a higher one."""
    salt: bytes = b""
    """Caches are shared only with requests of equal salt."""
    adapter: str | None = None
    """Name of the LoRA adapter that serves the request. None: the base model."""
    queue_timeout_s: float | None = None
    """Fail the request (`timeout`) if it has not started this long after it was submitted, preprocessing included."""
    timeout_s: float | None = None
    """Fail the request (`timeout`) if it has not ended this long after it was submitted."""
    traceparent: str | None = None
    """Span that the request belongs to, in W3C form. An engine elsewhere makes its spans inside it."""

    def __post_init__(self) -> None:
        if not isinstance(self.adapter, str | None):
            raise RequestError(f"adapter is {self.adapter!r}; use the name of one")
        priority: Any = self.priority
        if not isinstance(priority, Integral) or abs(int(priority)) > MAX_PRIORITY:
            raise RequestError(f"priority is {priority!r}; use a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}")
        object.__setattr__(self, "priority", int(priority))
        salt: Any = self.salt
        if not isinstance(salt, bytes):
            raise RequestError(f"salt is {type(salt).__name__}; use bytes")
        for name in ("queue_timeout_s", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < float("inf")):
                raise RequestError(f"{name} is {value!r}; use a positive number of seconds")


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """The placeholder tokens of one image or video in a request."""

    key: bytes
    """sha256 of the image as sent and of its preprocessing. Equal keys mean equal features."""
    start: int
    """Index of its first token."""
    num_tokens: int
    """Number of its tokens."""
    num_patches: int
    """Patches that the vision encoder reads for it; 0 if its features came with the request."""

    @property
    def end(self) -> int:
        """Index one past its last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Failure:
    """Why a request failed."""

    stage: Stage
    message: str
    """One line for the user. The text of exceptions is in the log."""
    kind: FailureKind = "internal_error"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request to the engine core. Its state is the scheduler's `RequestState` and the runner's slot."""

    id: str
    """Unique among open requests."""
    token_ids: Sequence[int]
    """The prompt."""
    images: tuple[ImageSpan, ...] = ()
    """Images in token order, not overlapping."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How its tokens are sampled."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end generation: the checkpoint's, unless they are ignored, and the request's own."""
    seed: int = 0
    """Seed of its samples."""
    priority: int = 0
    """A lower number is scheduled earlier. Waiting compensates for a higher one."""
    adapter: str | None = None
    """Name of the LoRA adapter that serves the request. None: the base model."""
    salt: bytes = b""
    """Caches are shared only with requests of equal salt, which names tenant, adapter and weights."""
    queue_timeout_s: float | None = None
    """Fail the request if it has not started after this time in the core."""
    timeout_s: float | None = None
    """Fail the request if it has not ended after this time in the core."""
    stream_interval: int = 1
    """Tokens per output. The first new token is sent at once; the last output has all remaining tokens."""
    output_ids: tuple[int, ...] = ()
    """Output tokens that are known already; the request continues after them."""
    traceparent: str | None = None
    """Span that the request belongs to, in W3C form."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)

    @property
    def prompt_logprobs(self) -> int | None:
        """`sampling.prompt_logprobs`. None if there are known output tokens: they were sent before those."""
        return None if self.output_ids else self.sampling.prompt_logprobs


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a token, and the most likely tokens with theirs, best first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


class RequestOutput(NamedTuple):
    """New output of a request after a step. The last output has the finish reason."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """New output tokens."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of these tokens, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of prompt tokens computed in the step, if requested."""
    finish_reason: FinishReason | None = None
    failure: Failure | None = None
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_preemptions: int = 0


new_output = partial(tuple.__new__, RequestOutput)
"""Make an output from a tuple of all fields, in half the time of `RequestOutput(...)`."""


def merge_outputs(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Merge two outputs of a request. An earlier output with a finish reason stays the last."""
    if earlier.finish_reason is not None:
        return earlier
    return later._replace(
        token_ids=earlier.token_ids + later.token_ids,
        logprobs=earlier.logprobs + later.logprobs,
        prompt_logprobs=earlier.prompt_logprobs + later.prompt_logprobs,
    )


@dataclass(frozen=True, kw_only=True)
class Timings:
    """When a request passed its stages, in seconds since it was submitted."""

    preprocessed_s: float | None = None
    """When its prompt was ready."""
    first_token_s: float | None = None
    """When its first token arrived at the front end."""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The output of one request."""

    text: str
    """Text of the output, up to a stop string."""
    token_ids: list[int]
    """Output tokens, with the stop token that ended generation."""
    finish_reason: FinishReason
    """`stop`: a stop token or stop string; `length`: `max_tokens` or the maximum length."""
    num_prompt_tokens: int
    """Prompt tokens, with those of images."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    logprobs: list[TokenLogprobs] | None = None
    """Log-probability of each output token, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probability of each prompt token, if requested; None for the first token."""
    failure: Failure | None = None
    """Why the request failed, if `finish_reason` is `failed`."""
    timings: Timings = field(default_factory=Timings, compare=False)
    """When the request passed its stages."""


@dataclass(frozen=True, kw_only=True)
class CompletionDelta:
    """New output of a request. The last delta has the whole `completion`."""

    text: str
    """New text that is final: no partial character, no beginning of a stop string."""
    token_ids: Sequence[int]
    """New tokens; their text may come with a later delta."""
    logprobs: Sequence[TokenLogprobs] = ()
    """Log-probabilities of these tokens, if requested."""
    completion: Completion | None = None
    """The whole output, in the last delta."""

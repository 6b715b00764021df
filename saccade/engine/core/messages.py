"""Messages between a front end and the engine core: plain data, which can travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class AddRequest:
    """Message: serve a request."""

    request: Request
    """The request to serve."""
    prompt: TokenPrompt
    """Tokens, positions and patches of the request."""


@dataclass(frozen=True, kw_only=True)
class EndRequest:
    """Message: end a request that was cancelled or whose text has a stop string. No effect if it has ended."""

    request_id: str
    """Id of the request to end."""
    reason: FinishReason
    """`cancelled`, or `stop` for a stop string."""


@dataclass(frozen=True, kw_only=True)
class FlushCaches:
    """Message: evict the cached prefixes and images that no request uses."""


@dataclass(frozen=True, kw_only=True)
class AddAdapter:
    """Message: load a LoRA adapter under a name.

    The reply is an output with `reply_id` as its request id: `stop`, or `failed` with the reason.
    """

    name: str
    """Name that requests use."""
    folder: str
    """Folder in PEFT's layout."""
    reply_id: str
    """Request id of the reply."""


@dataclass(frozen=True, kw_only=True)
class RemoveAdapter:
    """Message: take no new requests for an adapter. Replied to at once; the slot is free when running requests end."""

    name: str
    """Name of the adapter to remove."""
    reply_id: str
    """Request id of the reply."""


@dataclass(frozen=True, kw_only=True)
class StartProfile:
    """Message: start profiling the core's thread and the device."""

    begun: str
    """File that is created when the profile has begun. The first profile imports the profiler, which takes seconds."""


@dataclass(frozen=True, kw_only=True)
class StopProfile:
    """Message: end the profile and write it. No effect without one."""

    path: str
    """File for the trace in Chrome's format, written atomically."""


@dataclass(frozen=True, kw_only=True)
class GrammarCompiled:
    """Message of the core to itself: the grammar of a request is compiled, or could not be."""

    request_id: str
    """Id of the request that waits for the grammar."""


@dataclass(frozen=True, kw_only=True)
class AdapterRead:
    """Message of the core to itself: the folder of an adapter is read, or could not be."""

    reply_id: str
    """Reply id of the message that asked for the adapter."""


Message = AddRequest | EndRequest | FlushCaches | StartProfile | StopProfile | AddAdapter | RemoveAdapter
"""Messages that a front end sends."""
OwnMessage = GrammarCompiled | AdapterRead
"""Messages that the core sends to itself from another thread."""


@dataclass(frozen=True, kw_only=True)
class CoreInfo:
    """Properties of a core that its front end needs."""

    max_length: int
    """Maximum tokens of prompt and output together."""
    vocab_size: int
    """Vocabulary size of the model."""
    num_pages: int
    """Pages of the KV cache."""
    page_size: int
    """Tokens per page."""
    max_requests: int
    """Maximum number of running requests."""
    feature_bytes: int = 0
    """Bytes of the features of an image token."""

"""Messages between a front end and the engine core: plain data, which can travel between processes."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import FinishReason, Request


@dataclass(frozen=True, kw_only=True)
class AddRequest:
    """Message: serve a request."""

    request: Request
    """What is asked for."""
    prompt: TokenPrompt
    """Its tokens, positions and patches."""


@dataclass(frozen=True, kw_only=True)
class EndRequest:
    """Message: end a request, cancelled or stopped by its text. No effect if it has ended."""

    request_id: str
    """Which one."""
    reason: FinishReason
    """Cancelled, or stop for a stop string."""


@dataclass(frozen=True, kw_only=True)
class FlushCaches:
    """Message: forget cached prefixes and images that no request uses."""


@dataclass(frozen=True, kw_only=True)
class AddAdapter:
    """Message: load a LoRA adapter under a name. Answered by an output with `reply_id`: `stop`, or `failed` with the reason."""

    name: str
    """What requests call it."""
    folder: str
    """In PEFT's layout."""
    reply_id: str
    """Id of the answer."""


@dataclass(frozen=True, kw_only=True)
class RemoveAdapter:
    """Message: take no new requests for an adapter; its slot is free when those that run have ended. Answered at once."""

    name: str
    """Which one."""
    reply_id: str
    """Id of the answer."""


@dataclass(frozen=True, kw_only=True)
class StartProfile:
    """Message: profile the core's thread and the device from now on."""

    begun: str
    """File that appears when the profile has begun: the first one imports what it needs, for seconds."""


@dataclass(frozen=True, kw_only=True)
class StopProfile:
    """Message: end the profile and write it. No effect without one."""

    path: str
    """File for the trace, in Chrome's format; it appears complete."""


@dataclass(frozen=True, kw_only=True)
class GrammarCompiled:
    """Message of the core to itself: the grammar of a request is compiled, or is not possible."""

    request_id: str
    """Which one."""


@dataclass(frozen=True, kw_only=True)
class AdapterRead:
    """Message of the core to itself: the folder of an adapter is read, or is broken."""

    reply_id: str
    """Of the message that asked for it."""


Message = AddRequest | EndRequest | FlushCaches | StartProfile | StopProfile | AddAdapter | RemoveAdapter
"""What a front end sends."""
OwnMessage = GrammarCompiled | AdapterRead
"""What the core sends itself from another thread."""


@dataclass(frozen=True, kw_only=True)
class CoreInfo:
    """What clients of a core need to know of it."""

    max_length: int
    """Maximum tokens of prompt and output together."""
    vocab_size: int
    """Tokens the model knows."""
    num_pages: int
    """Pages of the KV cache."""
    page_size: int
    """Tokens per page."""
    max_requests: int
    """Maximum number of running requests."""

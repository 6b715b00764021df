"""Requests and outputs as messages between machines: bytes, without shared memory, never a pickle.

    version number (1 byte), msgpack of plain data

A request names its images and videos by their hashes and describes what they were made of; the media themselves travel
apart (`media_of`), to an engine that does not have them. An encoder gets an image by itself, and returns its features.
Messages of another version are refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import numpy as np

from saccade.engine.frames.plain import outputs_from_plain, packer, request_from_plain, request_to_plain, unpack
from saccade.engine.media import EncodedImage, TaskDescription
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Request, RequestOutput
from saccade.errors import ConfigError

WIRE_VERSION = 2
"""Version of the messages. It increases when a field of a message is added, removed or changes its meaning."""

_Decoded = TypeVar("_Decoded")


@dataclass(frozen=True, kw_only=True)
class SentRequest:
    """A request as an engine receives it, with what it needs to make the prompt again."""

    request: Request
    """The request; its tokens and images are those that the sender announces."""
    token_ids: list[int]
    """Tokens of the prompt with one placeholder per image and video."""
    tasks: tuple[TaskDescription, ...] = ()
    """Images and videos, without their data."""


def encode_request(request: Request, prompt: TokenPrompt) -> bytes:
    """A request as a message, without its media. The prompt has its `sources`: its images were only measured."""
    assert prompt.sources is not None, "a request is sent with the sources of its prompt: use measures_only"
    return _encode(
        {
            "request": request_to_plain(request),
            "token_ids": np.asarray(prompt.sources.token_ids, np.int32).tobytes(),
            "tasks": [dataclasses.asdict(TaskDescription.of(task)) for task in prompt.sources.tasks],
        }
    )


def decode_request(message: bytes) -> SentRequest:
    """Inverse of `encode_request`. ConfigError: the message has another version, or cannot be read."""
    return _decode(message, _sent_request)


def _sent_request(fields: dict[str, Any]) -> SentRequest:
    return SentRequest(
        request=request_from_plain(fields["request"]),
        token_ids=np.frombuffer(fields["token_ids"], np.int32).tolist(),
        tasks=tuple([TaskDescription(**task) for task in fields["tasks"]]),
    )


def media_of(prompt: TokenPrompt) -> list[bytes]:
    """The data of each image and video of a prompt, in the order of `SentRequest.tasks`."""
    assert prompt.sources is not None, "media are those of the sources of a prompt: use measures_only"
    return [task.media() for task in prompt.sources.tasks]


@dataclass(frozen=True, kw_only=True)
class SentTask:
    """An image or video that an encoder is to encode."""

    task: TaskDescription
    """The image or video without its data."""
    salt: bytes
    """Features are shared only with tasks of equal salt."""
    num_patches: int
    """Patches that it has, as far as the sender knows."""
    traceparent: str | None = None
    """Trace that it belongs to, in W3C form."""


def encode_task(sent: SentTask) -> bytes:
    """A task as a message, without its media."""
    return _encode(dataclasses.asdict(sent))


def decode_task(message: bytes) -> SentTask:
    """Inverse of `encode_task`. ConfigError: the message has another version, or cannot be read."""
    return _decode(message, lambda fields: SentTask(**fields | {"task": TaskDescription(**fields["task"])}))


def encode_image(image: EncodedImage) -> bytes:
    """An encoded image as a message."""
    fields = {name: getattr(image, name) for name in ("grid", "texts", "num_pixels")}
    return _encode(fields | {"shape": image.features.shape, "features": image.features.data})


def decode_image(message: bytes) -> EncodedImage:
    """Inverse of `encode_image`. ConfigError: the message has another version, or cannot be read."""
    return _decode(message, _encoded_image)


def _encoded_image(fields: dict[str, Any]) -> EncodedImage:
    features = np.frombuffer(fields.pop("features"), np.uint8).reshape(fields.pop("shape"))
    return EncodedImage(**fields, features=features)


def encode_outputs(outputs: Sequence[RequestOutput]) -> bytes:
    """Outputs as a message."""
    return _encode(outputs)


def decode_outputs(message: bytes) -> list[RequestOutput]:
    """Inverse of `encode_outputs`. ConfigError: the message has another version, or cannot be read."""
    return _decode(message, outputs_from_plain)


def _encode(plain: Any) -> bytes:
    return bytes([WIRE_VERSION]) + packer()(plain)


def _decode(message: bytes, read: Callable[[Any], _Decoded]) -> _Decoded:
    """Read a message of this version from its plain data."""
    version = message[0] if message else 0
    if version != WIRE_VERSION:
        raise ConfigError(
            f"a message between a front and an engine has version {version}, but this process knows version "
            f"{WIRE_VERSION}. Run the same version of Saccade everywhere"
        )
    try:
        return read(unpack(message[1:]))
    except (ValueError, TypeError, LookupError, AttributeError, msgpack.UnpackException) as error:
        raise ConfigError(
            "a message between a front and an engine cannot be read. Run the same version of Saccade everywhere"
        ) from error

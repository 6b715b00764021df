"""Requests and outputs as plain data, which msgpack packs. Never a pickle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import numpy as np

from saccade.engine.request import Failure, ImageSpan, Request, RequestOutput, TokenLogprobs, new_output
from saccade.engine.sampling_params import SamplingParams


def packer() -> Callable[[Any], bytes]:
    """A function that packs plain data and outputs; one thread may call it at a time."""
    # Outputs are tuples; dataclasses in them, such as Failure, become tuples too.
    pack: Callable[[Any], bytes] = msgpack.Packer(use_bin_type=True, default=dataclasses.astuple).pack
    return pack


def unpack(data: bytes) -> Any:
    """Inverse of `packer`. Arrays are tuples."""
    return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=False)


def request_to_plain(request: Request) -> dict[str, Any]:
    """A request as plain data."""
    fields = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
    return fields | {
        "token_ids": np.asarray(request.token_ids, np.int32).tobytes(),
        "images": [dataclasses.asdict(span) for span in request.images],
        "sampling": dataclasses.asdict(request.sampling),
        "stop_ids": list(request.stop_ids),
    }


def request_from_plain(fields: Mapping[str, Any]) -> Request:
    """Inverse of `request_to_plain`, after packing and unpacking."""
    changed = {
        "token_ids": np.frombuffer(fields["token_ids"], np.int32).tolist(),
        "images": tuple([ImageSpan(**span) for span in fields["images"]]),
        "sampling": SamplingParams(**fields["sampling"]),
        "stop_ids": frozenset(fields["stop_ids"]),
    }
    return Request(**{**fields, **changed})


def outputs_from_plain(outputs: Sequence[tuple[Any, ...]]) -> list[RequestOutput]:
    """Outputs from their fields, after packing and unpacking."""
    return [_output(fields) for fields in outputs]


def _output(fields: tuple[Any, ...]) -> RequestOutput:
    _, _, logprobs, prompt_logprobs, _, failure, _, _ = fields
    output = new_output(fields)
    if not (logprobs or prompt_logprobs or failure):
        return output
    return output._replace(
        logprobs=_logprobs(logprobs),
        prompt_logprobs=_logprobs(prompt_logprobs),
        failure=Failure(*failure) if failure else None,
    )


def _logprobs(tokens: tuple[Any, ...]) -> tuple[TokenLogprobs, ...]:
    return tuple([TokenLogprobs(token_id, logprob, list(top)) for token_id, logprob, top in tokens])

"""What routing needs to know of a request: images by content, prefix blocks by hash, expected length of the answer."""

from __future__ import annotations

import hashlib
from itertools import groupby

import numpy as np

from saccade.engine.request import ImageSpan, Request
from saccade.fleet.replicas import PREFIX_BLOCK, Image, RoutedRequest

_KEY_BYTES = 16
_EXPECTED_TOKENS = 256
"""Tokens of an answer until the front has seen some."""
_WEIGHT = 0.05
"""Weight of the newest answer in the mean length of answers."""


class ExpectedLength:
    """Running mean of the lengths of answers."""

    def __init__(self) -> None:
        self._mean = float(_EXPECTED_TOKENS)

    def observe(self, num_tokens: int) -> None:
        """Count an answer that ran to its end."""
        self._mean += _WEIGHT * (num_tokens - self._mean)

    def of(self, request: Request) -> int:
        """Expected output tokens of a request that it has not emitted yet."""
        remaining = request.sampling.max_tokens - len(request.output_ids)
        return max(1, min(remaining, round(self._mean)))


def routed(request: Request, version: str, expected: ExpectedLength) -> RoutedRequest:
    """What routing needs to know of a request."""
    known = [*request.token_ids, *request.output_ids]
    return RoutedRequest(
        id=request.id, version=version, prompt_tokens=len(known), output_tokens=expected.of(request),
        images=tuple(_images(request)), prefix=prefix_keys(known, request.images, request.salt + _name(request)),
        adapter=request.adapter,
    )  # fmt: skip


def _name(request: Request) -> bytes:
    return b"" if request.adapter is None else request.adapter.encode()


def _images(request: Request) -> list[Image]:
    """Images of a request. Their keys are salted like the caches of an engine."""
    return [Image(_hash(request.salt, image.key), image.num_patches, image.end) for image in request.images]


def prefix_keys(token_ids: list[int], images: tuple[ImageSpan, ...], salt: bytes) -> tuple[bytes, ...]:
    """Hashes of the first 1, 2, 3, ... whole blocks of a prompt, with images by content and place."""
    ids = np.asarray(token_ids, np.int32)
    keys, key = [], _hash(salt)
    # Keys are chained, so an image counts from the block on in which it starts.
    in_block = {block: list(spans) for block, spans in groupby(images, lambda span: span.start // PREFIX_BLOCK)}
    for block in range(len(ids) // PREFIX_BLOCK):
        tokens = ids[block * PREFIX_BLOCK : (block + 1) * PREFIX_BLOCK].tobytes()
        spans = [part for span in in_block.get(block, ()) for part in (span.key, span.start.to_bytes(8, "little"))]
        key = _hash(key, tokens, *spans)
        keys.append(key)
    return tuple(keys)


def _hash(*parts: bytes) -> bytes:
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()

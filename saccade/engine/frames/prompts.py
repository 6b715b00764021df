"""A request and its prompt as plain data, with the patches of its images in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from saccade.engine.frames.plain import request_from_plain, request_to_plain
from saccade.engine.frames.shared_images import Place, map_patches
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import Request


def encode_prompt(request: Request, prompt: TokenPrompt, places: Sequence[Place]) -> dict[str, Any]:
    """A request and its prompt as plain data. `places`: the patches of its images (`SharedImages.share`)."""
    return {
        "request": request_to_plain(request),
        "positions": np.ascontiguousarray(prompt.positions, np.int64).tobytes(),
        "images": [
            {"grid": image.grid, "shape": image.patches.shape, "place": place, "is_encoded": image.is_encoded}
            for image, place in zip(prompt.images, places, strict=True)
        ],
    }


def decode_prompt(fields: Mapping[str, Any], fds: Sequence[int]) -> tuple[Request, TokenPrompt]:
    """Inverse of `encode_prompt`, after packing and unpacking. OSError: a segment is missing or cannot be mapped."""
    request, found = request_from_plain(fields["request"]), fields["images"]
    patches = map_patches(fds, [image["place"] for image in found], [image["shape"] for image in found])
    images = tuple(
        PromptImage(span=span, grid=image["grid"], patches=one, is_encoded=image["is_encoded"])
        for span, image, one in zip(request.images, found, patches, strict=True)
    )
    positions = np.frombuffer(fields["positions"], np.int64).reshape(3, -1)
    return request, TokenPrompt(token_ids=list(request.token_ids), positions=positions, images=images)

"""Assemble a prompt from the tokens of its text and its processed images."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator, Sequence

from saccade.engine.frontend.preprocessing.config import ProcessorMetadata
from saccade.engine.frontend.preprocessing.processed_images import ProcessedImage
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan
from saccade.errors import RequestError
from saccade.processor.parts import VisualKind, expand_placeholders, feature_spans, in_written_order


def assemble_prompt(
    token_ids: Sequence[int],
    kinds: Sequence[VisualKind],
    images: Sequence[ProcessedImage],
    metadata: ProcessorMetadata,
) -> TokenPrompt:
    """Expand the placeholder of each image and video into its tokens."""
    indices, written = find_placeholders(token_ids, kinds, metadata)
    images = in_written_order(written, kinds, images)
    expanded, positions, starts = expand_placeholders(token_ids, indices, [image.parts for image in images])
    prompt_images: list[PromptImage] = []
    for image in images:
        prompt_images += _prompt_images(image, starts[len(prompt_images) :])
    return TokenPrompt(token_ids=expanded, positions=positions, images=tuple(prompt_images))


def images_by_themselves(image: ProcessedImage) -> list[PromptImage]:
    """Each span of features of an image or video that is in no prompt."""
    return list(_prompt_images(image, [0] * len(feature_spans(image.parts))))


def _prompt_images(image: ProcessedImage, starts: Sequence[int]) -> Iterator[PromptImage]:
    """Each span of features of an image or video, with its first token and its patches."""
    spans, first = feature_spans(image.parts), 0
    for number, (span, start) in enumerate(zip(spans, starts, strict=False)):
        num_rows = span.length if image.is_encoded else span.num_patches
        patches = image.patches if len(spans) == 1 else image.patches[first : first + num_rows]
        key = image.key if len(spans) == 1 else hashlib.sha256(image.key + number.to_bytes(4)).digest()
        yield PromptImage(
            span=ImageSpan(key=key, start=start, num_tokens=span.length, num_patches=span.num_patches),
            grid=span.grid,
            patches=patches,
            is_encoded=image.is_encoded,
        )
        first += num_rows


def find_placeholders(
    token_ids: Sequence[int], kinds: Sequence[VisualKind], metadata: ProcessorMetadata
) -> tuple[list[int], list[VisualKind]]:
    """Indices and kinds of the placeholders, one per image and video."""
    kind_of: dict[int | None, VisualKind] = {metadata.image.token_id: "image", metadata.video.token_id: "video"}
    indices = [index for index, token_id in enumerate(token_ids) if token_id in kind_of]
    written = [kind_of[token_ids[index]] for index in indices]
    if sorted(written) != sorted(kinds):
        raise RequestError(
            f"the tokens have {len(indices)} placeholders of images or videos, but {len(kinds)} were given. "
            f"Put one {metadata.image.token_id} where each image belongs"
        )
    return indices, written


def plain_ids(token_ids: Sequence[int]) -> list[int]:
    """Token ids as Python integers."""
    try:
        ids = list(map(operator.index, token_ids))
    except TypeError as error:
        raise RequestError("token ids must be integers") from error
    if ids and min(ids) < 0:
        raise RequestError(f"token ids must not be negative; got {min(ids)}")
    return ids

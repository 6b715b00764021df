"""Rules on images: their size by the header, and whether they decode. Each yields its reason and the rows that break it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from saccade.data.curate.features import flat
from saccade.data.curate.settings import CurationSettings

Broken = tuple[str, NDArray[np.bool_]]
"""A rule's reason, and for each row whether it breaks the rule."""

INDEX_COLUMNS = ("error", "widths", "heights")
FEATURE_COLUMNS = ("image_error",)


def broken_image_rules(index: pa.Table, features: pa.Table, settings: CurationSettings) -> Iterator[Broken]:
    """In order. A sample of several images breaks a rule when one of them does."""
    errors = index["error"].to_pylist()
    yield "animated image", np.array([error is not None and ": animated " in error for error in errors], bool)
    yield "unreadable sample", np.array([error is not None for error in errors], bool)
    widths, owners = flat(index["widths"])
    heights, _ = flat(index["heights"])
    # A header that could not be read has no size; its sample is unreadable already.
    width, height = (side.fill_null(settings.min_side).to_numpy().astype(np.int64) for side in (widths, heights))

    def samples_of(images: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return np.bincount(owners[images], minlength=len(index)) > 0

    if settings.require_image:
        yield "no image", ~samples_of(np.ones(len(owners), bool))
    shorter, longer = np.minimum(width, height), np.maximum(width, height)
    yield "image too small", samples_of(shorter < settings.min_side)
    yield "image too large", samples_of(width * height > settings.max_pixels)
    yield "aspect ratio", samples_of(longer > settings.max_aspect_ratio * shorter)
    yield "corrupt image", features["image_error"].is_valid().to_numpy()

"""Counters of a preprocessor."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.engine.core.time_histogram import TimeHistogram


@dataclass(frozen=True, kw_only=True)
class PreprocessingStatistics:
    """Counters since the start."""

    num_prompts: int
    """Prompts that are ready, failed or cancelled."""
    num_processed: int
    """Images decoded, and patchified unless the device does it."""
    num_cache_hits: int
    """Images found in the processed-image cache."""
    num_shared: int
    """Images that were being preprocessed for another prompt."""
    num_worker_crashes: int
    """Worker processes that crashed or were killed."""
    num_cached: int
    """Images in the cache now."""
    cached_bytes: int
    """Size of the images in the cache."""
    num_unfinished: int
    """Prompts that are being preprocessed now."""
    decode_times: TimeHistogram
    """Times to decode an image or video, where workers did it."""
    preprocess_times: TimeHistogram
    """Times to resize an image or video and cut it into patches, where workers did it."""

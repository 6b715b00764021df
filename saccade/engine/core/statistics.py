"""Counters of an engine core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Statistics:
    """Counters since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    """Computed, without cached ones."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_images_encoded: int = 0
    num_encoder_cache_queries: int = 0
    """Images that requests asked the encoder cache for. One in a cached prefix is not asked for."""
    num_encoder_cache_hits: int = 0
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_failures: int = 0
    num_late_captures: int = 0
    """CUDA graphs captured while serving: each delays a step."""
    num_late_compiles: int = 0
    """Kernels compiled, or read from the cache, while serving: each delays a step."""
    num_eager_steps: int = 0
    """Steps that ran without a CUDA graph on a GPU that uses them."""
    num_running: int = 0
    num_waiting: int = 0
    num_free_pages: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""
    encode_counts: Sequence[int] = ()
    """Images by the seconds from the start of their encoding until it was seen to be complete, in buckets of `STAGE_SECONDS`."""
    encode_total_s: float = 0.0
    queue_counts: Sequence[int] = ()
    """Requests by the seconds they waited for a slot, in the same buckets."""
    queue_total_s: float = 0.0

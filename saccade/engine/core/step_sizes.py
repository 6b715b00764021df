"""Sizes of steps. A step is rounded up to one of a declared set of sizes; each is one CUDA graph. Plain Python."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

STEP_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 4352)
"""Tokens of captured steps with prefill. Larger steps run eagerly: the device is slower than their launch."""
MAX_PREFILL = 4096
"""Maximum prefill tokens of a step while no request decodes."""
MAX_CHUNKS = 32
"""Prefill requests of every captured step with prefill: a padding request without tokens costs next to nothing."""
MAX_DRAFTING = 8
"""Maximum running requests with which drafts pay on a GPU (`prompt_lookup.py`)."""
_MIXED_SAMPLES = 64
"""Samples of the smaller captured steps with prefill and decode, for when few requests decode."""


class StepSize(NamedTuple):
    """Size of a captured step: upper bounds of its tokens, requests and samples. Contexts may have any length."""

    num_tokens: int
    num_decode: int
    """Decode requests, of one token each."""
    num_chunks: int
    """Prefill requests. 0: decode alone, with a sample after every token."""
    num_samples: int

    @property
    def num_requests(self) -> int:
        """Decode and prefill requests."""
        return self.num_decode + self.num_chunks


def step_size(
    *, num_decode: int, num_tokens: int, num_chunks: int, num_samples: int, max_requests: int
) -> StepSize | None:
    """The captured size for a step with these requests, prefill tokens and samples. None: it runs eagerly."""
    if num_chunks == 0:
        tokens = _round_decode(num_decode)
        return StepSize(tokens, tokens, 0, tokens)
    num_tokens += num_decode
    if num_tokens > STEP_TOKENS[-1] or num_chunks > MAX_CHUNKS:
        return None
    tokens = STEP_TOKENS[bisect_left(STEP_TOKENS, num_tokens)]
    if num_decode == 0:
        return StepSize(tokens, 0, MAX_CHUNKS, _round_samples(num_samples))
    return StepSize(tokens, max_requests, MAX_CHUNKS, _round_mixed_samples(num_samples, max_requests))


def prefill_with_decode(budget: int, num_decode: int) -> int:
    """The most prefill tokens, up to `budget`, that fill a captured step together with `num_decode` decode tokens."""
    fitting = [tokens - num_decode for tokens in STEP_TOKENS if 0 < tokens - num_decode <= budget]
    return fitting[-1] if fitting else budget


def declared_sizes(max_requests: int, max_draft_tokens: int = 0) -> Iterator[StepSize]:
    """Sizes captured at start-up: decode alone, prefill with and without decode, and drafts of a few requests."""
    for tokens in sorted({_round_decode(n) for n in range(1, max_requests + 1)}):
        yield StepSize(tokens, tokens, 0, tokens)
    for tokens in STEP_TOKENS:
        yield StepSize(tokens, 0, MAX_CHUNKS, MAX_CHUNKS)
        most_samples = min(tokens, max_requests + MAX_CHUNKS)
        for samples in sorted({_round_mixed_samples(n, max_requests) for n in (1, most_samples)}):
            yield StepSize(tokens, max_requests, MAX_CHUNKS, samples)
    drafting = [n * (1 + max_draft_tokens) for n in range(1, min(MAX_DRAFTING, max_requests) + 1)]
    sizes = {(STEP_TOKENS[bisect_left(STEP_TOKENS, tokens)], _round_samples(tokens)) for tokens in drafting}
    yield from (StepSize(tokens, 0, MAX_CHUNKS, n) for tokens, n in sorted(sizes) if n > MAX_CHUNKS)


def _round_samples(num_samples: int) -> int:
    return MAX_CHUNKS if num_samples <= MAX_CHUNKS else 1 << (num_samples - 1).bit_length()


def _round_mixed_samples(num_samples: int, max_requests: int) -> int:
    without_drafts = max_requests + MAX_CHUNKS
    if num_samples <= min(_MIXED_SAMPLES, without_drafts):
        return min(_MIXED_SAMPLES, without_drafts)
    return without_drafts if num_samples <= without_drafts else _round_samples(num_samples)


def _round_decode(num_requests: int) -> int:
    if num_requests <= 8:
        return 1 << (num_requests - 1).bit_length()
    step = 8 if num_requests <= 64 else 32
    return -(-num_requests // step) * step


def largest_step(max_tokens: int, max_requests: int, max_draft_tokens: int) -> tuple[int, int, int]:
    """Tokens, requests and samples of the largest step, rounded up to a captured size."""
    decode, most_samples = _round_decode(max_requests), max_requests + MAX_CHUNKS * (1 + max_draft_tokens)
    samples = max(decode, _round_mixed_samples(most_samples, max_requests))
    return max(max_tokens, STEP_TOKENS[-1], decode), max(decode, max_requests + MAX_CHUNKS), samples

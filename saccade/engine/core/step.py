"""One engine step as plain data: the scheduler's plan in, the runner's result out.

Integers, ids and tuples alone, immutable: a plan can be sent to another process, or to several ranks, as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from saccade.engine.request import Failure, TokenLogprobs


class ImageFeatures(NamedTuple):
    """Where a chunk reads the features of an image."""

    image_index: int
    """Of the image in its request."""
    slots: tuple[int, ...]
    """Encoder-cache slots, in token order."""


class Chunk(NamedTuple):
    """The tokens of one request that one step computes."""

    request_id: str
    slot: int
    """Of the runner's tables."""
    start: int
    """Index of its first token."""
    num_tokens: int
    new_pages: tuple[int, ...]
    """Pages to append to the slot's page table before the step."""
    images: tuple[ImageFeatures, ...]
    """Images with a token in the chunk, in order."""
    reads_last_token: bool
    """Its first token is the one sampled last in this slot, which the host may not know yet."""
    drafts: tuple[int, ...]
    """Draft tokens that follow its first token."""
    samples: bool
    """Whether a token is sampled after its last token (with drafts: after each token)."""

    @property
    def end(self) -> int:
        """Index one past its last token."""
        return self.start + self.num_tokens


new_chunk = partial(tuple.__new__, Chunk)
"""Make a chunk of a tuple with all its fields, in half the time of `Chunk(...)`."""


class SlotStart(NamedTuple):
    """A request gets a slot: for the first time, or again after it was preempted."""

    request_id: str
    slot: int
    output_token_ids: tuple[int, ...]
    """Output tokens known so far; they are computed again like a prompt."""


ENCODER_PARTS = 4
"""Parts of a pass of the vision encoder, of as many blocks each: a long pass runs in several steps, between which requests decode."""


class ImageToEncode(NamedTuple):
    """An image whose features the encoder writes into the encoder cache."""

    request_id: str
    """One request that has it."""
    image_index: int
    """Of the image in that request."""
    key: bytes
    """Salted."""
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: copy pages, run the encoder, compute chunks, sample."""

    number: int
    """Steps planned before."""
    chunks: tuple[Chunk, ...] = ()
    """At most one per request."""
    images: tuple[ImageToEncode, ...] = ()
    """Encodings to start, in one pass of the encoder."""
    encoder_parts: int = 0
    """Parts to run of this pass, or of the one in progress: after the steps before, and before the chunks."""
    encodes_beside: bool = False
    """Whether the parts run beside the steps instead. A chunk that reads an image waits for it in any case."""
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, target) pages, copied before anything is written. No page is both, so the order does not matter."""
    started: tuple[SlotStart, ...] = ()
    """Requests that get a slot."""


class ChunkResult(NamedTuple):
    """What a chunk gave."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """Sampled tokens: with drafts the accepted ones and the one after them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of these tokens, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt tokens after those of the chunk, if requested."""
    failure: Failure | None = None
    """Set if the chunk could not be computed."""


new_chunk_result = partial(tuple.__new__, ChunkResult)
"""Make a result of a tuple with all its fields, in half the time of `ChunkResult(...)`."""


class EncodeResult(NamedTuple):
    """The end of an image's encoding."""

    key: bytes
    """Salted."""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step gave, in the order of its chunks."""

    number: int
    """Of the plan."""
    chunks: tuple[ChunkResult, ...]
    """One for each chunk of the plan."""
    images: tuple[EncodeResult, ...]
    """Encodings found complete since the step before, of this step or earlier ones."""
    duration_s: float = 0.0
    """From the first chunk to the last sampled token, on the device. Without what the encoder took before it."""

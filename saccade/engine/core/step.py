"""One engine step as plain data: the plan of the scheduler and the result of the runner.

Both are immutable and have integers, ids and tuples only, so that a plan can be sent to another process or to several ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from saccade.engine.request import Failure, TokenLogprobs


class ImageFeatures(NamedTuple):
    """Where a chunk reads the features of an image."""

    image_index: int
    """Index of the image in its request."""
    slots: tuple[int, ...]
    """Encoder-cache slots, in token order."""


class Chunk(NamedTuple):
    """The tokens of one request that one step computes."""

    request_id: str
    slot: int
    """Index into the tables of the runner."""
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


class SlotStart(NamedTuple):
    """A request that gets a slot, for the first time or again after it was preempted."""

    request_id: str
    slot: int
    output_token_ids: tuple[int, ...]
    """Output tokens known so far; they are computed again like a prompt."""


ENCODER_PARTS = 4
"""Parts of a pass of the vision encoder, of about as many blocks each. An image larger than a pass has a multiple of these."""


class ImageToEncode(NamedTuple):
    """An image whose features the encoder writes into the encoder cache."""

    request_id: str
    """One request that has it."""
    image_index: int
    """Index of the image in that request."""
    key: bytes
    """Its key with the salt of the request."""
    slots: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: copy pages, run the encoder, compute chunks, sample."""

    number: int
    """Steps planned before."""
    chunks: tuple[Chunk, ...] = ()
    """At most one per request."""
    images: tuple[ImageToEncode, ...] = ()
    """Images of a pass of the encoder that begins."""
    encoder_parts: int = 0
    """Parts to run of this pass, or of the one in progress, before the chunks."""
    pass_parts: int = 0
    """Parts that the pass of `images` is divided into, 0 if none begins."""
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, target) pages, copied before anything is written. No page is both, so the order does not matter."""
    started: tuple[SlotStart, ...] = ()
    """Requests that get a slot."""


class ChunkResult(NamedTuple):
    """Result of a chunk."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """Sampled tokens: with drafts the accepted ones and the one after them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of these tokens, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt tokens after those of the chunk, if requested."""
    failure: Failure | None = None
    """Set if the chunk could not be computed."""


class EncodeResult(NamedTuple):
    """Result of encoding an image."""

    key: bytes
    """Its key with the salt of the request."""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, in the order of its chunks."""

    number: int
    """Number of the plan."""
    chunks: tuple[ChunkResult, ...]
    """One for each chunk of the plan."""
    images: tuple[EncodeResult, ...]
    """Images whose encoding ended in this step."""
    duration_s: float = 0.0
    """Time on the device from the first chunk to the last sampled token, without the encoder's parts."""

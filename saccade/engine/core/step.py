"""One engine step as plain data: the plan of the scheduler and the result of the runner.

Both are immutable and hold only integers, ids and tuples, so that a plan can be sent to another process or to several
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from saccade.engine.request import Failure, TokenLogprobs


class ImageFeatures(NamedTuple):
    """The encoder-cache slots from which a chunk reads the features of an image."""

    image_index: int
    """Index of the image in its request."""
    slots: tuple[int, ...]
    """Encoder-cache slots of the whole image, in token order."""


class Chunk(NamedTuple):
    """The tokens of one request that one step computes."""

    request_id: str
    slot: int
    """Request slot: index into the tables of the runner."""
    start: int
    """Index of the chunk's first token in the request."""
    num_tokens: int
    new_pages: tuple[int, ...]
    """Pages to append to the slot's page table before the step runs."""
    images: tuple[ImageFeatures, ...]
    """Images with a token in the chunk, in order."""
    reads_last_token: bool
    """Whether the first token is the one sampled last in this slot, which the host may not know yet."""
    drafts: tuple[int, ...]
    """Draft tokens after the chunk's first token."""
    samples: bool
    """Whether a token is sampled after the last token (with drafts: after each token)."""

    @property
    def end(self) -> int:
        """Index one past the chunk's last token."""
        return self.start + self.num_tokens


class SlotStart(NamedTuple):
    """A request that gets a slot, at its first start or after a preemption."""

    request_id: str
    slot: int
    output_token_ids: tuple[int, ...]
    """Known output tokens, from before a preemption or from another engine; they are computed like a prompt."""


STEP_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3072, 4096, 4352)
"""Tokens of captured steps with prefill. Larger steps run eagerly: the device is slower than their launch."""
MAX_PREFILL = 4096
"""Maximum prefill tokens of a step while no request decodes."""
MAX_CHUNKS = 32
"""Prefill requests of every captured step with prefill: a padding request without tokens costs next to nothing."""
MAX_DRAFTING = 8
"""Maximum running requests with which drafts pay on a GPU (`prompt_lookup.py`)."""
ENCODER_PARTS = 4
"""Parts of a vision encoder pass, with about equally many blocks. A larger image has a multiple of these parts."""


class ImageToEncode(NamedTuple):
    """An image whose features the encoder writes into the encoder cache."""

    request_id: str
    """Id of a request that has the image."""
    image_index: int
    """Index of the image in that request."""
    key: bytes
    """Key of the image, salted with the request's salt."""
    slots: tuple[int, ...]
    """Encoder-cache slots to write, in token order."""


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: copy pages, run the encoder, compute chunks, sample."""

    number: int
    """Number of steps planned before this one."""
    chunks: tuple[Chunk, ...] = ()
    """Chunks to compute, at most one per request."""
    images: tuple[ImageToEncode, ...] = ()
    """Images of the encoder pass that begins in this step."""
    loads: tuple[ImageToEncode, ...] = ()
    """Images whose features came with their request: they are copied into the encoder cache before the chunks."""
    encoder_parts: int = 0
    """Parts of this pass, or of the pass in progress, to run before the chunks."""
    pass_parts: int = 0
    """Number of parts that the pass of `images` is divided into; 0 if no pass begins."""
    page_copies: tuple[tuple[int, int], ...] = ()
    """(source, target) pages to copy before the step writes any page. No page is both, so the order does not matter."""
    started: tuple[SlotStart, ...] = ()
    """Requests that get a slot."""


class ChunkResult(NamedTuple):
    """Result of a chunk."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    """Sampled tokens; with drafts, the accepted ones and the token after them."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of these tokens, if requested."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt tokens that the chunk's tokens predict, if requested."""
    failure: Failure | None = None
    """The reason if the chunk could not be computed."""


class EncodeResult(NamedTuple):
    """Result of encoding an image."""

    key: bytes
    """Key of the image, salted with the request's salt."""
    failure: Failure | None = None


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step."""

    number: int
    """Number of the plan."""
    chunks: tuple[ChunkResult, ...]
    """One result for each chunk of the plan, in order."""
    images: tuple[EncodeResult, ...]
    """Results of images whose encoding ended with this step."""
    duration_s: float = 0.0
    """Device time from the first chunk to the last sampled token, without the encoder's parts."""

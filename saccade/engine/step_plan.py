"""What one step computes: the scheduler's output, the runner's input. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.engine.request import ImageSpan, Request
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the scheduler."""

    max_requests: int
    """Requests that run at once; slots are numbered below it."""
    max_step_tokens: int
    """Tokens computed in a step."""
    max_step_patches: int
    """Patches encoded in a step; an image with more is encoded alone."""
    max_length: int
    """Tokens of prompt and output together."""
    max_draft_tokens: int = 0
    """Draft tokens per request and step."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_step_tokens", "max_step_patches", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 1 or more")


@dataclass(frozen=True, eq=False, slots=True)
class CachedImage:
    """An image and the encoder-cache slots of its features."""

    key: bytes
    """Salted."""
    span: ImageSpan
    slots: Sequence[int]
    """In token order. Not reassigned before the next plan, even if the request ends earlier."""


class Chunk(NamedTuple):
    """The tokens of one request that one step computes.

    A tuple: a step has hundreds, and a frozen dataclass takes four times as long to construct.
    """

    request: Request
    """It may have ended when the step runs; its results are dropped then."""
    slot: int
    start: int
    """Index of its first token."""
    num_tokens: int
    images: tuple[CachedImage, ...]
    """Images with a token in the chunk, in order."""
    pages: Sequence[int]
    """The request's own page table, which later steps append to: read it before the next plan is made."""
    reads_pending: bool
    """Its only token is not known yet: it is the last one sampled in this slot."""
    drafts: tuple[int, ...]
    """Draft tokens that follow its first token."""
    samples: bool
    """Whether a token is sampled after its last token (with drafts: after each token)."""

    @property
    def end(self) -> int:
        """Index one past its last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, eq=False)
class ImageToEncode:
    """An image whose features the step writes into the encoder cache before any chunk reads them."""

    key: bytes
    """Salted."""
    span: ImageSpan
    request: Request
    """One request that has it."""
    slots: Sequence[int]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One step: copy pages, encode images, compute chunks, sample."""

    chunks: list[Chunk]
    """At most one per request."""
    images: list[ImageToEncode]
    page_copies: list[tuple[int, int]]
    """(source, target) pages, copied before anything is written. No page is both, so the order does not matter."""
    started: list[Request]
    """Requests that got a slot. Each has a chunk, which names the slot."""
    preempted: list[Request]
    """Requests that lost slot and pages since the previous plan."""

"""What a step computes: the scheduler's decision, handed to the runner. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from saccade.engine.request import ImageSpan, Request
from saccade.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much there may be at once."""

    max_requests: int
    """Requests that run at once; rows are numbered below it."""
    max_step_tokens: int
    """Tokens computed in a step."""
    max_step_patches: int
    """Patches encoded in a step; an image that has more is encoded alone."""
    max_length: int
    """Tokens of prompt and answer together."""
    max_draft_tokens: int = 0
    """Tokens guessed ahead of a request in a step."""

    def __post_init__(self) -> None:
        for name in ("max_requests", "max_step_tokens", "max_step_patches", "max_length"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; use 1 or more")


@dataclass(frozen=True, eq=False, slots=True)
class PlacedImage:
    """An image and where its features lie in the image pool."""

    key: bytes
    """Salted."""
    image: ImageSpan
    places: Sequence[int]
    """In order of its tokens. They stay as they are until the next plan, even if the request ends before."""


class Chunk(NamedTuple):
    """The tokens of one request that are computed in one step.

    A tuple, because a step has hundreds and a frozen dataclass takes four times as long to make.
    """

    request: Request
    """It may have ended by the time the step runs; what the chunk then computes is dropped."""
    row: int
    start: int
    """Index of its first token."""
    num_tokens: int
    images: tuple[PlacedImage, ...]
    """Those that have a token in it, in order."""
    pages: Sequence[int]
    """The request's own page table, which later steps extend at its end: read it before the next plan is made."""
    reads_pending: bool
    """Its one token is not known yet: it is the one sampled last for this row."""
    drafts: tuple[int, ...]
    """Guesses of the tokens behind its first one, computed with it."""
    samples: bool
    """A token is sampled behind its last one, and with drafts behind each one."""

    @property
    def end(self) -> int:
        """Index behind its last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, eq=False)
class ImageToEncode:
    """An image whose features a step puts into the image pool before anything reads them."""

    key: bytes
    """Salted."""
    image: ImageSpan
    request: Request
    """One that has it."""
    places: Sequence[int]


@dataclass(frozen=True, eq=False)
class StepPlan:
    """A step: copy pages, encode images, compute chunks, sample."""

    chunks: list[Chunk]
    """At most one per request."""
    images: list[ImageToEncode]
    copies: list[tuple[int, int]]
    """(from, to) pages, copied before anything is written. No page is both, so they may be copied in any order."""
    began: list[Request]
    """Got a row: the runner sets up its tables. Each has a chunk, which names the row."""
    preempted: list[Request]
    """Lost row and pages since the plan before."""

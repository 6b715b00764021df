"""The protocol of a model that is evaluated, which the engine and any OpenAI-compatible server fulfil.

A conversation is OpenAI's messages; an image part is `{"type": "image", "image": encoded bytes}`. Methods are called
from several threads at once: a model batches what arrives together. A conversation that the model refuses raises
`RequestError`, which is recorded with the example; any other error ends the evaluation, which can be resumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Conversation = list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How answers are generated."""

    max_tokens: int = 64
    """Maximum tokens of an answer."""
    temperature: float = 0.0
    """Sampling temperature; 0: greedy."""
    seed: int = 0
    """Seed of sampling."""
    num_beams: int = 1
    """Beams of beam search; 1: none. Needs temperature 0."""
    ignore_eos: bool = False
    """Continue to `max_tokens` after the end of the turn."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated answer."""

    text: str
    """Text without special tokens."""
    num_prompt_tokens: int
    """Tokens of the prompt, images included."""
    num_tokens: int
    """Generated tokens."""
    finish_reason: str
    """Why the answer ended: `stop` or `length`."""


@dataclass(frozen=True)
class Likelihood:
    """Log-likelihood of a continuation: the sum over its tokens, without the end of the turn."""

    logprob: float
    num_tokens: int


class Model(Protocol):
    """A model that answers questions."""

    can_score: bool
    """Whether `log_likelihoods` works."""
    can_embed: bool
    """Whether `embed` works."""
    has_beam_search: bool
    """Whether `generate` can search with several beams."""

    def describe(self) -> dict[str, Any]:
        """Identify the model for the results folder: equal after a restart, different for other weights."""

    def generate(self, conversation: Conversation, decoding: Decoding) -> Answer:
        """Answer a conversation."""

    def log_likelihoods(self, conversation: Conversation, continuations: Sequence[str]) -> list[Likelihood]:
        """Return the log-likelihood of each continuation as the assistant's turn."""

    def embed(self, conversation: Conversation) -> list[float]:
        """Return the embedding of an image or a text."""

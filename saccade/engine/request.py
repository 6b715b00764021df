"""A request: what is asked for, how far it has come, how it ended. Plain Python, no torch.

A request has *known* tokens (its prompt, then what was sampled and read back) and *computed* ones (their keys and values lie in
its pages, or will once the steps under way have run). Serving it is letting computed tokens chase known ones: there is no prefill
phase and no decode phase. A token that was sampled but not yet read back is *pending*: its value is on the GPU alone.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from saccade.errors import ConfigError

FinishReason = Literal["stop", "length", "cancelled", "failed"]
Stage = Literal["preparing", "encoding", "running"]
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_STOP_IDS = 1024
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of an answer are chosen and when it ends."""

    temperature: float = 0.0
    """0 takes the likeliest token; above 0 the logits are divided by it and a token is drawn."""
    top_k: int | None = None
    """Draw among the k likeliest tokens only."""
    top_p: float = 1.0
    """Draw among the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Draw among tokens at least this many times as likely as the likeliest."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen in prompt or answer are divided by it if positive, multiplied if negative; 1 changes nothing."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time the answer has it."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    max_tokens: int = 256
    """The answer ends here at the latest."""
    min_tokens: int = 0
    """Tokens before which the answer cannot end by itself."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside those of the checkpoint."""
    ignore_eos: bool = False
    """Go on behind the checkpoint's end-of-turn tokens."""
    seed: int | None = None
    """Same seed and prompt, same tokens, whatever else is in the batch. None: one is drawn."""
    logprobs: int | None = None
    """Also return the log-probability of each token and of this many likeliest ones; 0 for the token's own alone."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. Such a request computes its whole prompt, whatever is cached."""

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, _is_within(self.temperature, 0, 100), "a number from 0 to 100")
        _check("top_k", self.top_k, self.top_k is None or _is_count(self.top_k, 1), "a whole number from 1")
        _check("top_p", self.top_p, _is_within(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and up to 1")
        _check("min_p", self.min_p, _is_within(self.min_p, 0, 1), "a number from 0 to 1")
        is_penalty = _is_within(self.repetition_penalty, 0, 100) and self.repetition_penalty > 0
        _check("repetition_penalty", self.repetition_penalty, is_penalty, "a number above 0, up to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), _is_within(getattr(self, name), -2, 2), "a number from -2 to 2")
        _check("max_tokens", self.max_tokens, _is_count(self.max_tokens, 1), "a whole number from 1")
        is_least = _is_count(self.min_tokens, 0) and self.min_tokens <= self.max_tokens
        _check("min_tokens", self.min_tokens, is_least, "a whole number from 0 to max_tokens")
        _check("seed", self.seed, self.seed is None or _is_count(self.seed, 0, 2**63 - 1), "0 up to 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(
                name,
                value,
                value is None or _is_count(value, 0, MAX_LOGPROBS),
                f"a whole number from 0 to {MAX_LOGPROBS}",
            )
        are_texts = isinstance(self.stop, tuple) and all(isinstance(stop, str) for stop in self.stop)
        is_short = (
            are_texts and len(self.stop) <= MAX_STOPS and all(0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop)
        )
        _check("stop", self.stop, is_short, f"a tuple of up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters")
        is_few = isinstance(self.stop_token_ids, tuple) and len(self.stop_token_ids) <= MAX_STOP_IDS
        are_ids = is_few and all(_is_count(token_id, 0) for token_id in self.stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, are_ids, f"a tuple of up to {MAX_STOP_IDS} token ids")
        are_biases = isinstance(self.logit_bias, dict) and len(self.logit_bias) <= MAX_BIASED_TOKENS
        are_biases = are_biases and all(
            _is_count(token_id, 0) and _is_within(bias, -100, 100) for token_id, bias in self.logit_bias.items()
        )
        _check("logit_bias", self.logit_bias, are_biases, f"up to {MAX_BIASED_TOKENS} token ids, each with -100 to 100")

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _is_count(value: object, least: int, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _check(name: str, value: object, is_fine: bool, expected: str) -> None:
    if not is_fine:
        raise ConfigError(f"{name} is {reprlib.repr(value)}; use {expected}")


@dataclass(frozen=True, kw_only=True)
class ImageSpan:
    """An image in the tokens of a request."""

    key: bytes
    """sha256 of its pixels, its size, and how they were made; equal keys mean equal features."""
    start: int
    """Its first token."""
    num_tokens: int
    """Tokens it takes."""
    num_patches: int
    """Patches the tower reads for it."""

    @property
    def end(self) -> int:
        """The token behind its last."""
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Failure:
    """Why a request failed."""

    stage: Stage
    """What was being done with it."""
    message: str
    """One line for the one who asked."""


@dataclass(eq=False, kw_only=True)
class Request:
    """One request in the engine. The scheduler alone changes it."""

    id: str
    """Not that of any other open request."""
    token_ids: list[int]
    """Known tokens: the prompt, then the answer as far as it was read back."""
    num_prompt_tokens: int
    """How many of them are the prompt."""
    images: tuple[ImageSpan, ...] = ()
    """In order of their tokens, not overlapping."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """How the answer is chosen and when it ends."""
    stop_ids: frozenset[int] = frozenset()
    """Every token that ends the answer: the checkpoint's, unless ignored, and the request's own."""
    priority: int = 0
    """Lower is served earlier; waiting makes up for it."""
    salt: bytes = b""
    """Requests share cached prefixes and images only with those of equal salt: tenant, adapter and weights."""

    arrival: int = 0
    """How many requests had been added before."""
    num_computed: int = 0
    """Tokens whose keys and values lie in its pages, counting steps under way."""
    num_pending: int = 0
    """Tokens sampled in steps under way."""
    pages: list[int] = field(default_factory=list)
    """Its pages, in order of its tokens."""
    row: int | None = None
    """Its place in the runner's tables while it runs."""
    num_cached: int = 0
    """Prompt tokens that were not computed, because a cache had them."""
    num_preemptions: int = 0
    """How often it lost its pages to another."""
    finish_reason: FinishReason | None = None
    """How it ended; None while it is open."""
    failure: Failure | None = None
    """Why, if it failed."""

    @property
    def num_tokens(self) -> int:
        """Tokens there are, counting pending ones."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_answered(self) -> int:
        """Tokens of the answer, counting pending ones."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def answer(self) -> list[int]:
        """Known tokens of the answer."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token: its own, and the likeliest ones as (token, log-probability), best first."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """An answer."""

    text: str
    """Up to a stop text, if one ended it."""
    token_ids: list[int]
    """With the token that ended it."""
    finish_reason: FinishReason
    """`stop`: it ended by itself or by a stop text; `length`: at `max_tokens` or the longest there can be."""
    num_prompt_tokens: int
    """Tokens of the prompt, those of images counted."""
    num_cached_tokens: int = 0
    """Prompt tokens that a cache had."""
    logprobs: list[TokenLogprobs] | None = None
    """Of each token, if asked for."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """None for the first token, which nothing predicts."""
    failure: Failure | None = None
    """Why it failed, if it did."""

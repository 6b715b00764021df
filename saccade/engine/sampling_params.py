"""How output tokens are chosen and when generation ends. Plain Python, no torch."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from saccade.engine.structured import StructuredOutput
from saccade.errors import ConfigError, RequestError

MAX_COMPLETIONS = 128
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LENGTH = 1000
MAX_STOP_IDS = 1024
MAX_BIASED_TOKENS = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How output tokens are chosen and when generation ends. Numpy scalars and lists are converted to plain Python."""

    n: int = 1
    """Completions per prompt. Completion i uses `seed + i`. Needs a temperature above 0, and `generate`."""
    temperature: float = 0.0
    """0: greedy decoding; above 0 the logits are divided by it and a token is sampled."""
    top_k: int | None = None
    """Sample among the k most likely tokens. None or -1: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens whose probabilities sum up to this."""
    min_p: float = 0.0
    """Sample among tokens with at least this fraction of the probability of the most likely one."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the output are divided by it if positive, multiplied if negative; 1: off."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it occurs in the output."""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens."""
    max_tokens: int = 256
    """Maximum number of output tokens."""
    min_tokens: int = 0
    """Output tokens before which no stop token or stop string ends generation."""
    stop: tuple[str, ...] = ()
    """Stop strings (one string or a sequence); they are not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end generation, in addition to those of the checkpoint."""
    ignore_eos: bool = False
    """Continue after the checkpoint's end-of-turn tokens."""
    seed: int | None = None
    """The same seed and prompt give the same tokens in any batch. None: a random seed."""
    logprobs: int | None = None
    """Return the log-probability of each output token and of this many most likely tokens. 0: no others."""
    structured: StructuredOutput | None = None
    """Form of the output: JSON, a regular expression, choices or a grammar (or a dict of the fields). The output ends
    when it is complete, or at `max_tokens`."""
    prompt_logprobs: int | None = None
    """The same as `logprobs` for each prompt token. The request does not use the prefix cache."""

    def __post_init__(self) -> None:
        self._normalize()
        self._check_numbers()
        self._check_lists()
        _check("ignore_eos", self.ignore_eos, isinstance(self.ignore_eos, bool), "true or false")
        is_form = self.structured is None or isinstance(self.structured, StructuredOutput)
        _check("structured", self.structured, is_form, "a StructuredOutput or a dict of its fields")
        if self.structured is not None and (self.ignore_eos or self.min_tokens):
            raise ConfigError("structured output ends where it is complete; leave out ignore_eos and min_tokens")
        if self.n > 1 and self.temperature == 0:
            raise ConfigError(f"n is {self.n} with temperature 0: all completions would be equal. Raise temperature")

    def _check_numbers(self) -> None:
        _check("n", self.n, _is_count(self.n, 1, MAX_COMPLETIONS), f"a whole number from 1 to {MAX_COMPLETIONS}")
        _check("temperature", self.temperature, _is_within(self.temperature, 0, 100), "a number from 0 to 100")
        is_top_k = self.top_k is None or _is_count(self.top_k, 1)
        _check("top_k", self.top_k, is_top_k, "a whole number from 1, or -1 for all")
        _check("top_p", self.top_p, _is_within(self.top_p, 0, 1) and self.top_p > 0, "a number above 0 and up to 1")
        _check("min_p", self.min_p, _is_within(self.min_p, 0, 1), "a number from 0 to 1")
        is_penalty = _is_within(self.repetition_penalty, 0.01, 100)
        _check("repetition_penalty", self.repetition_penalty, is_penalty, "a number from 0.01 to 100")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(name, getattr(self, name), _is_within(getattr(self, name), -2, 2), "a number from -2 to 2")
        _check("max_tokens", self.max_tokens, _is_count(self.max_tokens, 1), "a whole number from 1")
        is_least = _is_count(self.min_tokens, 0) and self.min_tokens <= self.max_tokens
        _check("min_tokens", self.min_tokens, is_least, "a whole number from 0 to max_tokens")
        _check("seed", self.seed, self.seed is None or _is_count(self.seed, 0, 2**63 - 1), "0 up to 2^63 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            is_fine = value is None or _is_count(value, 0, MAX_LOGPROBS)
            _check(name, value, is_fine, f"a whole number from 0 to {MAX_LOGPROBS}")

    def _check_lists(self) -> None:
        is_few = isinstance(self.stop, tuple) and len(self.stop) <= MAX_STOPS
        are_texts = is_few and all(isinstance(stop, str) and 0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop)
        _check("stop", self.stop, are_texts, f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
        is_few = isinstance(self.stop_token_ids, tuple) and len(self.stop_token_ids) <= MAX_STOP_IDS
        are_ids = is_few and all(_is_count(token_id, 0) for token_id in self.stop_token_ids)
        _check("stop_token_ids", self.stop_token_ids, are_ids, f"up to {MAX_STOP_IDS} token ids")
        is_few = isinstance(self.logit_bias, dict) and len(self.logit_bias) <= MAX_BIASED_TOKENS
        are_biases = is_few and all(
            _is_count(token_id, 0) and _is_within(bias, -100, 100) for token_id, bias in self.logit_bias.items()
        )
        _check("logit_bias", self.logit_bias, are_biases, f"up to {MAX_BIASED_TOKENS} token ids, each with -100 to 100")

    def _normalize(self) -> None:
        """Convert the values that users of numpy, vLLM or JSON pass to plain Python numbers, tuples and dicts."""
        values = {name: _plain(value) for name, value in vars(self).items()}
        if values["top_k"] == -1:
            values["top_k"] = None
        if isinstance(values["stop"], str):
            values["stop"] = (values["stop"],)
        for name in ("stop", "stop_token_ids"):
            if values[name] is None:
                values[name] = ()
            elif isinstance(values[name], list):
                values[name] = tuple(map(_plain, values[name]))
        if isinstance(values["structured"], Mapping):
            values["structured"] = StructuredOutput.from_dict(values["structured"])
        if values["logit_bias"] is None:
            values["logit_bias"] = {}
        elif isinstance(values["logit_bias"], dict):
            values["logit_bias"] = {_plain(key): _plain(bias) for key, bias in values["logit_bias"].items()}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside a model's vocabulary."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            unknown = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
            if unknown:
                raise RequestError(
                    f"{name} names token {unknown[0]}, but the model has tokens 0 to {vocab_size - 1}. "
                    "Use ids of its tokenizer"
                )

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the previous tokens."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _plain(value: Any) -> Any:
    """A Python number for a numpy scalar; anything else unchanged."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def _is_count(value: object, least: int, most: int = 2**31 - 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_within(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _check(name: str, value: object, is_fine: bool, expected: str) -> None:
    if not is_fine:
        raise ConfigError(f"{name} is {reprlib.repr(value)}; use {expected}")

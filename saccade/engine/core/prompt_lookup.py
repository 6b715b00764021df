"""Speculative decoding by prompt lookup: propose the tokens that followed the last few tokens when they occurred before. No torch.

    ... the red car is parked ... | the red      draft: car is parked

Outputs often repeat their prompt and themselves (names, code, tables, lists). The model computes all drafts in one step and keeps those
that it samples itself, so output tokens do not change at any temperature.

Drafting is switched on per request, when it pays: the lookup predicts every next token of a request on the host, at no cost on the device,
and compares. When enough recent tokens were predicted, the request drafts; when too few drafts are accepted, it stops.

What is enough depends on what a token more costs. On a CPU that is known from the times of earlier steps: a draft costs a token's share of a
step, an accepted one saves a request's share of a step (`min_rate`). With one request a step takes hardly longer with drafts; with
many, a draft costs as much as it saves. On a GPU a request that drafts also waits for the tokens of every step, while the others are a step ahead, so
that the rate is fixed there, and with many running requests nothing is looked up.

Per request, a table maps each n-gram to where it occurred last; it grows with the request. Tokens of images are in no n-gram and are
never drafted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from saccade.engine.core.request_state import RequestState
from saccade.engine.request import ImageSpan

START_RATE = 0.5
"""Fraction of recent tokens predicted at which a request starts drafting, unless costs are known."""
_HYSTERESIS = 0.1
"""How much lower the rate is at which it stops."""
_MIN_START_RATE, _MAX_START_RATE = 0.3, 0.9
WEIGHT, WEIGHT_ON_CPU = 0.1, 0.2
"""Weight of the newest token in that average. Seven predicted tokens in a row reach a rate of 0.5, on a CPU of 0.8: there a wrong start costs
little, as no step waits for another."""
_TOKENS_AT_ONCE = 4096
"""Tokens that enter the table per call, about 3 ms. A longer prompt takes several."""
_MAX_TOKENS = 32768
"""Of a longer prompt only the last tokens are indexed: the table takes about 300 bytes per token."""


@dataclass(eq=False)
class _History:
    """What is known of one request."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    """For each n-gram, the index after its last occurrence. Never the end of the text, which nothing follows yet."""
    num_indexed: int = 0
    """N-grams that end at this token or before are in the table."""
    predicted: int | None = None
    """Prediction of the next token."""
    num_known: int = 0
    """Tokens when it was made."""
    rate: float = 0.0
    """Fraction of recent tokens predicted."""
    is_drafting: bool = False


def min_rate(cost: float, num_drafts: int) -> float | None:
    """The rate of predicted tokens from which `num_drafts` drafts pay; None: they never do.

    cost: of one more token in a step, as a fraction of what a request's token costs without drafts. The drafts cost `cost * num_drafts`,
    and save a token each up to the first that is wrong: rate + rate^2 + ... of them.
    """
    if cost >= 1:
        return None
    low, high = 0.0, 1.0
    while high - low > 0.01:
        rate = (low + high) / 2
        pays = sum(rate**count for count in range(1, num_drafts + 1)) > cost * num_drafts
        low, high = (low, rate) if pays else (rate, high)
    return high


class PromptLookup:
    """Drafts for all requests."""

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 2, weight: float = WEIGHT) -> None:
        assert 1 <= min_ngram <= max_ngram, f"n-grams of {min_ngram} to {max_ngram} tokens"
        self._start, self._weight = START_RATE, weight
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[str, _History] = {}

    def is_drafting(self, state: RequestState) -> bool:
        """Whether the request drafts, and so has to wait for the tokens of its steps in flight."""
        history = self._histories.get(state.request.id)
        return history is not None and history.is_drafting

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        """Up to `num_tokens` draft tokens after the known ones of a request that drafts."""
        history = self._histories.get(state.request.id)
        if history is None or not history.is_drafting or num_tokens < 1:
            return ()
        self._index(history, state)
        start = self._find(history, state)
        return () if start is None else _copied(state, start, num_tokens)

    def observe(self, state: RequestState, num_new: int, num_drafts: int) -> None:
        """The request has `num_new` new known tokens, from a step with `num_drafts` drafts. None for a request whose samples depend on
        which drafts are accepted: with penalties or a grammar."""
        sampling = state.request.sampling
        if num_new == 0 or sampling.has_penalties or sampling.structured is not None:
            return
        history = self._histories.get(state.request.id)
        if history is None:
            history = _History(num_indexed=max(0, len(state.token_ids) - _MAX_TOKENS))
            self._histories[state.request.id] = history
        if num_drafts:
            self._learn(history, hits=num_new - 1, misses=min(1, num_drafts - num_new + 1))
        elif history.predicted is not None and history.num_known == len(state.token_ids) - 1:
            is_hit = history.predicted == state.token_ids[-1]
            self._learn(history, hits=int(is_hit), misses=int(not is_hit))
        else:
            self._learn(history, hits=0, misses=1)
        self._index(history, state)
        start = self._find(history, state)
        history.predicted = None if start is None else state.token_ids[start]
        history.num_known = len(state.token_ids)

    def set_cost(self, cost: float, num_drafts: int) -> None:
        """Draft where it pays at this cost, see `min_rate`."""
        rate = min_rate(cost, num_drafts)
        self._start = math.inf if rate is None or rate > _MAX_START_RATE else max(rate, _MIN_START_RATE)

    def pause(self) -> None:
        """Too many requests run for drafts to pay: none drafts."""
        for history in self._histories.values():
            history.is_drafting = False

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._histories.pop(request_id, None)

    def _learn(self, history: _History, *, hits: int, misses: int) -> None:
        kept = (1 - self._weight) ** hits
        history.rate = (kept * history.rate + 1 - kept) * (1 - self._weight) ** misses
        history.is_drafting = history.rate >= self._start - _HYSTERESIS * history.is_drafting

    def _index(self, history: _History, state: RequestState) -> None:
        """Index n-grams that end before the last token, some thousands at most."""
        start, ids, last = history.num_indexed, state.token_ids, history.last
        end = min(len(ids) - 1, start + _TOKENS_AT_ONCE)
        if start >= end:
            return
        for first, behind in _text_spans(state.request.images, end):
            for index in range(max(first, start) + 1, behind + 1):
                for length in self._lengths:
                    if index - length >= first:
                        last[tuple(ids[index - length : index])] = index
        history.num_indexed = end

    def _find(self, history: _History, state: RequestState) -> int | None:
        """The index after the longest n-gram that the tokens end with and that occurred before."""
        for length in self._lengths:
            index = history.last.get(tuple(state.token_ids[-length:]))
            if index is not None:
                return index
        return None


def _copied(state: RequestState, start: int, num_tokens: int) -> list[int]:
    """Tokens from `start` on, up to an image or the end of the output. After the last token the copies follow: a loop continues."""
    request, ids = state.request, state.token_ids
    stop = min((image.start for image in request.images if image.start >= start), default=start + num_tokens)
    copied: list[int] = []
    for index in range(start, min(start + num_tokens, stop)):
        behind = index - len(ids)
        copied.append(ids[index] if behind < 0 else copied[behind])
        if copied[-1] in request.stop_ids:
            break
    return copied


def _text_spans(images: Sequence[ImageSpan], end: int) -> Iterator[tuple[int, int]]:
    """Start and end of every run of text in the first `end` tokens."""
    first = 0
    for image in images:
        yield first, min(image.start, end)
        first = image.end
    yield first, end

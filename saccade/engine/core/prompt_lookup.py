"""Speculative decoding by prompt lookup: draft what followed an earlier occurrence of the last tokens. No torch.

    ... the red car is parked ... | the red      draft: car is parked

Outputs often repeat their prompt and themselves (names, code, tables, lists). The model computes all drafts in one
step and keeps those that it samples itself, so output tokens do not change at any temperature.

Each request starts and stops drafting on its own. For every request the host predicts the next token by lookup, at no
cost on the device, and compares it with the sampled one. When enough recent tokens were predicted, the request drafts;
when too few drafts are accepted, it stops.

The rate that is enough depends on the cost of one more token in a step. On a CPU the cost is known from the times of
earlier steps: a draft costs one more token, an accepted draft saves the request's share of a step (`min_rate`). With
one request, drafts hardly make a step longer; with many, a draft costs as much as it saves. On a GPU a request that
drafts also waits until its tokens are read, while other requests are planned a step ahead. So the rate is fixed there,
and with many running requests none drafts.

A table per request maps each n-gram to its last occurrence and grows with the request. Image tokens are in no n-gram
and are never drafted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from saccade.engine.core.request_state import RequestState
from saccade.engine.core.scheduler import Scheduler
from saccade.engine.core.statistics import Statistics
from saccade.engine.core.step import MAX_DRAFTING, StepPlan, StepResult
from saccade.engine.request import ImageSpan

START_RATE = 0.5
"""Fraction of recent tokens predicted at which a request starts drafting, if token costs are unknown."""
_HYSTERESIS = 0.1
"""The rate at which a request stops drafting is lower by this."""
_MIN_START_RATE, _MAX_START_RATE = 0.3, 0.9
WEIGHT, WEIGHT_ON_CPU = 0.1, 0.2
"""Weight of the newest token in the rate. On a CPU it is higher because a wrong start costs little: steps do not
overlap there."""
_TOKENS_AT_ONCE = 4096
"""Maximum tokens indexed per call, which takes about 3 ms. A longer prompt takes several calls."""
_MAX_TOKENS = 32768
"""Maximum tokens of a prompt that are indexed, its last ones: the table takes about 300 bytes per token."""


class Drafting:
    """Keeps `lookup` up to date with the steps of the engine loop: which requests draft, and what they may draft."""

    def __init__(self, max_draft_tokens: int, *, is_cpu: bool) -> None:
        """`max_draft_tokens`: maximum drafts per request and step, 1 or more."""
        self._max_draft_tokens, self._is_cpu = max_draft_tokens, is_cpu
        self.lookup = PromptLookup(weight=WEIGHT_ON_CPU if is_cpu else WEIGHT)
        """Proposes drafts to the planner."""

    def learn(
        self,
        plan: StepPlan,
        result: StepResult,
        scheduler: Scheduler,
        statistics: Statistics,
        token_cost: Callable[[int], float],
    ) -> None:
        """Count the drafts of a step and compare new tokens with predicted ones. `token_cost`: see `StepBudget`."""
        for chunk, given in zip(plan.chunks, result.chunks, strict=True):
            if chunk.drafts:
                statistics.num_draft_tokens += len(chunk.drafts)
                statistics.num_accepted_draft_tokens += max(0, len(given.token_ids) - 1)
        if self._is_cpu:
            num_decoding = sum([chunk.reads_last_token for chunk in plan.chunks])
            self.lookup.set_cost(token_cost(num_decoding), self._max_draft_tokens)
        elif scheduler.num_running > MAX_DRAFTING:
            self.lookup.pause()
            return
        for chunk, given in zip(plan.chunks, result.chunks, strict=True):
            state = scheduler.find(chunk.request_id)
            if state is not None:
                self.lookup.observe(state, len(given.token_ids), len(chunk.drafts))


@dataclass(eq=False)
class _History:
    """Lookup table and prediction rate of one request."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    """For each n-gram, the index of the token after its last occurrence, which is a known token."""
    num_indexed: int = 0
    """The table has the n-grams of this many leading tokens."""
    predicted: int | None = None
    """Prediction of the next token."""
    num_known: int = 0
    """Known tokens when the prediction was made."""
    rate: float = 0.0
    """Fraction of recent tokens predicted."""
    is_drafting: bool = False


def min_rate(cost: float, num_drafts: int) -> float | None:
    """The rate of predicted tokens above which `num_drafts` drafts pay. None: they never pay.

    `cost`: one more token in a step, as a fraction of a request's token without drafts. The drafts cost `cost *
    num_drafts` and save one token each up to the first wrong one, in expectation rate + rate^2 + ...
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
    """Proposes drafts for all requests, and decides which requests draft."""

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 2, weight: float = WEIGHT) -> None:
        assert 1 <= min_ngram <= max_ngram, f"n-grams of {min_ngram} to {max_ngram} tokens"
        self._start, self._weight = START_RATE, weight
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[str, _History] = {}

    def is_drafting(self, state: RequestState) -> bool:
        """Whether the request drafts, so that it has to wait until its tokens in flight are read."""
        history = self._histories.get(state.request.id)
        return history is not None and history.is_drafting

    def propose(self, state: RequestState, num_tokens: int) -> Sequence[int]:
        """Propose up to `num_tokens` tokens after the known ones, if the request drafts."""
        history = self._histories.get(state.request.id)
        if history is None or not history.is_drafting or num_tokens < 1:
            return ()
        self._index(history, state)
        start = self._find(history, state)
        return () if start is None else _copied(state, start, num_tokens)

    def observe(self, state: RequestState, num_new: int, num_drafts: int) -> None:
        """Learn from `num_new` new known tokens of a request, sampled in a step with `num_drafts` drafts.

        Requests with penalties or a grammar never draft: their samples depend on which drafts are accepted.
        """
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
        """Set the rate from which drafts pay at this cost; see `min_rate`."""
        rate = min_rate(cost, num_drafts)
        self._start = math.inf if rate is None or rate > _MAX_START_RATE else max(rate, _MIN_START_RATE)

    def pause(self) -> None:
        """Stop drafting for all requests: drafts do not pay while many requests run."""
        for history in self._histories.values():
            history.is_drafting = False

    def forget(self, request_id: str) -> None:
        """Drop the table of an ended request."""
        self._histories.pop(request_id, None)

    def _learn(self, history: _History, *, hits: int, misses: int) -> None:
        kept = (1 - self._weight) ** hits
        history.rate = (kept * history.rate + 1 - kept) * (1 - self._weight) ** misses
        history.is_drafting = history.rate >= self._start - _HYSTERESIS * history.is_drafting

    def _index(self, history: _History, state: RequestState) -> None:
        """Index n-grams that end before the last token, at most `_TOKENS_AT_ONCE` tokens per call."""
        start, ids, last = history.num_indexed, state.token_ids, history.last
        end = min(len(ids) - 1, start + _TOKENS_AT_ONCE)
        if start >= end:
            return
        for text_start, text_end in _text_spans(state.request.images, end):
            for index in range(max(text_start, start) + 1, text_end + 1):
                for length in self._lengths:
                    if index - length >= text_start:
                        last[tuple(ids[index - length : index])] = index
        history.num_indexed = end

    def _find(self, history: _History, state: RequestState) -> int | None:
        """The index after the last occurrence of the longest n-gram that the tokens end with."""
        for length in self._lengths:
            index = history.last.get(tuple(state.token_ids[-length:]))
            if index is not None:
                return index
        return None


def _copied(state: RequestState, start: int, num_tokens: int) -> list[int]:
    """Tokens from `start` up to an image or a stop token. Copies follow the last token, so that a loop continues."""
    request, ids = state.request, state.token_ids
    stop = min((image.start for image in request.images if image.start >= start), default=start + num_tokens)
    copied: list[int] = []
    for index in range(start, min(start + num_tokens, stop)):
        past_end = index - len(ids)
        copied.append(ids[index] if past_end < 0 else copied[past_end])
        if copied[-1] in request.stop_ids:
            break
    return copied


def _text_spans(images: Sequence[ImageSpan], end: int) -> Iterator[tuple[int, int]]:
    """Start and end of every run of text tokens among the first `end` tokens."""
    first = 0
    for image in images:
        yield first, min(image.start, end)
        first = image.end
    yield first, end

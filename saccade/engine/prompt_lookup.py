"""Speculative decoding by prompt lookup: draft the tokens that followed the last n-gram earlier in the request. No torch.

    ... the red car is parked ... | the red      draft: car is parked

Outputs repeat their prompt and themselves (names, code, tables, lists). The model computes all drafts in one step and accepts those
it would have sampled itself, so the output tokens do not change.

A table per request maps every n-gram of its text to where it last occurred. It grows with the request and is never rebuilt. Image
tokens are in no n-gram and are never drafted.

Rejected drafts cost other requests time. So each request keeps a running acceptance rate; once it falls below `_MIN_ACCEPTANCE`,
drafting pauses for a number of tokens. Then it is tried again; every trial that fails doubles the pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from saccade.engine.request import ImageSpan, Request

_MIN_ACCEPTANCE = 0.2
"""Drafting continues while at least this fraction of draft tokens is accepted."""
_INITIAL_ACCEPTANCE = 0.4
"""Assumed acceptance rate at the start of a trial."""
_WEIGHT = 0.1
"""Weight of one draft token in the running rate: seven rejected ones end a trial."""
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
"""Tokens without drafts after a failed trial; doubled after the next."""
_TOKENS_AT_ONCE = 4096
"""Tokens indexed per proposal, about 3 ms. A longer prompt takes several."""
_MAX_INDEXED = 32768
"""Of a longer prompt only the last tokens are indexed: the table takes about 300 bytes per token."""


@dataclass(eq=False)
class _History:
    """N-gram table and acceptance rate of one request."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    """For each n-gram, the index after its last occurrence. Never the end of the text, where nothing follows yet."""
    num_indexed: int = 0
    """N-grams that end at this token or earlier are in the table."""
    acceptance: float = _INITIAL_ACCEPTANCE
    """Running fraction of accepted draft tokens."""
    pause: int = _FIRST_PAUSE
    """Length of the next pause, in tokens."""
    resumes_at: int = 0
    """Number of tokens at which drafting resumes."""


class PromptLookup:
    """Proposes drafts for all requests. `propose` is the scheduler's `draft`; report the outcome to `observe`."""

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, f"n-grams of {min_ngram} to {max_ngram} tokens"
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[str, _History] = {}

    def propose(self, request: Request, num_tokens: int) -> Sequence[int]:
        """Up to `num_tokens` draft tokens; none if no n-gram matches.

        They follow the last occurrence of the longest n-gram that the request ends with. None for a request with penalties, whose
        logits depend on which drafts are accepted, and none after a token that ends the request.
        """
        if num_tokens < 1 or request.sampling.has_penalties:
            return ()
        history = self._history(request)
        if len(request.token_ids) < history.resumes_at:
            return ()
        self._index(history, request)
        start = self._find(history, request)
        return () if start is None else _copy_tokens(request, start, num_tokens)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Of `num_drafted` draft tokens of the request, the first `num_accepted` were accepted."""
        history = self._histories.get(request.id)
        if history is None or num_drafted == 0:
            return
        kept = (1 - _WEIGHT) ** num_drafted
        history.acceptance = kept * history.acceptance + (1 - kept) * num_accepted / num_drafted
        if history.acceptance > _INITIAL_ACCEPTANCE:
            history.pause = _FIRST_PAUSE
        elif history.acceptance < _MIN_ACCEPTANCE:
            history.acceptance = _INITIAL_ACCEPTANCE
            history.resumes_at = len(request.token_ids) + history.pause
            history.pause = min(2 * history.pause, _LONGEST_PAUSE)

    def forget(self, request: Request) -> None:
        """Drop the history of an ended request."""
        self._histories.pop(request.id, None)

    def _history(self, request: Request) -> _History:
        history = self._histories.get(request.id)
        if history is None:
            history = _History(num_indexed=max(0, len(request.token_ids) - _MAX_INDEXED))
            self._histories[request.id] = history
        return history

    def _index(self, history: _History, request: Request) -> None:
        """Index n-grams that end before the last token, `_TOKENS_AT_ONCE` at most."""
        start, ids, last = history.num_indexed, request.token_ids, history.last
        end = min(len(ids) - 1, start + _TOKENS_AT_ONCE)
        if start >= end:
            return
        for first, stop in _text_spans(request.images, end):
            for index in range(max(first, start) + 1, stop + 1):
                for length in self._lengths:
                    if index - length >= first:
                        last[tuple(ids[index - length : index])] = index
        history.num_indexed = end

    def _find(self, history: _History, request: Request) -> int | None:
        """The index after the last occurrence of the longest n-gram that the tokens end with."""
        for length in self._lengths:
            index = history.last.get(tuple(request.token_ids[-length:]))
            if index is not None:
                return index
        return None


def _copy_tokens(request: Request, start: int, num_tokens: int) -> list[int]:
    """Tokens from `start`, up to an image or a stop token. Past the last token the copies themselves are copied: a loop continues."""
    stop = min((image.start for image in request.images if image.start >= start), default=start + num_tokens)
    copied: list[int] = []
    for index in range(start, min(start + num_tokens, stop)):
        past_end = index - len(request.token_ids)
        copied.append(request.token_ids[index] if past_end < 0 else copied[past_end])
        if copied[-1] in request.stop_ids:
            break
    return copied


def _text_spans(images: Sequence[ImageSpan], end: int) -> Iterator[tuple[int, int]]:
    """[start, end) of every run of text in the first `end` tokens."""
    first = 0
    for image in images:
        yield first, min(image.start, end)
        first = image.end
    yield first, end

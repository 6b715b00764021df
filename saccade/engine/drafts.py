"""Guessing tokens ahead by looking them up: what stood behind the last few tokens when they stood here before. No torch.

    ... the red car is parked ... | the red      guess: car is parked

Answers repeat their prompt and themselves (names, code, tables, lists), so this pays where it pays, and costs a lookup where it
does not. The model computes all guesses in one step and keeps those it would have drawn itself: tokens stay the same.

Per request, a table says for every n-gram of its text where it stood last. It grows with the request and is never built anew.
Tokens of images are in no n-gram and are never guessed.

Guesses that are wrong cost the others time. So each request keeps an average of how many of its guessed tokens were right, newer
ones weighing more; once that falls below `_WORTH`, it makes no guesses for a while. Then it gets another try, which a few right
guesses turn into trust again and a few wrong ones end, with twice the pause behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from saccade.engine.request import ImageSpan, Request

_WORTH = 0.2
"""Guesses are made while at least this share of the tokens guessed is right."""
_TRY = 0.4
"""The share believed in at the beginning of a try."""
_WEIGHT = 0.1
"""Of one guessed token in the average: seven wrong ones end a try."""
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 1024
"""Tokens without guesses behind a try that failed; twice as many behind the next."""
_TOKENS_AT_ONCE = 4096
"""Tokens that enter the table per guess, about 3 ms. A longer prompt takes several."""
_MOST_TOKENS = 32768
"""Of a longer prompt only the last tokens are looked at: the table takes about 300 bytes per token."""


@dataclass(eq=False)
class _History:
    """What is known of one request."""

    last: dict[tuple[int, ...], int] = field(default_factory=dict)
    """For each n-gram, the place behind where it stood last. Never the end of the text, where nothing follows yet."""
    num_indexed: int = 0
    """N-grams that end at this token or before are in the table."""
    share: float = _TRY
    """Average of right tokens per guessed one."""
    pause: int = _FIRST_PAUSE
    """Tokens to be silent for when the next try fails."""
    resumes_at: int = 0
    """Number of tokens before which no guess is made."""


class PromptLookup:
    """Guesses for all requests. `propose` is the scheduler's `draft`; tell `observe` how each guess went."""

    def __init__(self, *, max_ngram: int = 3, min_ngram: int = 2) -> None:
        assert 1 <= min_ngram <= max_ngram, f"n-grams of {min_ngram} to {max_ngram} tokens"
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._histories: dict[str, _History] = {}

    def propose(self, request: Request, num_tokens: int) -> Sequence[int]:
        """Up to `num_tokens` tokens that may come next, none if there is no good guess.

        They follow the latest place where the request's last tokens stood before, as many of these as are found. None for a
        request with penalties, whose draws depend on which guesses are right, and none behind a token that ends the answer.
        """
        if num_tokens < 1 or request.sampling.has_penalties:
            return ()
        history = self._history(request)
        if len(request.token_ids) < history.resumes_at:
            return ()
        self._index(history, request)
        place = self._find(history, request)
        return () if place is None else _copied(request, place, num_tokens)

    def observe(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """Of `num_drafted` tokens guessed for the request, the first `num_accepted` were right."""
        history = self._histories.get(request.id)
        if history is None or num_drafted == 0:
            return
        kept = (1 - _WEIGHT) ** num_drafted
        history.share = kept * history.share + (1 - kept) * num_accepted / num_drafted
        if history.share > _TRY:
            history.pause = _FIRST_PAUSE
        elif history.share < _WORTH:
            history.share = _TRY
            history.resumes_at = len(request.token_ids) + history.pause
            history.pause = min(2 * history.pause, _LONGEST_PAUSE)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._histories.pop(request.id, None)

    def _history(self, request: Request) -> _History:
        history = self._histories.get(request.id)
        if history is None:
            history = _History(num_indexed=max(0, len(request.token_ids) - _MOST_TOKENS))
            self._histories[request.id] = history
        return history

    def _index(self, history: _History, request: Request) -> None:
        """Enter n-grams that end before the last token, some thousands at most."""
        start, ids, last = history.num_indexed, request.token_ids, history.last
        end = min(len(ids) - 1, start + _TOKENS_AT_ONCE)
        if start >= end:
            return
        for first, behind in _text_spans(request.images, end):
            for place in range(max(first, start) + 1, behind + 1):
                for length in self._lengths:
                    if place - length >= first:
                        last[tuple(ids[place - length : place])] = place
        history.num_indexed = end

    def _find(self, history: _History, request: Request) -> int | None:
        """The place behind the longest n-gram that the tokens end with and that stood somewhere before."""
        for length in self._lengths:
            place = history.last.get(tuple(request.token_ids[-length:]))
            if place is not None:
                return place
        return None


def _copied(request: Request, place: int, num_tokens: int) -> list[int]:
    """Tokens from `place` on, up to an image or the end of the answer. Behind the last token come the copies: a loop goes on."""
    stop = min((image.start for image in request.images if image.start >= place), default=place + num_tokens)
    copied: list[int] = []
    for number in range(place, min(place + num_tokens, stop)):
        behind = number - len(request.token_ids)
        copied.append(request.token_ids[number] if behind < 0 else copied[behind])
        if copied[-1] in request.stop_ids:
            break
    return copied


def _text_spans(images: Sequence[ImageSpan], end: int) -> Iterator[tuple[int, int]]:
    """First token and the one behind the last of every run of text in the first `end` tokens."""
    first = 0
    for image in images:
        yield first, min(image.start, end)
        first = image.end
    yield first, end

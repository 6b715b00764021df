"""Incremental detokenization of one request, with stop strings. Plain Python, no torch.

A stop string may span several tokens, so text that may begin one is held back. The stop string that is complete first
ends the text, however it is split into tokens. If several are complete at the same character, the longest counts. The
stop string and everything after it are not part of the text. A stop string within the first `min_tokens` tokens is
plain text.

Each character is visited once per stop string (Knuth-Morris-Pratt), so the cost per token does not grow with the
output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from saccade.engine.request import Completion, RequestOutput, Timings, TokenLogprobs
from saccade.engine.sampling_params import SamplingParams
from saccade.processor.text_stream import TextStream


class TextDelta(NamedTuple):
    """Text added by new tokens."""

    text: str
    is_stopped: bool
    """A stop string is complete: the request must end, and further tokens are dropped."""


class Detokenizer:
    """The text of one request. `decode` leaves out special tokens, as `Processor.decode` does."""

    def __init__(self, decode: Callable[[Sequence[int]], str], sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        """All tokens, up to the one that completed a stop string."""
        self.is_stopped = False
        """Whether a stop string ended the text."""
        self._decode = decode
        self._stream = TextStream(decode)
        self._is_silent = False  # the last token added no text
        self._matchers = [_StopMatcher(stop) for stop in sampling.stop]
        self._min_tokens = sampling.min_tokens
        self._held: deque[str] = deque()  # characters that may be the beginning of a stop string
        self._emitted: list[str] = []

    @property
    def text(self) -> str:
        """All text emitted so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Sequence[int]) -> TextDelta:
        """Add tokens; return the text that is final now."""
        # One by one if it matters which token completes a stop string.
        pushes = [(token_id,) for token_id in token_ids] if self._matchers else [token_ids]
        text = "".join([self._push(ids) for ids in pushes])
        self._emitted.append(text)
        return TextDelta(text, self.is_stopped)

    def finish(self) -> str:
        """End the text and return the text that was held back. A second call returns nothing."""
        if self.is_stopped:
            return ""
        text = self._match(self._stream.finish()) + "".join(self._held)
        self._held.clear()
        self._emitted.append(text)
        return text

    def completion(
        self,
        last: RequestOutput,
        *,
        num_prompt_tokens: int,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
        timings: Timings | None = None,
    ) -> Completion:
        """The completion of a request that ends with this output, without log-probabilities of dropped tokens."""
        self.finish()
        reason = "stop" if self.is_stopped else last.finish_reason
        assert reason is not None, f"request {last.request_id} has not ended"
        return Completion(
            text=self.text,
            token_ids=list(self.token_ids),
            finish_reason=reason,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            logprobs=None if logprobs is None else logprobs[: len(self.token_ids)],
            prompt_logprobs=prompt_logprobs,
            failure=None if self.is_stopped else last.failure,
            timings=timings or Timings(),
        )

    def _push(self, token_ids: Sequence[int]) -> str:
        if self.is_stopped:
            return ""
        self.token_ids += token_ids
        return self._match(self._new_text(token_ids))

    def _new_text(self, token_ids: Sequence[int]) -> str:
        """New text of the stream, which buffers tokens until they decode to text.

        The stream decodes its whole buffer for each token. A long run of tokens without text (ignored end-of-turn
        tokens, unused ids) would fill it, so the stream gets the first of them only. Such a token decodes to nothing
        even twice in a row, unlike a space, which decoders strip from the beginning.
        """
        if self._is_silent:
            token_ids = [token_id for token_id in token_ids if self._decode((token_id, token_id))]
        if not token_ids:
            return ""
        text = self._stream.push(token_ids)
        self._is_silent = not text
        return text

    def _match(self, text: str) -> str:
        """The part of held and new text that cannot begin a stop string. Sets `is_stopped` if one is complete."""
        if not self._matchers:
            return text
        can_stop = len(self.token_ids) > self._min_tokens
        for character in text:
            self._held.append(character)
            # A list, because every matcher must see the character.
            complete = [len(matcher.stop) for matcher in self._matchers if matcher.push(character)]
            if complete and can_stop:
                self.is_stopped = True
                text = self._release(keep=max(complete))
                self._held.clear()
                return text
        return self._release(keep=max(matcher.num_matched for matcher in self._matchers))

    def _release(self, *, keep: int) -> str:
        return "".join([self._held.popleft() for _ in range(len(self._held) - keep)])


class _StopMatcher:
    """How many characters of one stop string the text so far ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _fallback(stop)

    def push(self, character: str) -> bool:
        """Whether the text with this character ends with the whole stop string."""
        num = self.num_matched
        while num and self.stop[num] != character:
            num = self._fallback[num]
        num += self.stop[num] == character
        is_complete = num == len(self.stop)
        self.num_matched = self._fallback[num] if is_complete else num
        return is_complete


def _fallback(stop: str) -> list[int]:
    """The next smaller number of matched characters that also matches their end, for each such number."""
    fallback = [0, 0]
    for character in stop[1:]:
        num = fallback[-1]
        while num and stop[num] != character:
            num = fallback[num]
        fallback.append(num + (stop[num] == character))
    return fallback

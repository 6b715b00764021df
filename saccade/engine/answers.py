"""Token ids of one request to its text, as they arrive, up to its first stop string. Plain Python, no torch.

A stop string may be spread over several tokens, so text that may turn out to begin one is held back until it is clear. The stop
string that is complete first ends the answer, whatever the tokens are cut into; of those complete at the same character, the
longest. It and all behind it are not part of the text. One that is complete before the answer has had `min_tokens` tokens is
plain text: the token that completes it must come behind them, as the stop tokens that the sampler bans till then.

Each character is looked at once per stop string (Knuth, Morris and Pratt), so a token costs the same however long the answer is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from saccade.engine.request import Completion, Request, SamplingParams, TokenLogprobs
from saccade.processor.text_stream import TextStream


class AnswerDelta(NamedTuple):
    """What new tokens added."""

    text: str
    is_stopped: bool
    """A stop string is complete: the request must end, and further tokens are dropped."""


class Answer:
    """The text of one request. `decode` leaves out special tokens, as `Processor.decode` does."""

    def __init__(self, decode: Callable[[Sequence[int]], str], sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        """All tokens taken, up to the one that completed the stop string."""
        self.is_stopped = False
        """Whether a stop string ended the answer."""
        self._decode = decode
        self._stream = TextStream(decode)
        self._is_silent = False  # the last token gave the stream no text
        self._watches = [_Watch(stop) for stop in sampling.stop]
        self._min_tokens = sampling.min_tokens
        self._held: deque[str] = deque()  # characters that may begin a stop string
        self._given: list[str] = []

    @property
    def text(self) -> str:
        """All text given out so far."""
        return "".join(self._given)

    def push(self, token_ids: Sequence[int]) -> AnswerDelta:
        """Take new tokens, return the text that is certain now."""
        # One by one where it matters which token completes a stop string.
        pushes = [(token_id,) for token_id in token_ids] if self._watches else [token_ids]
        text = "".join([self._take(ids) for ids in pushes])
        self._given.append(text)
        return AnswerDelta(text, self.is_stopped)

    def finish(self) -> str:
        """No more tokens will come: the text that was held back. A second call gives none."""
        if self.is_stopped:
            return ""
        text = self._watch(self._stream.finish()) + "".join(self._held)
        self._held.clear()
        self._given.append(text)
        return text

    def completion(
        self,
        request: Request,
        *,
        logprobs: list[TokenLogprobs] | None = None,
        prompt_logprobs: list[TokenLogprobs | None] | None = None,
    ) -> Completion:
        """The whole answer of a request that has ended. `logprobs` may have entries for dropped tokens; they are cut off."""
        self.finish()
        reason = "stop" if self.is_stopped else request.finish_reason
        assert reason is not None, f"request {request.id} has not ended"
        return Completion(
            text=self.text,
            token_ids=list(self.token_ids),
            finish_reason=reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached,
            logprobs=None if logprobs is None else logprobs[: len(self.token_ids)],
            prompt_logprobs=prompt_logprobs,
            failure=None if self.is_stopped else request.failure,
        )

    def _take(self, token_ids: Sequence[int]) -> str:
        if self.is_stopped:
            return ""
        self.token_ids += token_ids
        return self._watch(self._text_of(token_ids))

    def _text_of(self, token_ids: Sequence[int]) -> str:
        """New text of the stream, which keeps tokens until they give some and decodes all it keeps again for each new one.

        So of a long run of tokens without text (ignored end-of-turn tokens, ids that stand for nothing) it gets only the first.
        Such a token gives no text even twice in a row, unlike a blank that a decoder strips from the beginning.
        """
        if self._is_silent:
            token_ids = [token_id for token_id in token_ids if self._decode((token_id, token_id))]
        if not token_ids:
            return ""
        text = self._stream.push(token_ids)
        self._is_silent = not text
        return text

    def _watch(self, text: str) -> str:
        """The part of held and new text that begins no stop string. Sets `is_stopped` at the first that is complete."""
        if not self._watches:
            return text
        can_stop = len(self.token_ids) > self._min_tokens
        for character in text:
            self._held.append(character)
            # Every watch must see the character, so this is a list.
            complete = [len(watch.stop) for watch in self._watches if watch.completes(character)]
            if complete and can_stop:
                self.is_stopped = True
                text = self._release(keep=max(complete))
                self._held.clear()
                return text
        return self._release(keep=max(watch.num_matched for watch in self._watches))

    def _release(self, *, keep: int) -> str:
        return "".join([self._held.popleft() for _ in range(len(self._held) - keep)])


class _Watch:
    """How much of one stop string the text seen so far ends with."""

    __slots__ = ("_fallback", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _fallback(stop)

    def completes(self, character: str) -> bool:
        """Take one more character; whether the text now ends with the whole stop string. Goes on behind it."""
        num = self.num_matched
        while num and self.stop[num] != character:
            num = self._fallback[num]
        num += self.stop[num] == character
        is_complete = num == len(self.stop)
        self.num_matched = self._fallback[num] if is_complete else num
        return is_complete


def _fallback(stop: str) -> list[int]:
    """For each number of matched characters, the next smaller number that their end matches as well."""
    fallback = [0, 0]
    for character in stop[1:]:
        num = fallback[-1]
        while num and stop[num] != character:
            num = fallback[num]
        fallback.append(num + (stop[num] == character))
    return fallback

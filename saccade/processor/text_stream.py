"""Incremental detokenization that never returns part of a character.

A token may be part of a multi-byte character, and some decoders treat the first token of a text differently. New text
is therefore the difference between decoding a short window with and without the new tokens, once it is complete.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 16
"""Maximum tokens of one character: four bytes, or a few combined characters."""


class TextStream:
    """`push(ids)` returns the text that is complete; `finish()` the rest. Concatenated they equal decoding at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_returned = 0  # leading tokens of the window whose text was returned

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens and return the new text."""
        before = len(self._window) - self._num_returned
        self._window += ids
        if not self._should_decode(before, before + len(ids)):
            return ""
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._num_returned :]  # the new tokens are the context of the next ones
        self._num_returned = len(self._window)
        return text

    def finish(self) -> str:
        """The remaining text; incomplete characters become the replacement character."""
        text = self._new_text()
        self._window, self._num_returned = [], 0
        return text

    @staticmethod
    def _should_decode(before: int, now: int) -> bool:
        """Whether to decode the window: while a character may be incomplete, and then at every doubling.

        A character is complete within a few tokens; longer text is invalid, and decoding it at doublings keeps the cost
        per token constant.
        """
        return now <= _LONGEST_CHARACTER or now.bit_length() > before.bit_length()

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._num_returned])) :]

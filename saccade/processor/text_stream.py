"""Token ids to text as they arrive, never half a character.

A token may hold part of a multi-byte character, and some decoders treat the first token of a text differently from the rest.
So new text is the difference between decoding a short window with and without the new tokens, given out once it is whole.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 16
"""Tokens of the longest sequence worth waiting for; four bytes, or a few joined characters that a tokenizer cuts apart."""


class TextStream:
    """`push(ids)` returns the text that became certain; `finish()` what is left. Joined, they equal decoding at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_given = 0  # leading tokens of the window whose text has been given out

    def push(self, ids: Sequence[int]) -> str:
        """Take new tokens, return the new text."""
        before = len(self._window) - self._num_given
        self._window += ids
        if not self._is_worth_a_look(before, before + len(ids)):
            return ""
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._window = self._window[self._num_given :]  # keep what was new as the context of what comes next
        self._num_given = len(self._window)
        return text

    def finish(self) -> str:
        """The rest, half characters included as the replacement character."""
        text = self._new_text()
        self._window, self._num_given = [], 0
        return text

    @staticmethod
    def _is_worth_a_look(before: int, now: int) -> bool:
        """Any character is whole within a few tokens. Where it is not, the text is broken: looking at it at every doubling keeps
        the cost of a token constant, however long that goes on."""
        return now <= _LONGEST_CHARACTER or now.bit_length() > before.bit_length()

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._num_given])) :]

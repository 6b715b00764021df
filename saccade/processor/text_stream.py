"""Token ids to text as they arrive, never half a character.

A token may hold part of a multi-byte character, and some decoders treat the first token of a text differently from the rest.
So new text is the difference between decoding a short window with and without the new tokens, given out once it is whole.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"


class TextStream:
    """`push(ids)` returns the text that became certain; `finish()` what is left. Joined, they equal decoding at once."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._num_given = 0  # leading tokens of the window whose text has been given out

    def push(self, ids: Sequence[int]) -> str:
        """Take new tokens, return the new text."""
        self._window += ids
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

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._num_given])) :]

"""Limits on the body of a request. A body whose text cannot fit into the context is refused while it arrives."""

from __future__ import annotations

from dataclasses import dataclass

from saccade.serve.errors import CLOSE, ApiError

MAX_CHARACTERS_PER_TOKEN = 64
"""Characters that a token has at most; longer ones are runs of white space."""
_BYTES_PER_CHARACTER = 6
"""Bytes of an escaped character, such as `\\u20ac`. One outside the basic plane takes twice as many, but is a token of
its own."""
_OTHER_BYTES = 2**20
"""Allowance for what is no part of a prompt, such as a schema, settings and labels."""
_URL_BEGINS = b'"data:'


@dataclass(frozen=True, kw_only=True)
class BodyLimits:
    """Limits of one body."""

    max_depth: int
    """Maximum nesting."""
    max_length: int | None
    """Maximum tokens of a prompt; None: the engine is not loaded."""
    max_prompts: int = 1
    """Maximum prompts of the request."""

    def check_text(self, num_bytes: int) -> None:
        """Refuse a body with `num_bytes` outside of data URLs if no prompt of that size fits."""
        if self.max_length is None:
            return
        max_characters = self.max_prompts * self.max_length * MAX_CHARACTERS_PER_TOKEN
        if num_bytes > (max_bytes := _OTHER_BYTES + max_characters * _BYTES_PER_CHARACTER):
            raise too_long(self.max_length, f"the request has more than {max_bytes} bytes without its images")


def too_long(max_length: int, what: str) -> ApiError:
    """Return the error of a request whose text cannot fit. The rest of its body is not read."""
    message = f"This model's maximum context length is {max_length} tokens; {what}. Shorten it"
    return ApiError(400, message, code="context_length_exceeded", headers=CLOSE)


class TextCounter:
    """Counts the bytes of a body that are not in data URLs, which hold images and videos."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes outside of data URLs so far."""
        self._is_in_url = False
        self._end = b""
        """Last bytes of the previous part, with which a data URL may begin."""

    def add(self, part: bytes) -> int:
        """Count the next part of the body; return the bytes outside of data URLs so far."""
        data, at = self._end + part, 0
        self.num_bytes += len(part)
        while (found := data.find(b'"' if self._is_in_url else _URL_BEGINS, at)) >= 0:
            if self._is_in_url:
                self.num_bytes -= found - at
            at = found + (1 if self._is_in_url else len(_URL_BEGINS))
            self._is_in_url = not self._is_in_url
        if self._is_in_url:
            self.num_bytes -= len(data) - at
        self._end = b"" if self._is_in_url else data[max(at, len(data) - len(_URL_BEGINS) + 1) :]
        return self.num_bytes

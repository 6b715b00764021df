"""The state of one request's grammar."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from saccade.engine.core.grammar.vocabulary import Vocabulary

logger = logging.getLogger(__name__)


class GrammarState:
    """The position of a request's output in its grammar. Use it from one thread at a time."""

    def __init__(self, matcher: Any, vocabulary: Vocabulary, kind: str, on_failure: Callable[[], None]) -> None:
        """`matcher` is copied. `kind` is the request's field. `on_failure` is called if the grammar may be unusable."""
        self.error: str | None = None
        """Reason why the request cannot continue, if any. Its masks then allow only the end of the sequence."""
        self.lexer_id = id(matcher)
        """Identifies the lexer, which several states may share."""
        self.matcher = matcher.deep_copy()
        self.vocabulary = vocabulary
        self._kind, self._on_failure = kind, on_failure

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete, so that only the end of the sequence may follow."""
        return bool(self.matcher.is_stopped()) and self.error is None

    def accept(self, token_ids: Iterable[int]) -> bool:
        """Advance by sampled tokens.

        False, with `error` set: a token is not allowed, a limit is exceeded, or the library failed.
        """
        if self.error is not None:
            return False
        try:
            is_accepted = all(self.matcher.consume_token(token_id) for token_id in token_ids)
        except BaseException as error:  # a panic of the library is not an Exception
            self.fail_by(error)
            return False
        if not is_accepted:
            self.fail("the output left the grammar, or the grammar became too complex")
        return is_accepted

    def fail(self, reason: str) -> None:
        """Set `error`. The next request compiles the grammar again, as its lexer may be unusable."""
        self.error = self.error or f"structured.{self._kind}: {reason}"
        self._on_failure()

    def check(self) -> None:
        """Set `error` if the matcher is in an error state."""
        if self.error is not None:
            return
        try:
            is_error = self.matcher.is_error()
        except BaseException as error:
            self.fail_by(error)
        else:
            if is_error:
                self.fail("the grammar became too complex")

    def fail_by(self, error: BaseException) -> None:
        """Set `error` after an exception of the library."""
        logger.warning("llguidance failed on a %s: %r", self._kind, error, exc_info=error)
        self.fail("the grammar cannot be continued")

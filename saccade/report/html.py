"""Text that is already HTML, and the escaping of all other text."""

from __future__ import annotations

from html import escape


class Html(str):
    """Text that is already HTML and is not escaped again."""


def to_html(value: object) -> str:
    """A value as HTML: text is escaped, `Html` stays, None is empty."""
    return value if isinstance(value, Html) else escape("" if value is None else str(value))

"""Errors as clients see them: in OpenAI's shape, with a typed code and a message of ours, never that of a library.

{"error": {"message": "...", "type": "invalid_request_error", "param": "messages[0].content", "code": "invalid_value"}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from saccade.engine.request import Failure, FailureKind

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    421: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_STATUS_OF_FAILURE: dict[FailureKind, int] = {
    "invalid_request": 400,
    "context_length_exceeded": 400,
    "overloaded": 429,
    "unavailable": 503,
    "timeout": 504,
    "non_finite_logits": 500,
    "out_of_memory": 503,
    "internal_error": 500,
    "engine_stopped": 503,
}


CLOSE = {"connection": "close"}
"""Headers of an answer after which the rest of the body is not read."""


class ApiError(HTTPException):
    """A request that is refused or has failed."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`retry_after_s` becomes a Retry-After header, which clients honour."""
        retry = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
        super().__init__(status, message, {**(headers or {}), **retry})
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """Body of the response, as JSON."""
        fields = {"message": self.detail, "type": _TYPES.get(self.status_code, "invalid_request_error")}
        return {"error": {**fields, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """Return the HTTP response."""
        return Response(orjson.dumps(self.body), self.status_code, dict(self.headers or {}), "application/json")


def error_of_failure(failure: Failure) -> ApiError:
    """Return the error of a request that failed in the engine."""
    status = _STATUS_OF_FAILURE[failure.kind]
    message = failure.message
    if failure.kind == "engine_stopped":
        message = "the engine stopped while it worked on this request; it is being restarted, send the request again"
    return ApiError(status, message, code=failure.kind, retry_after_s=2.0 if status in (429, 503) else None)


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """Return the error of a request that can never be served as it is."""
    return ApiError(400, message, code=code, param=param)


# ------------------------------------------------------------------ validation errors of pydantic, in our words

_TYPE_WORDS = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
}
"""What a value must be; a union has several of these."""

_WORDS = {
    "missing": ("is required", "missing_required_parameter"),
    "prompt_or_messages": ("must have prompt or messages, one of them", "missing_required_parameter"),
    "extra_forbidden": ("is not a field of this request", "unknown_parameter"),
    "none_required": ("is not supported; leave it out", "unsupported_parameter"),
    "value_error": ("must be false or left out", "unsupported_parameter"),
    "string_pattern_mismatch": ("has characters that are not allowed, or too many", "invalid_value"),
    "finite_number": ("must be a finite number", "invalid_value"),
    "union_tag_not_found": ("has no {discriminator}", "missing_required_parameter"),
    "union_tag_invalid": ("has {discriminator} {tag}; use one of {expected_tags}", "invalid_value"),
    "greater_than": ("must be above {gt}", "invalid_value"),
    "greater_than_equal": ("must be at least {ge}", "invalid_value"),
    "less_than": ("must be below {lt}", "invalid_value"),
    "less_than_equal": ("must be at most {le}", "invalid_value"),
    "too_short": ("has too few entries; at least {min_length} are needed", "invalid_value"),
    "too_long": ("has too many entries; at most {max_length} are allowed", "invalid_value"),
    "string_too_short": ("must have at least {min_length} characters", "invalid_value"),
    "string_too_long": ("must have at most {max_length} characters", "invalid_value"),
}


def validation_error(
    errors: Sequence[Mapping[str, Any]], body: object, unsupported: Mapping[str, str] | None = None
) -> ApiError:
    """Return one error for what pydantic found; of the errors of a union's types, the one that fits best.

    `unsupported` has reasons for known fields that this server does not support.
    """
    if isinstance(body, bytes) or body is None:
        return bad_request("the body must be a JSON object", code="invalid_json")
    found = [(_path(error, body), error) for error in errors]
    path, error = max(found, key=lambda one: _fit(*one))
    param = _spell(path) or None
    name = param or "the body"
    if error["type"] in _TYPE_WORDS:
        alike = [one for own, one in found if own == path and one["type"] in _TYPE_WORDS]
        code = "invalid_value" if error["type"] == "literal_error" else "invalid_type"
        return bad_request(
            f"{name} must be {_any_of([_fill(_TYPE_WORDS[one['type']], one) for one in alike])}", param=param, code=code
        )
    if error["type"] == "extra_forbidden" and (reason := (unsupported or {}).get(str(path[-1]))):
        return bad_request(f"{name} is not supported: {reason}", param=param, code="unsupported_parameter")
    words, code = _WORDS.get(error["type"], ("is not valid", "invalid_value"))
    return bad_request(f"{name} {_fill(words, error)}", param=param, code=code)


def _fit(path: Sequence[str | int], error: Mapping[str, Any]) -> tuple[bool, int, list[int]]:
    """How well a value fits the type of an error: by that type, the depth of the error, its place in lists."""
    return error["type"] not in _TYPE_WORDS, len(path), [part if isinstance(part, int) else 0 for part in path]


def _fill(words: str, error: Mapping[str, Any]) -> str:
    return words.format_map({key: str(value)[:200] for key, value in (error.get("ctx") or {}).items()})


def _any_of(words: Sequence[str]) -> str:
    """Join words without repetition: `a string, an integer or a list`."""
    *first, last = dict.fromkeys(words)
    if not first:
        return last
    comma = "," if " or " in first[-1] else ""
    return f"{', '.join(first)}{comma} or {last}"


_UNKNOWN = object()


def _path(error: Mapping[str, Any], body: object) -> list[str | int]:
    """Return where in the body an error is.

    pydantic's location contains the names of union types as well; the value that it found wrong tells them from fields.
    """
    parts = list(error["loc"][1:])
    if error["type"] == "missing":
        return [*(_walk(parts[:-1], body, error.get("input", _UNKNOWN)) or ()), *parts[-1:]]
    return _walk(parts, body, error.get("input", _UNKNOWN)) or _walk(parts, body, _UNKNOWN) or []


def _walk(parts: Sequence[Any], node: object, value: object) -> list[str | int] | None:
    """Return those parts of a location that lead to the value, or None if no choice of them does."""
    if not parts:
        return [] if node is value or value is _UNKNOWN else None
    part, *rest = parts
    if _has(node, part) and (found := _walk(rest, node[part], value)) is not None:
        return [part, *found]
    return _walk(rest, node, value)


def _has(node: object, part: object) -> TypeGuard[Any]:
    if isinstance(part, int):
        return isinstance(node, list) and part < len(node)
    return isinstance(node, dict) and part in node


def _spell(path: Sequence[str | int]) -> str:
    """Write the parts of a location as `messages[0].content`; a field name of the client is cut to a bounded length."""
    spelled = ""
    for part in path:
        spelled += f"[{part}]" if isinstance(part, int) else f".{part[:100]}"
    return spelled.removeprefix(".")

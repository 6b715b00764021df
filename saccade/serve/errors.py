"""Errors as clients see them: OpenAI's shape, a typed code, and text of our own; never an exception of a library.

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
    "timeout": 504,
    "non_finite_logits": 500,
    "out_of_memory": 503,
    "internal_error": 500,
    "engine_stopped": 503,
}


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
        """The JSON body."""
        fields = {"message": self.detail, "type": _TYPES.get(self.status_code, "invalid_request_error")}
        return {"error": {**fields, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The HTTP response."""
        return Response(orjson.dumps(self.body), self.status_code, dict(self.headers or {}), "application/json")


def error_of_failure(failure: Failure) -> ApiError:
    """The error of a request that failed in the engine."""
    status = _STATUS_OF_FAILURE[failure.kind]
    message = failure.message
    if failure.kind == "engine_stopped":
        message = "the engine stopped while it worked on this request; it is being restarted, send the request again"
    return ApiError(status, message, code=failure.kind, retry_after_s=2.0 if status in (429, 503) else None)


def bad_request(message: str, *, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A request that can never be served as it is."""
    return ApiError(400, message, code=code, param=param)


# ------------------------------------------------------------------ validation errors of pydantic, in our words

_WORDS = {
    "missing": ("is required", "missing_required_parameter"),
    "extra_forbidden": ("is not a field of this request", "unknown_parameter"),
    "string_type": ("must be a string", "invalid_type"),
    "int_type": ("must be an integer", "invalid_type"),
    "float_type": ("must be a number", "invalid_type"),
    "bool_type": ("must be true or false", "invalid_type"),
    "list_type": ("must be a list", "invalid_type"),
    "dict_type": ("must be an object", "invalid_type"),
    "model_type": ("must be an object", "invalid_type"),
    "model_attributes_type": ("must be an object", "invalid_type"),
    "none_required": ("is not supported; leave it out", "unsupported_parameter"),
    "value_error": ("must be false or left out", "unsupported_parameter"),
    "string_pattern_mismatch": ("has characters that are not allowed, or too many", "invalid_value"),
    "finite_number": ("must be a finite number", "invalid_value"),
    "union_tag_not_found": ("has no {discriminator}", "missing_required_parameter"),
    "union_tag_invalid": ("has {discriminator} {tag}; use one of {expected_tags}", "invalid_value"),
    "literal_error": ("must be {expected}", "invalid_value"),
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
    """One error for what pydantic found: the one deepest in the body, which is the most specific of a union's.

    `unsupported` has reasons for known fields that this server does not support.
    """
    if isinstance(body, bytes) or body is None:
        return bad_request("the body must be a JSON object", code="invalid_json")
    found = [(_path(error["loc"], body), error) for error in errors]
    path, error = max(found, key=lambda one: len(one[0]))
    param = _spell(path) or None
    name = param or "the body"
    if error["type"] == "extra_forbidden" and (reason := (unsupported or {}).get(str(path[-1]))):
        return bad_request(f"{name} is not supported: {reason}", param=param, code="unsupported_parameter")
    words, code = _WORDS.get(error["type"], ("is not valid", "invalid_value"))
    context = {key: str(value)[:200] for key, value in (error.get("ctx") or {}).items()}
    return bad_request(f"{name} {words.format_map(_Context(context))}", param=param, code=code)


class _Context(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return key


def _path(loc: Sequence[Any], body: object) -> list[str | int]:
    """The location without "body" and the names of union branches: what exists in the body, and a last missing field."""
    path: list[str | int] = []
    node = body
    parts = list(loc[1:])
    for number, part in enumerate(parts):
        if _has(node, part):
            node = node[part]
        elif not (number == len(parts) - 1 and isinstance(part, str) and isinstance(node, dict)):
            continue
        path.append(part)
    return path


def _has(node: object, part: object) -> TypeGuard[Any]:
    if isinstance(part, int):
        return isinstance(node, list) and part < len(node)
    return isinstance(node, dict) and part in node


def _spell(path: Sequence[str | int]) -> str:
    """`messages[0].content` of its parts; a field name of the client is cut to a sane length."""
    spelled = ""
    for part in path:
        spelled += f"[{part}]" if isinstance(part, int) else f".{part[:100]}"
    return spelled.removeprefix(".")

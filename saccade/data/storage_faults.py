"""Faults of storage: which may pass with another attempt, and what to tell the user about the others."""

from __future__ import annotations

import asyncio
import errno
import re

MISSING = "There is no such file or folder: check the path"
DENIED = "Access is denied: check the credentials, and that they may read this path"
TRANSIENT = "The connection or the server failed each time: check both, then run again"
_OTHER = "Check the path and the server"

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}
_TRANSIENT_CODES = {
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "RequestTimeout",
    "InternalError",
    "ServiceUnavailable",
}
_TRANSIENT_ERRNO = {
    errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE, errno.EHOSTUNREACH,
    errno.ENETUNREACH, errno.ENETDOWN, errno.EBUSY, errno.EAGAIN, errno.EINTR,
}  # fmt: skip
_TRANSIENT_CLASSES = {
    "ClientConnectionError",
    "ClientPayloadError",
    "HTTPClientError",
    "TransportError",
    "ProtocolError",
}
"""Base classes of connection errors: aiohttp's (two), botocore's, httpx's, urllib3's."""


def fault_of(error: BaseException) -> str:
    """What to tell the user; `TRANSIENT` if another attempt may succeed.

    The root cause decides: fsspec's HTTP filesystem raises "file not found" for every failed request.
    """
    chain = [error]
    while len(chain) < 5 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    for each in reversed(chain):
        status = _status(each)
        if isinstance(each, FileNotFoundError) or status in (404, 410):
            return MISSING
        if isinstance(each, PermissionError) or status in (401, 403) or type(each).__name__ == "NoCredentialsError":
            return DENIED
        names = {base.__name__ for base in type(each).__mro__}
        if (
            status in _TRANSIENT_STATUS
            or _code(each) in _TRANSIENT_CODES
            or isinstance(each, TimeoutError | asyncio.TimeoutError | ConnectionError)
            or (isinstance(each, OSError) and each.errno in _TRANSIENT_ERRNO)
            or names & _TRANSIENT_CLASSES
        ):
            return TRANSIENT
    return _OTHER


def _status(error: BaseException) -> int | None:
    """The HTTP status of an error, wherever its library stores it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        response = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if hasattr(error, "status"):
        status = error.status
    else:
        status = getattr(response, "status_code", response) or getattr(error, "code", None)
    return int(status) if re.fullmatch("[1-5][0-9][0-9]", str(status)) else None


def _code(error: BaseException) -> str | None:
    response = getattr(error, "response", None)
    return response.get("Error", {}).get("Code") if isinstance(response, dict) else None


def reason_of(error: BaseException) -> str:
    """One line, without URLs: they may hold secrets."""
    text = re.sub(r"(,? url=)?'?\w+://\S+", "", " ".join(str(error).split()))[:200].strip(" .,:")
    return f"{type(error).__name__} {text}".strip()

"""Ask any OpenAI-compatible server as a model: `/v1/chat/completions`.

Log-likelihoods use two fields that vLLM adds to it, `prompt_logprobs` and `continue_final_message`; how many of the
prompt's tokens belong to the continuation is the difference to the prompt without it. Embeddings use `/v1/embeddings`
with `messages`, as vLLM has it for images. A server is asked once whether it has either.

Connections are kept open. A server that is busy or restarts is asked again for a while; a request it refuses is a
`RequestError` of that example; a server that stays away ends the evaluation.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import logging
import math
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from saccade.data.image_formats import image_extension
from saccade.errors import ConfigError, RequestError
from saccade.evaluate.model import Answer, Conversation, Decoding, Likelihood

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 8
"""Attempts of one request, which take about two minutes with the waiting times below."""
_MAX_WAIT_S = 30.0
_BUSY = {408, 409, 425, 429, 502, 503, 504}
_MEDIA_TYPES = {"jpg": "jpeg", "tif": "tiff", None: "jpeg"}
"""Media types of images that differ from their extension."""


class OpenAIModel:
    """A model served at a URL. Any thread may ask."""

    has_beam_search = False

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout_s: float = 600.0
    ) -> None:
        """`url`: `http://host:8000` or `.../v1`. `model`: None is the first that the server lists."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url}: not the URL of a server. Use http://HOST:PORT/v1")
        self.url, path = url, parts.path.rstrip("/")
        self._base = path if path.endswith("/v1") else f"{path}/v1"
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._connections = _Connections(parts, timeout_s)
        self._limit_name = "max_tokens"
        self.model = model or self._first_model()

    def describe(self) -> dict[str, Any]:
        """Return the URL and the model's name."""
        return {"url": self.url, "model": self.model}

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- questions

    def generate(self, conversation: Conversation, decoding: Decoding) -> Answer:
        """Request one chat completion."""
        content = self._complete(conversation, decoding)
        choice = _field(content, "choices")[0]
        usage = content.get("usage") or {}
        return Answer(
            text=choice["message"].get("content") or "",
            num_prompt_tokens=int(usage.get("prompt_tokens", 0)),
            num_tokens=int(usage.get("completion_tokens", 0)),
            finish_reason=str(choice.get("finish_reason")),
        )

    @functools.cached_property
    def can_score(self) -> bool:
        """Whether the server gives log-likelihoods of prompt tokens."""
        try:
            return bool(self.log_likelihoods([{"role": "user", "content": "hello"}], ["hello"]))
        except RequestError:
            return False

    def log_likelihoods(self, conversation: Conversation, continuations: Sequence[str]) -> list[Likelihood]:
        """Score each continuation as an open assistant turn, with one request each."""
        one_token = Decoding(max_tokens=1)
        usage = self._complete(conversation, one_token).get("usage") or {}
        likelihoods = []
        for continuation in continuations:
            messages = [*conversation, {"role": "assistant", "content": continuation.strip()}]
            options = {"prompt_logprobs": 0, "continue_final_message": True, "add_generation_prompt": False}
            content = self._complete(messages, one_token, **options)
            scored = _field(content, "prompt_logprobs")[int(_field(usage, "prompt_tokens")) :]
            likelihoods.append(Likelihood(sum(map(_logprob, scored)), len(scored)))
        return likelihoods

    @functools.cached_property
    def can_embed(self) -> bool:
        """Whether the server gives embeddings of messages."""
        try:
            return bool(self.embed([{"role": "user", "content": "hello"}]))
        except (RequestError, ConfigError):
            return False

    def embed(self, conversation: Conversation) -> list[float]:
        """Return the embedding of one message."""
        body = {"model": self.model, "messages": to_openai(conversation)}
        vector: list[float] = _field(self._post("/embeddings", body), "data")[0]["embedding"]
        return vector

    # -------------------------------------------------------------- requests

    def _first_model(self) -> str:
        listed = json.loads(self._read("GET", "/models", None)).get("data") or []
        if not listed:
            raise ConfigError(f"{self.url} lists no model. Name one: --model NAME")
        return str(listed[0]["id"])

    def _body(self, conversation: Conversation, decoding: Decoding) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": to_openai(conversation),
            "temperature": decoding.temperature,
            "seed": decoding.seed,
            self._limit_name: decoding.max_tokens,
        }
        return body | ({"ignore_eos": True} if decoding.ignore_eos else {})

    def _complete(self, conversation: Conversation, decoding: Decoding, **options: Any) -> dict[str, Any]:
        try:
            return self._post("/chat/completions", self._body(conversation, decoding) | options)
        except RequestError as error:
            if self._limit_name == "max_completion_tokens" or "max_completion_tokens" not in str(error):
                raise
            self._limit_name = "max_completion_tokens"  # newer models of OpenAI take no other
            return self._post("/chat/completions", self._body(conversation, decoding) | options)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        content = json.loads(self._read("POST", path, body))
        if not isinstance(content, dict):
            raise RequestError(f"{self.url}{path} answered with a {type(content).__name__}, not an object")
        return content

    def _read(self, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        with self._respond(method, path, body) as response:
            return response.read()

    @contextmanager
    def _respond(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        """Return a response with status 200. Tries again while the server is busy or unreachable."""
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(MAX_ATTEMPTS):
            is_last = attempt + 1 == MAX_ATTEMPTS
            try:
                connection, response = self._send(method, self._base + path, data)
            except (OSError, http.client.HTTPException) as error:
                if is_last or isinstance(error, ssl.SSLCertVerificationError):
                    raise self._unreachable(error) from error
                self._wait(attempt, None)
                continue
            with self._connections.used(connection, response):
                if response.status == 200:
                    yield response
                    return
                message = _error_message(response.read())
            if response.status not in _BUSY or is_last:
                raise self._refused(response.status, message)
            self._wait(attempt, response.headers.get("Retry-After"))

    def _send(
        self, method: str, path: str, data: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send on a free connection, or on a new one if the server has closed it."""
        while True:
            connection, is_new = self._connections.take()
            try:
                connection.request(method, path, data, self._headers)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_new or isinstance(error, TimeoutError):
                    raise

    def _wait(self, attempt: int, retry_after: str | None) -> None:
        seconds = 0.25 * 2**attempt
        if retry_after is not None and retry_after.strip().isdigit():
            seconds = max(seconds, float(retry_after))
        time.sleep(min(seconds, _MAX_WAIT_S))

    def _unreachable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"{self.url} does not answer: {error}. Check the URL, or start the server; the same command then resumes"
        )

    def _refused(self, status: int, message: str) -> RequestError | ConfigError:
        if status in (401, 403):
            return ConfigError(f"{self.url}: {status} {message}. Give a key: --api-key, or OPENAI_API_KEY")
        if status == 404:
            return ConfigError(f"{self.url}: 404 {message}. Check the URL and --model")
        return RequestError(f"{status} {message}")


class _Connections:
    """Free connections to one server."""

    def __init__(self, parts: SplitResult, timeout_s: float) -> None:
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._make = functools.partial(kind, parts.hostname or "", parts.port, timeout=timeout_s)
        self._free: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def take(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection, and whether it is new."""
        with self._lock:
            return (self._free.pop(), False) if self._free else (self._make(), True)

    @contextmanager
    def used(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> Iterator[None]:
        """Free the connection when its response was read to the end; close it otherwise."""
        try:
            yield
        finally:
            is_free = response.isclosed() and connection.sock is not None
            response.close()
            if is_free:
                with self._lock:
                    self._free.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """Close the free connections."""
        with self._lock:
            free, self._free = self._free, []
        for connection in free:
            connection.close()


def to_openai(conversation: Conversation) -> Conversation:
    """Write the images of a conversation as data URLs."""
    return [
        message | {"content": [_part(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else message
        for message in conversation
    ]


def _part(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] != "image":
        return part
    extension = image_extension(part["image"])
    kind = _MEDIA_TYPES.get(extension, extension)
    data = base64.b64encode(part["image"]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def _field(content: dict[str, Any], name: str) -> Any:
    if content.get(name) is None:
        raise RequestError(f"the server's answer has no {name}")
    return content[name]


def _logprob(entry: Any) -> float:
    """Read the log-probability of one prompt token, the only entry of a table by token id."""
    if not isinstance(entry, dict) or not entry:
        raise RequestError("the server's prompt_logprobs have no entry for a token of the continuation")
    value = next(iter(entry.values()))
    number = value["logprob"] if isinstance(value, dict) else value
    return float(number) if number is not None else -math.inf


def _error_message(content: bytes) -> str:
    """Read the message of OpenAI's error object, or the beginning of the text."""
    try:
        error = json.loads(content)
        error = error.get("error", error) if isinstance(error, dict) else error
        message = error.get("message") or error.get("detail") if isinstance(error, dict) else error
    except ValueError:
        message = content.decode("utf-8", errors="replace")
    return " ".join(str(message).split())[:400]

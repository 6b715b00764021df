"""Fetch images and videos that a request names by URL, from the hosts that the operator allows. Off by default.

    --allow-remote-media images.example.org          https or http on the usual ports, at a public address
    --allow-remote-media storage.internal:9000       this host and port, whatever its address

A client that may name URLs makes this machine connect for it, so the rules are strict: the same parser serves check and
request; addresses are checked after the name is resolved, and connected to as checked (`data/url_policy.py`); there are
no redirects, cookies, proxies, credentials or compressed bodies; a byte limit counts what arrives; one deadline spans
the DNS lookup and the last byte.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
from yarl import URL

from saccade import __version__
from saccade.data.url_policy import CheckedResolver, RefusedError, Resolve, UrlPolicy
from saccade.errors import ConfigError, ImageError
from saccade.processor.image import MediaBudget, MediaLimits
from saccade.serve.errors import ApiError, bad_request

_PORTS = frozenset({80, 443})
_MAX_CONCURRENT = 64
"""Maximum concurrent fetches of all requests."""
_CHUNK_BYTES = 2**16


def is_remote(url: object) -> bool:
    """Whether a media URL names a file on the web."""
    return isinstance(url, str) and url[:8].lower().startswith(("http://", "https://"))


class RemoteMedia:
    """Fetches media of requests. Used in one event loop."""

    def __init__(
        self, hosts: Sequence[str], *, limits: MediaLimits, timeout_s: float, resolve: Resolve | None = None
    ) -> None:
        """`hosts` are names, or `name:port` of hosts that may be private. `resolve` replaces the system's resolver."""
        self._limits, self._timeout_s = limits, timeout_s
        explicit = frozenset(host.lower() for host in hosts if ":" in host)
        self._hosts = frozenset(host.lower().rstrip(".") for host in hosts if ":" not in host)
        for host in (*explicit, *self._hosts):
            if not host or "/" in host or not host.isascii() or host.startswith(":"):
                raise ConfigError(f"allow_remote_media has {host!r}. Write a host name, or host:port for a private one")
        self._explicit = explicit
        self._policy = UrlPolicy(_PORTS, explicit)
        self._resolve = resolve or _resolve_by_system
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._session: aiohttp.ClientSession | None = None

    async def fetch_all(
        self, conversation: Sequence[dict[str, Any]], add_bytes: Callable[[int], None] = lambda _: None
    ) -> None:
        """Replace every remote URL of a conversation by its file. An `ApiError` names the first that cannot be fetched.

        `add_bytes` counts what arrives, and raises if the server has no room for it.
        """
        fields = [url_field for message in conversation for url_field in _url_fields(message.get("content"))]
        urls = [(number, url_field) for number, url_field in enumerate(fields) if is_remote(url_field.get())]
        if not urls:
            return
        if len(urls) > self._limits.max_frames:
            raise bad_request(f"the request has {len(urls)} remote URLs; at most {self._limits.max_frames} are fetched")
        budget = MediaBudget(self._limits)

        def count(num_bytes: int) -> None:
            budget.add_bytes(num_bytes)
            add_bytes(num_bytes)

        tasks = [asyncio.create_task(self._fetch(url_field.get(), url_field.kind, count)) for _, url_field in urls]
        try:
            for (number, url_field), task in zip(urls, tasks, strict=True):
                try:
                    url_field.put(await task)
                except ImageError as error:
                    raise bad_request(str(error)) from error
                except RefusedError as error:
                    raise ApiError(
                        400,
                        f"{url_field.kind} {number + 1}: its URL cannot be fetched: {error}. Send the file as a data "
                        "URL",
                        code="remote_media_failed",
                    ) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _fetch(self, text: str, kind: str, count: Callable[[int], None]) -> bytes:
        url = self._check(text)
        max_bytes = self._limits.max_bytes if kind == "image" else self._limits.max_request_bytes
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._slots,
                self._open_session().get(url, allow_redirects=False) as response,
            ):
                _check_response(response, max_bytes)
                return await _read(response, max_bytes, count)
        except TimeoutError as error:
            raise RefusedError(f"it did not arrive within {self._timeout_s:g} s") from error
        except aiohttp.ClientSSLError as error:
            raise RefusedError("its certificate is not valid") from error
        except aiohttp.ClientConnectorDNSError as error:
            raise RefusedError("its host is unknown") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RefusedError("its host does not answer as a web server") from error

    def _check(self, text: str) -> URL:
        url = self._policy.check_url(text)
        host = (url.host or "").lower().rstrip(".")
        if host not in self._hosts and f"{host}:{url.port}" not in self._explicit:
            raise RefusedError("its host is not allowed on this server")
        return url

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    resolver=CheckedResolver(self._resolve, self._policy), use_dns_cache=False, limit=_MAX_CONCURRENT
                ),
                headers={"User-Agent": f"saccade/{__version__}", "Accept-Encoding": "identity"},
                timeout=aiohttp.ClientTimeout(total=None),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


class _UrlField:
    """A URL within a conversation."""

    def __init__(self, holder: Any, key: Any, kind: str) -> None:
        self._holder, self._key, self.kind = holder, key, kind

    def get(self) -> Any:
        return self._holder[self._key]

    def put(self, data: bytes) -> None:
        self._holder[self._key] = data


def _url_fields(content: object) -> list[_UrlField]:
    """Return the URLs of a message, in order: one per image, video file and frame."""
    fields: list[_UrlField] = []
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image_url":
            fields.append(_UrlField(part, "image_url", "image"))
        elif part["type"] == "video_url":
            fields.append(_UrlField(part, "video_url", "video"))
        elif part["type"] == "video":
            fields += [_UrlField(part["video"], number, "image") for number in range(len(part["video"]))]
    return fields


def _check_response(response: aiohttp.ClientResponse, max_bytes: int) -> None:
    if 300 <= response.status < 400:
        raise RefusedError("it redirects, which is not followed")
    if response.status != 200:
        raise RefusedError(f"its host answered {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise RefusedError("its body is compressed")
    if (response.content_length or 0) > max_bytes:
        raise RefusedError(f"it has more than {max_bytes} bytes")


async def _read(response: aiohttp.ClientResponse, max_bytes: int, count: Callable[[int], None]) -> bytes:
    """Read the body; `count` bounds the bytes of all files of the request."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
        body += chunk
        if len(body) > max_bytes:
            raise RefusedError(f"it has more than {max_bytes} bytes")
        count(len(chunk))
    return bytes(body)


async def _resolve_by_system(host: str, port: int) -> Sequence[str]:
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # a part of the name is too long
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
    return [str(address[0]) for *_, address in found]

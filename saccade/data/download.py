"""Download images from the web: politely, and without access to the private network of this machine.

    URL -> URL policy -> the host's turn -> headers checked -> body up to a limit -> image format checked
                ^---------------- redirect ----'

`url_policy.py` decides which URLs and addresses are allowed; every redirect passes it again. Proxies, cookies and
credentials are not used; compressed bodies are refused; the byte limit counts what arrives, not what the header
promises; the timeout covers a request from the DNS lookup to the last byte.

Politeness: a limit on concurrent requests per host and a delay between their starts, `Retry-After` and backoff on
transient errors, an honest User-Agent, and respect for `X-Robots-Tag` and `TDM-Reservation`. `robots.txt` is not read:
a list names single images, it is not a crawl.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType

import aiohttp
from yarl import URL

from saccade import __version__
from saccade.data.readers.reader import UnusableError, check_image
from saccade.data.url_policy import CheckedResolver, RefusedError, Resolve, UrlPolicy
from saccade.errors import ConfigError

_BACKPRESSURE_POLL_S = 0.02
_REDIRECTS = {301, 302, 303, 307, 308}
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_MAX_RETRY_AFTER_S = 30.0
_NUM_DNS_THREADS = 64
_OPT_OUT = {"noai", "noimageai", "noindex", "noimageindex", "none"}
_ROBOTS_SETTINGS = {"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"}
"""Directives with a value after a colon; before any other colon is the name of a robot."""


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """How images are downloaded."""

    timeout_s: float = 20.0
    """Timeout of one request, from the DNS lookup to the last byte."""
    max_bytes: int = 32 * 2**20
    """Maximum size of an image; a larger one is dropped while it arrives."""
    num_retries: int = 2
    """Retries after a transient error (no connection, timeout, 429, 5xx)."""
    max_redirects: int = 5
    """Redirects followed for one image; each target must pass the URL policy."""
    backoff_s: float = 1.0
    """Delay before the first retry; doubles each time, with jitter."""
    max_concurrent: int = 256
    """Concurrent requests."""
    max_per_host: int = 8
    """Concurrent requests to one host."""
    host_delay_s: float = 0.02
    """Minimum time between the starts of two requests to one host."""
    user_agent: str = f"saccade/{__version__}"
    """User-Agent header. Add a contact: `saccade/0.1 (you@example.org)`."""
    respect_opt_out: bool = True
    """Skip images whose response has `X-Robots-Tag: noai` (noimageai, noindex, noimageindex, none) or `TDM-Reservation:
    1`."""
    ports: frozenset[int] = frozenset({80, 443})
    """Allowed ports."""
    allow_hosts: frozenset[str] = frozenset()
    """`host:port` that are allowed although private, for an intranet: a name as in the URL, or an address."""
    max_held_bytes: int = 256 * 2**20
    """Downloaded images waiting to be written; above this no request is started."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_bytes", "max_concurrent", "max_per_host", "max_held_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"download: {name} is {getattr(self, name)!r}, not above 0")
        for name in ("num_retries", "max_redirects", "backoff_s", "host_delay_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"download: {name} is {getattr(self, name)!r}, below 0")
        if not self.user_agent.strip() or not self.user_agent.isprintable():
            raise ConfigError(f"download: user_agent is {self.user_agent!r}, not one line of text")
        for entry in self.allow_hosts:
            if not re.fullmatch(r".+:\d+", entry):
                raise ConfigError(f"download: allow_hosts has {entry!r}. Write host:port, for instance 10.0.0.5:8080")


@dataclass(frozen=True)
class Downloaded:
    """An image as sent by the server."""

    data: bytes


@dataclass(frozen=True)
class Failed:
    """A URL without an image; `reason` is one of a few, for counting."""

    reason: str


class _AttemptError(Exception):
    """Why a request failed, and whether a retry may succeed."""

    def __init__(self, reason: str, *, is_transient: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.is_transient = is_transient
        self.wait_s = wait_s


@dataclass
class _Host:
    """Concurrency and pace of the requests to one host."""

    slots: asyncio.Semaphore
    next_start: float = 0.0
    num_waiting: int = 0


class Downloader:
    """Download images in one event loop:

    `async with Downloader(options) as downloader: await downloader.download(url)`.
    """

    def __init__(
        self, options: DownloadOptions, resolve: Resolve | None = None, can_start: Callable[[], bool] = lambda: True
    ) -> None:
        """`can_start` is polled before each request: backpressure from whoever takes the images."""
        self._options = options
        self._can_start = can_start
        self._policy = UrlPolicy(options.ports, options.allow_hosts)
        self._resolve = resolve or self._resolve_by_system
        self._dns_threads = ThreadPoolExecutor(_NUM_DNS_THREADS, thread_name_prefix="dns")
        self._hosts: dict[str, _Host] = {}
        self._slots = asyncio.Semaphore(options.max_concurrent)

    async def __aenter__(self) -> Downloader:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=CheckedResolver(self._resolve, self._policy),
                use_dns_cache=False,  # the system has one; here a name is resolved once per connection
                limit=0,  # limited below, outside of the timeout
                keepalive_timeout=1.0,  # few images per host: idle sockets would exhaust the file descriptors
            ),
            headers={"User-Agent": self._options.user_agent, "Accept": "image/*", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()
        self._dns_threads.shutdown(wait=False, cancel_futures=True)

    async def download(self, text: str) -> Downloaded | Failed:
        """The image of a URL, or why there is none. No input and no server response makes it raise."""
        try:
            url = self._policy.check_url(text)
            for attempt in range(self._options.num_retries):
                try:
                    return await self._follow(url)
                except _AttemptError as failure:
                    if not failure.is_transient:
                        raise
                    backoff = self._options.backoff_s * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311
                    await asyncio.sleep(max(backoff, failure.wait_s))
            return await self._follow(url)
        except (RefusedError, _AttemptError) as failure:
            return Failed(str(failure))

    async def _follow(self, url: URL) -> Downloaded:
        """Request a URL and what it redirects to."""
        for _ in range(self._options.max_redirects + 1):
            answer = await self._request(url)
            if isinstance(answer, Downloaded):
                return answer
            url = answer
        raise _AttemptError("too many redirects")

    async def _request(self, url: URL) -> Downloaded | URL:
        """One request: the image, or the target of a redirect, which the policy allows."""
        async with self._turn(url.host or ""):
            try:
                async with (
                    asyncio.timeout(self._options.timeout_s),
                    self._session.get(url, allow_redirects=False) as response,
                ):
                    if response.status in _REDIRECTS:
                        return self._policy.check_url(str(_redirect_target(url, response)))
                    _check_status(response)
                    _check_headers(response, self._options)
                    data = await _read(response, self._options.max_bytes)
            except TimeoutError as error:
                raise _AttemptError("timeout", is_transient=True) from error
            except aiohttp.ClientSSLError as error:
                raise _AttemptError("bad certificate") from error
            except aiohttp.InvalidURL as error:
                raise _AttemptError("bad url") from error
            except aiohttp.ClientConnectorDNSError as error:
                raise _AttemptError("unknown host", is_transient=error.os_error.errno == socket.EAI_AGAIN) from error
            except (aiohttp.ClientResponseError, ValueError) as error:  # not HTTP
                raise _AttemptError("bad response") from error
            except (aiohttp.ClientError, OSError) as error:
                raise _AttemptError("connection failed", is_transient=True) from error
        try:
            check_image(data)
        except UnusableError as error:
            raise _AttemptError(error.reason) from error
        return Downloaded(data)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Wait for a slot of this host, its delay, then a global slot; a slow host does not block others."""
        loop = asyncio.get_running_loop()
        host = self._hosts.setdefault(name, _Host(asyncio.Semaphore(self._options.max_per_host)))
        host.num_waiting += 1
        try:
            async with host.slots:
                start = max(loop.time(), host.next_start)
                host.next_start = start + self._options.host_delay_s
                await asyncio.sleep(start - loop.time())
                async with self._slots:
                    while not self._can_start():
                        await asyncio.sleep(_BACKPRESSURE_POLL_S)
                    yield
        finally:
            host.num_waiting -= 1
            loop.call_later(self._options.host_delay_s, self._remove_idle, name)

    def _remove_idle(self, name: str) -> None:
        """Drop the state of a host without requests: a web-scale list names millions."""
        if name in self._hosts and not self._hosts[name].num_waiting:
            del self._hosts[name]

    async def _resolve_by_system(self, host: str, port: int) -> Sequence[str]:
        def look_up() -> Sequence[str]:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except UnicodeError as error:  # a part of the name is too long
                raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
            return [str(address[0]) for *_, address in found]

        return await asyncio.get_running_loop().run_in_executor(self._dns_threads, look_up)


def _redirect_target(url: URL, response: aiohttp.ClientResponse) -> URL:
    try:
        return url.join(URL(response.headers["Location"].strip()))
    except (KeyError, ValueError) as error:
        raise _AttemptError("bad redirect") from error


def _check_status(response: aiohttp.ClientResponse) -> None:
    if response.status != 200:
        wait = response.headers.get("Retry-After", "")
        raise _AttemptError(
            f"http {response.status}",
            is_transient=response.status in _TRANSIENT_STATUS,
            wait_s=min(float(wait), _MAX_RETRY_AFTER_S) if wait.isascii() and wait.isdigit() else 0.0,
        )


def _check_headers(response: aiohttp.ClientResponse, options: DownloadOptions) -> None:
    """Refuse what the headers already rule out."""
    headers = response.headers
    if options.respect_opt_out:
        robot = options.user_agent.partition("/")[0].lower()
        if headers.get("TDM-Reservation") == "1" or has_opted_out(headers.getall("X-Robots-Tag", []), robot):
            raise _AttemptError("opted out")
    if headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _AttemptError("encoded body")
    if (response.content_length or 0) > options.max_bytes:
        raise _AttemptError("too large")


def has_opted_out(tags: Iterable[str], robot: str) -> bool:
    """Whether `X-Robots-Tag` headers opt out for everyone or for us.

    `name: directive` is for the robot of that name.
    """
    for tag in tags:
        addressee = None
        for directive in tag.lower().split(","):
            name, colon, rest = (part.strip() for part in directive.partition(":"))
            if colon and name not in _ROBOTS_SETTINGS:
                addressee, name = name, rest
            if name in _OPT_OUT and addressee in (None, robot):
                return True
    return False


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read the body, never more than the limit."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > max_bytes:
            raise _AttemptError("too large")
    return bytes(body)

"""Images from the web: politely, and without a way into the network this machine stands in.

    link -> through the gate -> the host's turn -> headers checked -> body up to a cap -> sniffed

`gate.py` says where a link may lead. Redirects are not followed; proxies, cookies and credentials not used; compressed bodies
refused; the byte cap counts what arrives, not what the header promises; the deadline covers everything from the name to the last byte.

Politeness: a limit of requests in flight to one host and a pause between their starts, `Retry-After` and backoff on transient
errors, an honest User-Agent, and respect for `X-Robots-Tag` and `TDM-Reservation`. `robots.txt` is not read: a list names single
images, it is no crawl.
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
from saccade.data.readers.reader import image_extension
from saccade.data.url_policy import CheckedResolver, RefusedError, Resolve, UrlPolicy
from saccade.errors import ConfigError

_ROOM_PAUSE_S = 0.02
_TRANSIENT_STATUS = {408, 429, 500, 502, 503, 504}
_MAX_RETRY_AFTER_S = 30.0
_NUM_DNS_THREADS = 64
_OPT_OUT = {"noai", "noimageai", "noindex", "noimageindex", "none"}
_ROBOTS_SETTINGS = {"unavailable_after", "max-snippet", "max-image-preview", "max-video-preview"}
"""Directives that carry a value after a colon; before any other colon stands the name of a robot."""


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """How images are downloaded."""

    timeout_s: float = 20.0
    """Deadline of one attempt, from looking up the name to the last byte."""
    max_bytes: int = 32 * 2**20
    """Longest body; a longer one is dropped while it arrives."""
    num_retries: int = 2
    """Further attempts after an error that may pass (no connection, time-out, 429, 5xx)."""
    backoff_s: float = 1.0
    """Wait before the first retry; doubles each time, with jitter."""
    max_concurrent: int = 256
    """Requests in flight in all."""
    max_per_host: int = 8
    """Requests in flight to one host."""
    host_delay_s: float = 0.02
    """Least time between the starts of two requests to one host."""
    user_agent: str = f"saccade/{__version__}"
    """Who asks. Add a way to reach you: `saccade/0.1 (you@example.org)`."""
    respect_opt_out: bool = True
    """Drop images whose site answers with `X-Robots-Tag: noai` (noimageai, noindex, noimageindex, none) or `TDM-Reservation: 1`."""
    ports: frozenset[int] = frozenset({80, 443})
    """Ports a link may name."""
    allow_hosts: frozenset[str] = frozenset()
    """`host:port` that may be reached though private, for an intranet: a name as in the link, or an address."""
    max_held_bytes: int = 256 * 2**20
    """Finished images waiting to be written; over this nothing new is started."""

    def __post_init__(self) -> None:
        for name in ("timeout_s", "max_bytes", "max_concurrent", "max_per_host", "max_held_bytes"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"fetch: {name} is {getattr(self, name)!r}, not above 0")
        for name in ("num_retries", "backoff_s", "host_delay_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"fetch: {name} is {getattr(self, name)!r}, below 0")
        if not self.user_agent.strip() or not self.user_agent.isprintable():
            raise ConfigError(f"fetch: user_agent is {self.user_agent!r}, not one line of text")
        for entry in self.allow_hosts:
            if not re.fullmatch(r".+:\d+", entry):
                raise ConfigError(f"fetch: allow_hosts has {entry!r}. Write host:port, for instance 10.0.0.5:8080")


@dataclass(frozen=True)
class Downloaded:
    """An image as the server sent it."""

    data: bytes


@dataclass(frozen=True)
class Failed:
    """A link without an image; `reason` is one of a few, for counting."""

    reason: str


class _AttemptError(Exception):
    """Why an attempt failed, and whether another may succeed."""

    def __init__(self, reason: str, *, may_pass: bool = False, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.may_pass = may_pass
        self.wait_s = wait_s


@dataclass
class _Host:
    """The requests to one host: how many at once, and when the next may start."""

    slots: asyncio.Semaphore
    next_start: float = 0.0
    num_users: int = 0


class Downloader:
    """Downloads images inside one event loop: `async with Downloader(options) as fetcher: await fetcher.fetch(url)`."""

    def __init__(
        self, options: DownloadOptions, resolve: Resolve | None = None, has_room: Callable[[], bool] = lambda: True
    ) -> None:
        """`has_room` is asked before a request is sent: whether what was fetched before has been taken away."""
        self._options = options
        self._has_room = has_room
        self._policy = UrlPolicy(options.ports, options.allow_hosts)
        self._resolve = resolve or self._ask_system
        self._dns_threads = ThreadPoolExecutor(_NUM_DNS_THREADS, thread_name_prefix="dns")
        self._hosts: dict[str, _Host] = {}
        self._slots = asyncio.Semaphore(options.max_concurrent)

    async def __aenter__(self) -> Downloader:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                resolver=CheckedResolver(self._resolve, self._policy),
                use_dns_cache=False,  # the system's cache does; here a name is looked up once for each connection
                limit=0,  # counted here, outside of the deadline
                keepalive_timeout=1.0,  # a list names few images of one host; idle sockets would exhaust the files
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

    async def fetch(self, text: str) -> Downloaded | Failed:
        """The image behind a link, or why there is none. Raises nothing that a server or a list could cause."""
        try:
            url = self._policy.check_url(text)
            for attempt in range(self._options.num_retries):
                try:
                    return await self._attempt(url)
                except _AttemptError as failure:
                    if not failure.may_pass:
                        raise
                    backoff = self._options.backoff_s * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311
                    await asyncio.sleep(max(backoff, failure.wait_s))
            return await self._attempt(url)
        except (RefusedError, _AttemptError) as failure:
            return Failed(str(failure))

    async def _attempt(self, url: URL) -> Downloaded:
        async with self._turn(url.host or ""):
            try:
                async with (
                    asyncio.timeout(self._options.timeout_s),
                    self._session.get(url, allow_redirects=False) as response,
                ):
                    _check_status(response)
                    _check_headers(response, self._options)
                    data = await _read(response, self._options.max_bytes)
            except TimeoutError as error:
                raise _AttemptError("timeout", may_pass=True) from error
            except aiohttp.ClientSSLError as error:
                raise _AttemptError("bad certificate") from error
            except aiohttp.InvalidURL as error:
                raise _AttemptError("bad url") from error
            except aiohttp.ClientConnectorDNSError as error:
                raise _AttemptError("unknown host", may_pass=error.os_error.errno == socket.EAI_AGAIN) from error
            except (aiohttp.ClientResponseError, ValueError) as error:  # what answers speaks no HTTP
                raise _AttemptError("bad answer") from error
            except (aiohttp.ClientError, OSError) as error:
                raise _AttemptError("connection failed", may_pass=True) from error
        if image_extension(data) is None:
            raise _AttemptError("not an image")
        return Downloaded(data)

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """Wait for a slot of this host, its pause, then a slot of all; a slow host keeps no other waiting."""
        loop = asyncio.get_running_loop()
        host = self._hosts.setdefault(name, _Host(asyncio.Semaphore(self._options.max_per_host)))
        host.num_users += 1
        try:
            async with host.slots:
                start = max(loop.time(), host.next_start)
                host.next_start = start + self._options.host_delay_s
                await asyncio.sleep(start - loop.time())
                async with self._slots:
                    while not self._has_room():
                        await asyncio.sleep(_ROOM_PAUSE_S)
                    yield
        finally:
            host.num_users -= 1
            loop.call_later(self._options.host_delay_s, self._forget, name)

    def _forget(self, name: str) -> None:
        """Hosts nobody waits for are dropped: a web-scale list names millions."""
        if name in self._hosts and not self._hosts[name].num_users:
            del self._hosts[name]

    async def _ask_system(self, host: str, port: int) -> Sequence[str]:
        def look_up() -> Sequence[str]:
            try:
                found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except UnicodeError as error:  # a part of the name is too long
                raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
            return [str(address[0]) for *_, address in found]

        return await asyncio.get_running_loop().run_in_executor(self._dns_threads, look_up)


def _check_status(response: aiohttp.ClientResponse) -> None:
    if 300 <= response.status < 400:
        raise _AttemptError("redirect")
    if response.status != 200:
        wait = response.headers.get("Retry-After", "")
        raise _AttemptError(
            f"http {response.status}",
            may_pass=response.status in _TRANSIENT_STATUS,
            wait_s=min(float(wait), _MAX_RETRY_AFTER_S) if wait.isascii() and wait.isdigit() else 0.0,
        )


def _check_headers(response: aiohttp.ClientResponse, options: DownloadOptions) -> None:
    """Refuse on the headers what need not be read."""
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
    """Whether `X-Robots-Tag` headers close an image to everyone or to us. `name: directive` is for the robot of that name."""
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
    """The body, never more than the cap."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > max_bytes:
            raise _AttemptError("too large")
    return bytes(body)

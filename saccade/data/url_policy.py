"""Where a link may lead: to public addresses of the open internet, on the usual ports, and nowhere else.

A list of links is written by strangers, and this machine stands in a network that trusts it. A link is parsed once, by the parser
that also sends the request; a name is resolved once for each connection, and the addresses checked are the ones connected to, so a
name that changes its mind in between gains nothing.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Host name and port to addresses; raises `OSError` when there are none."""

_MAX_URL_LENGTH = 4096
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocol assignments, a cloud's metadata among them
        "192.88.99.0/24",  # relays into IPv6
        "168.63.129.16/32",  # a cloud's metadata behind a public address
        "2001::/23",  # Teredo, ORCHID and other protocols
        "2001:db8::/32",
        "2002::/16",  # an IPv4 address inside
        "3fff::/20",
    )
]


class RefusedError(Exception):
    """A link that leads elsewhere; the message is the reason it is counted under."""


def is_public(address: str) -> bool:
    """Whether an address is of the open internet: no private, local, shared, reserved, multicast or translated one."""
    ip = ipaddress.ip_address(address)
    if isinstance(ip, ipaddress.IPv6Address) and ip not in _IPV6_UNICAST:  # mapped IPv4 and NAT64 lie outside too
        return False
    if any(ip in network for network in _NOT_PUBLIC if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


@dataclass(frozen=True)
class UrlPolicy:
    """What is let through: these ports at public addresses, and the `host:port` that are allowed by name or address."""

    ports: frozenset[int]
    allow_hosts: frozenset[str]

    def check_url(self, text: str) -> URL:
        """The one parse of a link: what is checked here is what is sent."""
        try:
            url = URL(text.strip()) if len(text) <= _MAX_URL_LENGTH else URL()
            host, port = url.host, url.port
        except ValueError as error:
            raise RefusedError("bad url") from error
        if url.scheme not in ("http", "https") or not host or not port:
            raise RefusedError("bad url")
        if url.user is not None or url.password is not None:
            raise RefusedError("credentials in url")
        if self._is_allowed(host, port):
            return url
        if port not in self.ports:
            raise RefusedError("port not allowed")
        if _is_address(host):
            self.check_address(host, port)
        elif not _HOST_NAME.fullmatch(url.raw_host or ""):
            raise RefusedError("bad url")
        return url

    def check_address(self, address: str, port: int, host: str = "") -> None:
        """Whether a connection may be made to what a host resolved to."""
        if not (self._is_allowed(host, port) or self._is_allowed(address, port) or is_public(address)):
            raise RefusedError("address not public")

    def _is_allowed(self, host: str, port: int) -> bool:
        return f"{host}:{port}" in self.allow_hosts or f"[{host}]:{port}" in self.allow_hosts


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class CheckedResolver(AbstractResolver):
    """Hands aiohttp the addresses to connect to, all of them checked; one bad address condemns the name."""

    def __init__(self, resolve: Resolve, gate: UrlPolicy) -> None:
        self._resolve = resolve
        self._policy = gate

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a name."""
        addresses = await self._resolve(host, port)
        for address in addresses:
            self._policy.check_address(address, port, host)
        return [
            ResolveResult(hostname=host, host=address, port=port, family=_family(address), proto=0, flags=0)
            for address in addresses
        ]

    async def close(self) -> None:
        """Nothing to release."""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET

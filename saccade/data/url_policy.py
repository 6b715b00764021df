"""The URL policy of downloads: only public addresses, on the usual ports (no SSRF).

A list of URLs is untrusted input, and this machine may be inside a trusted network. A URL is parsed once, by the parser
that also sends the request; a name is resolved once per connection, and the addresses that are checked are the ones
connected to, so DNS rebinding gains nothing. A host whose last label is a number is an IPv4 address in some notation
(WHATWG URL) and must be one in the usual notation: `127.1`, `0x7f.1` and `2130706433` never reach a resolver.
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
"""Resolve a host name and port to addresses; raises `OSError` when there are none."""

_MAX_URL_LENGTH = 4096
_HOST_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?\.?")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.IGNORECASE)
_IPV6_UNICAST = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        "192.0.0.0/24",  # protocol assignments, cloud metadata among them
        "192.88.99.0/24",  # relays into IPv6
        "168.63.129.16/32",  # cloud metadata at a public address
        "2001::/23",  # Teredo, ORCHID and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4: an IPv4 address inside
        "3fff::/20",
    )
]


class RefusedError(Exception):
    """A URL or address that the policy refuses; the message is the reason it is counted under."""


def is_public(address: str) -> bool:
    """Whether an address is on the public internet: not private, local, shared, reserved, multicast or translated."""
    ip = ipaddress.ip_address(address)
    if (
        isinstance(ip, ipaddress.IPv6Address) and ip not in _IPV6_UNICAST
    ):  # this excludes IPv4-mapped addresses and NAT64
        return False
    if any(ip in network for network in _NOT_PUBLIC if network.version == ip.version):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or ip.is_unspecified)


@dataclass(frozen=True)
class UrlPolicy:
    """Allowed are these ports at public addresses, and each `host:port` listed by name or address."""

    ports: frozenset[int]
    allow_hosts: frozenset[str]

    def check_url(self, text: str) -> URL:
        """Parse and check a URL; the returned object is what is requested."""
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
        elif not _HOST_NAME.fullmatch(url.raw_host or "") or _NUMBER.fullmatch(host.rstrip(".").rpartition(".")[2]):
            raise RefusedError("bad url")
        return url

    def check_address(self, address: str, port: int, host: str = "") -> None:
        """Check an address that a host resolved to."""
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
    """Give aiohttp the addresses to connect to; one refused address refuses the name."""

    def __init__(self, resolve: Resolve, policy: UrlPolicy) -> None:
        self._resolve = resolve
        self._policy = policy

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

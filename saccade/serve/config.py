"""Server configuration: where it listens, who may ask, and every limit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from saccade.errors import ConfigError
from saccade.serve.cors import check_origins

_COUNTS = (
    "max_body_bytes", "max_open_body_bytes", "max_header_bytes", "max_connections", "max_json_depth", "max_messages",
    "max_completions", "max_queued_requests", "max_unsent_tokens", "max_media_bytes",
)  # fmt: skip
_LOCAL_HOSTS = frozenset(("127.0.0.1", "::1", "localhost"))
_SECONDS = (
    "header_timeout_s", "body_timeout_s", "keep_alive_s", "write_timeout_s", "queue_timeout_s", "request_timeout_s",
    "drain_timeout_s", "restart_backoff_s", "remote_media_timeout_s",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Address, access and limits of one server."""

    host: str = "127.0.0.1"
    """Address to listen on. Any other than loopback needs `api_keys`, or `no_auth`."""
    port: int = 8000
    """Port to listen on; 0: a free one."""
    model_name: str | None = None
    """Name of the model in requests and answers. None: the name of the checkpoint folder."""
    api_keys: Path | None = None
    """File of API keys, made by `saccade keys create`. None: no key is needed, on loopback only."""
    no_auth: bool = False
    """Serve other machines without keys. For a network that only trusted clients reach."""
    admin_port: int | None = None
    """Loopback port of the admin routes. None: no admin routes. They need a key of scope `admin`."""
    allowed_hosts: tuple[str, ...] = ()
    """Accepted Host headers, without port. Empty: not checked, but a loopback server without keys accepts the names of
    loopback only, so that no web page reaches it under another name (DNS rebinding)."""
    cors_origins: tuple[str, ...] = ()
    """Web origins whose pages may call the API from a browser, such as https://app.example; *: any, with API keys.
    Empty: only the server's own page may."""
    tool_call_format: str | None = None
    """How the model calls tools: hermes, or none if it does not. None: hermes if the chat template writes calls so."""
    max_body_bytes: int = 64 * 2**20
    """Maximum size of a request body; an image takes 4/3 of its file size."""
    max_open_body_bytes: int = 2 * 2**30
    """Bytes of the bodies of all requests in progress. A body that exceeds this is answered 503, unless it has no more
    bytes than its share, `max_open_body_bytes / max_connections`."""
    max_header_bytes: int = 32 * 2**10
    """Maximum size of a request line with its headers."""
    max_connections: int = 4096
    """Open connections; further ones are answered 503 and closed."""
    header_timeout_s: float = 10.0
    """A connection that has not sent complete headers after this time is closed."""
    body_timeout_s: float = 30.0
    """A body that has not arrived after this time is refused."""
    keep_alive_s: float = 15.0
    """An idle connection is closed after this time."""
    write_timeout_s: float = 30.0
    """A client that reads nothing for this time is disconnected."""
    allow_remote_media: tuple[str, ...] = ()
    """Hosts from which images and videos are fetched if a request names their URL: a name (public addresses, ports 80
    and 443), or name:port for a host that may be private. Empty: nothing is fetched."""
    remote_media_timeout_s: float = 10.0
    """Time to fetch one image or video, from the DNS lookup to the last byte."""
    max_json_depth: int = 128
    """Maximum nesting of a JSON body."""
    max_messages: int = 1024
    """Maximum messages of a conversation."""
    max_completions: int = 16
    """Maximum `n` of a request."""
    max_queued_requests: int = 256
    """Requests that may wait for the engine; further ones are answered 429."""
    max_open_kv_caches: float = 4.0
    """Number of KV caches and encoder caches that all admitted requests together may fill, as estimated; most of them
    wait."""
    max_media_bytes: int = 2**30
    """Bytes of images and videos that may be in preprocessing."""
    max_unsent_tokens: int = 4096
    """Tokens of a stream that may wait for a slow reader; then the request is cancelled."""
    queue_timeout_s: float = 60.0
    """A request that has not started after this time fails."""
    request_timeout_s: float = 600.0
    """A request that has not ended after this time fails."""
    drain_timeout_s: float = 120.0
    """Time for running requests to finish after SIGTERM; then they are cancelled."""
    max_restarts: int = 5
    """Restarts of the engine core within ten minutes; after that the server exits. 0: none."""
    restart_backoff_s: float = 1.0
    """Delay before the first restart of the core; it doubles with each that follows."""
    otlp_endpoint: str | None = None
    """URL of an OpenTelemetry collector that gets a span per request, such as http://collector:4318/v1/traces. None: no
    tracing. Needs the extra `otel`."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; use a whole number from 1")
        for name in _SECONDS:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value!r}; use a positive number of seconds")
        for name in ("port", "admin_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 2**16:
                raise ConfigError(f"{name} is {value!r}; use a port from 0 to 65535")
        if self.max_restarts < 0:
            raise ConfigError(f"max_restarts is {self.max_restarts!r}; use a whole number from 0")
        if not self.is_loopback and self.api_keys is None and not self.no_auth:
            raise ConfigError(
                f"host {self.host} is reachable from other machines, and no API keys are set: anyone could use the "
                "server. Make a key with saccade keys create KEYS.json --name NAME and pass --api-keys KEYS.json, or "
                "pass --no-auth"
            )
        if self.tool_call_format not in (None, "hermes", "none"):
            raise ConfigError(f"tool_call_format is {self.tool_call_format!r}; use hermes or none")
        check_origins(self.cors_origins)
        if "*" in self.cors_origins and self.api_keys is None and not self.no_auth:
            raise ConfigError(
                "cors_origins has *, and no API keys are set: every web page could use the server. Name the origins, "
                "or pass --api-keys KEYS.json (saccade keys create), or --no-auth"
            )
        if self.admin_port is not None and self.api_keys is None:
            raise ConfigError("admin_port needs api_keys with a key of scope admin: saccade keys create --admin")

    @property
    def checked_hosts(self) -> frozenset[str]:
        """Accepted Host headers; empty: any."""
        if not self.allowed_hosts and self.is_loopback and self.api_keys is None:
            return _LOCAL_HOSTS
        return frozenset(host.lower() for host in self.allowed_hosts)

    @property
    def body_share(self) -> int:
        """Bytes of a body that is never refused because of the bodies of others."""
        return self.max_open_body_bytes // self.max_connections

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return self.host in _LOCAL_HOSTS

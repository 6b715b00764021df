"""API keys: a file of their hashes. A key is 32 random bytes, so a plain SHA-256 of it cannot be reversed.

    {"keys": [{"name": "alice", "sha256": "...", "scope": "api", "tenant": "alice", "requests_per_minute": 60}]}

The file has no secrets, but whoever can write it can add keys, so only its owner may read or write it. The server reads
it again when it changes: a revoked key stops working within two seconds.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from saccade.config import decode
from saccade.errors import ConfigError
from saccade.files import atomic_write

logger = logging.getLogger(__name__)

Scope = Literal["api", "admin"]
_PREFIX = "sk-saccade-"
_CHECK_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """One entry of the key file."""

    name: str
    """Name in logs and metrics."""
    sha256: str
    """SHA-256 of the key, in hexadecimal."""
    scope: Scope = "api"
    """Port that accepts the key: `api`, the public one, or `admin`."""
    tenant: str | None = None
    """Keys of one tenant share caches. None: the key's name."""
    requests_per_minute: int | None = None
    """Rate limit. None: no limit."""
    tokens_per_minute: int | None = None
    """Rate limit of prompt and output tokens together. None: no limit."""

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > 64 or not self.name.isprintable():
            raise ConfigError(f"name is {self.name!r}; use 1 to 64 printable characters")
        if len(self.sha256) != 64 or set(self.sha256) - set("0123456789abcdef"):
            raise ConfigError(
                f"sha256 of key {self.name} is not 64 hexadecimal digits. Make keys with saccade keys create"
            )
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} of key {self.name} is {value}; use a whole number from 1")

    @property
    def salt(self) -> bytes:
        """Salt of the tenant: caches are shared only among requests of equal salt."""
        return hashlib.sha256(b"saccade tenant\0" + (self.tenant or self.name).encode()).digest()[:16]


def salt_of(key: ApiKey | None, cache_salt: str | None = None) -> bytes:
    """Return the salt of the caches for a request, from those of its tenant and of the request itself."""
    tenant = b"" if key is None else key.salt
    if cache_salt is None:
        return tenant
    return hashlib.sha256(tenant + b"\0" + cache_salt.encode()).digest()[:16]


@dataclass(frozen=True, kw_only=True)
class _KeyFile:
    keys: tuple[ApiKey, ...] = ()
    """Keys of the file."""


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such key file. Make one: saccade keys create {path} --name NAME") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not a readable JSON file of keys. Make one: saccade keys create") from error
    keys = decode(_KeyFile, tree, str(path)).keys
    names = [key.name for key in keys]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"{path}: more than one key is named {min(twice)}. Rename one")
    return keys


def create_key(path: Path, **fields: Any) -> str:
    """Add a key to the file, which is created if missing; return the key, which is stored nowhere."""
    secret = _PREFIX + secrets.token_urlsafe(32)
    keys = read_keys(path) if path.exists() else ()
    key = ApiKey(sha256=_hash(secret), **fields)
    if any(one.name == key.name for one in keys):
        raise ConfigError(
            f"{path}: there is a key named {key.name} already. Choose another name, or run saccade keys revoke"
        )
    _write_keys(path, (*keys, key))
    return secret


def revoke_key(path: Path, name: str) -> None:
    """Remove a key from the file. Servers that use the file refuse the key from then on."""
    keys = read_keys(path)
    if name not in (key.name for key in keys):
        known = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"{path}: no key is named {name}. Keys: {known}")
    _write_keys(path, tuple(key for key in keys if key.name != name))


def _write_keys(path: Path, keys: tuple[ApiKey, ...]) -> None:
    entries = [{name: value for name, value in asdict(key).items() if value is not None} for key in keys]
    with atomic_write(path) as temporary:
        temporary.touch(mode=0o600)
        temporary.write_text(json.dumps({"keys": entries}, indent=2) + "\n", encoding="utf-8")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


class KeyRing:
    """The keys of a file, read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp = self._read_stamp()
        self._keys = read_keys(path)
        self._next_check = 0.0

    def find(self, secret: str, scope: Scope) -> ApiKey | None:
        """Return the key with this secret, or None. Every key is compared in constant time."""
        self._reload_if_changed()
        digest = _hash(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest) and key.scope == scope:
                found = key
        return found

    def by_sha256(self) -> dict[str, ApiKey]:
        """Return the keys by their hash."""
        self._reload_if_changed()
        return {key.sha256: key for key in self._keys}

    def _reload_if_changed(self) -> None:
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_EVERY_S
        stamp = self._read_stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._keys = read_keys(self._path)
                logger.info("%s has changed: %d keys", self._path, len(self._keys))
            except ConfigError as error:
                logger.warning("the keys stay as they were: %s", error)

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino

"""Objects of a state folder: small files in a local folder, on S3 or on Google Cloud Storage.

    objects = open_objects("s3://fleets/photos")
    objects.create("desired/000012.json", content)       # False: another process has created it
    objects.write("snapshot/000007.json", content)       # replaces what is there, complete or not at all
    objects.read("snapshot/000007.json")                 # None: there is none

Creation is exclusive: of several processes that create a name, one succeeds. Locally this is a hard link, on S3 and
Google Cloud Storage a conditional request. Other stores are refused: their clients look first and write then.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from saccade.data.storage import is_remote, shown
from saccade.data.storage_faults import TRANSIENT, fault_of, reason_of
from saccade.errors import ConfigError, StorageError
from saccade.files import atomic_write, sync_to_disk

T = TypeVar("T")

_SCHEMES = ("s3", "s3a", "gs", "gcs")
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_ATTEMPTS, _FIRST_WAIT_S = 4, 0.2


class Objects(Protocol):
    """Named objects. Names have one folder and a file: `desired/000012.json`."""

    url: str
    """The folder, as messages name it."""

    def create(self, name: str, content: bytes) -> bool:
        """Create an object; False if it exists with other content. The content must be the writer's alone."""

    def write(self, name: str, content: bytes, *, sync: bool = True) -> None:
        """Write an object, in place of an earlier one. `sync`: it survives a loss of power from then on."""

    def read(self, name: str) -> bytes | None:
        """Read an object; None if it does not exist."""

    def names(self, folder: str) -> list[str]:
        """Names of the files in a folder, sorted; empty if there is no such folder."""

    def remove(self, name: str) -> None:
        """Remove an object, if it exists."""


def open_objects(url: str) -> Objects:
    """Open a folder or URL. Nothing is read or written yet."""
    if not is_remote(url):
        return LocalObjects(Path(url.removeprefix("file://")))
    if (scheme := url.partition("://")[0]) not in _SCHEMES:
        raise ConfigError(
            f"{shown(url)}: {scheme}:// cannot create a file exclusively, so that two controllers could both win. "
            "Use a local folder, s3:// or gs://"
        )
    return RemoteObjects(url)


class LocalObjects:
    """Files of a local folder, or of one that machines share."""

    def __init__(self, root: Path) -> None:
        self.url, self._root = str(root), root

    def create(self, name: str, content: bytes) -> bool:
        """Create a file: complete, or not at all."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            temporary.write_bytes(content)
            sync_to_disk(temporary)
            os.link(temporary, path)
            sync_to_disk(path.parent)
        except FileExistsError:
            return path.read_bytes() == content
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StorageError(
                f"{self.url}: its file system has no hard links ({error.strerror}), and creation needs them to be "
                "exclusive. Use another folder, s3:// or gs://"
            ) from error
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def write(self, name: str, content: bytes, *, sync: bool = True) -> None:
        """Replace a file atomically."""
        with atomic_write(self._root / name, sync=sync) as temporary:
            temporary.write_bytes(content)

    def read(self, name: str) -> bytes | None:
        """Read a file."""
        try:
            return (self._root / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        """List a folder, without files that are being written."""
        try:
            return sorted(path.name for path in (self._root / folder).iterdir() if not path.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, name: str) -> None:
        """Remove a file."""
        (self._root / name).unlink(missing_ok=True)


class RemoteObjects:
    """Objects of a store, through fsspec. Credentials and endpoints are those of the store's own tools."""

    def __init__(self, url: str) -> None:
        self.url, self._root = shown(url), url.rstrip("/")
        self._filesystem: Any = None
        self._is_checked = False

    def create(self, name: str, content: bytes) -> bool:
        """Create an object by a conditional request."""
        self._check_exclusive()
        return self._create(name, content)

    def write(self, name: str, content: bytes, *, sync: bool = True) -> None:
        """Replace an object. A store keeps what it has accepted."""
        del sync
        self._attempt(lambda fs: fs.pipe_file(f"{self._root}/{name}", content))

    def read(self, name: str) -> bytes | None:
        """Read an object."""
        try:
            return bytes(self._attempt(lambda fs: fs.cat_file(f"{self._root}/{name}")))
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> list[str]:
        """List a folder."""
        try:
            found = self._attempt(lambda fs: fs.ls(f"{self._root}/{folder}", detail=False))
        except FileNotFoundError:
            return []
        return sorted(name for path in found if (name := path.rpartition("/")[2]))

    def remove(self, name: str) -> None:
        """Remove an object."""
        try:
            self._attempt(lambda fs: fs.rm_file(f"{self._root}/{name}"))
        except FileNotFoundError:
            return

    def _create(self, name: str, content: bytes) -> bool:
        path = f"{self._root}/{name}"
        try:
            self._attempt(lambda fs: fs.pipe_file(path, content, mode="create"))
        except FileExistsError:
            return self.read(name) == content  # the answer to an earlier attempt may have been lost
        return True

    def _check_exclusive(self) -> None:
        """Refuse a server that ignores the condition, such as an old one that only speaks the protocol."""
        if self._is_checked:
            return
        name = f"checks/{secrets.token_hex(8)}"
        is_exclusive = self._create(name, b"first") and not self._create(name, b"second")
        self.remove(name)
        if not is_exclusive:
            raise StorageError(
                f"{self.url}: the server replaces an object that should be created exclusively, so that two "
                "controllers could both win. Update it, or use a local folder, S3 or Google Cloud Storage"
            )
        self._is_checked = True

    def _open(self) -> Any:
        """The filesystem, without caches of its own."""
        if self._filesystem is None:
            import fsspec

            scheme = self._root.partition("://")[0]
            try:
                self._filesystem = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
            except ImportError as error:
                extra = "gcs" if scheme.startswith("g") else "s3"
                raise StorageError(
                    f"{self.url}: {scheme}:// needs a package that is not installed ({error}). "
                    f"Install it: pip install 'saccade[{extra}]'"
                ) from error
        return self._filesystem

    def _attempt(self, action: Callable[[Any], T]) -> T:
        """Run an action, again after faults that may pass; one line about the others."""
        filesystem, wait_s = self._open(), _FIRST_WAIT_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return action(filesystem)
            except (FileNotFoundError, FileExistsError):
                raise
            except Exception as error:  # each filesystem and each of their HTTP clients brings its own classes
                if _exists_already(error):
                    raise FileExistsError(str(error)) from error
                fault = fault_of(error)
                if fault != TRANSIENT or attempt == _ATTEMPTS:
                    raise StorageError(f"{self.url}: {reason_of(error)}. {fault}") from error
                time.sleep(wait_s)
                wait_s *= 2
        raise AssertionError("the last attempt returns or raises")


def _exists_already(error: BaseException) -> bool:
    """Whether a conditional request was refused because the object exists, or is being created by another one."""
    names = ("PreconditionFailed", "ConditionalRequestConflict", "conditionNotMet", "At least one of the pre-condition")
    chain: list[BaseException] = [error]
    while len(chain) < 5 and (cause := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(cause)
    return any(name in str(each) for each in chain for name in names)

"""The headers of a tar, read once from front to back: where each file's bytes lie.

    512-byte header, data padded to 512, next header ... a block of zeros ends the archive

Formats: v7, ustar (name prefix), GNU (long names, large sizes), pax (path and size records). Directories, links, devices and
sparse files are passed over. A header's checksum is verified; what cannot be one is damage, and reading stops there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

BLOCK = 512
_END = bytes(BLOCK)
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_MAX_NAME_BYTES = 1 << 20
"""Long names and pax records beyond this are garbage that happens to add up."""
_WINDOW_BYTES = 4 << 20


class Member(NamedTuple):
    """One file of a tar: its path, and where its data lies."""

    name: str
    offset: int
    size: int


class TarDamageError(Exception):
    """The archive ends or breaks off; the message says how and at which byte."""


class Window:
    """A file read from front to back in large pieces, so that headers cost no call of their own."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, window_bytes: int = _WINDOW_BYTES) -> None:
        self.num_bytes = num_bytes
        self._read, self._window_bytes = read, window_bytes
        self._begin, self._data = 0, b""

    def get(self, offset: int, size: int) -> bytes:
        """These bytes; at the end of the file what is left of them."""
        end = min(offset + size, self.num_bytes)
        if offset >= end:
            return b""
        if not self._begin <= offset <= end <= self._begin + len(self._data):
            self._begin = offset
            self._data = self._read(offset, min(max(size, self._window_bytes), self.num_bytes - offset))
        return self._data[offset - self._begin : end - self._begin]


def members(window: Window) -> Iterator[Member]:
    """The regular files of a tar in order. Raises `TarDamageError` after the last whole one if the end mark is missing."""
    offset, name, size, is_sparse = 0, None, None, False  # name, size: from extension headers, for the next file
    while True:
        header = window.get(offset, BLOCK)
        if len(header) < BLOCK:
            raise TarDamageError(f"truncated at byte {window.num_bytes}")
        if header == _END:
            return
        kind, stated_size = header[156:157], _number(header[124:136])
        if stated_size is None or stated_size < 0 or not _checksum_fits(header):
            raise TarDamageError(f"no tar header at byte {offset}")
        begin = offset + BLOCK
        if kind in (b"L", b"x", b"X"):
            extension = window.get(begin, stated_size) if stated_size <= _MAX_NAME_BYTES else b""
            if len(extension) < stated_size:
                raise TarDamageError(
                    f"truncated at byte {window.num_bytes}" if extension else f"no tar header at byte {offset}"
                )
            if kind == b"L":
                name = _text(extension)
            else:
                records = _pax_records(extension)
                name, size = records.get("path", name), _size_record(records, size)
                is_sparse = any(record.startswith("GNU.sparse.") for record in records)
            offset = begin + _padded(stated_size)
            continue
        path = name or _path(header)
        num_bytes = stated_size if size is None else size
        is_regular = kind in _REGULAR and not is_sparse and not (kind == b"\0" and path.endswith("/"))
        if kind == b"S":
            begin += _sparse_blocks(window, header, begin)
        offset = begin if kind in _WITHOUT_DATA else begin + _padded(num_bytes)
        if is_regular:
            if begin + num_bytes > window.num_bytes:
                raise TarDamageError(f"truncated at byte {window.num_bytes}")
            yield Member(path, begin, num_bytes)
        if kind not in (b"K", b"g"):
            name, size, is_sparse = None, None, False


def _path(header: bytes) -> str:
    """The name field, behind ustar's prefix. GNU keeps other things where ustar keeps the prefix."""
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    """Up to the first zero byte. Bytes that are no UTF-8 are spelled out, so that every name can be stored."""
    return field.partition(b"\0")[0].decode("utf-8", "backslashreplace")


def _number(field: bytes) -> int | None:
    """Octal digits, or GNU's large numbers: a first byte of 0x80, then big-endian. None for anything else."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    try:
        return int(field.partition(b"\0")[0].strip() or b"0", 8)
    except ValueError:
        return None


def _checksum_fits(header: bytes) -> bool:
    """The sum of the header's bytes with the sum's own field as blanks; old tars summed signed bytes."""
    stated = _number(header[148:156])
    total = sum(header) - sum(header[148:156]) + 8 * 32
    return stated == total or stated == total - 256 * sum(byte > 127 for byte in header[:148] + header[156:])


def _pax_records(data: bytes) -> dict[str, str]:
    """`LENGTH KEY=VALUE\\n`, one after another."""
    records = {}
    while data:
        length, blank, _ = data.partition(b" ")
        if not blank or not length.isdigit() or not len(length) + 1 < int(length) <= len(data):
            break
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key.decode("utf-8", "replace")] = value.decode("utf-8", "backslashreplace")
        data = data[int(length) :]
    return records


def _size_record(records: dict[str, str], otherwise: int | None) -> int | None:
    size = records.get("size", "")
    return int(size) if size.isascii() and size.isdigit() else otherwise


def _sparse_blocks(window: Window, header: bytes, begin: int) -> int:
    """Bytes of the extra headers behind the header of an old GNU sparse file."""
    size, has_more = 0, header[482:483] == b"\1"
    while has_more:
        has_more = window.get(begin + size, BLOCK)[504:505] == b"\1"
        size += BLOCK
    return size


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK

"""Scan the headers of a tar once from front to back: name, offset and size of each file.

    512-byte header, data padded to 512, next header ... a record of zeros ends the archive

Formats: v7, ustar (name prefix), GNU (long names, large sizes), pax (path and size records). Directories, links,
devices and sparse files are skipped. Header checksums are verified. After a damaged header the scan resumes at the
next valid one, found by its ustar magic and checksum, and a `Gap` reports what was skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

RECORD = 512
_END = bytes(RECORD)
_MAGIC, _MAGIC_OFFSET = b"ustar", 257
_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_MAX_NAME_BYTES = 1 << 20
"""Long names and pax records beyond this are garbage with a valid checksum by chance."""
_WINDOW_BYTES = 4 << 20


class Member(NamedTuple):
    """One regular file of a tar: its path, and the offset and size of its data."""

    name: str
    offset: int
    size: int


class Gap(NamedTuple):
    """Bytes of a damaged tar that were skipped, from the last header's offset to the next one, and why."""

    begin: int
    end: int
    reason: str


class Window:
    """A buffered reader for a file read from front to back."""

    def __init__(self, read: Callable[[int, int], bytes], num_bytes: int, window_bytes: int = _WINDOW_BYTES) -> None:
        self.num_bytes = num_bytes
        self._read, self._window_bytes = read, window_bytes
        self._begin, self._data = 0, b""

    def get(self, offset: int, size: int) -> bytes:
        """Read a range; shorter at the end of the file."""
        end = min(offset + size, self.num_bytes)
        if offset >= end:
            return b""
        if not self._begin <= offset <= end <= self._begin + len(self._data):
            self._begin = offset
            self._data = self._read(offset, min(max(size, self._window_bytes), self.num_bytes - offset))
        return self._data[offset - self._begin : end - self._begin]


def members(window: Window) -> Iterator[Member | Gap]:
    """The regular files of a tar in order, and a `Gap` wherever it is damaged or truncated."""
    offset, name, size, is_sparse = 0, None, None, False  # name, size: from extension headers, for the next file
    while True:
        header = window.get(offset, RECORD)
        stated_size, begin = _data_size(header), offset + RECORD
        if header == _END:
            offset = _next_header(window, begin)
            if offset == window.num_bytes:
                return
            yield Gap(begin - RECORD, offset, f"zeros at byte {begin - RECORD}")
            name, size, is_sparse = None, None, False
            continue
        kind = header[156:157]
        is_extension = kind in (b"L", b"x", b"X")
        num_bytes = stated_size if size is None or is_extension else size
        is_regular = (
            kind in _REGULAR and not is_sparse and not (kind == b"\0" and (name or _path(header)).endswith("/"))
        )
        is_truncated = num_bytes is not None and (is_regular or is_extension) and begin + num_bytes > window.num_bytes
        if num_bytes is None or is_truncated or (is_extension and num_bytes > _MAX_NAME_BYTES):
            found = _next_header(window, offset + 1)
            is_cut = found == window.num_bytes and (is_truncated or len(header) < RECORD)
            yield Gap(
                offset, found, f"truncated at byte {window.num_bytes}" if is_cut else f"no tar header at byte {offset}"
            )
            if found == window.num_bytes:
                return
            offset, name, size, is_sparse = found, None, None, False
            continue
        if is_extension:
            extension = window.get(begin, num_bytes)
            if kind == b"L":
                name = _text(extension)
            else:
                records = _pax_records(extension)
                name, size = records.get("path", name), _size_record(records, size)
                is_sparse = any(record.startswith("GNU.sparse.") for record in records)
            offset = begin + _padded(num_bytes)
            continue
        if kind == b"S":
            begin += _sparse_bytes(window, header, begin)
        offset = begin if kind in _WITHOUT_DATA else begin + _padded(num_bytes)
        if is_regular:
            yield Member(name or _path(header), begin, num_bytes)
        if kind not in (b"K", b"g"):
            name, size, is_sparse = None, None, False


def _next_header(window: Window, offset: int) -> int:
    """Offset of the first valid ustar, GNU or pax header from `offset` on, or the end of the file."""
    while offset + RECORD <= window.num_bytes:
        data = window.get(offset, min(_WINDOW_BYTES, window.num_bytes - offset))
        found = data.find(_MAGIC, _MAGIC_OFFSET)
        while 0 <= found - _MAGIC_OFFSET <= len(data) - RECORD:
            if _data_size(data[found - _MAGIC_OFFSET : found - _MAGIC_OFFSET + RECORD]) is not None:
                return offset + found - _MAGIC_OFFSET
            found = data.find(_MAGIC, found + 1)
        offset += len(data) - RECORD + 1
    return window.num_bytes


def _data_size(header: bytes) -> int | None:
    """The size field of a header; None if the header is not valid."""
    if len(header) < RECORD or not _checksum_fits(header):
        return None
    size = _number(header[124:136])
    return size if size is None or size >= 0 else None


def _path(header: bytes) -> str:
    """The name field with ustar's prefix. GNU uses the prefix field for other data."""
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _text(field: bytes) -> str:
    """Decode up to the first zero byte. Invalid UTF-8 is escaped, so that every name can be stored."""
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
    """The sum of the header's bytes with the checksum field as blanks; old tars summed signed bytes."""
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


def _sparse_bytes(window: Window, header: bytes, begin: int) -> int:
    """Size of the extra headers after the header of an old GNU sparse file."""
    size, has_more = 0, header[482:483] == b"\1"
    while has_more:
        has_more = window.get(begin + size, RECORD)[504:505] == b"\1"
        size += RECORD
    return size


def _padded(size: int) -> int:
    return -(-size // RECORD) * RECORD

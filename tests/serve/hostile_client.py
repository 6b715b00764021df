"""Send a hostile case over a new connection and read the answer."""

import asyncio
import contextlib
import re
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Answer to a case."""

    status: int | None
    """Status of the response; None: the connection was closed without one."""
    seconds: float
    body: bytes = b""
    is_late: bool = False
    """Whether the limit of the case passed."""

    def fits(self, case):
        if self.is_late:
            return False
        if self.status is None:
            return case.may_close
        return self.status == 200 if case.is_served else 400 <= self.status < 500


async def send(case, host, port, pieces=None, limit_s=None):
    """Send a case; the clock runs from the first byte to the end of the answer. `pieces` were made before.

    `limit_s` replaces the limit of the case, which holds on a machine that does nothing else.
    """
    pieces = case.pieces() if pieces is None else pieces
    started_at = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    sender = asyncio.create_task(_write(writer, pieces))
    try:
        async with asyncio.timeout(limit_s or case.limit_s):
            status, body = await _read(reader)
        return Answer(status, time.perf_counter() - started_at, body)
    except TimeoutError:
        return Answer(None, time.perf_counter() - started_at, is_late=True)
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):
            await sender
        writer.transport.abort()


async def _write(writer, pieces):
    with contextlib.suppress(OSError):
        for piece in pieces:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                writer.write(piece)
                await writer.drain()


async def _read(reader):
    """Return status and body of the first response; (None, b"") if there is none."""
    data = b""
    with contextlib.suppress(OSError):
        while b"\r\n\r\n" not in data:
            if not (more := await reader.read(2**16)):
                break
            data += more
        head, _, body = data.partition(b"\r\n\r\n")
        found = re.match(rb"HTTP/1\.1 (\d{3})", head)
        if found is None:
            return None, b""
        if found[1] == b"100":
            return await _read(reader)
        length = re.search(rb"(?i)content-length: (\d+)", head)
        while length is not None and len(body) < int(length[1]) and (more := await reader.read(2**16)):
            body += more
        return int(found[1]), body
    return None, b""

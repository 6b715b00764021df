"""Send the answer of one generation as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from saccade.serve.generation import Generation, cancelled_on_disconnect

DONE = b"data: [DONE]\n\n"


def event(data: bytes, name: str | None = None) -> bytes:
    """Write one event."""
    return (b"" if name is None else b"event: " + name.encode() + b"\n") + b"data: " + data + b"\n\n"


class EventStream(Response):
    """Sends chunks as they come. When the client leaves, the generation is cancelled."""

    def __init__(self, generation: Generation, chunks: AsyncIterator[bytes]) -> None:
        """`chunks` are complete events; a chunk may have several."""
        super().__init__(media_type="text/event-stream", headers={"x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._generation, self._chunks = generation, chunks

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send all chunks."""
        async with cancelled_on_disconnect(self._generation, receive):
            error = await self._generation.started()
            if error is not None:  # the status can still be chosen
                scope["state"]["record"].fail(error.code, error.status_code)
                await error.response()(scope, receive, send)
                return
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

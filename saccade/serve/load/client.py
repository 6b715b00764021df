"""Send one streamed request to OpenAI's chat API, and note the time of every chunk.

Chunks are searched, not parsed: the JSON of 256 streams would keep a core busy. Only the last events are decoded.
"""

import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

_CONTENT = re.compile(rb'"(?:content|reasoning_content|arguments|name)":\s*"[^"]')
_FINISH = re.compile(rb'"finish_reason":\s*"')


@dataclass
class Outcome:
    """Outcome of one request. Times are `time.perf_counter` seconds."""

    started_at: float
    status: int = 0
    """Status of the HTTP response; 0: there was none."""
    error: str | None = None
    """Why it failed: a typed code, `http STATUS`, or the name of a connection error."""
    chunk_times: list[float] = field(default_factory=list)
    """Arrival of each chunk with text."""
    ended_at: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    """Completions that sent a finish reason."""
    num_endings: int = 0
    """`[DONE]` events and error events: exactly one ends a stream."""

    @property
    def is_success(self) -> bool:
        """Whether the whole answer arrived."""
        return self.error is None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.chunk_times[0] - self.started_at

    @property
    def latency_s(self) -> float:
        """Time to the last byte."""
        return self.ended_at - self.started_at

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None with one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between consecutive chunks."""
        return [b - a for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


def open_session(api_key: str | None = None, timeout_s: float = 3600.0) -> aiohttp.ClientSession:
    """Open a session without a limit on connections."""
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        headers=headers,
        read_bufsize=2**18,
        trust_env=False,
    )


async def stream_chat(session: aiohttp.ClientSession, url: str, body: bytes) -> Outcome:
    """Send a chat request with `stream` and read the answer to its end. Nothing that a server does raises."""
    outcome = Outcome(time.perf_counter())
    try:
        async with session.post(f"{url}/v1/chat/completions", data=body) as response:
            outcome.status = response.status
            if response.status != 200:
                outcome.error = _error_code(await response.read(), response.status)
            else:
                await read_events(response, outcome)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        outcome.error = type(error).__name__
    outcome.ended_at = time.perf_counter()
    if outcome.error is None and (outcome.num_endings != 1 or not outcome.chunk_times):
        outcome.error = "no ending" if outcome.num_endings != 1 else "no output"
    return outcome


async def read_events(response: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read a stream to its end."""
    rest = b""
    while data := await response.content.readany():
        now = time.perf_counter()
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            _count(event, outcome, now)


def _count(event: bytes, outcome: Outcome, now: float) -> None:
    is_last = _FINISH.search(event) is not None
    is_empty = b'"content":' in event and b'"role":' not in event and not is_last  # tokens whose text is incomplete
    if _CONTENT.search(event) or is_empty:
        outcome.chunk_times.append(now)
    if is_last:
        outcome.num_finished += 1
        outcome.chunk_times = outcome.chunk_times or [now]  # none of its tokens has text
    if b"[DONE]" in event[:16]:
        outcome.num_endings += 1
    elif b'"usage":' in event and b'"usage":null' not in event and b'"usage": null' not in event:
        usage = _decoded(event).get("usage") or {}
        outcome.num_prompt_tokens = usage.get("prompt_tokens", 0)
        outcome.num_output_tokens = usage.get("completion_tokens", 0)
    elif b'"error":' in event[:64]:
        outcome.error = _error_code(event.removeprefix(b"data: "), 200)


def _decoded(event: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _error_code(body: bytes, status: int) -> str:
    """Return the typed code of an error, or the status."""
    error = _decoded(body).get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else f"http {status}"


async def find_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the name of the first model that the server lists."""
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        return str((await response.json())["data"][0]["id"])

"""Which requests are admitted. Pure: plain Python over numbers; the caller passes the time.

    arrival -> preprocessing -> engine (waiting, then running) -> end

Each stage has a bound, so a client hears 429 at once instead of waiting for what cannot be served in time:

- completions in the engine: those that run and a bounded number that wait;
- their KV-cache pages: prompt tokens, and as many output tokens as recent completions had;
- their image tokens, which take encoder memory;
- bytes of images and videos that are being preprocessed;
- the time a new request would wait, by the rate at which requests end.

What arrives at an idle server is always admitted; the engine itself refuses what can never fit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

Bound = Literal["queue", "kv_cache", "encoder", "media", "wait"]

_RATE_WINDOW_S = 30.0
"""Window over which the rate of ending requests is measured."""
_MIN_ENDINGS = 8
"""With fewer endings in the window the rate counts as unknown."""
_WEIGHT = 0.05
"""Weight of a new observation in a running average."""
_MAX_RETRY_S = 60.0


@dataclass(frozen=True, kw_only=True)
class AdmissionLimits:
    """Bounds of the stages."""

    max_running: int
    """Completions the engine runs at the same time."""
    max_queued: int
    """Completions that may wait for one of these to end."""
    max_pages: int
    """Estimated KV-cache pages of all open requests. Most of these wait, so the bound is several times the pages that
    exist."""
    page_size: int
    """Tokens per page."""
    max_image_tokens: int
    """Estimated image tokens of all open requests."""
    max_media_bytes: int
    """Bytes of images and videos being preprocessed."""
    max_wait_s: float
    """Longest expected wait of a request that is admitted."""

    def part(self, *, num_engines: int, num_fronts: int) -> AdmissionLimits:
        """Return the limits of one of several front processes, for a model that several engines serve.

        What the engines bound grows with their number (one is counted while there is none); all of it, the queue and
        the bytes of media are divided by the fronts.
        """

        def share(limit: int, number: int = 1) -> int:
            return max(1, round(limit * number / num_fronts))

        engines = max(1, num_engines)
        return replace(
            self,
            max_running=share(self.max_running, engines),
            max_queued=share(self.max_queued),
            max_pages=share(self.max_pages, engines),
            max_image_tokens=share(self.max_image_tokens, engines),
            max_media_bytes=share(self.max_media_bytes),
        )


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The resources that a request needs of each stage."""

    num_completions: int
    """Sequences that the engine generates."""
    num_prompt_tokens: int
    """Tokens of the text of its prompts."""
    max_tokens: int
    """Maximum output tokens of a completion."""
    num_images: int = 0
    """Images and videos."""
    num_media_bytes: int = 0
    """Encoded size of the images and videos."""


@dataclass(frozen=True)
class Refusal:
    """Why a request is not admitted, and when to try again."""

    bound: Bound
    retry_after_s: float


class AdmittedRequest:
    """One admitted request, with what it counts for until it is closed."""

    __slots__ = ("demand", "is_open", "is_preprocessing", "num_image_tokens", "num_media_bytes", "num_pages")

    def __init__(self, demand: Demand, num_pages: int, num_image_tokens: int) -> None:
        self.demand, self.num_pages, self.num_image_tokens = demand, num_pages, num_image_tokens
        self.num_media_bytes = demand.num_media_bytes
        self.is_open = self.is_preprocessing = True


class Admission:
    """Counts what is open in each stage. Used by one thread."""

    def __init__(self, limits: AdmissionLimits) -> None:
        self.limits = limits
        self.num_open = 0
        """Admitted requests that have not ended."""
        self.num_preprocessing = 0
        """Open requests whose prompt is not ready."""
        self.num_completions = self.num_pages = self.num_image_tokens = self.num_media_bytes = 0
        self.num_refused: dict[Bound, int] = dict.fromkeys(("queue", "kv_cache", "encoder", "media", "wait"), 0)
        self._output_tokens = 256.0
        self._tokens_per_image = 512.0
        self._endings: deque[tuple[float, int]] = deque()
        self._num_ended = 0

    @property
    def usage(self) -> dict[Bound, float]:
        """How much of each bound is in use, from 0 to 1. `wait` is missing, since it depends on the time."""
        limits = self.limits
        return {
            "queue": self.num_completions / (limits.max_running + limits.max_queued),
            "kv_cache": self.num_pages / limits.max_pages,
            "encoder": self.num_image_tokens / limits.max_image_tokens,
            "media": self.num_media_bytes / limits.max_media_bytes,
        }

    def set_limits(self, limits: AdmissionLimits) -> None:
        """Change the bounds. What is admitted stays; what is above a lower bound only keeps new requests out."""
        self.limits = limits

    # -------------------------------------------------------------- decide

    def refusal(self, demand: Demand, now: float) -> Refusal | None:
        """Return why the request cannot be admitted now, or None if it can."""
        if self.num_open == 0:
            return None
        limits = self.limits
        pages, image_tokens = self._estimate(demand)
        excess: dict[Bound, bool] = {
            "queue": self.num_completions + demand.num_completions > limits.max_running + limits.max_queued,
            "kv_cache": self.num_pages + pages > limits.max_pages,
            "encoder": image_tokens > 0 and self.num_image_tokens + image_tokens > limits.max_image_tokens,
            "media": demand.num_media_bytes > 0
            and self.num_media_bytes + demand.num_media_bytes > limits.max_media_bytes,
            "wait": self.expected_wait_s(now) > limits.max_wait_s,
        }
        bound = next((name for name, is_exceeded in excess.items() if is_exceeded), None)
        return None if bound is None else Refusal(bound, self._retry_after_s(now))

    def is_full(self, now: float) -> Refusal | None:
        """Return why even the smallest request would be refused, or None. Known before a body is read."""
        return self.refusal(Demand(num_completions=1, num_prompt_tokens=0, max_tokens=1), now)

    def expected_wait_s(self, now: float) -> float:
        """Seconds until a new completion starts, by the rate of endings; 0 if there is room or no rate."""
        num_waiting = self.num_completions - self.limits.max_running
        rate = self._rate(now)
        return num_waiting / rate if num_waiting > 0 and rate > 0 else 0.0

    def _rate(self, now: float) -> float:
        """Completions that end per second."""
        while self._endings and self._endings[0][0] < now - _RATE_WINDOW_S:
            self._num_ended -= self._endings.popleft()[1]
        if len(self._endings) < _MIN_ENDINGS:
            return 0.0
        return self._num_ended / max(1e-3, now - self._endings[0][0])

    def _retry_after_s(self, now: float) -> float:
        """Time in which about a tenth of the open requests end, which makes room for some of the refused ones."""
        rate = self._rate(now)
        return min(_MAX_RETRY_S, max(1.0, self.num_completions / 10 / rate)) if rate > 0 else 1.0

    def estimated_tokens(self, demand: Demand) -> int:
        """Estimated tokens of prompt and output together."""
        output = min(demand.max_tokens, 2 * self._output_tokens) * demand.num_completions
        return round(demand.num_prompt_tokens + demand.num_images * self._tokens_per_image + output)

    def _estimate(self, demand: Demand) -> tuple[int, int]:
        """Estimated KV-cache pages and image tokens."""
        image_tokens = round(demand.num_images * self._tokens_per_image)
        output = min(demand.max_tokens, 2 * self._output_tokens)
        shared = demand.num_prompt_tokens + image_tokens
        page_size = self.limits.page_size
        pages = math.ceil(shared / page_size) + demand.num_completions * math.ceil(output / page_size)
        return pages, image_tokens

    # -------------------------------------------------------------- count

    def admit(self, demand: Demand) -> AdmittedRequest:
        """Count a request."""
        admitted = AdmittedRequest(demand, *self._estimate(demand))
        self.num_open += 1
        self.num_preprocessing += 1
        self.num_completions += demand.num_completions
        self.num_pages += admitted.num_pages
        self.num_image_tokens += admitted.num_image_tokens
        self.num_media_bytes += demand.num_media_bytes
        return admitted

    def add_media(self, admitted: AdmittedRequest, num_bytes: int, now: float) -> Refusal | None:
        """Count media that arrive after the request was admitted.

        Returns a refusal if the media of all requests are too large.
        """
        if not admitted.is_open or not admitted.is_preprocessing:
            return None
        admitted.num_media_bytes += num_bytes
        self.num_media_bytes += num_bytes
        is_alone = self.num_media_bytes == admitted.num_media_bytes
        if is_alone or self.num_media_bytes <= self.limits.max_media_bytes:
            return None
        return Refusal("media", self._retry_after_s(now))

    def refuse(self, refusal: Refusal) -> None:
        """Count a refused request."""
        self.num_refused[refusal.bound] += 1

    def preprocessed(self, admitted: AdmittedRequest, num_image_tokens: int) -> None:
        """Note that the prompt of a request is ready: its media are decoded, its image tokens counted."""
        if not admitted.is_open or not admitted.is_preprocessing:
            return
        self._end_preprocessing(admitted)
        self.num_image_tokens += num_image_tokens - admitted.num_image_tokens
        admitted.num_image_tokens = num_image_tokens
        if admitted.demand.num_images:
            per_image = num_image_tokens / admitted.demand.num_images
            self._tokens_per_image += _WEIGHT * (per_image - self._tokens_per_image)

    def close(self, admitted: AdmittedRequest, now: float, *, num_output_tokens: int | None = None) -> None:
        """Note that a request has ended; `num_output_tokens` is given if it ran to its end."""
        if not admitted.is_open:
            return
        if admitted.is_preprocessing:
            self._end_preprocessing(admitted)
        admitted.is_open = False
        self.num_open -= 1
        self.num_completions -= admitted.demand.num_completions
        self.num_pages -= admitted.num_pages
        self.num_image_tokens -= admitted.num_image_tokens
        if num_output_tokens is not None:
            self._endings.append((now, admitted.demand.num_completions))
            self._num_ended += admitted.demand.num_completions
            each = num_output_tokens / admitted.demand.num_completions
            self._output_tokens += _WEIGHT * (each - self._output_tokens)

    def _end_preprocessing(self, admitted: AdmittedRequest) -> None:
        admitted.is_preprocessing = False
        self.num_preprocessing -= 1
        self.num_media_bytes -= admitted.num_media_bytes

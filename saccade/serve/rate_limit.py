"""Rate limits per key: token buckets of requests and of tokens. Pure: the caller passes the time.

Several processes hold a limit together by exchanging what they counted:

    limiter.take_consumption() -> messages, at most D seconds -> limiter.charge on every other one

A bucket that is charged goes below zero, and admits nothing until it has refilled. So in any window of W seconds N
limiters together let a key take at most

    limit * (1 + W / 60) + (N - 1) * limit * (1 + D / 60)

units, where a single limiter allows the first term. The second one is what the others can admit before they know, at
most what arrives there within D; it does not grow with W. With evenly spread requests it is the rate of the key
times D.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from saccade.serve.keys import ApiKey


@dataclass(frozen=True, kw_only=True)
class Consumption:
    """Requests and tokens of one API key that count against its limits."""

    requests: int = 0
    """Requests."""
    tokens: int = 0
    """Tokens of prompts and outputs; negative after a correction of an estimate."""

    def plus(self, other: Consumption) -> Consumption:
        """The sum of two consumptions of a key."""
        return Consumption(requests=self.requests + other.requests, tokens=self.tokens + other.tokens)


class Bucket:
    """Token bucket that holds up to `per_minute` units and refills at that rate.

    It may go below zero after a low estimate.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Return the units that can be taken now."""
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / 60)
        self._at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` can be taken; more than the bucket holds waits for a full bucket."""
        lacking = min(amount, self.per_minute) - self.level(now)
        return max(0.0, lacking * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Take units; a negative amount gives them back."""
        self._level = min(self.per_minute, self.level(now) - amount)


class RateLimiter:
    """Limits the requests and tokens of all keys that have limits."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str, int], Bucket] = {}
        self._consumed: dict[str, Consumption] = {}
        """By the SHA-256 of the key, since `take_consumption`."""

    def _bucket(self, key: ApiKey, kind: str, per_minute: int, now: float) -> Bucket:
        """Return the bucket of a key and a limit: a changed limit takes effect with a new bucket."""
        name = key.sha256, kind, per_minute
        if name not in self._buckets:
            self._buckets[name] = Bucket(per_minute, now)
        return self._buckets[name]

    def take_request(self, key: ApiKey, now: float) -> float:
        """Count a request. If the limit is reached, it is not counted; returns the seconds to wait."""
        if key.requests_per_minute is None:
            return 0.0
        wait_s = self._take(self._bucket(key, "requests", key.requests_per_minute, now), 1, now)
        if wait_s == 0.0:
            self._note(key, Consumption(requests=1))
        return wait_s

    def take_tokens(self, key: ApiKey, num_tokens: int, now: float) -> float:
        """Count the estimated tokens of a request, in the same way."""
        if key.tokens_per_minute is None:
            return 0.0
        wait_s = self._take(self._bucket(key, "tokens", key.tokens_per_minute, now), num_tokens, now)
        if wait_s == 0.0:
            self._note(key, Consumption(tokens=num_tokens))
        return wait_s

    def settle_tokens(self, key: ApiKey, num_estimated: int, num_used: int, now: float) -> None:
        """Correct the estimate of a request that has ended."""
        if key.tokens_per_minute is not None:
            correction = num_used - num_estimated
            self._bucket(key, "tokens", key.tokens_per_minute, now).take(correction, now)
            self._note(key, Consumption(tokens=correction))

    @staticmethod
    def _take(bucket: Bucket, amount: float, now: float) -> float:
        wait_s = bucket.wait_s(amount, now)
        if wait_s == 0.0:
            bucket.take(amount, now)
        return wait_s

    # -------------------------------------------------------------- limits that several processes hold together

    def take_consumption(self) -> dict[str, Consumption]:
        """Return what was counted here since the last call, corrections included, by the SHA-256 of the key."""
        taken, self._consumed = self._consumed, {}
        return {sha256: one for sha256, one in taken.items() if one != Consumption()}

    def charge(self, keys: Mapping[str, ApiKey], consumption: Mapping[str, Consumption], now: float) -> None:
        """Count what other processes counted, of the keys that are still known; it is not part of `take_consumption`.

        `keys` and `consumption` are by SHA-256.
        """
        for sha256, used in consumption.items():
            if (key := keys.get(sha256)) is None:
                continue
            if key.requests_per_minute is not None:
                self._bucket(key, "requests", key.requests_per_minute, now).take(used.requests, now)
            if key.tokens_per_minute is not None:
                self._bucket(key, "tokens", key.tokens_per_minute, now).take(used.tokens, now)

    def _note(self, key: ApiKey, used: Consumption) -> None:
        self._consumed[key.sha256] = self._consumed.get(key.sha256, Consumption()).plus(used)

"""Rate limits per key: token buckets of requests and of tokens. Pure: the caller passes the time."""

from __future__ import annotations

from saccade.serve.keys import ApiKey


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
        return self._take(self._bucket(key, "requests", key.requests_per_minute, now), 1, now)

    def take_tokens(self, key: ApiKey, num_tokens: int, now: float) -> float:
        """Count the estimated tokens of a request, in the same way."""
        if key.tokens_per_minute is None:
            return 0.0
        return self._take(self._bucket(key, "tokens", key.tokens_per_minute, now), num_tokens, now)

    def settle_tokens(self, key: ApiKey, num_estimated: int, num_used: int, now: float) -> None:
        """Correct the estimate of a request that has ended."""
        if key.tokens_per_minute is not None:
            self._bucket(key, "tokens", key.tokens_per_minute, now).take(num_used - num_estimated, now)

    @staticmethod
    def _take(bucket: Bucket, amount: float, now: float) -> float:
        wait_s = bucket.wait_s(amount, now)
        if wait_s == 0.0:
            bucket.take(amount, now)
        return wait_s

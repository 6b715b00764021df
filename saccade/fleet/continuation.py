"""What happens to a request whose replica died: it continues on another replica, or ends with a typed failure.

    following = Continuation(request, front, now)
    following.extend(output)                    # for every output that reached the front
    verdict = following.lose()                  # its replica died: retry, or why not
    request = following.next_request(now)       # for the next replica: the same request with the tokens emitted so far

A request that kills its replica must not kill them all. Each loss counts against the request only if it has emitted few
tokens since it was sent to that replica: what decoded for a while is a bystander. Time is a parameter.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Literal

from saccade.engine.request import Failure, Request, RequestOutput

MAX_LOSSES = 4
"""Replicas that a request may lose before it ends, whatever it had emitted."""
MAX_SUSPECTED = 2
"""Losses soon after the request was sent; then it is refused everywhere."""
_BYSTANDER_TOKENS = 16
"""Tokens that a request emits on a replica before a loss of that replica no longer counts against it."""

Verdict = Literal["retry", "poison", "exhausted"]

POISONOUS = Failure(
    "running", "this request has ended two engines and is refused; change it, or report it to the operator",
    "invalid_request",
)  # fmt: skip
EXHAUSTED = Failure("running", "the engines of this request were lost; send it again", "engine_stopped")
NOT_STARTED = Failure("waiting", "no engine could start the request within its time limit", "unavailable")


class Continuation:
    """One request of a front, from replica to replica."""

    def __init__(self, request: Request, front: str, now: float) -> None:
        """`front` is an id of the front's process, so that replicas see no id twice."""
        self.request, self._front = request, front
        self.output_ids = list(request.output_ids)
        """Output tokens that reached the front."""
        self.num_losses = 0
        """Replicas that died while they had the request."""
        self._num_suspected = 0
        self._submitted_at = now
        self._num_sent_ids = 0

    @property
    def has_output(self) -> bool:
        """Whether tokens have reached the front."""
        return len(self.output_ids) > len(self.request.output_ids)

    def next_request(self, now: float) -> Request:
        """The request for the next replica: tokens emitted so far are known, time that has passed is gone."""
        self._num_sent_ids = len(self.output_ids)
        elapsed_s, request = now - self._submitted_at, self.request
        return replace(
            request,
            id=f"{self._front}/{request.id}/{self.num_losses}",
            output_ids=tuple(self.output_ids),
            queue_timeout_s=None if self.has_output else _less(request.queue_timeout_s, elapsed_s),
            timeout_s=_less(request.timeout_s, elapsed_s),
        )

    def extend(self, output: RequestOutput) -> None:
        """Note the tokens of an output that is passed on."""
        self.output_ids.extend(output.token_ids)

    def lose(self, *, is_suspect: bool = True) -> Verdict:
        """Note that the replica died; whether another one may be tried. Not `is_suspect`: it could not be reached."""
        self.num_losses += 1
        self._num_suspected += is_suspect and len(self.output_ids) - self._num_sent_ids < _BYSTANDER_TOKENS
        if self._num_suspected >= MAX_SUSPECTED:
            return "poison"
        return "exhausted" if self.num_losses >= MAX_LOSSES else "retry"


def _less(limit_s: float | None, elapsed_s: float) -> float | None:
    return None if limit_s is None else max(0.001, limit_s - elapsed_s)


def digest_of(request: Request) -> bytes:
    """Digest of what a request computes, by which fronts recognise one that has ended engines."""
    digest = hashlib.blake2b(digest_size=16)
    parts = (request.token_ids, [image.key for image in request.images], request.sampling, request.adapter)
    digest.update(repr(parts).encode())
    return digest.digest()


@dataclass
class RetryBudget:
    """Bounds retries of a front to a share of its requests, so that a fleet that fails is not flooded by retries."""

    share: float = 0.2
    """Retries that each request adds."""
    most: float = 512.0
    """Retries that can be saved up: those of a few replicas that die at once."""

    def __post_init__(self) -> None:
        self._level = self.most

    def count_request(self) -> None:
        """Count a request that was accepted."""
        self._level = min(self.most, self._level + self.share)

    def take(self) -> bool:
        """Take one retry. False: none is left."""
        if self._level < 1:
            return False
        self._level -= 1
        return True

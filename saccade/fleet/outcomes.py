"""What a request that has ended says about the version that answered it."""

from __future__ import annotations

from saccade.fleet.objectives import Outcome
from saccade.serve.record import RequestRecord

_REFUSALS = frozenset({"overloaded", "loading", "engine_restarting", "unavailable"})
"""Error codes of requests that were refused for load, or found no engine."""
_OTHERS_FAULT = frozenset({"rate_limit_exceeded", "cancelled", "draining"})
"""Error codes that say nothing about a version: limits of a key, clients that left, a front that stops."""


def outcome_of(record: RequestRecord) -> Outcome | None:
    """Metrics of a request. None: it says nothing about a version, as a request that the client got wrong."""
    if record.version is None or record.status == 0 or record.error_code in _OTHERS_FAULT:
        return None
    is_refused = record.error_code in _REFUSALS
    status = record.error_status or record.status  # the error may have come within a stream
    if 400 <= status < 500 and not is_refused:
        return None
    values = {"refusals": float(is_refused)}
    if not is_refused:
        values["errors"] = float(status >= 500 or record.error_code is not None or record.ending == "failed")
    if record.first_token_s is not None:
        values["ttft"] = record.first_token_s
    if record.ms_per_token is not None:
        values["tpot"] = record.ms_per_token / 1e3
    return Outcome(
        user=record.sticky_user, version=record.version, values=values,
        experiment=record.experiment, variant=record.variant,
    )  # fmt: skip

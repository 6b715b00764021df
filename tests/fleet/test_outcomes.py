"""What ended requests say about their version: errors and refusals are its own, mistakes of clients are not."""

import pytest

from saccade.fleet.outcomes import outcome_of
from saccade.serve.record import RequestRecord


def record(status=200, **fields):
    return RequestRecord(id="r1", route="/v1/chat/completions", model="m", version="may", status=status, **fields)


def test_a_whole_answer_has_its_latencies():
    ended = record(user="ann", ending="stop", first_token_s=0.2, decode_s=0.9, num_output_tokens=10, num_completions=1)
    outcome = outcome_of(ended)
    assert (outcome.user, outcome.version) == ("ann", "may")
    assert outcome.values == pytest.approx({"errors": 0.0, "refusals": 0.0, "ttft": 0.2, "tpot": 0.1})


def test_an_outcome_says_by_which_variant_the_user_had_the_version():
    outcome = outcome_of(record(user="ann", ending="stop", experiment="quantized", variant="int4"))
    assert (outcome.experiment, outcome.variant) == ("quantized", "int4")
    assert (outcome_of(record()).experiment, outcome_of(record()).variant) == (None, None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": 500, "error_code": "internal_error"}, {"errors": 1.0, "refusals": 0.0}),
        ({"status": 200, "error_code": "engine_stopped", "ending": "failed"}, {"errors": 1.0, "refusals": 0.0}),
        ({"status": 429, "error_code": "overloaded"}, {"refusals": 1.0}),
        ({"status": 503, "error_code": "unavailable"}, {"refusals": 1.0}),
    ],
)
def test_failures_and_refusals_count_against_the_version(fields, expected):
    assert outcome_of(record(**fields)).values == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"status": 400, "error_code": "bad_request"},
        {"status": 200, "error_code": "invalid_request", "error_status": 400, "ending": "failed"},
        {"status": 429, "error_code": "rate_limit_exceeded"},
        {"status": 0},
        {"status": 200, "error_code": "cancelled", "ending": "cancelled"},
    ],
)
def test_mistakes_limits_and_absence_of_clients_do_not(fields):
    assert outcome_of(record(**fields)) is None


def test_requests_without_a_version_have_no_outcome():
    assert outcome_of(RequestRecord(id="r1", route="/v1/models", status=200)) is None

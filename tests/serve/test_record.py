"""What observers of ended requests can ask of their records."""

import pytest

from saccade.engine.request import Failure
from saccade.serve.errors import error_of_failure
from saccade.serve.record import RequestRecord


def failed(kind):
    record, error = RequestRecord(id="req-1", route="/v1/completions"), error_of_failure(Failure("waiting", "no", kind))
    record.fail(error.code, error.status_code)
    return record


def test_the_user_is_the_named_one_or_else_the_key_or_else_the_request():
    record = RequestRecord(id="req-1", route="/v1/completions")
    assert record.sticky_user == "req-1"
    record.key_name = "alice"
    assert record.sticky_user == "alice"
    record.user = "carol"
    assert record.sticky_user == "carol"


@pytest.mark.parametrize(
    ("kind", "is_error", "is_refusal"),
    [
        ("invalid_request", False, False),
        ("context_length_exceeded", False, False),
        ("overloaded", False, True),
        ("unavailable", True, False),
        ("timeout", True, False),
        ("internal_error", True, False),
        ("engine_stopped", True, False),
    ],
)
def test_faults_of_the_client_and_refusals_for_load_are_no_errors(kind, is_error, is_refusal):
    record = failed(kind)
    assert (record.is_error, record.is_refusal) == (is_error, is_refusal)


def test_a_request_that_is_answered_is_no_error():
    record = RequestRecord(id="req-1", route="/v1/completions", status=200, ending="stop")
    assert not record.is_error
    assert not record.is_refusal


def test_what_no_replica_started_in_time_may_be_sent_again():
    error = error_of_failure(Failure("waiting", "no engine could start the request", "unavailable"))
    assert error.status_code == 503
    assert int(error.headers["retry-after"]) >= 1
    assert error_of_failure(Failure("running", "it has ended two engines", "invalid_request")).status_code == 400

"""What observers of ended requests can ask of their records."""

from saccade.engine.request import Failure
from saccade.serve.errors import error_of_failure
from saccade.serve.record import RequestRecord


def test_the_user_is_the_named_one_or_else_the_key_or_else_the_request():
    record = RequestRecord(id="req-1", route="/v1/completions")
    assert record.sticky_user == "req-1"
    record.key_name = "alice"
    assert record.sticky_user == "alice"
    record.user = "carol"
    assert record.sticky_user == "carol"


def test_what_no_replica_started_in_time_may_be_sent_again():
    error = error_of_failure(Failure("waiting", "no engine could start the request", "unavailable"))
    assert error.status_code == 503
    assert int(error.headers["retry-after"]) >= 1
    assert error_of_failure(Failure("running", "it has ended two engines", "invalid_request")).status_code == 400

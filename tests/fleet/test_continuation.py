"""Requests that lose their replica: what the next replica gets, who is suspected, how many retries there are."""

from saccade.engine.request import ImageSpan, Request, RequestOutput
from saccade.engine.sampling_params import SamplingParams
from saccade.fleet.continuation import MAX_LOSSES, Continuation, RetryBudget, digest_of
from saccade.fleet.poison import PoisonList

REQUEST = Request(
    id="request-1", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=64), seed=7, queue_timeout_s=5.0,
    timeout_s=60.0,
)  # fmt: skip


def emitted(*token_ids):
    return RequestOutput(request_id="request-1", token_ids=token_ids)


def test_the_next_replica_gets_the_tokens_emitted_so_far_and_the_remaining_time():
    following = Continuation(REQUEST, "front", now=100.0)
    first = following.next_request(now=101.0)
    assert (first.output_ids, first.queue_timeout_s, first.timeout_s) == ((), 4.0, 59.0)
    following.extend(emitted(5, 6))
    following.extend(emitted(7))
    assert following.lose() == "retry"
    second = following.next_request(now=110.0)
    assert (second.output_ids, second.queue_timeout_s, second.timeout_s) == ((5, 6, 7), None, 50.0)
    assert second.seed == first.seed
    assert len({first.id, second.id, REQUEST.id}) == 3


def test_a_request_that_loses_two_replicas_soon_after_it_came_is_poison():
    following = Continuation(REQUEST, "front", now=0.0)
    following.next_request(0.0)
    assert following.lose() == "retry"
    following.next_request(0.0)
    assert following.lose() == "poison"


def test_a_request_whose_replicas_could_not_be_reached_is_not_suspected():
    following = Continuation(REQUEST, "front", now=0.0)
    verdicts = []
    for _ in range(MAX_LOSSES):
        following.next_request(0.0)
        verdicts.append(following.lose(is_suspect=False))
    assert verdicts == ["retry"] * (MAX_LOSSES - 1) + ["exhausted"]


def test_a_request_that_had_decoded_for_a_while_is_not_suspected_and_ends_after_so_many_losses():
    following, verdicts = Continuation(REQUEST, "front", now=0.0), []
    for _ in range(MAX_LOSSES):
        following.next_request(0.0)
        following.extend(emitted(*range(16)))
        verdicts.append(following.lose())
    assert verdicts == ["retry"] * (MAX_LOSSES - 1) + ["exhausted"]


def test_equal_requests_have_one_digest_whatever_their_id_seed_or_tenant():
    image = ImageSpan(key=b"k", start=1, num_tokens=1, num_patches=4)
    same = Request(id="other", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=64), seed=8, salt=b"tenant")
    assert digest_of(same) == digest_of(REQUEST)
    for other in (
        Request(id="request-1", token_ids=(1, 2, 4), sampling=REQUEST.sampling),
        Request(id="request-1", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=63)),
        Request(id="request-1", token_ids=(1, 2, 3), sampling=REQUEST.sampling, images=(image,)),
    ):
        assert digest_of(other) != digest_of(REQUEST)


def test_retries_are_a_share_of_the_requests_and_what_was_saved_up():
    budget = RetryBudget(share=0.5, most=3.0)
    assert [budget.take() for _ in range(4)] == [True, True, True, False]
    for _ in range(4):
        budget.count_request()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_poison_is_refused_for_a_while_and_reported_once():
    now = [0.0]
    poison = PoisonList(lambda: now[0])
    poison.add(b"mine")
    poison.add_known([b"theirs"])
    assert poison.take_unreported() == (b"mine",)
    assert poison.take_unreported() == ()
    assert poison.has(b"mine")
    assert poison.has(b"theirs")
    assert not poison.has(b"other")
    now[0] = 599.0
    assert poison.has(b"mine")
    now[0] = 601.0
    assert not poison.has(b"mine")


def test_the_list_of_poison_is_bounded():
    poison = PoisonList(lambda: 0.0)
    poison.add_known(number.to_bytes(4) for number in range(5000))
    assert not poison.has((0).to_bytes(4))
    assert poison.has((4999).to_bytes(4))

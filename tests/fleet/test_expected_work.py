"""The work that a replica expects is that of a simulated engine with the same requests."""

import random

import pytest

from saccade.fleet.costs import H200_8B
from saccade.fleet.expected_work import ExpectedWork
from saccade.fleet.replicas import Image, Replica, RoutedRequest
from saccade.fleet.simulated_engine import Progress, SimulatedEngine

REPLICA = Replica(name="r", version="v", costs=H200_8B, cached_patches=40_000, cached_tokens=20_000)


def request(number, *, group, num_blocks=0, output=20):
    images = (Image(f"image {group}".encode(), 4000, 1000),)
    prefix = tuple(f"{group} {depth}".encode() for depth in range(num_blocks))
    return RoutedRequest(
        id=str(number), version="v", prompt_tokens=3000, output_tokens=output, images=images, prefix=prefix
    )


@pytest.mark.parametrize("seed", range(6))
def test_expected_work_follows_a_simulated_engine(seed):
    rng, engine, expected, now = random.Random(seed), SimulatedEngine(REPLICA), ExpectedWork(REPLICA), 0.0
    for number in range(200):
        now += rng.expovariate(4)
        while (when := engine.next_event()) <= now:
            for progress in engine.advance(when):
                expected.end(progress.request.id, when)
        engine.advance(now)
        num_decoding = engine.num_running - len(expected)
        queued_s = expected.queued_s(H200_8B, num_decoding, now)
        most = 1 - H200_8B.prompt_share(50)  # the first may have begun while fewer or more requests decoded
        assert queued_s == pytest.approx(engine.queued_s, abs=1.1 * most * H200_8B.work_s(4000, 3000) / (1 - most))
        new = request(number, group=rng.randrange(20), num_blocks=rng.randrange(8))
        engine.accept(Progress(new, now))
        expected.add(new, now)


def test_what_earlier_requests_brought_costs_nothing():
    expected = ExpectedWork(REPLICA)
    assert expected.add(request(0, group=0, num_blocks=2), 0.0) == (4000, 3000)
    assert expected.add(request(1, group=0, num_blocks=2), 0.0) == (0, 3000 - 512)
    assert expected.add(request(2, group=0, num_blocks=4), 0.0) == (0, 3000 - 512), "pages end before the image"
    assert expected.add(request(3, group=1), 0.0, encoded_share=0.5) == (2000, 3000)


def test_the_first_request_of_the_queue_is_worked_on():
    expected, each_s = ExpectedWork(REPLICA), H200_8B.work_s(4000, 3000)
    for number in range(2):
        expected.add(request(number, group=number), 10.0)
    assert expected.queued_s(H200_8B, 0, 10.0) == pytest.approx(2 * each_s)
    assert expected.queued_s(H200_8B, 0, 10.0 + each_s / 2) == pytest.approx(1.5 * each_s)
    assert expected.queued_s(H200_8B, 0, 100.0) == pytest.approx(each_s), "it is not known to be done"
    expected.end("0", 10.0 + each_s)
    assert expected.queued_s(H200_8B, 0, 10.0 + each_s) == pytest.approx(each_s)
    expected.end("1", 11.0)
    expected.end("1", 12.0)
    assert expected.queued_s(H200_8B, 0, 12.0) == 0

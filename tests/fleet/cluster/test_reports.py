"""What fronts hear of each other's requests."""

import time

import pytest
import torch
from fleet.cluster.local_fleet import LocalFleet

from saccade.engine import SamplingParams
from saccade.model.initialize import initialize_random, named_size


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


def test_a_request_is_counted_once_by_its_front(checkpoint):
    with LocalFleet(checkpoint, ("one",)) as fleet:
        prompt = fleet.engine.preprocess([{"role": "user", "content": "hello"}])
        sampling = SamplingParams(max_tokens=6000, temperature=0.0, ignore_eos=True)
        request_id = fleet.engine.submit(prompt, sampling, lambda delta: None)
        seen, deadline = set(), time.monotonic() + 0.4  # four reports
        while time.monotonic() < deadline:
            seen |= {load.num_running for load in fleet.set.loads()}
        assert seen <= {0, 1}
        fleet.wait_until(lambda: [load.num_running for load in fleet.set.loads()] == [1])
        fleet.engine.cancel(request_id)
        fleet.wait_until(lambda: [load.num_running for load in fleet.set.loads()] == [0])


def test_a_front_hears_of_another_front_s_request_before_the_next_periodic_report(checkpoint):
    with (
        LocalFleet(checkpoint, ("one",), report_s=600.0) as first,
        LocalFleet(checkpoint, ("one",), front="b", joins=first) as second,
    ):
        time.sleep(0.1)  # the first reports
        prompt = first.engine.preprocess([{"role": "user", "content": "hello"}])
        sampling = SamplingParams(max_tokens=6000, temperature=0.0, ignore_eos=True)
        request_id = first.engine.submit(prompt, sampling, lambda delta: None)
        second.wait_until(lambda: [load.num_running for load in second.set.loads()] == [1])
        first.engine.cancel(request_id)

"""What fronts hear of each other's requests."""

import time

import pytest
import torch
from fleet.cluster.local_fleet import LocalFleet

from saccade.engine import SamplingParams
from saccade.fleet.cluster import replica_service
from saccade.model.initialize import initialize_random, named_size


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


def test_a_front_hears_of_another_front_s_request_before_the_next_periodic_report(checkpoint, monkeypatch):
    monkeypatch.setattr(replica_service, "REPORT_S", 600.0)
    with LocalFleet(checkpoint, ("one",)) as first, LocalFleet(checkpoint, ("one",), front="b", joins=first) as second:
        time.sleep(0.1)  # the first reports
        prompt = first.engine.preprocess([{"role": "user", "content": "hello"}])
        sampling = SamplingParams(max_tokens=6000, temperature=0.0, ignore_eos=True)
        request_id = first.engine.submit(prompt, sampling, lambda delta: None)
        second.wait_until(lambda: [load.num_running for load in second.set.loads()] == [1])
        first.engine.cancel(request_id)

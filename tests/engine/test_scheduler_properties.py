"""Random runs of the scheduler, checked against a simulated device: 25,000 steps, 200,000 with those marked slow."""

from itertools import count

import pytest
from engine.traces import Trace

NUM_RUNS = 8
NUM_SHORT = 1
"""Number of runs that are not marked slow."""
STEPS_PER_RUN = 25_000


@pytest.mark.parametrize(
    "run", [*range(NUM_SHORT), *(pytest.param(run, marks=pytest.mark.slow) for run in range(NUM_SHORT, NUM_RUNS))]
)
def test_random_traces_leak_nothing_mix_up_nothing_and_starve_no_request(run):
    num_steps, seen = 0, set()
    for seed in count(run, NUM_RUNS):
        trace = Trace(seed)
        try:
            num_steps += trace.run()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
        seen |= trace.seen
        if num_steps >= STEPS_PER_RUN:
            break
    assert seen == {
        "copy",
        "preemption",
        "pending",
        "wait for masks",
        "draft",
        "shared image",
        "cached prefix",
        "image in chunks",
        "failed image",
        "failed chunk",
        "refused image",
        "ended in flight",
        "encoded ahead",
        "two passes",
        "large image",
        "pass in parts",
        "encoded before decoding",
        "wait on the device",
        "loaded image",
        "loaded image during a pass",
        "image read as it is loaded",
        "image read while others decode",
        "image encoded without a user",
        "result of a preempted request",
        "started after known tokens",
        "ended by known tokens",
    }

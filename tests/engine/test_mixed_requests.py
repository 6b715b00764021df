"""Each of many mixed requests gets the answer that it gets alone, in every family: see `mixed_requests.py`."""

import pytest
from engine.mixed_requests import FAMILIES, run


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("seeds", "num_requests"),
    [(range(1), 14), pytest.param(range(1, 7), 40, marks=pytest.mark.slow)],
    ids=["short", "long"],
)
def test_each_of_many_mixed_requests_gets_the_answer_that_it_gets_alone(family, tmp_path, seeds, num_requests):
    report = run(family, tmp_path, seeds=seeds, num_requests=num_requests)
    assert report.differences == []
    assert report.num_comparisons >= len(seeds) * num_requests
    for name in ("with images", "with penalties", "with a grammar", "with stop strings", "with an adapter", "streamed"):
        assert report.events[name] > 0

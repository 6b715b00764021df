"""Objectives: those that cannot be measured are refused by name."""

import pytest

from saccade.errors import ConfigError
from saccade.fleet.objectives import Objective, check_measurable


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"metric": "tpot", "max_s": 0.05}, "quantile"),
        ({"metric": "tpot", "quantile": 90.0, "max_s": 0.05}, "quantile"),
        ({"metric": "tpot", "quantile": 0.9}, "promises nothing"),
        ({"metric": "tpot", "quantile": 0.9, "max_share": 0.1}, "max_share"),
        ({"metric": "tpot", "quantile": 0.9, "max_s": 0.0}, "max_s"),
        ({"metric": "errors"}, "promises nothing"),
        ({"metric": "errors", "max_s": 1.0}, "max_s"),
        ({"metric": "errors", "max_share": 1.0}, "max_share"),
        ({"metric": "errors", "max_share": 0.1, "quantile": 0.9}, "quantile"),
        ({"metric": "errors", "max_ratio": 0.9}, "max_ratio"),
        ({"metric": "probes", "max_share": 0.1, "max_ratio": 2.0}, "max_ratio"),
    ],
)
def test_an_objective_that_cannot_be_measured_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Objective(**fields)


TAIL = Objective(metric="ttft", quantile=0.99, max_s=1.0)


@pytest.mark.parametrize(
    ("objectives", "message"),
    [
        ((Objective(metric="probes", max_share=0.0),), "the model has no probes"),
        ((TAIL, TAIL), "two objectives are about ttft p99"),
        ((TAIL,), "rollout.min_requests to 500"),
    ],
)
def test_objectives_that_a_rollout_cannot_measure_are_refused(objectives, message):
    with pytest.raises(ConfigError, match=message):
        check_measurable(objectives, num_probes=0, min_requests=200)
    check_measurable(objectives[:1], num_probes=1, min_requests=500)


def test_names_tell_objectives_apart():
    assert TAIL.name == "ttft p99"
    assert Objective(metric="ttft", quantile=0.999, max_s=1.0).name == "ttft p99.9"
    assert Objective(metric="errors", max_share=0.1).name == "errors"

"""Experiments: sticky and independent assignment, the sample ratio, and verdicts that hold whenever one looks."""

import json
import random
from collections import Counter

import pytest

from bench.fleet_experiments import simulate
from saccade.errors import ConfigError
from saccade.fleet.experiments import Experiment, Results, Variant

USERS = [f"user {number}" for number in range(6000)]


def experiment(name="colors", weights=(1.0, 1.0), **fields):
    variants = tuple(Variant(name=f"v{number}", version="may", proportion=one) for number, one in enumerate(weights))
    return Experiment(name=name, variants=variants, **fields)


def test_variants_have_users_by_their_weights():
    one = experiment(weights=(5.0, 3.0, 2.0))
    counts = Counter(one.variant_of(user).name for user in USERS)
    for variant in one.variants:
        assert abs(counts[variant.name] / len(USERS) - one.expected_share(variant)) < 0.02


def test_a_changed_weight_moves_users_to_the_variant_that_grew_only():
    before, after = experiment(weights=(1.0, 1.0, 1.0)), experiment(weights=(1.0, 1.0, 2.0))
    moved = Counter(
        (before.variant_of(user).name, after.variant_of(user).name)
        for user in USERS
        if before.variant_of(user).name != after.variant_of(user).name
    )
    assert {new for _, new in moved} == {"v2"}
    assert abs(sum(moved.values()) / len(USERS) - 1 / 6) < 0.02


def test_experiments_are_independent_of_each_other():
    first, second = experiment("first"), experiment("second")
    both = sum(first.variant_of(user).name == second.variant_of(user).name for user in USERS)
    assert abs(both / len(USERS) - 0.5) < 0.03


def test_variants_that_do_not_differ_get_no_verdict_however_often_one_looks():
    found = [simulate(seed, num_requests=1500, num_users=1000) for seed in range(40)]
    assert sum(verdict is not None for verdict, _ in found) <= 3
    assert all(suspicion is None for _, suspicion in found)


def test_a_difference_is_found_and_lost_users_are_suspected():
    verdict, suspicion = simulate(0, slower=1.3, num_requests=4000)
    assert verdict is not None
    assert suspicion is None
    assert simulate(0, lost=0.4, num_requests=4000)[1] is not None


def test_a_verdict_says_what_differs_and_by_how_much_and_is_plain_data():
    one, rng = experiment(metrics=("tpot", "thumbs_up")), random.Random(0)
    results = Results(one)
    for user in USERS:
        name = one.variant_of(user).name
        tpot = rng.lognormvariate(0.0, 0.2) * (1.5 if name == "v1" else 1.0)
        results.observe(user, name, {"tpot": tpot} | ({"thumbs_up": 1.0} if user.endswith("7") else {}))
    report = json.loads(json.dumps(results.report()))
    tpot, thumbs = report["comparisons"]
    assert tpot["verdict"] == "higher"
    assert tpot["difference"] == pytest.approx(0.51, abs=0.03)
    assert 0 < tpot["low"] < tpot["difference"] < tpot["high"]
    assert thumbs["verdict"] == "no difference found"
    assert report["variants"]["v0"]["users"] + report["variants"]["v1"]["users"] == len(USERS)
    assert report["sample_ratio"]["is_as_expected"]


def test_a_wrong_sample_ratio_withholds_the_verdict():
    one = experiment(metrics=("tpot",))
    results = Results(one)
    for user in USERS:
        name = one.variant_of(user).name
        if name == "v0" or not user.endswith(("1", "2", "3")):
            results.observe(user, name, {"tpot": 1.0 if name == "v0" else 9.0})
    [comparison] = results.report()["comparisons"]
    assert comparison["verdict"] == "none: users are missing from a variant"


def test_a_user_with_many_requests_counts_once():
    one = experiment(metrics=("tpot",))
    results = Results(one)
    for user in USERS[:400]:
        results.observe(user, one.variant_of(user).name, {"tpot": 1.0})
    for _ in range(2000):
        results.observe(USERS[0], one.variant_of(USERS[0]).name, {"tpot": 100.0})
    report = results.report()
    assert report["comparisons"][0]["verdict"] == "no difference found"
    assert sum(variant["users"] for variant in report["variants"].values()) == 400


def test_another_controller_continues_with_the_same_report():
    one, rng = experiment(), random.Random(0)
    first, second = Results(one), Results(one)
    for number in range(2000):
        if number == 1000:
            second.restore(json.loads(json.dumps(first.to_plain())))
        user = rng.choice(USERS)
        for results in (first, second) if number >= 1000 else (first,):
            results.observe(
                user, one.variant_of(user).name, {"tpot": 0.1 + number % 7, "errors": float(number % 50 == 0)}
            )
    assert first.report() == second.report()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": (1.0,)}, "two or more"),
        ({"weights": (1.0, 0.0)}, "proportions must be above 0"),
        ({"metrics": ()}, "metrics"),
        ({"metrics": ("tpot", "tpot")}, "metrics"),
        ({"false_verdicts": 1.0}, "false_verdicts"),
    ],
)
def test_an_experiment_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        experiment(**fields)

"""Splits: every user has one version, shares are those that were asked for, and users move as little as they must."""

import random

import pytest

from saccade.fleet.comparison import position
from saccade.fleet.split import Split, split_by_shares

USERS = [f"user {number}" for number in range(5000)]


def test_versions_have_the_shares_that_were_asked_for():
    split = split_by_shares([("m/c@3", "c", 0.2), ("m/b@2", "b", 0.1), ("m/a@1", "a", 0.7)])
    assert split.shares == pytest.approx({"a": 0.7, "b": 0.1, "c": 0.2})
    given = [split.version_of(user) for user in USERS]
    for version, share in split.shares.items():
        assert abs(given.count(version) / len(USERS) - share) < 0.03


def test_a_growing_first_version_moves_no_user_between_the_others():
    def split(share):
        rest = 1 - share
        return split_by_shares([("m/c@3", "c", share), ("m/b@2", "b", 0.1 * rest), ("m/a@1", "a", 0.9 * rest)])

    for smaller, larger in ((0.0, 0.01), (0.01, 0.3), (0.3, 0.95), (0.95, 1.0)):
        for user in USERS:
            before, after = split(smaller).version_of(user), split(larger).version_of(user)
            assert after == before or after == "c"


def test_the_first_entry_agrees_with_the_rollout_of_the_same_name():
    split = split_by_shares([("m/b@2", "b", 0.3), ("m/a@1", "a", 0.7)])
    assert all((split.version_of(user) == "b") == (position(user, "m/b@2") < 0.3) for user in USERS)


def test_without_a_version_no_user_has_one():
    assert Split().version_of("ann") is None
    assert Split().shares == {}
    assert split_by_shares([("m/a@1", "a", 0.0)]) == Split()


@pytest.mark.parametrize("seed", range(20))
def test_shares_of_random_splits_sum_to_one(seed):
    rng = random.Random(seed)
    weights = [rng.choice([0.0, rng.random()]) for _ in range(rng.randrange(1, 6))] + [1.0]
    split = split_by_shares((f"m/{i}", str(i), weight / sum(weights)) for i, weight in enumerate(weights))
    assert sum(split.shares.values()) == pytest.approx(1.0)
    assert all(0 < entry.share < 1 for entry in split.entries)

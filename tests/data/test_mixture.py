"""The mixture: exact proportions at every prefix, however far, for any weights; no history."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.mixture import MAX_TOTAL, Mixture
from saccade.errors import ConfigError

any_weight = st.one_of(st.integers(1, 20), st.integers(1, 10**9))


def largest_deviation(mixture, begin, end):
    """In draws, over the prefixes of begin + 1 .. end draws, in exact arithmetic."""
    total = sum(mixture.weights)
    sources, _ = mixture.draws(begin, end)
    worst = Fraction(0)
    for source, (weight, before) in enumerate(zip(mixture.weights, mixture.counts(begin), strict=True)):
        excess = before * total - begin * weight
        steps = np.cumsum(np.where(sources == source, total - weight, -weight).astype(object))
        worst = max(
            worst, abs(Fraction(excess + int(max(steps)), total)), abs(Fraction(excess + int(min(steps)), total))
        )
    return worst


@given(st.lists(any_weight, min_size=1, max_size=16), st.one_of(st.integers(0, 3000), st.integers(0, 10**10)))
@settings(max_examples=120, deadline=None)
def test_each_source_is_within_one_draw_of_its_share_at_every_prefix(weights, begin):
    assert largest_deviation(Mixture(weights), begin, begin + 300) < 1


@pytest.mark.parametrize(
    "weights", [[1] * 16, [3, 2, 2, 1, 1, 1], [10**9, 10**6, 10**3, 1], [64, 32, 16, 8, 4, 2, 1, 1]]
)
def test_a_long_run_from_the_start_never_leaves_a_source_a_draw_off(weights):
    mixture = Mixture(weights)
    assert largest_deviation(mixture, 0, 20_000) < 1
    assert largest_deviation(mixture, 10**10 - 10_000, 10**10 + 10_000) < 1


def test_wide_mixtures_keep_to_their_shares_around_the_cuts_of_their_blocks():
    rng = np.random.default_rng(0)
    for _ in range(25):
        mixture = Mixture((1 + 10 ** rng.uniform(0, 6, size=rng.integers(2, 17))).astype(int).tolist())
        for cut in rng.integers(1, 10**6, size=3).tolist():
            assert largest_deviation(mixture, 1024 * cut - 100, 1024 * cut + 100) < 1


@given(st.lists(any_weight, min_size=1, max_size=8), st.integers(0, 10**10), st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_draws_and_counts_tell_the_same_story_wherever_one_looks(weights, begin, middle, end):
    mixture = Mixture(weights)
    sources, numbers = mixture.draws(begin, begin + middle + end)
    parts = [mixture.draws(begin, begin + middle), mixture.draws(begin + middle, begin + middle + end)]
    assert np.array_equal(sources, np.concatenate([part[0] for part in parts]))
    assert np.array_equal(numbers, np.concatenate([part[1] for part in parts]))
    before, after = mixture.counts(begin), mixture.counts(begin + middle + end)
    assert sum(before) == begin
    for source in range(len(weights)):
        assert numbers[sources == source].tolist() == list(range(before[source], after[source]))


@given(st.lists(st.integers(1, 10**10), min_size=1, max_size=16), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_weights_that_are_numbers_of_samples_come_out_exactly_in_every_epoch(sizes, epoch):
    mixture = Mixture(sizes)
    assert mixture.weights == sizes
    assert mixture.counts(epoch * sum(sizes)) == [epoch * size for size in sizes]


def test_the_draws_are_the_same_on_every_machine():
    sources, _ = Mixture([3, 2, 1]).draws(0, 6)
    assert np.bincount(sources).tolist() == [3, 2, 1]
    assert sources.tolist() == [0, 1, 0, 1, 0, 2]


def test_decimals_are_taken_as_written():
    assert Mixture([0.6, 0.3, 0.1]).weights == [6, 3, 1]
    assert Mixture([1, 0.5]).weights == [2, 1]


def test_weights_without_a_common_measure_are_rounded_to_one_part_in_a_trillion():
    weights = [1 / 3, 2 / 7, 0.1234567890123456]
    mixture = Mixture(weights)
    assert sum(mixture.weights) == pytest.approx(MAX_TOTAL)
    for weight, integer in zip(weights, mixture.weights, strict=True):
        assert integer / sum(mixture.weights) == pytest.approx(weight / sum(weights), abs=1e-12)


@pytest.mark.parametrize("weights", [[1, 0], [-1.0], [float("nan"), 1.0], [float("inf")]])
def test_weights_that_are_not_positive_numbers_are_refused(weights):
    with pytest.raises(ConfigError, match=r"weights are positive"):
        Mixture(weights)


def test_a_mixture_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="no sources"):
        Mixture([])


def test_a_block_of_draws_far_into_the_stream_takes_milliseconds():
    mixture = Mixture([5_850_000_000, 400_000_000, 118_287, 3_000, 12_345_678])
    times = []
    for begin in (0, 10**9, 10**12):
        began = time.process_time()
        mixture.draws(begin, begin + 4096)
        times.append(time.process_time() - began)
    assert min(times) < 0.1

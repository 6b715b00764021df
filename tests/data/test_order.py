"""The order of a stream: exact mixture proportions, well shuffled epochs, the same on every machine."""

import math
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.order import MAX_SIZE, MAX_TOTAL, EpochOrder, Mixture, Permutation, key_of
from saccade.errors import ConfigError

LAION_5B = 5_850_000_000
shard_sizes = st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 40)), max_size=60)


def order_of(sizes, seed=0, epoch=0, window_shards=4, source="a"):
    return EpochOrder(sizes, seed=seed, epoch=epoch, window_shards=window_shards, source=source)


def whole(order):
    return order.locate(np.arange(len(order)))


@pytest.mark.parametrize("size", [*range(40), 99, 100, 101, 1023, 1024, 1025, 65_537])
def test_a_permutation_visits_every_value_once(size):
    assert np.array_equal(np.sort(Permutation(size, key_of("size", size))(np.arange(size))), np.arange(size))


@pytest.mark.parametrize("size", [LAION_5B, MAX_SIZE])
def test_permutations_of_billions_map_different_positions_to_different_values(size):
    positions = np.unique(np.random.default_rng(0).integers(0, size, 20_000))
    values = Permutation(size, 7)(positions)
    assert values.min() >= 0
    assert values.max() < size
    assert len(np.unique(values)) == len(positions)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_orders_of_a_few_shards_are_about_equally_likely(size):
    trials = 30 * math.factorial(size)
    orders = [tuple(Permutation(size, key_of(trial))(np.arange(size))) for trial in range(trials)]
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == math.factorial(size)
    freedom = len(counts) - 1
    assert ((counts - 30) ** 2 / 30).sum() < freedom + 6 * math.sqrt(2 * freedom)


@given(shard_sizes, st.integers(0, 2**64), st.integers(0, 100), st.integers(1, 70))
@settings(max_examples=150, deadline=None)
def test_an_epoch_visits_every_sample_of_every_shard_once(sizes, seed, epoch, window_shards):
    order = order_of(sizes, seed, epoch, window_shards)
    shards, rows = whole(order)
    assert len(order) == sum(sizes)
    assert sorted(zip(shards.tolist(), rows.tolist(), strict=True)) == [
        (s, r) for s, n in enumerate(sizes) for r in range(n)
    ]


@given(shard_sizes.filter(any), st.data())
@settings(max_examples=60, deadline=None)
def test_any_part_of_an_epoch_is_looked_up_as_in_the_whole(sizes, data):
    order = order_of(sizes)
    positions = data.draw(st.lists(st.integers(0, len(order) - 1), max_size=20))
    assert all(
        np.array_equal(part, all_[positions]) for part, all_ in zip(order.locate(positions), whole(order), strict=True)
    )


def test_the_order_is_the_same_on_every_machine():
    shards, rows = whole(order_of([3, 0, 5, 2], seed=1, epoch=2, window_shards=2))
    assert shards.tolist() == [0, 2, 2, 0, 2, 0, 2, 2, 3, 3]
    assert rows.tolist() == [2, 3, 2, 1, 1, 0, 4, 0, 0, 1]


def test_seed_epoch_and_source_each_give_another_order():
    changes = ({}, {"seed": 1}, {"epoch": 1}, {"source": "b"})
    orders = [order_of([100] * 10, window_shards=10, **change) for change in changes]
    places = [shards * 100 + rows for shards, rows in map(whole, orders)]
    for i in range(len(places)):
        for j in range(i):
            assert (places[i] == places[j]).sum() < 10  # one is expected by chance
            assert abs(np.corrcoef(places[i], places[j])[0, 1]) < 0.15  # 4.7 standard deviations of chance


def test_only_the_shards_of_one_window_are_in_use_at_a_time():
    shards, _ = whole(order_of([50] * 40, window_shards=8))
    windows = [set(part.tolist()) for part in np.split(shards, 5)]
    assert [len(window) for window in windows] == [8] * 5
    assert set.union(*windows) == set(range(40))


def test_a_window_is_shuffled_as_well_as_by_chance():
    """16 shards of 5000: correlations under 0.017 (5 standard deviations), neighbours a third of the window apart."""
    shards, rows = whole(order_of([5000] * 16, window_shards=16))
    position = shards * 5000 + rows
    n = len(position)
    assert abs(np.corrcoef(position, np.arange(n))[0, 1]) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(position[1:], position[:-1])[0, 1]) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(position[2::2] // 2, position[:-2:2] % 977)[0, 1]) < 5 / math.sqrt(n / 2)
    distance = np.abs(np.diff(position))
    assert distance.mean() == pytest.approx(n / 3, rel=0.01)
    assert (distance == 1).mean() < 5 * 2 / n + 5 * math.sqrt(2 / n / n)


def test_batches_hold_the_shards_of_a_window_in_even_numbers():
    """Chi-square of shard occupancy over 1000 batches of 80 from 16 shards is within 5 deviations of random draws."""
    shards, _ = whole(order_of([5000] * 16, window_shards=16))
    counts = np.stack([np.bincount(batch, minlength=16) for batch in np.split(shards, 1000)])
    chi_square, freedom = ((counts - 5) ** 2 / 5).sum(), 999 * 15
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


def test_positions_outside_the_epoch_are_refused():
    order = order_of([3, 4])
    for position in (-1, 7):
        with pytest.raises(IndexError, match="order of 7"):
            order.locate([position])
    with pytest.raises(ValueError, match="window_shards is 0"):
        order_of([3], window_shards=0)
    with pytest.raises(ValueError, match="permutation of -1"):
        Permutation(-1, 0)


def test_positions_of_an_epoch_of_billions_are_found_at_once_in_little_memory():
    """585,000 shards of 10,000: opening takes less than a second, 10,000 positions milliseconds, at most 20 MB."""
    sizes = np.full(585_000, 10_000)
    began = time.process_time()
    order = order_of(sizes, window_shards=16)
    opened = time.process_time() - began
    looked_up = []
    for position in (0, LAION_5B // 2, LAION_5B - 10_000):
        began = time.process_time()
        shards, rows = order.locate(np.arange(position, position + 10_000))
        looked_up.append(time.process_time() - began)
        assert len(set(zip(shards.tolist(), rows.tolist(), strict=True))) == 10_000
    assert opened < 1.5
    assert max(looked_up) < 0.5
    tracemalloc.start()
    order_of(sizes, window_shards=16).locate(np.arange(LAION_5B - 10_000, LAION_5B))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


# ------------------------------------------------------------------ mixtures

any_weight = st.one_of(st.integers(1, 20), st.integers(1, 10**9))


@given(st.lists(any_weight, min_size=1, max_size=16), st.one_of(st.integers(0, 3000), st.integers(0, 10**10)))
@settings(max_examples=120, deadline=None)
def test_each_source_is_within_half_a_draw_per_level_of_its_share_at_every_prefix(weights, begin):
    mixture = Mixture(weights)
    total, depth = sum(mixture.weights), max(1, math.ceil(math.log2(len(weights))))
    sources, numbers = mixture.draws(begin, begin + 300)
    for draw, (source, number) in enumerate(zip(sources.tolist(), numbers.tolist(), strict=True), start=begin):
        assert abs(number - Fraction(draw * mixture.weights[source], total)) <= Fraction(depth, 2)


@given(st.lists(any_weight, min_size=1, max_size=8), st.integers(0, 10**10), st.integers(0, 200), st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_any_part_of_the_draws_is_looked_up_as_in_the_whole(weights, begin, middle, end):
    mixture = Mixture(weights)
    sources, numbers = mixture.draws(begin, begin + middle + end)
    parts = [mixture.draws(begin, begin + middle), mixture.draws(begin + middle, begin + middle + end)]
    assert np.array_equal(sources, np.concatenate([part[0] for part in parts]))
    assert np.array_equal(numbers, np.concatenate([part[1] for part in parts]))
    for source in range(len(weights)):
        found = numbers[sources == source]
        assert found.tolist() == list(range(found[0], found[0] + len(found))) if len(found) else True


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=16), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_weights_that_are_numbers_of_samples_give_each_sample_once_in_every_epoch(sizes, epoch):
    mixture = Mixture(sizes)
    assert mixture.weights == sizes
    sources, numbers = mixture.draws(epoch * sum(sizes), (epoch + 1) * sum(sizes))
    for source, size in enumerate(sizes):
        assert numbers[sources == source].tolist() == list(range(epoch * size, (epoch + 1) * size))


def test_the_draws_are_the_same_on_every_machine():
    sources, numbers = Mixture([3, 2, 1]).draws(0, 6)
    assert sources.tolist() == [0, 1, 0, 2, 0, 1]
    assert numbers.tolist() == [0, 0, 1, 0, 2, 1]


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
    with pytest.raises(ConfigError, match=r"weights must be positive"):
        Mixture(weights)


def test_a_mixture_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="no sources"):
        Mixture([])


def test_a_packing_buffer_of_draws_far_into_the_stream_takes_milliseconds():
    mixture = Mixture([5_850_000_000, 400_000_000, 118_287, 3_000, 12_345_678])
    times = []
    for begin in (0, 10**9, 10**12):
        began = time.process_time()
        mixture.draws(begin, begin + 4096)
        times.append(time.process_time() - began)
    assert min(times) < 0.01

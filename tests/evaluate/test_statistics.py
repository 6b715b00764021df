"""Intervals cover the truth as often as they say, and paired tests find differences that are there."""

from functools import partial

import numpy as np
import pytest

from saccade.evaluate.metrics.bleu import bleu, bleu_counts
from saccade.evaluate.statistics import (
    Metric,
    bootstrap,
    holm,
    mean_metric,
    paired_difference,
    proportion_metric,
    ratio_metric,
)


def names(count):
    return [str(number) for number in range(count)]


def test_intervals_cover_the_true_mean_about_95_times_in_100():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        interval = bootstrap(mean_metric(rng.random(80) < 0.3), names(80), num_resamples=400)
        hits += interval.low <= 0.3 <= interval.high
    assert 0.90 <= hits / 200 <= 0.99


def test_the_interval_of_a_mean_is_that_of_its_standard_error():
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    interval = bootstrap(mean_metric(values), names(400))
    error = values.std() / np.sqrt(400)
    assert interval.value == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - 1.96 * error, abs=0.04)
    assert interval.high == pytest.approx(values.mean() + 1.96 * error, abs=0.04)


def test_full_marks_have_an_interval_too():
    """The exact binomial one: with 30 of 30 right, the true rate may well be 0.9."""
    interval = bootstrap(proportion_metric(np.ones(30)), names(30))
    assert (interval.value, interval.high) == (1.0, 1.0)
    assert interval.low == pytest.approx(1 - (1 - 0.025 ** (1 / 30))) == pytest.approx(0.8843, abs=1e-4)
    assert bootstrap(proportion_metric(np.zeros(30)), names(30)).high == pytest.approx(1 - 0.8843, abs=1e-4)


def test_examples_about_one_image_count_as_one_draw():
    """Ten copies of every value know no more than the values themselves."""
    values = np.random.default_rng(2).random(60)
    once = bootstrap(mean_metric(values), names(60))
    copies = bootstrap(mean_metric(np.repeat(values, 10)), np.repeat(names(60), 10).tolist())
    naive = bootstrap(mean_metric(np.repeat(values, 10)), names(600))
    assert copies.high - copies.low == pytest.approx(once.high - once.low, rel=0.1)
    assert naive.high - naive.low < 0.5 * (copies.high - copies.low)


def test_corpus_metrics_are_resampled_as_a_corpus():
    """A resample's BLEU is that of its sums: the same as scoring the drawn captions again."""
    words = ["a", "dog", "runs", "over", "the", "wet", "sand", "and", "barks"]
    rng = np.random.default_rng(3)
    pairs = [(list(rng.choice(words, 8)), [list(rng.choice(words, 9))]) for _ in range(30)]
    counts = np.array([bleu_counts(*pair) for pair in pairs])
    metric = Metric(counts, partial(bleu, n=2))
    drawn = rng.integers(30, size=30)
    weights = np.bincount(drawn, minlength=30).astype(float)
    again = np.array([bleu_counts(*pairs[number]) for number in drawn]).sum(axis=0)
    assert float(metric.combine(weights @ counts)) == pytest.approx(float(bleu(again, 2)), abs=1e-12)
    interval = bootstrap(metric, names(30))
    assert interval.low < interval.value < interval.high


def test_resampling_is_the_same_for_the_same_seed_and_in_chunks(monkeypatch):
    metric = ratio_metric(np.arange(50.0), np.arange(1.0, 51.0))
    whole = bootstrap(metric, names(50), seed=7)
    assert bootstrap(metric, names(50), seed=7) == whole != bootstrap(metric, names(50), seed=8)
    monkeypatch.setattr("saccade.evaluate.statistics._CHUNK_ELEMENTS", 500)
    chunked = bootstrap(metric, names(50), seed=7)
    assert (chunked.low, chunked.high) == pytest.approx((whole.low, whole.high), abs=0.02)


def test_a_small_consistent_gain_is_significant_although_the_intervals_overlap():
    rng = np.random.default_rng(4)
    before = rng.random(300) < 0.5
    after = before | (rng.random(300) < 0.08)
    intervals = [bootstrap(mean_metric(values), names(300)) for values in (after, before)]
    assert intervals[0].low < intervals[1].high
    found = paired_difference(mean_metric(after), mean_metric(before), names(300))
    assert found.p_value < 0.01
    assert 0 < found.low < found.value < found.high


def test_without_a_difference_p_values_are_uniform():
    rng = np.random.default_rng(5)
    p_values = []
    for _ in range(200):
        one, other = rng.random((2, 60))
        p_values.append(paired_difference(mean_metric(one), mean_metric(other), names(60), num_resamples=300).p_value)
    assert np.mean(np.array(p_values) < 0.05) < 0.1
    assert 0.4 < np.mean(p_values) < 0.6


def test_scores_that_are_0_but_for_a_constant_of_the_metric_do_not_differ():
    references = [["a", "red", "ring", "on", "a", "table"]] * 20
    one, other = (
        Metric(np.array([bleu_counts(answer, [reference]) for reference in references]), lambda sums: bleu(sums, 4))
        for answer in (["x", "y"], ["x"])
    )
    assert one.value != other.value
    assert paired_difference(one, other, names(20)).p_value == 1.0


def test_equal_answers_have_no_difference():
    same = mean_metric([1.0, 0.0, 1.0])
    found = paired_difference(same, same, names(3))
    assert (found.value, found.low, found.high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_p_values_are_adjusted_for_their_number():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == pytest.approx([1.0, 1.0])
    assert holm([]) == []

"""Histograms of durations as Prometheus reads them."""

from saccade.engine.core.time_histogram import TimeHistogram


def test_a_duration_counts_for_every_bound_that_is_not_below_it():
    times = TimeHistogram((0.1, 1.0))
    times.observe_all([0.05, 0.1, 0.5, 1.0, 7.0])
    assert list(times.cumulative()) == [("0.1", 2), ("1.0", 4), ("+Inf", 5)]
    assert sum(times.counts) == 5
    assert times.total_s == 0.05 + 0.1 + 0.5 + 1.0 + 7.0


def test_a_copy_stays_as_it_was():
    times = TimeHistogram((0.1,))
    times.observe(0.05)
    copy = times.copy()
    times.observe(0.05)
    assert list(copy.cumulative()) == [("0.1", 1), ("+Inf", 1)]

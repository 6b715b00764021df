"""Units: every sample in exactly one part of its shard, of bounded size, from two numbers per shard."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.units import MAX_UNIT_BYTES, Units, byte_range

shards = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 2000)), max_size=30)


@given(shards, st.one_of(st.none(), st.integers(1, 500)))
@settings(max_examples=100, deadline=None)
def test_every_sample_is_in_exactly_one_unit_and_units_follow_the_shards(shards, max_bytes):
    num_samples, num_bytes = np.array(shards, np.int64).reshape(-1, 2).T
    units = Units(num_samples, num_bytes, max_bytes=max_bytes)
    rows = units.rows(np.arange(len(units)))
    found = [
        (shard, row)
        for shard, first, count in zip(*(column.tolist() for column in rows), strict=True)
        for row in range(first, first + count)
    ]
    assert found == [(shard, row) for shard, (count, _) in enumerate(shards) for row in range(count)]
    assert np.array_equal(rows.counts, units.sizes())
    assert [unit for shard in range(len(shards)) for unit in units.of_shard(shard)] == list(range(len(units)))
    of_samples = units.of_samples(*np.array(found, np.int64).reshape(-1, 2).T)
    assert of_samples.tolist() == np.repeat(np.arange(len(units)), rows.counts).tolist()


@given(st.integers(1, 10**5), st.integers(1, 10**12))
@settings(max_examples=100, deadline=None)
def test_large_shards_are_cut_into_parts_of_64_to_128_mb(num_samples, num_bytes):
    units = Units([num_samples], [num_bytes], max_bytes=MAX_UNIT_BYTES)
    if num_bytes <= MAX_UNIT_BYTES:
        assert len(units) == 1
    elif len(units) < num_samples:
        assert MAX_UNIT_BYTES / 2 < num_bytes / len(units) <= MAX_UNIT_BYTES
    assert np.ptp(units.sizes()) <= 1


def test_without_a_size_every_shard_is_a_unit():
    assert Units([3, 0, 5], None, max_bytes=None).sizes().tolist() == [3, 0, 5]
    with pytest.raises(ValueError, match="the bytes of every shard"):
        Units([3], None, max_bytes=10)
    with pytest.raises(IndexError, match="units 1 to 1 of 1"):
        Units([3], [4], max_bytes=10).rows([1])


def test_the_bytes_of_units_do_not_overlap():
    begins, ends = np.array([512, 2048, 9000, 12_000]), np.array([2000, 4000, 11_000, 13_000])
    assert [byte_range(begins, ends, first, 2) for first in (0, 2)] == [(512, 4000), (9000, 13_000)]


def test_cutting_a_table_of_half_a_million_shards_takes_little_memory():
    num_samples, num_bytes = np.full(585_000, 10_000), np.full(585_000, 410 << 20)
    began = time.process_time()
    tracemalloc.start()
    units = Units(num_samples, num_bytes, max_bytes=MAX_UNIT_BYTES)
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(units), units.rows(len(units) - 1)) == (4 * 585_000, (584_999, 7500, 2500))
    assert kept < 6e6
    assert peak < 30e6
    assert time.process_time() - began < 0.5

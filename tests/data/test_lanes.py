"""Lanes: the same batches for any number of nodes, nearly every byte read by one node, even work, resumed anywhere."""

import json
import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from data.test_batch_sampler import Synthetic, ids
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data import rank_batches
from saccade.data.batch_sampler import BatchSampler, Position
from saccade.data.config import StreamConfig
from saccade.data.lanes import Owners, round_order
from saccade.data.order import EpochOrder
from saccade.data.packing_buffer import PackingBuffer
from saccade.data.rank_batches import RankBatches
from saccade.errors import ConfigError, DataError


class Sized(Synthetic):
    """A source whose shards have bytes."""

    @property
    def num_bytes(self):
        return np.array(self.sizes) * 100


def sampler_of(sources, **changes):
    settings = {
        "seed": 0,
        "max_seq_len": 4096,
        "max_patches": 16_384,
        "global_batch_size": 64,
        "packing_buffer_size": 64,
        "window_shards": 3,
        "num_lanes": 32,
        "unit_bytes": 1000,
    }
    return BatchSampler(sources, StreamConfig(checkpoint="", **{**settings, **changes}))


def three_sources(rng, weighted=False):
    weights = (0.6, 0.3, 0.1) if weighted else (None, None, None)
    return [Sized(name, rng.integers(0, 300, 20).tolist(), weight) for name, weight in zip("abc", weights, strict=True)]


class InMemory:
    """An exchange between threads, with the values that were stored."""

    def __init__(self):
        self.values, self.num_put = {}, 0

    def put(self, key, value):
        self.values[key], self.num_put = value, self.num_put + 1

    def get(self, keys):
        found = [self.values.get(key) for key in keys]
        return None if None in found else found

    def remove(self, key):
        self.values.pop(key, None)


def planned(sampler, seen=None):
    """Plans here; notes which lanes."""

    def compute(key):
        if seen is not None:
            seen.append(key)
        done = Future()
        done.set_result(sampler.packing_buffer(*key))
        return done

    return compute


def rank_batches_of(sources, position=None, exchange=None, seen=None, **changes):
    sampler = sampler_of(sources, **changes)
    return list(RankBatches(sampler, planned(sampler, seen), exchange).read(position or Position()))


# ------------------------------------------------------------------ the order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_a_round_has_every_sequence_of_every_lane_once_and_each_lane_in_its_own_order(counts):
    lanes, numbers = round_order(counts)
    assert Counter(lanes.tolist()) == Counter({lane: count for lane, count in enumerate(counts) if count})
    for lane in range(len(counts)):
        assert numbers[lanes == lane].tolist() == list(range(counts[lane]))
    assert numbers.tolist() == sorted(numbers.tolist())


def test_any_quarter_of_a_turn_has_lanes_of_every_quarter():
    lanes, _ = round_order([3] * 64)
    for begin in range(0, 192, 16):
        assert Counter((lanes[begin : begin + 16] // 16).tolist()) == {0: 4, 1: 4, 2: 4, 3: 4}


@given(st.lists(st.integers(0, 30), max_size=25), st.integers(1, 40), st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_an_epoch_with_lanes_visits_every_sample_once_and_windows_never_cross_lanes(sizes, num_lanes, window):
    order = EpochOrder(sizes, seed=1, epoch=0, window_shards=window, num_lanes=num_lanes)
    total = sum(sizes)
    shards, rows = order.locate(np.arange(total))
    pairs = list(zip(shards.tolist(), rows.tolist(), strict=True))
    assert sorted(pairs) == [(s, r) for s, n in enumerate(sizes) for r in range(n)]
    plain, _ = EpochOrder(sizes, seed=1, epoch=0, window_shards=1).locate(np.arange(total))
    for lane in range(num_lanes):
        part = slice(lane * total // num_lanes, (lane + 1) * total // num_lanes)
        assert Counter(shards[part].tolist()) == Counter(plain[part].tolist())


def test_one_lane_is_the_order_without_lanes_and_its_states_stay_valid():
    sizes = np.random.default_rng(0).integers(0, 30, 50)
    one = EpochOrder(sizes, seed=3, epoch=1, window_shards=4).locate(np.arange(sizes.sum()))
    same = EpochOrder(sizes, seed=3, epoch=1, window_shards=4, num_lanes=1).locate(np.arange(sizes.sum()))
    assert all(np.array_equal(a, b) for a, b in zip(one, same, strict=True))
    sources = [Synthetic("a", [50, 60])]
    config = {"checkpoint": "", "max_seq_len": 4096, "max_patches": 16_384, "packing_buffer_size": 256}
    state = BatchSampler(sources, StreamConfig(**config)).save(Position(3, 1, 9))
    assert state["fingerprint"] == "9b85a5fdd043-76270ab1bff1", "written before there were lanes"
    with_lanes = BatchSampler(sources, StreamConfig(**config, num_lanes=2))
    with pytest.raises(DataError, match="num_lanes 2"):
        with_lanes.restore(state)


@pytest.mark.parametrize("weighted", [False, True])
def test_every_sample_comes_once_an_epoch_or_in_proportion_to_its_weight(weighted):
    sources = three_sources(np.random.default_rng(1), weighted)
    many = {"num_samples": 6000} if weighted else {"num_epochs": 2}
    batches = list(sampler_of(sources, **many).batches())
    assert {len(batch.sequences) for batch in batches[:-1]} == {64}
    seen = Counter(ids(sequence for batch in batches for sequence in batch.sequences))
    assert set(seen.values()) == {1}
    if weighted:
        counts = Counter(source for source, *_ in seen.elements())
        assert sum(counts.values()) == 6000
        assert all(abs(counts[s] - 6000 * share) <= 32 for s, share in enumerate((0.6, 0.3, 0.1)))
    else:
        assert len(seen) == 2 * sum(sum(source.sizes) for source in sources)
        epochs = [sample.epoch for batch in batches for sequence in batch.sequences for sample in sequence.samples]
        assert epochs == sorted(epochs)


def test_a_lane_reads_consecutive_units_and_no_other_lane_reads_most_of_them():
    source = Sized("a", [100] * 640)
    sampler = sampler_of([source], num_epochs=1, unit_bytes=5000)
    units = {lane: Counter() for lane in range(32)}
    for batch in sampler.batches():
        for sequence, lane in zip(batch.sequences, batch.lanes, strict=True):
            units[lane].update((sample.shard, sample.kept_row // 50) for sample in sequence.samples)
    assert sum(len(each) for each in units.values()) <= 1280 + 31, "only the units at lane starts are read by two lanes"


# ------------------------------------------------------------------ nodes and ranks


@pytest.mark.parametrize(
    ("num_nodes", "per_node"),
    [(1, 1), (7, 2), (8, 8), *(pytest.param(nodes, 1, marks=pytest.mark.slow) for nodes in (48, 63, 64, 96))],
)
def test_batches_are_identical_for_any_number_of_nodes(num_nodes, per_node):
    sources = three_sources(np.random.default_rng(2))
    changes = {"global_batch_size": 96, "num_epochs": 1}
    whole = list(sampler_of(sources, **changes).batches())
    size = {"num_ranks": num_nodes * per_node, "ranks_per_node": per_node}
    chosen = sorted({0, 1, num_nodes // 2, num_nodes * per_node - 1} & set(range(num_nodes * per_node)))
    shares = {rank: rank_batches_of(sources, rank=rank, **size, **changes) for rank in chosen}
    for number, batch in enumerate(whole):
        ranks = batch.per_rank(size["num_ranks"], per_node, num_lanes=32)
        counts = [len(share) for share in ranks]
        assert sorted(ids(s for share in ranks for s in share)) == sorted(ids(batch.sequences))
        assert max(counts) - min(counts) <= 1
        assert max(counts) == -(-len(batch.sequences) // size["num_ranks"])
        for rank in chosen:
            assert shares[rank][number].sequences == ranks[rank]
            assert shares[rank][number].num_sequences == len(batch.sequences)
            assert shares[rank][number].after == batch.after


@pytest.mark.parametrize("weighted", [False, True])
def test_resumed_on_63_nodes_in_mid_epoch_the_run_of_64_nodes_continues(weighted):
    sources = three_sources(np.random.default_rng(3), weighted)
    changes = {"num_samples": 4000} if weighted else {"num_epochs": 1}
    whole = list(sampler_of(sources, **changes).batches())
    for stop in (1, len(whole) // 2):
        sampler = sampler_of(sources, **changes)
        state = json.loads(json.dumps(sampler.save(whole[stop - 1].after)))
        position = sampler_of(sources, **changes).restore(state)
        shares = [
            rank_batches_of(sources, position, rank=rank, num_ranks=63, ranks_per_node=1, **changes)
            for rank in (0, 31, 62)
        ]
        for number, batch in enumerate(whole[stop:]):
            ranks = batch.per_rank(63, 1, num_lanes=32)
            assert [share[number].sequences for share in shares] == [ranks[rank] for rank in (0, 31, 62)]


def test_other_limits_on_a_resume_repeat_and_lose_nothing():
    sources = three_sources(np.random.default_rng(4))
    expected = sorted(ids(s for batch in sampler_of(sources, num_epochs=1).batches() for s in batch.sequences))
    seen, state = [], None
    for num_batches, changes in [
        (2, {}),
        (1, {"max_seq_len": 3000}),
        (1, {"max_seq_len": 3500, "global_batch_size": 40}),
        (None, {"max_seq_len": 6000}),
    ]:
        sampler = sampler_of(sources, num_epochs=1, packing_buffer_size=128, **changes)
        position = Position() if state is None else sampler.restore(state)
        for number, batch in enumerate(sampler.batches(position)):
            if number == num_batches:
                break
            seen += ids(batch.sequences)
            state = json.loads(json.dumps(sampler.save(batch.after)))
    assert sorted(seen) == expected


@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 9), st.integers(1, 200), st.integers(0, 99))
@settings(max_examples=150, deadline=None)
def test_every_sequence_has_one_rank_and_counts_differ_by_one(num_lanes, num_ranks, per_node, batch_size, seed):
    owners = Owners(num_lanes, num_ranks, per_node)
    lanes = np.sort(np.random.default_rng(seed).integers(0, num_lanes, batch_size))
    nodes = owners.nodes_of(lanes)
    chosen = [each for node in range(len(owners.nodes)) for each in owners.assign(nodes, lanes + 1, node)]
    assert len(chosen) == num_ranks
    assert sorted(np.concatenate(chosen).tolist()) == list(range(batch_size))
    counts = [len(each) for each in chosen]
    assert max(counts) <= -(-batch_size // num_ranks)
    assert sorted(np.concatenate([owners.lanes_of(n) for n in range(len(owners.nodes))])) == list(range(num_lanes))


# ------------------------------------------------------------------ planning is shared


def run_ranks(sources, num_ranks, exchange, **changes):
    """All ranks at once, as threads: the batches of each, and the buffers it planned."""
    plans = [[] for _ in range(num_ranks)]

    def run(rank):
        size = {"rank": rank, "num_ranks": num_ranks, "ranks_per_node": 4}
        return rank_batches_of(sources, exchange=exchange, seen=plans[rank], **size, **changes)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks))), plans


def test_each_rank_plans_its_own_lanes_and_gets_the_others():
    sources, exchange = three_sources(np.random.default_rng(5)), InMemory()
    batches, plans = run_ranks(sources, 8, exchange, num_epochs=1)
    whole = list(sampler_of(sources, num_epochs=1).batches())
    for number, batch in enumerate(whole):
        assert [each[number].sequences for each in batches] == batch.per_rank(8, 4, num_lanes=32)
    too_large = [sample for each in batches for batch in each for sample in batch.too_large]
    assert sorted(too_large) == sorted(sample for batch in whole for sample in batch.too_large)
    for rank, keys in enumerate(plans):
        assert {key.lane for key in keys} == set(range(4 * rank, 4 * rank + 4))
        assert len(keys) == len(set(keys))


def test_a_rank_that_gives_nothing_in_time_is_replaced_by_the_others(monkeypatch):
    monkeypatch.setattr(rank_batches, "_PATIENCE_S", 0.05)
    sources = three_sources(np.random.default_rng(6))
    alone = rank_batches_of(sources, exchange=InMemory(), rank=3, num_ranks=8, ranks_per_node=4, num_epochs=1)
    whole = list(sampler_of(sources, num_epochs=1).batches())
    assert [batch.sequences for batch in alone] == [batch.per_rank(8, 4, num_lanes=32)[3] for batch in whole]


def test_closing_a_stream_ends_its_wait_for_other_ranks():
    sampler = sampler_of(three_sources(np.random.default_rng(7)), rank=0, num_ranks=2, ranks_per_node=1)
    plans = RankBatches(sampler, planned(sampler), InMemory())
    threading.Timer(0.1, plans.close).start()
    with pytest.raises(DataError, match="closed"):
        next(plans.read(Position()))


def test_old_plans_are_removed_from_the_exchange():
    exchange = InMemory()
    run_ranks([Sized("a", [400] * 40)], 8, exchange, num_epochs=1, packing_buffer_size=16, global_batch_size=8)
    assert len(exchange.values) < exchange.num_put / 2


def test_a_packing_buffer_reads_back_as_it_was_written():
    buffer = sampler_of(three_sources(np.random.default_rng(8)), max_seq_len=300).packing_buffer(0, 3)
    read = PackingBuffer.from_bytes(buffer.to_bytes())
    assert (read.sequences, read.too_large) == (buffer.sequences, buffer.too_large)
    assert read.sequences
    assert read.too_large
    costs = type(buffer.costs).from_bytes(buffer.costs.to_bytes())
    assert costs.num_too_large == buffer.costs.num_too_large == len(buffer.too_large)
    assert costs.costs.tolist() == [sequence.tokens + sequence.patches for sequence in buffer.sequences]


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_lanes": 0}, "num_lanes is 0"),
        ({"unit_bytes": 0}, "unit_bytes is 0"),
        ({"num_ranks": 65}, "global_batch_size is 64 for 65 ranks.*Raise it to 65"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0"),
        ({"sources": [Sized("a", [50], 1.0), Sized("b", [9], 1.0)]}, "source b has 9 samples for 32 lanes"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        sampler_of(**{"sources": [Sized("a", [50])], **changes})


def test_a_source_smaller_than_the_lanes_is_read_once():
    batches = list(sampler_of([Sized("a", [500] * 4), Sized("b", [7])], num_epochs=1).batches())
    seen = Counter(ids(sequence for batch in batches for sequence in batch.sequences))
    assert len(seen) == 2007
    assert set(seen.values()) == {1}

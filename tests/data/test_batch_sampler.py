"""The plan: one stream of global batches for any number of ranks, to be taken up again anywhere."""

import json
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.batch_sampler import BatchSampler, Position
from saccade.errors import ConfigError, DataError


@dataclass(frozen=True)
class Synthetic:
    """A source whose lengths are a hash of shard, row and epoch: images of many sizes with captions, a share of texts."""

    name: str
    sizes: list[int]
    weight: float | None = None
    fingerprint: str = "1"
    text_share: float = 0.2

    def lengths(self, shard, kept_rows, epochs):
        chance = np.array([0.754877666, 0.569840296, 0.362372, 0.8191725]) @ np.stack(
            [np.full(len(kept_rows), shard), kept_rows, epochs, np.ones(len(kept_rows))]
        )
        chance = (np.sin(chance * 12.9898) * 43758.5453) % 1
        patches = np.where(chance < self.text_share, 0, 4 * (16 + (chance * 1e4 % 1 * 500)).astype(int))
        return patches // 4 + 20 + (chance * 1e7 % 1 * 60).astype(int), patches


def plan_of(sources, **changes):
    settings = {
        "seed": 0,
        "max_seq_len": 4096,
        "max_patches": 16_384,
        "global_batch_size": 8,
        "packing_buffer_size": 256,
        "window_shards": 3,
    }
    return BatchSampler(sources, **{**settings, **changes})


def three_sources(rng, weighted=True):
    weights = (0.6, 0.3, 0.1) if weighted else (None, None, None)
    return [
        Synthetic(name, rng.integers(0, 90, 12).tolist(), weight) for name, weight in zip("abc", weights, strict=True)
    ]


def ids(rows):
    return [tuple(sample[:4]) for row in rows for sample in row.samples]


def ids_over_ranks(batch, num_ranks):
    """Sample ids of the union of the ranks' rows, in the batch's order of rows."""
    shares = batch.ranks(num_ranks)
    assert len(shares) == num_ranks
    number_of = {id(row): number for number, row in enumerate(batch.sequences)}
    return ids(sorted((row for share in shares for row in share), key=lambda row: number_of[id(row)]))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 4), (8, 7), (4, 1)])
def test_resumed_on_another_number_of_ranks_the_stream_goes_on_as_if_uninterrupted(seed, before, after):
    rng = np.random.default_rng(seed)
    sources = three_sources(rng)
    whole = list(plan_of(sources, seed=seed, num_samples=2500).batches())
    assert len(whole) > 10
    for stop in [0, 1, *rng.integers(2, len(whole), 3).tolist()]:
        first = plan_of(sources, seed=seed, num_samples=2500)
        seen, state = [], first.save(Position())
        for batch, _ in zip(first.batches(), range(stop), strict=False):
            seen.append(ids_over_ranks(batch, before))
            state = first.save(batch.after)
        second = plan_of(sources, seed=seed, num_samples=2500)
        rest = list(second.batches(second.restore(json.loads(json.dumps(state)))))
        assert [batch.number for batch in rest] == list(range(stop, len(whole)))
        seen += [ids_over_ranks(batch, after) for batch in rest]
        assert seen == [ids(batch.sequences) for batch in whole]
        assert rest == whole[stop:]


@given(
    st.lists(
        st.lists(st.one_of(st.just(0), st.integers(0, 60)), min_size=1, max_size=12).filter(any), min_size=1, max_size=3
    ),
    st.sampled_from([1, 2, 3, 7, 8, 64]),
    st.integers(1, 3),
)
@settings(max_examples=25, deadline=None)
def test_each_sample_comes_once_an_epoch_whatever_the_shards_and_ranks(sizes, num_ranks, num_epochs):
    sources = [Synthetic(str(number), shards) for number, shards in enumerate(sizes)]
    plan = plan_of(sources, num_epochs=num_epochs, max_seq_len=1000, global_batch_size=5, packing_buffer_size=64)
    seen = [sample for batch in plan.batches() for share in batch.ranks(num_ranks) for sample in ids(share)]
    expected = [
        (source, shard, row, epoch)
        for source, shards in enumerate(sizes)
        for shard, size in enumerate(shards)
        for row in range(size)
        for epoch in range(num_epochs)
    ]
    assert sorted(seen) == sorted(expected)


def test_sources_by_number_of_samples_each_keep_their_epoch():
    """In a mixture by number of samples no source begins its second epoch before the first is over for all."""
    sources = three_sources(np.random.default_rng(3), weighted=False)
    plan = plan_of(sources, packing_buffer_size=sum(sum(source.sizes) for source in sources))
    for number in range(3):
        assert {sample.epoch for row in plan.packing_buffer(number).sequences for sample in row.samples} == {number}


def test_weights_hold_within_one_sample_in_the_stream():
    sources = three_sources(np.random.default_rng(4))
    plan = plan_of(sources, packing_buffer_size=100)
    counts = np.zeros(3)
    for number in range(30):
        block = plan.packing_buffer(number)
        drawn = [sample.source for row in block.sequences for sample in row.samples] + [
            sample.source for sample in block.too_large
        ]
        counts += np.bincount(drawn, minlength=3)
        assert np.all(np.abs(counts - (number + 1) * 100 * np.array([0.6, 0.3, 0.1])) < 1)


def test_every_batch_has_its_rows_and_only_the_last_may_be_short():
    batches = list(plan_of(three_sources(np.random.default_rng(5)), num_samples=3000).batches())
    assert {len(batch.sequences) for batch in batches[:-1]} == {8}
    assert 1 <= len(batches[-1].sequences) <= 8
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert all(row.tokens <= 4096 and row.patches <= 16_384 for batch in batches for row in batch.sequences)


def test_a_stream_without_end_goes_on():
    plan = plan_of([Synthetic("a", [50, 60])])
    assert plan.num_packing_buffers is None
    epochs = [
        sample.epoch
        for batch, _ in zip(plan.batches(), range(50), strict=False)
        for row in batch.sequences
        for sample in row.samples
    ]
    assert max(epochs) > 20


def test_the_last_block_takes_what_is_left_over():
    plan = plan_of([Synthetic("a", [50, 60])], num_epochs=2, packing_buffer_size=100)
    assert plan.num_packing_buffers == 2
    assert [len(ids(plan.packing_buffer(number).sequences)) for number in range(2)] == [100, 120]
    assert plan_of([Synthetic("a", [7])], num_epochs=1).num_packing_buffers == 1


def test_a_finished_stream_stays_finished():
    plan = plan_of([Synthetic("a", [50, 60])], num_epochs=2)
    *_, last = plan.batches()
    assert list(plan.batches(last.after)) == []


def test_rows_are_98_percent_full_and_vision_work_is_even_over_8_ranks():
    """Three sources, one of them half text, in rows of 16,384 tokens, 16 to a batch; batches run across blocks."""
    sources = [Synthetic("a", [10_000] * 20), Synthetic("b", [5000] * 20, text_share=0.5), Synthetic("c", [1000] * 5)]
    plan = plan_of(sources, max_seq_len=16_384, max_patches=65_536, global_batch_size=16, packing_buffer_size=8192)
    fills, imbalances = [], []
    for batch, _ in zip(plan.batches(), range(20), strict=False):
        fills += [row.tokens / 16_384 for row in batch.sequences]
        work = [sum(row.patches for row in share) for share in batch.ranks(8)]
        imbalances.append(max(work) / np.mean(work) - 1)
    assert np.mean(fills) >= 0.98
    assert max(imbalances) <= 0.05


def test_rows_of_a_block_come_in_no_order_of_content():
    sources = [Synthetic("a", [10_000] * 4)]
    rows = plan_of(sources, packing_buffer_size=8192).packing_buffer(3).sequences
    place = np.arange(len(rows))
    for figure in ([row.tokens for row in rows], [row.patches for row in rows], [len(row.samples) for row in rows]):
        assert abs(np.corrcoef(place, figure)[0, 1]) < 4 / np.sqrt(len(rows))


def test_each_shard_is_asked_for_lengths_once_a_block():
    asked = []

    class Counting(Synthetic):
        def lengths(self, shard, kept_rows, epochs):
            asked.append(shard)
            assert len(set(zip(kept_rows.tolist(), epochs.tolist(), strict=True))) == len(kept_rows)
            return super().lengths(shard, kept_rows, epochs)

    plan_of([Counting("a", [40] * 6)], packing_buffer_size=512).packing_buffer(1)  # two epochs and a bit
    assert sorted(asked) == list(range(6))


def test_samples_too_large_are_reported_once_also_across_a_restart():
    plan = plan_of([Synthetic("a", [100] * 10)], max_seq_len=400, num_epochs=1, global_batch_size=3)
    whole = list(plan.batches())
    too_large = [sample for batch in whole for sample in batch.too_large]
    assert 0 < len(too_large) < 500
    assert all(sample.tokens > 400 for sample in too_large)
    in_rows = [sample for batch in whole for row in batch.sequences for sample in row.samples]
    assert sorted(sample[1:3] for sample in in_rows + too_large) == [
        (shard, row) for shard in range(10) for row in range(100)
    ]
    for stop in (1, 7, 20):
        resumed = plan.batches(whole[stop - 1].after)
        assert [batch.too_large for batch in resumed] == [batch.too_large for batch in whole[stop:]]


def test_a_block_of_which_nothing_fits_is_an_error_that_names_the_budgets():
    with pytest.raises(DataError, match=r"none of 256 samples.*10 tokens.*Raise the budgets"):
        next(plan_of([Synthetic("a", [1000])], max_seq_len=10).batches())


def test_a_position_is_refused_by_a_plan_of_other_settings_or_other_data():
    sources = three_sources(np.random.default_rng(6))
    state = plan_of(sources).save(Position(3, 1, 9))
    assert plan_of(sources).restore(state) == Position(3, 1, 9)
    for change in (
        {"seed": 1},
        {"max_seq_len": 4095},
        {"global_batch_size": 9},
        {"packing_buffer_size": 128},
        {"window_shards": 4},
    ):
        with pytest.raises(DataError, match=r"settings differ, now seed .*Set back what changed"):
            plan_of(sources, **change).restore(state)
    others = ({"sizes": [1, 2]}, {"weight": 0.5}, {"fingerprint": "2"}, {"name": "z"})
    for other in (replace(sources[0], **change) for change in others):
        with pytest.raises(DataError, match=r"shards, kept samples, weights or lengths differ in sources"):
            plan_of([other, *sources[1:]]).restore(state)
    with pytest.raises(DataError, match="not the position of a data stream"):
        plan_of(sources).restore({"block": 3})


def test_a_state_is_small():
    assert len(json.dumps(plan_of(three_sources(np.random.default_rng(7))).save(Position(10**9, 500, 10**9)))) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"packing_buffer_size": 1 << 21}, "use at most"),
        ({"num_epochs": 1, "num_samples": 1}, "give one of them"),
        ({"sources": [Synthetic("a", [1]), Synthetic("a", [2])]}, "two sources have one name"),
        ({"sources": [Synthetic("a", [1]), Synthetic("b", [2], 0.5)]}, "no weight for a"),
        ({"sources": [Synthetic("a", [1], 1.0)], "num_epochs": 1}, "num_samples"),
        ({"sources": []}, "no sources"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(**{"sources": [Synthetic("a", [1])], **changes})


def test_a_source_without_samples_is_refused():
    with pytest.raises(DataError, match="source b has no samples"):
        plan_of([Synthetic("a", [1]), Synthetic("b", [0, 0])])


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_restoring_takes_under_a_tenth_of_a_second_at_any_position(share):
    """Ten million samples, blocks of 4096: about 25 ms of an idle core. CPU time, since cores may be shared."""
    source = Synthetic("a", [10_000] * 1000)
    times = []
    for _ in range(5):
        began = time.process_time()
        plan = plan_of([source], max_seq_len=16_384, max_patches=65_536, global_batch_size=16, packing_buffer_size=4096)
        state = {"plan": plan.fingerprint, "block": int(share * 1e7) // 4096, "row": 5, "batch": 7}
        batch = next(plan.batches(plan.restore(state)))
        times.append(time.process_time() - began)
    assert (batch.number, len(batch.sequences)) == (7, 16)
    assert min(times) < 0.1

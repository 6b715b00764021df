"""The batch sampler: one stream of global batches for any number of ranks, resumable anywhere."""

import json
import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.data.batch_sampler import BatchSampler, Position
from saccade.data.config import StreamConfig
from saccade.errors import ConfigError, DataError


@dataclass(frozen=True)
class Synthetic:
    """A source with lengths hashed from shard, row and epoch: images of many sizes with captions, a share of texts."""

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


def sampler_of(sources, **changes):
    settings = {
        "seed": 0,
        "max_seq_len": 4096,
        "max_patches": 16_384,
        "global_batch_size": 8,
        "packing_buffer_size": 256,
        "window_shards": 3,
    }
    return BatchSampler(sources, StreamConfig(checkpoint="", **{**settings, **changes}))


def three_sources(rng, weighted=True):
    weights = (0.6, 0.3, 0.1) if weighted else (None, None, None)
    return [
        Synthetic(name, rng.integers(0, 90, 12).tolist(), weight) for name, weight in zip("abc", weights, strict=True)
    ]


def ids(sequences):
    return [tuple(sample[:4]) for sequence in sequences for sample in sequence.samples]


def ids_over_ranks(batch, num_ranks):
    """Sample ids of the union of the ranks' sequences, in the batch's order of sequences."""
    shares = batch.per_rank(num_ranks)
    assert len(shares) == num_ranks
    number_of = {id(sequence): number for number, sequence in enumerate(batch.sequences)}
    return ids(
        sorted((sequence for share in shares for sequence in share), key=lambda sequence: number_of[id(sequence)])
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 4), (8, 7), (4, 1)])
def test_resumed_on_another_number_of_ranks_the_stream_continues_as_if_uninterrupted(seed, before, after):
    rng = np.random.default_rng(seed)
    sources = three_sources(rng)
    whole = list(sampler_of(sources, seed=seed, num_samples=2500).batches())
    assert len(whole) > 10
    for stop in [0, 1, *rng.integers(2, len(whole), 3).tolist()]:
        first = sampler_of(sources, seed=seed, num_samples=2500)
        seen, state = [], first.save(Position())
        for batch, _ in zip(first.batches(), range(stop), strict=False):
            seen.append(ids_over_ranks(batch, before))
            state = first.save(batch.after)
        second = sampler_of(sources, seed=seed, num_samples=2500)
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
    sampler = sampler_of(sources, num_epochs=num_epochs, max_seq_len=1000, global_batch_size=5, packing_buffer_size=64)
    seen = [sample for batch in sampler.batches() for share in batch.per_rank(num_ranks) for sample in ids(share)]
    expected = [
        (source, shard, sequence, epoch)
        for source, shards in enumerate(sizes)
        for shard, size in enumerate(shards)
        for sequence in range(size)
        for epoch in range(num_epochs)
    ]
    assert sorted(seen) == sorted(expected)


@pytest.mark.parametrize("packing_buffer_size", [16, 100, 5000])
def test_no_sample_is_repeated_before_every_sample_of_the_epoch_was_seen(packing_buffer_size):
    """Checks every prefix of the stream; epochs of 3 sources without weights, buffers of any size."""
    sources = three_sources(np.random.default_rng(3), weighted=False)
    sampler = sampler_of(sources, packing_buffer_size=packing_buffer_size, max_seq_len=1000, num_epochs=3)
    sequences = [sequence for batch in sampler.batches() for sequence in batch.sequences]
    epochs = [{sample.epoch for sample in sequence.samples} for sequence in sequences]
    assert all(len(each) == 1 for each in epochs)
    assert [epoch for each in epochs for epoch in each] == sorted(epoch for each in epochs for epoch in each)
    one = sampler_of(sources, packing_buffer_size=packing_buffer_size, max_seq_len=1000, num_epochs=1)
    first = [sequence for batch in one.batches() for sequence in batch.sequences]
    assert first == sequences[: len(first)], "num_epochs=1 is the first epoch of a longer stream"
    assert sorted(ids(first)) == [
        (source, shard, row, 0)
        for source, each in enumerate(sources)
        for shard, size in enumerate(each.sizes)
        for row in range(size)
    ]


def test_weights_hold_within_one_sample_at_every_packing_buffer():
    sources = three_sources(np.random.default_rng(4))
    sampler = sampler_of(sources, packing_buffer_size=100)
    counts = np.zeros(3)
    for number in range(30):
        buffer = sampler.packing_buffer(number)
        drawn = [sample.source for sequence in buffer.sequences for sample in sequence.samples] + [
            sample.source for sample in buffer.too_large
        ]
        counts += np.bincount(drawn, minlength=3)
        assert np.all(np.abs(counts - (number + 1) * 100 * np.array([0.6, 0.3, 0.1])) <= 1)


def test_every_batch_is_full_and_only_the_last_may_be_short():
    batches = list(sampler_of(three_sources(np.random.default_rng(5)), num_samples=3000).batches())
    assert {len(batch.sequences) for batch in batches[:-1]} == {8}
    assert 1 <= len(batches[-1].sequences) <= 8
    assert [batch.number for batch in batches] == list(range(len(batches)))
    assert all(
        sequence.tokens <= 4096 and sequence.patches <= 16_384 for batch in batches for sequence in batch.sequences
    )


def test_an_endless_stream_repeats_its_epochs():
    sampler = sampler_of([Synthetic("a", [50, 60])])
    epochs = [
        sample.epoch
        for batch, _ in zip(sampler.batches(), range(50), strict=False)
        for sequence in batch.sequences
        for sample in sequence.samples
    ]
    assert max(epochs) > 20


def test_an_epoch_is_divided_into_equal_packing_buffers():
    sampler = sampler_of([Synthetic("a", [50, 60])], num_epochs=2, packing_buffer_size=100)
    assert [len(ids(sampler.packing_buffer(number).sequences)) for number in range(4)] == [55, 55, 55, 55]
    with pytest.raises(AssertionError, match="after the end"):
        sampler.packing_buffer(4)
    cut = sampler_of([Synthetic("a", [50, 60])], num_samples=120, packing_buffer_size=100)
    assert [len(ids(cut.packing_buffer(number).sequences)) for number in range(3)] == [55, 55, 10]


def test_a_finished_stream_stays_finished():
    sampler = sampler_of([Synthetic("a", [50, 60])], num_epochs=2)
    *_, last = sampler.batches()
    assert list(sampler.batches(last.after)) == []


def test_packed_sequences_are_98_percent_full_and_vision_work_is_even_over_8_ranks():
    """Three sources, one of them half text, in sequences of 16,384 tokens, 16 to a batch, across buffers."""
    sources = [Synthetic("a", [10_000] * 20), Synthetic("b", [5000] * 20, text_share=0.5), Synthetic("c", [1000] * 5)]
    sampler = sampler_of(
        sources, max_seq_len=16_384, max_patches=65_536, global_batch_size=16, packing_buffer_size=8192
    )
    fills, imbalances = [], []
    for batch, _ in zip(sampler.batches(), range(20), strict=False):
        fills += [sequence.tokens / 16_384 for sequence in batch.sequences]
        work = [sum(sequence.patches for sequence in share) for share in batch.per_rank(8)]
        imbalances.append(max(work) / np.mean(work) - 1)
    assert np.mean(fills) >= 0.98
    assert max(imbalances) <= 0.05


def test_sequences_of_a_packing_buffer_come_in_no_order_of_content():
    sources = [Synthetic("a", [10_000] * 4)]
    sequences = sampler_of(sources, packing_buffer_size=8192).packing_buffer(3).sequences
    place = np.arange(len(sequences))
    for figure in (
        [sequence.tokens for sequence in sequences],
        [sequence.patches for sequence in sequences],
        [len(sequence.samples) for sequence in sequences],
    ):
        assert abs(np.corrcoef(place, figure)[0, 1]) < 4 / np.sqrt(len(sequences))


def test_each_shard_is_asked_for_lengths_once_per_packing_buffer():
    asked = []

    class Counting(Synthetic):
        def lengths(self, shard, kept_rows, epochs):
            asked.append(shard)
            assert len(set(zip(kept_rows.tolist(), epochs.tolist(), strict=True))) == len(kept_rows)
            return super().lengths(shard, kept_rows, epochs)

    sampler_of([Counting("a", [40] * 6)], packing_buffer_size=512).packing_buffer(1)
    assert sorted(asked) == list(range(6))


def test_samples_too_large_are_reported_once_also_across_a_resume():
    sampler = sampler_of([Synthetic("a", [100] * 10)], max_seq_len=400, num_epochs=1, global_batch_size=3)
    whole = list(sampler.batches())
    too_large = [sample for batch in whole for sample in batch.too_large]
    assert 0 < len(too_large) < 500
    assert all(sample.tokens > 400 for sample in too_large)
    in_rows = [sample for batch in whole for sequence in batch.sequences for sample in sequence.samples]
    assert sorted(sample[1:3] for sample in in_rows + too_large) == [
        (shard, sequence) for shard in range(10) for sequence in range(100)
    ]
    for stop in (1, 7, 20):
        resumed = sampler.batches(whole[stop - 1].after)
        assert [batch.too_large for batch in resumed] == [batch.too_large for batch in whole[stop:]]


def test_a_packing_buffer_of_which_nothing_fits_is_an_error_that_names_the_limits():
    with pytest.raises(DataError, match=r"none of 250 consecutive samples.*max_seq_len 10 .*Raise the limits"):
        next(sampler_of([Synthetic("a", [1000])], max_seq_len=10).batches())


def test_a_state_is_refused_by_a_sampler_of_other_settings_or_other_data():
    sources = three_sources(np.random.default_rng(6))
    state = sampler_of(sources).save(Position(3, 1, 9))
    assert sampler_of(sources).restore(state) == Position(3, 1, 9)
    for change in (
        {"seed": 1},
        {"packing_buffer_size": 128},
        {"window_shards": 4},
    ):
        with pytest.raises(DataError, match=r"settings differ, now seed .*Undo the change"):
            sampler_of(sources, **change).restore(state)
    others = ({"sizes": [1, 2]}, {"weight": 0.5}, {"fingerprint": "2"}, {"name": "z"})
    for other in (replace(sources[0], **change) for change in others):
        with pytest.raises(DataError, match=r"shards, kept samples, weights or lengths differ in sources"):
            sampler_of([other, *sources[1:]]).restore(state)
    with pytest.raises(DataError, match="not the state of a data stream"):
        sampler_of(sources).restore({"plan": "a-b", "block": 3, "row": 1, "batch": 2})


@pytest.mark.parametrize("weighted", [False, True])
def test_limits_and_batch_size_may_change_on_a_resume_and_each_sample_still_comes_once(weighted):
    """Twice in one packing buffer: its remaining samples are packed again, later buffers as before."""
    sources = three_sources(np.random.default_rng(9), weighted=weighted)
    settings = {"num_samples": 1000, "packing_buffer_size": 400}
    whole = [sequence for batch in sampler_of(sources, **settings).batches() for sequence in batch.sequences]
    seen, state = [], None
    for changes, num_batches in [
        ({"max_seq_len": 1000, "global_batch_size": 3}, 2),
        ({"max_seq_len": 2000, "max_patches": 3000, "global_batch_size": 2}, 1),
        ({"max_seq_len": 1500, "global_batch_size": 1}, 0),
        ({"max_seq_len": 700, "global_batch_size": 4}, None),
    ]:
        sampler = sampler_of(sources, **settings, **changes)
        position = Position() if state is None else sampler.restore(json.loads(json.dumps(state)))
        state = sampler.save(position)
        for number, batch in enumerate(sampler.batches(position)):
            if number == num_batches:
                break
            assert batch.number == position.batch + number
            assert all(sequence.tokens <= changes["max_seq_len"] for sequence in batch.sequences)
            seen += ids(batch.sequences)
            state = sampler.save(batch.after)
            assert sampler.restore(state) == batch.after
    assert sorted(seen) == sorted(ids(whole))


def test_more_epochs_may_be_asked_for_on_a_resume():
    sources = [Synthetic("a", [50, 60])]
    *_, last = sampler_of(sources, num_epochs=1).batches()
    longer = sampler_of(sources, num_epochs=2)
    rest = list(longer.batches(longer.restore(sampler_of(sources, num_epochs=1).save(last.after))))
    assert len(ids(sequence for batch in rest for sequence in batch.sequences)) == 110


def test_a_packing_buffer_of_samples_that_are_all_too_large_does_not_stop_a_stream():
    class Growing(Synthetic):
        def lengths(self, shard, kept_rows, epochs):
            return np.where(shard == 1, 10_000, 100) + 0 * kept_rows, 0 * kept_rows

    sampler = sampler_of([Growing("a", [500, 3])], packing_buffer_size=8, window_shards=1, num_epochs=2)
    batches = list(sampler.batches())
    assert sum(len(sequence.samples) for batch in batches for sequence in batch.sequences) == 1000


def test_a_state_is_small():
    assert len(json.dumps(sampler_of(three_sources(np.random.default_rng(7))).save(Position(10**9, 500, 10**9)))) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"num_epochs": 0}, "num_epochs is 0"),
        ({"packing_buffer_size": 1 << 22}, "use at most"),
        ({"num_epochs": 1, "num_samples": 1}, "give one of them"),
        ({"sources": [Synthetic("a", [1]), Synthetic("a", [2])]}, "two sources have one name"),
        ({"sources": [Synthetic("a", [1]), Synthetic("b", [2], 0.5)]}, "no weight for a"),
        ({"sources": [Synthetic("a", [1], 1.0), Synthetic("b", [1], 1.0)], "num_epochs": 1}, "num_samples"),
        ({"sources": []}, "no sources"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        sampler_of(**{"sources": [Synthetic("a", [1])], **changes})


def test_a_source_without_samples_is_refused():
    with pytest.raises(DataError, match="source b has no samples"):
        sampler_of([Synthetic("a", [1]), Synthetic("b", [0, 0])])


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_restoring_takes_a_fraction_of_a_second_at_any_position(share):
    """Ten million samples, buffers of 4096: about 25 ms of an idle core. CPU time, since cores may be shared."""
    source = Synthetic("a", [10_000] * 1000)
    times = []
    for _ in range(5):
        began = time.process_time()
        sampler = sampler_of(
            [source], max_seq_len=16_384, max_patches=65_536, global_batch_size=16, packing_buffer_size=4096
        )
        state = sampler.save(Position(int(share * 1e7) // 4096, 5, 7))
        batch = next(sampler.batches(sampler.restore(state)))
        times.append(time.process_time() - began)
    assert (batch.number, len(batch.sequences)) == (7, 16)
    assert min(times) < 0.5, "reading up to there would take minutes"

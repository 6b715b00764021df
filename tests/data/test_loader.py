"""The stream: every sample once an epoch, the same batches for any ranks and workers, resumed = uninterrupted."""

import gc
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from commands import is_alive
from data.making import make_sample, make_shards, write_samples
from data.test_collate import assert_same_inputs

from saccade.data import Source, StreamConfig, open_stream
from saccade.data.index_builder import build_index
from saccade.data.sample import TextRules
from saccade.data.sources import open_sources
from saccade.errors import ConfigError, DataError
from saccade.processor import Processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = make_shards(tmp_path_factory.mktemp("stream") / "photos", 3, 20)
    build_index(folder, num_workers=1)
    return folder


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Three sources of different kinds and sizes, mixed 5 to 3 to 2."""
    root = tmp_path_factory.mktemp("mixture")
    photos = make_shards(root / "photos", 3, 13)
    chats = make_shards(root / "chats", 2, 7, seed=100, fields={"questions": [{"question": "why?", "answer": "so."}]})
    pages = make_shards(root / "pages", 1, 9, seed=200, num_images=2, fields={"captions": ["one", "and two"]})
    return [
        Source(path=photos, weight=0.5),
        Source(path=chats, weight=0.3),
        Source(path=pages, weight=0.2, rules=TextRules(caption_prompt="Compare.")),
    ]


def ids_of(batches):
    return [sample_id for batch in batches for sample_id in batch.sample_ids]


def assert_same_batches(actual, expected):
    assert [batch.number for batch in actual] == [batch.number for batch in expected]
    for left, right in zip(actual, expected, strict=True):
        assert left.state == right.state
        assert left.num_sequences == right.num_sequences
        assert left.max_sequences_per_rank == right.max_sequences_per_rank
        for one, other in zip(left.sequences, right.sequences, strict=True):
            assert one.sample_ids == other.sample_ids
            assert one.source_of_conversation == other.source_of_conversation
            assert one.source_names == other.source_names
            assert (one.replaced_index, one.replaced_by) == (other.replaced_index, other.replaced_by)
            assert_same_inputs(one.inputs, other.inputs)


# ------------------------------------------------------------------ contents


def test_an_epoch_has_every_sample_once_and_the_next_has_another_order(folder, opened):
    stream = opened(folder, num_epochs=2)
    ids = ids_of(stream)
    first, second = ids[:60], ids[60:]
    expected = {f"photos/{shard:05d}/{shard:05d}{number:04d}" for shard in range(3) for number in range(20)}
    assert Counter(ids) == dict.fromkeys(expected, 2)
    assert first != second
    with pytest.raises(StopIteration):
        next(stream)


def test_packed_sequences_keep_to_their_limits_and_batches_are_full(folder, opened):
    batches = list(
        opened(folder, max_seq_len=1500, max_patches=300, global_batch_size=2, num_epochs=3, packing_buffer_size=180)
    )
    sequences = [sequence for batch in batches for sequence in batch.sequences]
    assert max(sequence.inputs.num_tokens for sequence in sequences) <= 1500
    assert max(len(sequence.inputs.patches) for sequence in sequences) <= 300
    assert {len(batch.sequences) for batch in batches[:-1]} == {2}
    for sequence in sequences:
        assert sequence.inputs.patches.dtype == torch.uint8
        assert sequence.inputs.num_conversations == len(sequence.sample_ids) == len(sequence.source_of_conversation)
        assert sequence.inputs.loss_mask.any()


def test_the_seed_determines_the_order(folder, opened):
    one, same, other = (ids_of(opened(folder, num_epochs=1, seed=seed)) for seed in (1, 1, 2))
    assert one == same != other
    assert sorted(one) == sorted(other)


def test_each_epoch_shows_the_next_caption(tmp_path, opened, checkpoint):
    captions = ["one", "two two", "three three three"]
    write_samples(tmp_path / "shards" / "00000.tar", [make_sample("a", fields={"captions": captions})])
    processor = Processor.load(checkpoint)
    sequences = [
        sequence
        for batch in opened(tmp_path / "shards", num_epochs=4, packing_buffer_size=1)
        for sequence in batch.sequences
    ]
    learned = [sequence.inputs.token_ids[sequence.inputs.loss_mask].tolist() for sequence in sequences]
    assert [processor.decode(ids) for ids in learned] == [*captions, captions[0]]


def test_a_mixture_keeps_its_weights_and_its_sources_apart(three, opened):
    stream = opened(three, num_samples=400, packing_buffer_size=100)
    batches = list(stream)
    sources = Counter(
        source for batch in batches for sequence in batch.sequences for source in sequence.source_of_conversation
    )
    assert sources == {0: 200, 1: 120, 2: 80}
    assert stream.source_names == ["photos", "chats", "pages"]
    for batch in batches:
        for sequence in batch.sequences:
            names = [sequence.source_names[source] for source in sequence.source_of_conversation]
            assert names == [sample_id.split("/")[0] for sample_id in sequence.sample_ids]


def test_the_fast_resize_is_used_by_default(folder, opened):
    fast, exact = next(opened(folder)), next(opened(folder, resize="pillow"))
    difference = (fast.sequences[0].inputs.patches.int() - exact.sequences[0].inputs.patches.int()).abs()
    assert 0 < difference.max() <= 2
    assert torch.equal(fast.sequences[0].inputs.token_ids, exact.sequences[0].inputs.token_ids)


def test_what_is_missing_is_built_on_first_use(tmp_path, opened):
    folder, seen = make_shards(tmp_path / "new", 2, 3), []
    stream = opened(folder, num_epochs=1, on_progress=lambda what, progress: seen.append((what, progress.num_done)))
    where = f"of {folder}"
    assert seen == [(f"index {where}", 1), (f"index {where}", 2), (f"lengths {where}", 1), (f"lengths {where}", 2)]
    assert len(ids_of(stream)) == 6
    opened(folder, on_progress=lambda what, progress: seen.append((what, progress)))
    assert len(seen) == 4


def test_lengths_measured_ahead_are_those_the_stream_uses(tmp_path, checkpoint, opened):
    folder, seen = make_shards(tmp_path / "new", 3, 4), []
    rules = TextRules(caption_prompt="What is it?")
    source = Source(path=folder, rules=rules)
    (measured,) = open_sources(source, checkpoint=checkpoint, num_workers=1)
    assert (measured.num_measured, measured.name) == (3, "new")
    assert open_sources([source], checkpoint=checkpoint)[0].num_measured == 0
    stream = opened(source, num_epochs=1, on_progress=lambda what, progress: seen.append(what))
    assert len(ids_of(stream)) == 12
    assert seen == []


# ------------------------------------------------------------------ ranks and workers


def test_ranks_share_the_sequences_of_each_batch(three, opened):
    whole = list(opened(three, num_samples=150, global_batch_size=7))
    ranks = [list(opened(three, num_samples=150, global_batch_size=7, rank=rank, num_ranks=3)) for rank in range(3)]
    for number, batch in enumerate(whole):
        shares = [batches[number] for batches in ranks]
        assert len({len(share.sequences) for share in shares} | {shares[0].max_sequences_per_rank}) <= 2
        assert shares[0].num_sequences == batch.num_sequences == len(batch.sequences)
        assert shares[0].max_sequences_per_rank == max(len(share.sequences) for share in shares)
        assert {tuple(sequence.sample_ids) for share in shares for sequence in share.sequences} == {
            tuple(sequence.sample_ids) for sequence in batch.sequences
        }
        assert len({json.dumps(share.state) for share in [batch, *shares]}) == 1
    assert {len(batches) for batches in ranks} == {len(whole)}


def test_processes_make_the_same_batches_bit_for_bit(three, opened):
    settings = {"num_samples": 150, "global_batch_size": 3, "max_seq_len": 1000}
    expected = list(opened(three, **settings))
    for num_workers in (1, 2):
        stream = opened(three, num_workers=num_workers, **settings)
        batches = []
        for batch in stream:
            assert len(stream.worker_pids) == num_workers or batch.number == len(expected) - 1
            batches.append(batch)
        assert_same_batches(batches, expected)


def test_memory_is_reused_only_when_the_last_tensor_of_its_sequence_is_gone(folder, opened, checkpoint):
    expected = list(opened(folder, num_samples=240))
    stream = opened(folder, num_samples=240, num_workers=1, prefetch=1)
    kept, addresses = [], set()
    for batch in stream:
        (sequence,) = batch.sequences
        addresses.add(sequence.inputs.patches.data_ptr())
        if batch.number % 5 == 0:
            kept.append((batch.number, sequence.inputs.patches[-7:], sequence.inputs.token_ids[3:]))
        del batch, sequence
    assert len(addresses) < len(expected) / 2, "memory is reused"
    for number, patches, token_ids in kept:
        inputs = expected[number].sequences[0].inputs
        assert torch.equal(patches, inputs.patches[-7:])
        assert torch.equal(token_ids, inputs.token_ids[3:])


# ------------------------------------------------------------------ resume


def test_a_resumed_stream_continues_as_if_uninterrupted_on_any_number_of_ranks(three, opened):
    settings = {"num_samples": 200, "global_batch_size": 5, "max_seq_len": 700, "packing_buffer_size": 70}
    whole = list(opened(three, **settings))
    dice = random.Random(0)
    for ranks_before, ranks_after in ((1, 1), (1, 3), (2, 5), (5, 2)):
        stop = dice.randrange(1, len(whole) - 1)
        states = []
        for rank in range(ranks_before):
            before = opened(three, **settings, rank=rank, num_ranks=ranks_before)
            for _ in range(stop):
                next(before)
            states.append(before.state_dict())
        assert all(state == whole[stop - 1].state for state in states)
        state = json.loads(json.dumps(states[0]))
        after = [
            list(opened(three, **settings, rank=rank, num_ranks=ranks_after, state=state))
            for rank in range(ranks_after)
        ]
        for number, expected in enumerate(whole[stop:]):
            shares = [batches[number] for batches in after]
            assert {share.number for share in shares} == {expected.number}
            found = {tuple(sequence.sample_ids): sequence for share in shares for sequence in share.sequences}
            assert len(found) == len(expected.sequences)
            for sequence in expected.sequences:
                assert_same_inputs(found[tuple(sequence.sample_ids)].inputs, sequence.inputs)


def test_the_state_is_that_of_the_last_batch_returned_not_of_those_prefetched(folder, opened):
    whole = list(opened(folder, num_epochs=2))
    stream = opened(folder, num_epochs=2, num_workers=1, prefetch=4)
    assert stream.state_dict()["batch"] == 0
    for _ in range(3):
        batch = next(stream)
    time.sleep(0.2)  # workers continue
    assert stream.state_dict() == batch.state == whole[2].state
    stream.close()
    assert stream.state_dict() == whole[2].state
    assert_same_batches(list(opened(folder, num_epochs=2, state=stream.state_dict())), whole[3:])


def test_a_state_is_small_and_restored_at_once_wherever_it_is(three, opened):
    state = opened(three).state_dict() | {"buffer": 3_000_000, "sequence": 2, "batch": 50_000_000}
    assert len(json.dumps(state)) <= 200
    next(opened(three))

    def cpu_s(**state):
        began = time.process_time()
        stream = opened(three, **state)
        return time.process_time() - began, next(stream).number

    fresh, restored = ([cpu_s(**one) for _ in range(3)] for one in ({}, {"state": state}))
    assert [number for _, number in restored] == [50_000_000] * 3
    assert min(restored)[0] <= 3 * min(fresh)[0] + 0.05, "as long as opening it at its start"


def test_a_state_of_another_stream_is_refused(folder, three, opened):
    state = opened(folder, num_epochs=1).state_dict()
    with pytest.raises(DataError, match="another data stream"):
        opened(folder, num_epochs=1, seed=1, state=state)
    with pytest.raises(DataError, match="another data stream"):
        opened(Source(path=three[0].path), num_epochs=1, state=state)
    with pytest.raises(DataError, match="not the state"):
        opened(folder, state={"epoch": 3})


# ------------------------------------------------------------------ memory, settings


def resident_bytes(pid="self"):
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096


def test_memory_stays_flat_over_the_epochs(folder, opened):
    stream = opened(folder, num_workers=1, max_seq_len=2048, packing_buffer_size=60, prefetch=1)
    sizes = []
    for _ in range(4):
        for _ in range(15):
            next(stream)
        gc.collect()
        sizes.append(resident_bytes() + resident_bytes(stream.worker_pids[0]))
    assert max(sizes[2:]) - sizes[1] < 8 * 2**20, sizes


def test_a_stream_that_is_dropped_ends_its_processes(folder, opened, checkpoint):
    stream = open_stream(folder, checkpoint=checkpoint, max_seq_len=1024, num_workers=1)
    next(stream)
    (pid,) = stream.worker_pids
    del stream
    gc.collect()
    assert_gone([pid])


def assert_gone(pids, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 2, "num_ranks": 2}, "rank is 2 of 2"),
        ({"num_ranks": 4, "global_batch_size": 3}, "Raise it to 4"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"prefetch": 0}, "prefetch 0"),
        ({"max_bad_share": 1.5}, "max_bad_share is 1.5"),
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"resize": "opencv"}, "resize is 'opencv'"),
    ],
    ids=lambda value: str(value),
)
def test_settings_that_cannot_be_honoured_are_refused_at_once(folder, opened, settings, message):
    with pytest.raises(ConfigError, match=message):
        opened(folder, **settings)


def test_two_sources_of_one_name_are_refused(folder, opened):
    with pytest.raises(ConfigError, match="photos"):
        opened([folder, folder])
    with pytest.raises(ConfigError, match="cannot be a source's name"):
        opened(Source(path=folder, name="a/b"))
    assert len(ids_of(opened([folder, Source(path=folder, name="again")], num_epochs=1))) == 120


def test_options_are_fields_of_the_config(folder, checkpoint, opened):
    with pytest.raises(TypeError, match="'max_len'"):
        open_stream("shards", checkpoint="model", max_seq_len=64, max_len=1)
    config = StreamConfig(checkpoint=checkpoint, max_seq_len=1024, packing_buffer_size=64, num_workers=0, seed=1)
    with open_stream(folder, config) as stream, open_stream(folder, config, seed=0) as other:
        first, other_first = next(stream), next(other)
    assert_same_batches([first], [next(opened(folder, seed=1))])
    assert_same_batches([other_first], [next(opened(folder))])

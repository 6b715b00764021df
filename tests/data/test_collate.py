"""A packed sequence is its samples one by one, with the measured lengths; bad samples are left out and named."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from data.making import MAKERS, begin_of, make_sample, make_shards, write_samples
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.config import decode, encode
from saccade.data.augment import AugmentConfig
from saccade.data.collate import Collator
from saccade.data.config import Source, StreamConfig
from saccade.data.index import open_index
from saccade.data.index_builder import build_index
from saccade.data.lengths import Measurer, measure_sample
from saccade.data.packing_buffer import SampleRef
from saccade.data.sample import Sample, TextRules, conversations
from saccade.data.sources import IndexedSource, open_sources
from saccade.data.storage import StorageConfig
from saccade.errors import DataError, UserError
from saccade.processor import ModelInputs, Processor

RULES = TextRules()


@pytest.fixture(scope="module")
def processor(checkpoint):
    return Processor.load(checkpoint)


def collator_of(checkpoint, *folders):
    sources = open_sources(folders, checkpoint=checkpoint, num_workers=1)
    return Collator(sources, StreamConfig(checkpoint=checkpoint, max_seq_len=1, resize="pillow"))


def refs_of(folder, processor, *, source=0, epoch=0, rules=RULES):
    """Every sample of a folder, with the lengths measured for it."""
    index, samples = open_index(folder), []
    for shard in range(len(index.shards)):
        for kept_row, row in enumerate(index.kept(shard)):
            tokens, patches = measure_sample(index.read_sample(shard, row), processor, rules)
            samples.append(SampleRef(source, shard, kept_row, epoch, tokens[epoch % len(tokens)], patches))
    return samples


def assert_same_inputs(actual, expected):
    for field in dataclasses.fields(ModelInputs):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(left, torch.Tensor):
            assert left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


# ------------------------------------------------------------------ lengths

texts = st.text(min_size=1, max_size=40).filter(str.strip)
pictures = st.builds(
    lambda make, width, height, orientation: make(width, height, orientation=orientation),
    st.sampled_from(MAKERS),
    st.integers(1, 120),
    st.integers(1, 120),
    st.sampled_from([None, 1, 3, 6, 8]),
)
fields = st.one_of(
    st.fixed_dictionaries({"captions": st.lists(texts, min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"questions": st.lists(st.fixed_dictionaries({"question": texts, "answer": texts}), min_size=1, max_size=2)}
    ),
    st.fixed_dictionaries({"caption": texts}),
)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(images=st.lists(pictures, max_size=3), fields=fields)
def test_the_measure_of_every_variant_is_the_length_of_its_conversation(processor, images, fields):
    members = {f"{number}.jpg": data for number, data in enumerate(images)} | {"json": json.dumps(fields).encode()}
    sample = Sample("key", "made", members)
    try:
        rows = [processor.preprocess(messages) for messages in conversations(sample, RULES)]
    except UserError:
        with pytest.raises(UserError):
            measure_sample(sample, processor, RULES)
        return
    tokens, patches = measure_sample(sample, processor, RULES)
    assert tokens == [row.num_tokens for row in rows]
    assert {patches} == {len(row.patches) for row in rows}


def test_measuring_decodes_no_pixel(processor):
    whole = make_sample("a", width=90, height=70)
    cut = Sample("a", "made", whole.members | {"jpg": whole.members["jpg"][:700]})
    assert measure_sample(cut, processor, RULES) == measure_sample(whole, processor, RULES)


def test_the_fingerprint_is_of_the_processor_and_the_rules(checkpoint, tmp_path):
    fingerprint = Measurer(str(checkpoint), RULES).fingerprint
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert Measurer(str(copy), TextRules()).fingerprint == fingerprint
    assert Measurer(str(copy), TextRules(caption_prompt="What?")).fingerprint != fingerprint
    with (copy / "chat_template.jinja").open("a") as file:
        file.write("{# another #}")
    assert Measurer(str(copy), RULES).fingerprint != fingerprint


# ------------------------------------------------------------------ packed sequences


def test_a_packed_sequence_is_its_samples_one_by_one(checkpoint, processor, tmp_path):
    folders = [make_shards(tmp_path / name, 1, 4, seed=seed) for seed, name in enumerate(("first", "second"))]
    write_samples(folders[1] / "00001.tar", [make_sample("two", num_images=2), make_sample("text", num_images=0)])
    samples = refs_of(folders[0], processor) + refs_of(folders[1], processor, source=1)
    samples = [samples[number] for number in (5, 0, 8, 9, 2)]
    made = collator_of(checkpoint, *folders).make(samples)
    indexes = [open_index(folder) for folder in folders]
    samples = [indexes[sample.source].read_sample(sample.shard, sample.kept_row) for sample in samples]
    expected = processor([conversations(sample, RULES)[0] for sample in samples])
    assert_same_inputs(made.sequence.inputs, expected)
    assert made.sequence.sample_ids == [
        "second/00000/000000001",
        "first/00000/000000000",
        "second/00001/two",
        "second/00001/text",
        "first/00000/000000002",
    ]
    assert made.sequence.source_of_conversation == [1, 0, 1, 1, 0]
    assert made.sequence.source_names == ["first", "second"]
    assert made.bad == []


def test_each_epoch_shows_the_next_caption(checkpoint, processor, tmp_path):
    captions = ["one", "two two", "three three three"]
    write_samples(tmp_path / "shards" / "00000.tar", [make_sample("a", fields={"captions": captions})])
    collator = collator_of(checkpoint, tmp_path / "shards")
    for epoch in range(4):
        row = collator.make(refs_of(tmp_path / "shards", processor, epoch=epoch)).sequence
        learned = row.inputs.token_ids[row.inputs.loss_mask].tolist()
        assert processor.decode(learned) == captions[epoch % 3]


def test_config_and_sources_survive_the_way_to_another_process(checkpoint, tmp_path):
    folder = make_shards(tmp_path / "shards", 1, 1)
    config = StreamConfig(
        checkpoint=str(checkpoint),
        max_seq_len=64,
        augment=AugmentConfig(flip=0.5),
        storage=StorageConfig(timeout_s=3.0),
    )
    assert decode(StreamConfig, json.loads(json.dumps(encode(config)))) == config
    wanted = Source(path=str(folder), weight=2.0, rules=TextRules(system_prompt="Be brief."))
    [source] = open_sources(wanted, checkpoint=checkpoint)
    again = IndexedSource.from_json(json.loads(json.dumps(source.to_json())), config.storage)
    assert (again.config, again.name, again.fingerprint) == (wanted, "shards", source.fingerprint)


def test_an_index_rewritten_in_the_meantime_is_detected(checkpoint, tmp_path):
    folder = make_shards(tmp_path / "shards", 1, 2)
    [source] = open_sources(folder, checkpoint=checkpoint)
    make_shards(folder, 2, 2)
    build_index(folder)
    with pytest.raises(DataError, match="rewritten while it was in use"):
        IndexedSource.from_json(source.to_json(), StorageConfig())


# ------------------------------------------------------------------ bad samples


def damage(tar, what, replacement):
    """Overwrite bytes of a shard in place."""
    data = tar.read_bytes()
    assert data.count(what) == 1
    tar.write_bytes(data.replace(what, replacement))


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "shards"
    samples = [make_sample(f"s{number}", seed=number, width=60 + 20 * number) for number in range(5)]
    write_samples(folder / "00000.tar", samples)
    build_index(folder)
    return folder


def test_a_damaged_sample_is_skipped_and_named(checkpoint, processor, folder):
    samples = refs_of(folder, processor)
    collator = collator_of(checkpoint, folder)
    photo = open_index(folder).read_sample(0, 2).members["jpg"]
    damage(folder / "00000.tar", photo, photo[:-50] + bytes(50))
    made = collator.make(samples)
    assert_same_inputs(
        made.sequence.inputs, collator.make([samples[number] for number in (0, 1, 3, 4)]).sequence.inputs
    )
    assert made.sequence.sample_ids == [f"shards/00000/s{number}" for number in (0, 1, 3, 4)]
    (bad,) = made.bad
    assert bad.sample_id == "shards/00000/s2", "the id it would have in sample_ids"
    assert "differs from its checksum" in bad.reason


def test_a_picture_that_does_not_decode_is_skipped_and_named(checkpoint, processor, tmp_path):
    whole = make_sample("whole")
    cut = Sample("cut", "made", whole.members | {"jpg": whole.members["jpg"][:-900]})
    write_samples(tmp_path / "shards" / "00000.tar", [cut, whole])
    made = collator_of(checkpoint, tmp_path / "shards").make(refs_of(tmp_path / "shards", processor))
    assert made.sequence.sample_ids == ["shards/00000/whole"]
    assert [bad.sample_id for bad in made.bad] == ["shards/00000/cut"]
    assert "truncated or corrupt" in made.bad[0].reason


def test_samples_after_the_end_of_a_cut_shard_are_bad(checkpoint, processor, folder):
    samples = refs_of(folder, processor)
    collator = collator_of(checkpoint, folder)
    with (folder / "00000.tar").open("r+b") as tar:
        tar.truncate(begin_of(open_index(folder), 0, 3) + 10)
    made = collator.make(samples)
    assert [bad.sample_id for bad in made.bad] == ["shards/00000/s3", "shards/00000/s4"]
    assert made.sequence.sample_ids == [f"shards/00000/s{number}" for number in range(3)]


@pytest.mark.parametrize("wrong", [{"tokens": 1}, {"patches": 4}, {"patches": 400}])
def test_a_length_that_differs_from_its_file_is_bad_and_has_a_remedy(checkpoint, processor, folder, wrong):
    samples = refs_of(folder, processor)
    samples[1] = samples[1]._replace(**wrong)
    made = collator_of(checkpoint, folder).make(samples)
    assert [bad.sample_id for bad in made.bad] == ["shards/00000/s1"]
    assert "remove the folder's index/lengths-*" in made.bad[0].reason
    assert len(made.sequence.sample_ids) == 4
    assert len(made.sequence.inputs.patches) == made.sequence.inputs.image_grids.prod(-1).sum()


def test_a_packed_sequence_without_a_good_sample_is_empty(checkpoint, processor, folder):
    samples = refs_of(folder, processor)
    collator = collator_of(checkpoint, folder)
    (folder / "00000.tar").write_bytes(b"")
    made = collator.make(samples)
    assert len(made.bad) == 5
    assert made.sequence.sample_ids == []
    assert (made.sequence.inputs.num_tokens, made.sequence.inputs.num_conversations) == (0, 0)
    assert made.sequence.inputs.patches.shape == (0, collator.patch_dim)
    assert made.sequence.inputs.cu_seqlens.tolist() == [0]


def test_patches_are_written_where_they_are_wanted(checkpoint, processor, folder):
    samples = refs_of(folder, processor)
    collator = collator_of(checkpoint, folder)
    memory = np.zeros((sum(sample.patches for sample in samples), collator.patch_dim), dtype=np.uint8)
    made = collator.make(samples, into=memory)
    assert made.sequence.inputs.patches.data_ptr() == memory.ctypes.data
    assert_same_inputs(made.sequence.inputs, collator.make(samples).sequence.inputs)

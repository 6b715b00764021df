"""A row written to shared memory is read back in place; its memory is free when its last tensor is gone; errors travel."""

import dataclasses
import mmap

import pytest
from data.making import make_picture
from data.test_collate import assert_same_inputs

from saccade.data.bad_samples import BadSample
from saccade.data.collate import CollateResult, PackedSequence
from saccade.data.row_memory import RowFile, read_row
from saccade.errors import ConfigError, DataError
from saccade.processor import Processor

PATCHES = 4 * 6
"""Of one picture of 60 x 40 pixels."""


def made_row(processor, into, *, num_copies=1):
    """A row whose patches lie in `into`."""
    picture = make_picture(60, 40)
    messages = [{"role": "user", "content": [{"type": "image", "image": picture}] * num_copies}]
    inputs = processor.prepare(messages, into=into)
    row = PackedSequence(inputs=inputs, sample_ids=["a/b/ü"], source_of_conversation=[0], source_names=["a"])
    return CollateResult(row, [BadSample("a", "b.tar", "c", "why")], 123)


@pytest.fixture(scope="module")
def processor(checkpoint):
    return Processor.load(checkpoint)


def written(file, processor, num_copies, num_spare=0):
    """A row written to the file, a copy of it, and where it lies."""
    rows = []

    def make(into):
        rows.append(made_row(processor, into, num_copies=num_copies))
        return rows[0]

    num_patches = num_copies * PATCHES + num_spare
    place = file.write(make, num_patches, processor.images.patch_dim)
    copied = dataclasses.replace(rows[0].sequence.inputs, patches=rows[0].sequence.inputs.patches.clone())
    return rows[0], copied, place


@pytest.mark.parametrize(("num_copies", "num_spare"), [(1, 0), (3, 0), (2, 5)])
def test_a_row_is_read_as_it_was_written(processor, num_copies, num_spare):
    file = RowFile()
    made, expected, place = written(file, processor, num_copies, num_spare)
    found = read_row(mmap.mmap(file.fd, 0), *place, when_gone=lambda: None)
    assert_same_inputs(found.sequence.inputs, expected)
    assert dataclasses.replace(found.sequence, inputs=expected) == dataclasses.replace(made.sequence, inputs=expected)
    assert (found.bad, found.num_bytes) == (made.bad, made.num_bytes)


def test_memory_grows_for_a_larger_row_and_stays_for_a_smaller_one(processor):
    file, sizes = RowFile(), []
    for num_copies in (1, 4, 2):
        _, expected, place = written(file, processor, num_copies)
        sizes.append(file.num_bytes())
        assert_same_inputs(read_row(mmap.mmap(file.fd, 0), *place, when_gone=lambda: None).sequence.inputs, expected)
    assert sizes[0] < sizes[1] == sizes[2]


def test_memory_is_free_when_the_last_tensor_is_gone(processor):
    file, gone = RowFile(), []
    _, _, place = written(file, processor, 1)
    found = read_row(mmap.mmap(file.fd, 0), *place, when_gone=lambda: gone.append(True))
    last = found.sequence.inputs.token_ids[2:].view(-1)
    del found
    assert not gone
    del last
    assert gone


@pytest.mark.parametrize(
    ("raised", "expected", "text"),
    [
        (ConfigError("no such thing"), DataError, "^no such thing$"),
        (KeyError("x"), RuntimeError, "Traceback.*KeyError"),
    ],
    ids=["the user's", "ours"],
)
def test_what_went_wrong_is_raised_where_the_row_is_read(raised, expected, text):
    def make(into):
        raise raised

    file = RowFile()
    place = file.write(make, 3, 100)
    with pytest.raises(expected, match=f"(?s){text}"):
        read_row(mmap.mmap(file.fd, 0), *place, when_gone=lambda: None)

"""One tiny checkpoint with a real processor, and streams that are closed again."""

import pytest

from saccade.data import open_stream
from saccade.model.initialize import initialize_random, named_size


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "checkpoint"
    initialize_random(folder, named_size("tiny"))
    return folder


@pytest.fixture
def opened(checkpoint):
    """`open_stream` with small defaults; all streams are closed at the end."""
    streams = []

    def open_small(shards, **settings):
        settings = {"max_seq_len": 1024, "num_workers": 0, "packing_buffer_size": 64} | settings
        streams.append(open_stream(shards, checkpoint=checkpoint, **settings))
        return streams[-1]

    yield open_small
    for stream in streams:
        stream.close()

"""One tiny checkpoint with a byte tokenizer, shared by all tests of the room."""

import pytest
import torch

from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def processor(checkpoint):
    return Processor.load(checkpoint)

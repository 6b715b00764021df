"""A tiny checkpoint and toy shards that all tests of the package share."""

import pytest
import torch

from saccade.data.toy import write_toy_shards
from saccade.model.initialize import initialize_random, named_size


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "tiny"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32, seed=1)
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate") / "shards"
    write_toy_shards(folder, first=5000, count=12, side=56)
    return folder

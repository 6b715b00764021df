"""A small model with real shards."""

import pytest
import torch

from saccade.data.toy import write_toy_shards
from saccade.model.initialize import initialize_random, named_size


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_toy_shards(folder / "large", first=0, count=24, side=84)
    write_toy_shards(folder / "small", first=100, count=24, side=56)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Random weights whose inputs differ in size as those of trained models do: norms are spread over two orders of magnitude."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    spread_norms(folder / "model.safetensors")
    return folder


def spread_norms(file):
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "norm" in name:
            tensors[name] = tensor * torch.logspace(-1, 1, len(tensor))[torch.randperm(len(tensor))]
    save_file(tensors, file, metadata={"format": "pt"})

"""A small model with real shards."""

import pytest
import torch
from train.running import make_checkpoint, read_recipe, write_recipe

from saccade.data.toy import write_toy_shards
from saccade.model.initialize import initialize_random, named_size
from saccade.train.stages import train


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_toy_shards(folder / "large", first=0, count=24, side=84)
    write_toy_shards(folder / "small", first=100, count=24, side=56)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Random weights whose inputs differ in size as in trained models: norms spread over two orders of magnitude."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    spread_norms(folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder with a checkpoint that has learned a little, and `train` and `held-out` shards."""
    folder = tmp_path_factory.mktemp("trained")
    start = make_checkpoint(folder / "start")
    write_toy_shards(folder / "train", first=0, count=96, side=56)
    write_toy_shards(folder / "held-out", first=1000, count=48, side=56)
    path = write_recipe(folder / "learn.toml", run=folder / "run", checkpoint=start, shards=folder / "train")
    settings = ("steps=20", "optimizer.kind=muon", "optimizer.lr=4e-3", "data.max_seq_len=480")
    train(read_recipe(path, "log.every=100", *(f"stages.0.{one}" for one in settings)), device="cpu")
    (folder / "run" / "checkpoints" / "step-00000020").rename(folder / "checkpoint")
    return folder


def spread_norms(file):
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and "norm" in name:
            tensors[name] = tensor * torch.logspace(-1, 1, len(tensor))[torch.randperm(len(tensor))]
    save_file(tensors, file, metadata={"format": "pt"})

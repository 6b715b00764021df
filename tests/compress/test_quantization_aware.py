"""Rounding a checkpoint of quantization-aware training to nearest changes none of its weights."""

import pytest
import torch
from compress.stored import dequantized
from safetensors.torch import load_file
from train.running import make_checkpoint, read_recipe, write_recipe, write_shards

from saccade.compress import compress
from saccade.train.stages import train


@pytest.mark.parametrize(("form", "dtype", "scheme"), [("int4", "bf16", "w4a16-rtn"), ("int8", "fp32", "int8-rtn")])
def test_a_trained_grid_is_what_round_to_nearest_stores(tmp_path, form, dtype, scheme):
    checkpoint, shards = make_checkpoint(tmp_path / "checkpoint"), write_shards(tmp_path / "shards", 16)
    path = write_recipe(tmp_path / "qat.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
    settings = [
        "stages.0.steps=4",
        f"stages.0.qat.form={form}",
        f"model.dtype={dtype}",
        f"checkpoint.export_dtype={dtype}",
    ]
    train(read_recipe(path, *settings), device="cpu")
    trained, out = tmp_path / "run" / "checkpoints" / "step-00000004", tmp_path / "compressed"
    compress(trained, out, scheme=scheme, device="cpu")
    stored, weights = dequantized(out), load_file(trained / "model.safetensors")
    assert len(stored) >= 18
    for name, weight in stored.items():
        assert torch.equal(weight, weights[name]), name

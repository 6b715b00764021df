import pytest
import torch
from safetensors.torch import save_file

from saccade.errors import CheckpointError
from saccade.model import weights
from saccade.model.weights import read_tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("read_bytes", [64, 1000, 2**24])
def test_tensors_read_for_a_gpu_are_those_of_the_file(read_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_READ_BYTES", read_bytes)
    dtypes = (torch.bfloat16, torch.float32, torch.int32, torch.int8, torch.float8_e4m3fn, torch.bool)
    shapes = [(3, 5), (1,), (0, 4), (17, 33), (), (130,)]
    stored = {f"{dtype} {shape}": (torch.randn(shape) * 10).to(dtype) for dtype in dtypes for shape in shapes}
    save_file(stored, tmp_path / "model.safetensors")
    names = list(stored)[::2] + list(stored)[1::2]
    found = dict(read_tensors(dict.fromkeys(names, tmp_path / "model.safetensors"), names, torch.device("cuda")))
    assert found.keys() == stored.keys()
    for name, tensor in stored.items():
        assert found[name].is_cuda
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].cpu().view(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
        assert found[name].shape == tensor.shape


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    save_file({f"x{i}": torch.randn(2**20) for i in range(64)}, file)
    names = [f"x{i}" for i in range(64)]
    reading = read_tensors(dict.fromkeys(names, file), names, torch.device("cuda"))
    next(reading)
    with file.open("r+b") as opened:
        opened.truncate(2**20)
    with pytest.raises(CheckpointError, match=r"model\.safetensors.*shorter than its header says"):
        list(reading)

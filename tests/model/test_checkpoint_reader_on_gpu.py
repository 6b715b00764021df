import pytest
import torch
from safetensors.torch import save_file

from saccade.errors import CheckpointError
from saccade.model import checkpoint_reader
from saccade.model.checkpoint_reader import read_tensors

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("read_bytes", [64, 1000, 2**24])
def test_tensors_read_for_a_gpu_are_those_of_the_file(read_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "_READ_BYTES", read_bytes)
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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_parts_that_wait_for_a_gpu_other_than_the_current_one_are_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_reader, "_READ_BYTES", 2**16)
    stored = {"x": torch.randn(2**20)}
    save_file(stored, tmp_path / "model.safetensors")
    with torch.cuda.device(1):
        torch.cuda._sleep(10**9)
    [(_, found)] = read_tensors({"x": tmp_path / "model.safetensors"}, ["x"], torch.device("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert torch.equal(found.cpu(), stored["x"])

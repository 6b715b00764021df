"""Who this process is: from the launcher's variables, or alone. (Two ranks are met in `test_parallelize.py`.)"""

import pytest
import torch
import torch.distributed as dist

from saccade.errors import ConfigError
from saccade.world import open_world

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)


def test_a_world_of_one_needs_no_network():
    with open_world("cpu") as world:
        assert (world.rank, world.size, world.local_rank, world.device) == (0, 1, 0, torch.device("cpu"))
        assert world.is_main
        assert not dist.is_initialized()
        assert world.all_sum(torch.tensor([2.0])).tolist() == [2.0]
        assert world.gather({"a": [1]}) == [{"a": [1]}]
        assert world.broadcast("x") == "x"
        world.barrier()


def test_a_world_of_one_opens_a_process_group_on_demand_and_closes_it():
    with open_world("cpu") as world:
        world.open_local_group()
        world.open_local_group()
        assert dist.get_world_size(world.new_cpu_group()) == 1
    assert not dist.is_initialized()


def test_a_launcher_with_one_process_is_a_world_of_one(monkeypatch):
    for name, value in (LAUNCHED | {"WORLD_SIZE": "1"}).items():
        monkeypatch.setenv(name, value)
    with open_world("cpu") as world:
        assert world.size == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "one"), ("RANK", "-1"), ("RANK", ""), ("RANK", "2"), ("WORLD_SIZE", "0"), ("WORLD_SIZE", "many"),
        ("LOCAL_RANK", "x"), ("MASTER_PORT", "http"),
        ("MASTER_PORT", None), ("MASTER_ADDR", None), ("RANK", None), ("WORLD_SIZE", None),
    ],
)  # fmt: skip
def test_a_malformed_variable_is_refused_by_name(monkeypatch, name, value):
    for one, launched in LAUNCHED.items():
        monkeypatch.setenv(one, launched)
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name}.*torchrun"), open_world("cpu"):
        pass

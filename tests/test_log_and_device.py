"""One log handler with the package's name, and names resolved to torch devices and dtypes."""

import logging

import pytest
import torch

from saccade.device import DTYPES, lazy_zeros, resolve_device, resolve_dtype
from saccade.errors import ConfigError
from saccade.log import log_once, rank_of_process, set_up_logging


@pytest.fixture(autouse=True)
def restore_logger():
    logger = logging.getLogger("saccade")
    before = logger.handlers[:], logger.propagate, logger.level
    yield
    logger.handlers[:], logger.propagate, logger.level = before
    logger.setLevel(before[2])


@pytest.fixture
def rank(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    return lambda value: monkeypatch.setenv("RANK", value)


# ------------------------------------------------------------------ log


def test_each_line_has_the_package_name(rank, capsys):
    set_up_logging()
    logging.getLogger("saccade.model.weights").info("loaded")
    logging.getLogger("saccade.cli").warning("careful")
    logging.getLogger("saccade").info("hello")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert [line.split(maxsplit=1)[1].split() for line in lines] == [
        ["model", "loaded"],
        ["cli", "careful"],
        ["saccade", "hello"],
    ]


def test_details_are_shown_only_when_asked_for(rank, capsys):
    set_up_logging()
    logging.getLogger("saccade.model").debug("detail")
    assert capsys.readouterr().err == ""
    set_up_logging(verbose=True)
    logging.getLogger("saccade.model").debug("detail")
    assert "detail" in capsys.readouterr().err


def test_setting_up_twice_writes_each_line_once(rank, capsys):
    set_up_logging()
    set_up_logging()
    logging.getLogger("saccade.model").info("only once")
    assert capsys.readouterr().err.count("only once") == 1


def test_other_ranks_log_from_warnings_up_with_their_rank(rank, capsys):
    rank("3")
    set_up_logging(verbose=True)
    logging.getLogger("saccade.model").info("hidden")
    logging.getLogger("saccade.model").warning("shown")
    err = capsys.readouterr().err
    assert "hidden" not in err
    assert "[rank 3] model" in err


def test_a_repeated_message_is_logged_once(rank, capsys):
    set_up_logging()
    for _ in range(3):
        log_once("kernels", "test_a_repeated_message_is_logged_once", logging.WARNING)
        log_once("kernels", "test_a_repeated_message_is_logged_once, another")
    err = capsys.readouterr().err
    assert err.count("once, another") == 1
    assert err.count("test_a_repeated_message_is_logged_once") == 2


def test_the_rank_is_the_launchers(rank):
    assert rank_of_process() == 0
    rank("17")
    assert rank_of_process() == 17


@pytest.mark.parametrize("value", ["", "x", "-1", "1.5", " ", "²"])
def test_a_malformed_rank_is_refused(rank, value):
    rank(value)
    with pytest.raises(ConfigError, match=f"RANK is '{value}', not a number. Start through torchrun, or unset it"):
        set_up_logging()


# ------------------------------------------------------------------ device


def test_auto_is_the_gpu_when_there_is_one():
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device() == resolve_device("auto")
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["", "GPU", "CPU", "cuda:x", "cuda:-1", "cpu,cuda", "a b"])
def test_an_unknown_device_is_refused(name):
    with pytest.raises(ConfigError, match=rf"unknown device '{name}'\. Use cpu, cuda, cuda:1 or auto"):
        resolve_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1", torch.device("cuda")])
def test_a_gpu_that_is_not_there_is_refused(name):
    with pytest.raises(ConfigError, match=r"sees no GPU. Use --device cpu"):
        resolve_device(name)


@pytest.mark.parametrize("name", ["meta", "xpu", "vulkan", "hpu"])
def test_a_device_torch_knows_and_we_do_not_run_on_is_refused(name):
    with pytest.raises(ConfigError, match=f"device '{name}'"):
        resolve_device(name)


def test_dtypes_have_short_and_long_names():
    assert resolve_dtype("bf16") == resolve_dtype("bfloat16") == resolve_dtype(torch.bfloat16) == torch.bfloat16
    assert resolve_dtype("fp16") == resolve_dtype("float16") == torch.float16
    assert resolve_dtype("fp32") == resolve_dtype("float32") == torch.float32
    assert resolve_dtype(None) is None
    assert list(DTYPES) == ["bf16", "fp16", "fp32"]


@pytest.mark.parametrize("name", ["", "int8", "fp64", "BF16"])
def test_an_unknown_dtype_is_refused(name):
    with pytest.raises(ConfigError, match=f"unknown dtype '{name}'. Use one of bf16, fp16, fp32"):
        resolve_dtype(name)


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float8_e4m3fn])
def test_lazy_zeros_are_writable_zeros(dtype):
    zeros = lazy_zeros((3, 5), dtype, torch.device("cpu"))
    assert (zeros.shape, zeros.dtype) == ((3, 5), dtype)
    assert (zeros.float() == 0).all()
    zeros[1] = 1.0
    assert zeros.float().sum() == 5.0

"""The same code path on a GPU: agrees with the CPU, and never waits for the device inside a forward pass."""

import pytest
import torch
from closeness import assert_close
from model.hugging_face import CONVERSATIONS, FAMILIES, SHAPES, make_checkpoint

from saccade.model import generate, load_model
from saccade.processor import Processor

pytestmark = pytest.mark.gpu

BOUNDS = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 3e-3}


@pytest.fixture(scope="module", params=[*SHAPES, *FAMILIES], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def inputs(folder):
    return Processor.load(folder)(list(CONVERSATIONS.values()), add_generation_prompt=True)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_logits_on_the_gpu_equal_the_cpu_reference(dtype, folder, inputs):
    """The CPU computes in fp32 with the same weights, rounded to the dtype: only the arithmetic differs."""
    with torch.no_grad():
        expected = load_model(folder, device="cpu", dtype=dtype).float()(inputs)
        actual = load_model(folder, device="cuda", dtype=dtype)(inputs.to("cuda"))
    assert_close(dtype, actual.float(), expected, BOUNDS[dtype])


def test_a_bf16_forward_never_waits_for_the_gpu(folder, inputs):
    model, row = load_model(folder, device="cuda", dtype="bf16"), inputs.to("cuda")
    with torch.no_grad():
        model(row)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(row)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_greedy_words_on_the_gpu_equal_those_on_the_cpu(folder, inputs):
    on_cpu = generate(load_model(folder, device="cpu", dtype="fp32"), inputs, max_new_tokens=8)
    assert generate(load_model(folder, device="cuda", dtype="fp32"), inputs, max_new_tokens=8) == on_cpu

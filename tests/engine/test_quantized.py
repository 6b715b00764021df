"""The engine gives the tokens of plain generation by the same quantized model."""

import pytest
import torch
from engine.making_adapters import write_adapters
from engine.tiny import make_core, plain, request_of, run_all
from model.compressed import write_quantized
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine import Engine, RequestOptions
from saccade.engine.config import EngineConfig
from saccade.engine.device.startup import profile_largest_step, small_runner
from saccade.engine.sampling_params import SamplingParams
from saccade.model.families import load_model_config
from saccade.model.linear import projections
from saccade.model.quantization import parse_quantization
from saccade.model.quantized_linear import Linear8bit, QuantizedLinear
from saccade.processor.folder import read_config


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("source") / "model", SHAPES[0])


@pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "W4A16"])
def test_tokens_equal_plain_generation(source, tmp_path, preset):
    folder = write_quantized(source, tmp_path / preset, preset, change=lambda weights: _groups_of(64, weights))
    prompts, expected = plain(folder, 0, 12, 12)
    core = make_core(folder, EngineConfig(page_size=8, num_pages=70, max_length=550, max_step_tokens=64))
    assert any(isinstance(module, QuantizedLinear) for module in core._runner.model.modules())
    requests = [
        (request_of(f"r{i}", prompt, SamplingParams(max_tokens=len(tokens), logprobs=2)), prompt)
        for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
    ]
    outputs = run_all(core, requests, at_once=5)
    differing = [
        _gap(output, tokens) for output, tokens in zip(outputs, expected, strict=True) if output.token_ids != tokens
    ]
    assert len(differing) <= 2
    assert all(gap < 0.05 for gap in differing), (
        "activations of two equal runs may round differently, and ties fall either way"
    )


def _gap(output, expected):
    """Difference in log-probability between the first token that differs and the expected token."""
    first = next(i for i, (a, b) in enumerate(zip(output.token_ids, expected, strict=True)) if a != b)
    top = dict(output.logprobs[first].top)
    return top[output.token_ids[first]] - top.get(expected[first], float("-inf"))


def _groups_of(size, weights):
    if weights.group_size is not None:
        weights.group_size = size


def test_the_model_that_compiles_kernels_has_the_same_storage_forms(source, tmp_path):
    folder = write_quantized(source, tmp_path / "model", "W8A8")
    runner = small_runner(
        load_model_config(folder), EngineConfig(max_length=512), device=torch.device("cpu"), dtype=torch.float32,
        quantization=parse_quantization(read_config(folder)),
    )  # fmt: skip
    forms = {type(module) for _, module in projections(runner.model.language)}
    assert forms == {Linear8bit}
    profile_largest_step(runner)


def test_adapters_are_served_on_quantized_weights(source, tmp_path):
    """Adapters are not merged into the weights; tokens are those with decompressed weights."""
    folder = write_quantized(source, tmp_path / "model", "W4A16", change=lambda weights: _groups_of(64, weights))
    [adapter] = write_adapters(
        source, tmp_path / "adapters", one={"r": 8, "target_modules": r".*language_model.*_proj"}
    ).values()
    config = EngineConfig(num_workers=0, num_pages=40, page_size=8, max_length=200)
    found = []
    for base in (folder, folder.with_name("model-plain")):
        with Engine.load(base, device="cpu", config=config, adapters={"one": adapter}) as engine:
            sampling = SamplingParams(max_tokens=6, logprobs=1, ignore_eos=True)
            for name in ("one", None):
                found += engine.generate(
                    [{"role": "user", "content": "hello"}], sampling, options=RequestOptions(adapter=name)
                )
    for actual, expected in zip(found[:2], found[2:], strict=True):
        assert actual.token_ids == expected.token_ids
        assert all(abs(a.logprob - e.logprob) < 1e-4 for a, e in zip(actual.logprobs, expected.logprobs, strict=True))
    assert found[0].token_ids != found[1].token_ids

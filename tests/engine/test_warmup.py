"""Warm-up compiles the kernels of any model, so that the first request compiles nothing."""

import dataclasses
import json
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from engine.tiny import core_of
from PIL import Image

from saccade.engine import Engine, SamplingParams
from saccade.engine.config import EngineConfig
from saccade.engine.device import step_inputs
from saccade.engine.device.rank_exchange import LoneRank
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.device.startup import (
    _with_few_layers,
    compile_all_sizes,
    profile_largest_step,
    run_blank_request,
    small_runner,
)
from saccade.engine.ranks.leading_runner import LeadingRunner
from saccade.kernels import launch
from saccade.kernels.rms_norm import rms_norm
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.initialize import initialize_random
from saccade.model.shard import TensorRank

LANGUAGE = LanguageConfig(
    vocab_size=2057, hidden_size=224, num_layers=3, num_heads=7, num_kv_heads=1, intermediate_size=352, rope_theta=1e6,
    rope_sections=(4, 6, 6), norm_eps=1e-6, max_positions=4096,
)  # fmt: skip
VISION = VisionConfig(num_layers=4, hidden_size=144, num_heads=3, intermediate_size=268, full_attention_layers=(1, 3))
CONFIG = ModelConfig(vision=VISION, language=LANGUAGE, tied_head=True, family="qwen2_5_vl")

ENGINE = EngineConfig(max_step_tokens=256, max_encoder_patches=1024)


@pytest.mark.parametrize("full", [(), (0, 2), (0, 1, 2, 3)], ids=["windows", "both", "full"])
def test_a_model_with_few_layers_has_layers_of_every_kind(full):
    config = dataclasses.replace(CONFIG, vision=dataclasses.replace(VISION, full_attention_layers=full))
    small = _with_few_layers(config)
    assert small.language.num_layers == 2
    assert small.vision.num_layers == (2 if full == (0, 2) else 1)
    assert len(small.vision.full_attention_layers) == (1 if full else 0)
    assert small.language.vocab_size % 16 == LANGUAGE.vocab_size % 16
    profile_largest_step(small_runner(config, ENGINE, device=torch.device("cpu"), dtype=torch.float32))


@pytest.mark.parametrize(
    "engine", [{"page_size": 1}, {"max_step_tokens": 1}, {"max_requests": 1}, {"max_length": 64}], ids=str
)
def test_any_engine_configuration_can_warm_up(engine, monkeypatch):
    monkeypatch.setattr(step_inputs, "STEP_TOKENS", (16, 64))  # on a CPU the larger sizes test nothing more
    config = dataclasses.replace(ENGINE, **({"max_requests": 5} | engine))
    compile_all_sizes(small_runner(CONFIG, config, device=torch.device("cpu"), dtype=torch.float32))


def test_a_ranks_part_of_a_model_can_warm_up(monkeypatch):
    monkeypatch.setattr(step_inputs, "STEP_TOKENS", (16, 64))
    config = dataclasses.replace(ENGINE, max_requests=2)
    rank, cpu = TensorRank(1, 7), torch.device("cpu")
    compile_all_sizes(small_runner(CONFIG, config, device=cpu, dtype=torch.float32, rank=rank))


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_the_first_request_compiles_nothing(tmp_path):
    import triton

    folder = tmp_path / "checkpoint"
    initialize_random(folder, CONFIG)
    compiled = []
    before = triton.knobs.compilation.listener
    with Engine.load(folder, config=EngineConfig(num_workers=0, max_length=2048)) as engine:
        triton.knobs.compilation.listener = lambda **event: compiled.append(event["src"].name)
        try:
            image_id = json.loads((folder / "config.json").read_text())["image_token_id"]
            prompts = [([1, image_id, *[1] * 64], [Image.new("RGB", size)]) for size in ((448, 448), (301, 517))]
            completions = engine.generate_tokens(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        finally:
            triton.knobs.compilation.listener = before
        rms_norm(
            torch.ones(3, 48, device="cuda"), torch.ones(48, device="cuda"), 1e-6
        )  # compiled by another thread, so not counted
        engine.generate_tokens(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        assert engine.statistics.num_late_compiles == 0
        runner = core_of(engine)._runner
        forward = runner.forward

        def forward_with_a_new_kernel(plan):
            rms_norm(torch.ones(3, 40, device="cuda"), torch.ones(40, device="cuda"), 1e-6)
            return forward(plan)

        runner.forward = forward_with_a_new_kernel
        engine.generate_tokens(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
        assert engine.statistics.num_late_compiles == 1
    assert [len(completion.token_ids) for completion in completions] == [2, 2]
    assert compiled == []


def test_kernels_are_counted_that_the_thread_compiles():
    triton = pytest.importorskip("triton")
    counter, other = launch.CompileCounter(), launch.CompileCounter()
    counter.thread_id, other.thread_id = threading.get_ident(), -1
    num_counters = len(launch._counters)
    triton.knobs.runtime.jit_post_compile_hook(fn=SimpleNamespace(name="kernel"))
    assert (counter.num_kernels, other.num_kernels) == (1, 0)
    del other
    assert len(launch._counters) == num_counters - 1, "a counter is kept by its owner alone"


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"page_size": 1, "num_pages": 1},
        {"page_size": 1, "num_pages": 40},
        {"encoder_cache_tokens": 1},
        {"max_length": 1},
    ],
    ids=str,
)
def test_a_blank_request_runs_where_it_fits(engine):
    config = dataclasses.replace(ENGINE, **{"max_requests": 2, "max_length": 64} | engine)
    runner = small_runner(CONFIG, config, device=torch.device("cpu"), dtype=torch.float32)
    if "num_pages" in engine:
        runner = Runner(
            runner.model,
            config,
            pixels=PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3),
            num_pages=engine["num_pages"],
            max_length=config.max_length,
        )
    assert run_blank_request(runner) is None
    assert runner.num_registered == 0


def test_a_leading_runner_runs_the_blank_request_before_its_followers_are_known():
    config = dataclasses.replace(ENGINE, max_requests=2, max_length=64)
    runner = small_runner(CONFIG, config, device=torch.device("cpu"), dtype=torch.float32, rank=TensorRank(0, 7))
    leading = LeadingRunner(
        runner.model,
        config,
        pixels=PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3),
        num_pages=8,
        max_length=config.max_length,
        exchange=LoneRank(0, 7),
    )
    run_blank_request(leading)  # what it computes is undefined, since nothing is exchanged
    followers = Mock()
    leading.lead(followers)
    leading._send_plan()
    assert not followers.mock_calls, "a plan of the time before is not sent"
    assert leading.num_registered == 0

"""Capacity plans: the worked examples of capacity planning, and the engine's own numbers for every family."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from saccade.compress import compress
from saccade.compress.scheme import BUILT_IN
from saccade.engine import Engine, EngineConfig
from saccade.engine.device.kv_cache import bytes_per_page
from saccade.engine.device.loading import cpu_pages, make_runner
from saccade.engine.device.runner import PixelScale
from saccade.errors import ConfigError
from saccade.model import load_model
from saccade.model.families import VISION_LANGUAGE, size_name
from saccade.model.initialize import initialize_random, named_size
from saccade.model.weights import meta_model
from saccade.plan.gpus import GPUS, Gpu, gpu_named
from saccade.plan.served_model import (
    QUANTIZED_PARTS,
    STORED,
    configured_model,
    described_model,
    image_cost,
    served_model,
)
from saccade.plan.serving import compare_layouts, plan_serving
from saccade.plan.throughput import RequestLoad, decode_step_s, steady_state
from saccade.processor import Processor

GIB = 2**30
SETTINGS = EngineConfig(
    max_requests=4, max_step_tokens=64, max_encoder_patches=256, encoder_cache_tokens=256, num_workers=0
)
GREY = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)


# ------------------------------------------------------------------ worked examples


def test_13b_with_8_requests_of_576_image_and_512_text_tokens():
    model = described_model(
        parameters=13e9, num_layers=40, num_heads=40, head_dim=128, num_kv_heads=None, max_length=4096
    )
    plan = plan_serving(
        model, gpu_named("A100-40GB"), RequestLoad(text_tokens=512, image_tokens=576, output_tokens=128, concurrency=8)
    )
    assert plan.kv_bytes_per_request * 8 == 2 * 40 * 40 * 128 * (576 + 512) * 8 * 2 == 7_130_316_800
    assert plan.record()["kv_bytes"] == 7_130_316_800
    [best, *_] = plan.fits
    assert best.weight_bytes == 26_000_000_000
    assert best.pages_per_request == 68
    assert best.page_bytes * best.pages_per_request == plan.kv_bytes_per_request, "68 pages of 16 tokens are 1088"
    assert plan.chosen == best, "weights and the KV cache of 8 requests fit 40 GB in 16 bits"
    assert best.num_requests == 8
    tighter = plan_serving(model, gpu_named("A100-40GB"), replace(plan.load, concurrency=15))
    assert (tighter.chosen.scheme, tighter.chosen.kv_format) == ("bf16", "int8"), "8-bit keys and values come first"
    more = plan_serving(model, gpu_named("A100-40GB"), replace(plan.load, concurrency=20))
    assert (more.chosen.scheme, more.chosen.kv_format) == ("int8", "model"), "an A100 has no fp8 units"


def test_34b_on_two_gpus_of_40_gb_at_50_requests_per_second():
    model = described_model(parameters=34e9, num_layers=60, num_heads=56, head_dim=128, num_kv_heads=8, max_length=4096)
    load = RequestLoad(text_tokens=512, image_tokens=576, output_tokens=128, requests_per_s=50, latency_s=2.0)
    plan = plan_serving(model, gpu_named("A100-40GB"), load, num_gpus=2)
    by_scheme = {(fit.scheme, fit.kv_format): fit for fit in plan.fits}
    bf16, int8, int4 = (by_scheme[scheme, "model"] for scheme in ("bf16", "int8", "w4a16"))
    assert bf16.weight_bytes == 68_000_000_000 > plan.usable_bytes
    assert not bf16.fits
    assert "weights alone exceed" in bf16.reason
    assert int8.weight_bytes < plan.usable_bytes
    assert not int8.fits, "the weights fit, but then there is no room for a request"
    assert plan.chosen == int4
    # Little's law: 25 requests a second and GPU, each of 2 s, are 50 in progress.
    assert int4.needed == 50 <= int4.num_requests
    text = "\n".join(plan.lines())
    assert "25 requests/s, 3,200 output and 24,000 prompt tokens/s" in text
    assert f"{int4.num_requests} requests at once must each end within {int4.num_requests / 25:.1f} s" in text


def test_34b_at_50_requests_per_second_needs_more_gpus_than_memory_suggests():
    model = described_model(parameters=34e9, num_layers=60, num_heads=56, head_dim=128, num_kv_heads=8, max_length=4096)
    load = RequestLoad(text_tokens=512, image_tokens=576, output_tokens=128, requests_per_s=50)
    plan = plan_serving(model, gpu_named("A100-40GB"), load, num_gpus=2)
    assert plan.chosen.scheme == "w4a16"
    assert plan.chosen.times is None
    assert "does not keep up with 25 requests/s" in plan.chosen.reason
    needed = plan.num_gpus_needed(plan.chosen)
    prefill = 50 * 960 * 2 * 34e9 / (0.5 * 312e12)  # seconds of prefill in a second
    assert prefill < needed < 2 * prefill
    enough = plan_serving(model, gpu_named("A100-40GB"), load, num_gpus=needed)
    assert enough.chosen.keeps_up
    assert enough.chosen.times.in_progress <= enough.chosen.num_requests
    fewer = plan_serving(model, gpu_named("A100-40GB"), load, num_gpus=needed - 1)
    assert not any(
        fit.keeps_up and fit.fits for fit in fewer.fits if fit.kv_format == "model" and fit.scheme == "w4a16"
    )


def test_estimated_times_obey_littles_law():
    model, gpu = configured_model("3b", named_size("3b"), EngineConfig()), gpu_named("H200")
    load = RequestLoad(text_tokens=190, image_tokens=576, image_patches=2304, output_tokens=128)
    for rate in (1.0, 10.0, 40.0):
        times = steady_state(model, gpu, "bf16", 2**20, load, rate)
        assert times.in_progress == pytest.approx(rate * times.latency_s)
        assert times.latency_s == pytest.approx(times.prefill_s + 128 * times.step_s)


def test_estimates_of_the_3b_shape_agree_with_an_h200():
    """Requests per second are compared with docs/results/serving.md.

    The load is 256 requests with 62 tokens of text, an image of 672 x 672 and 128 output tokens.
    """
    model, gpu = configured_model("3b", named_size("3b"), EngineConfig()), gpu_named("H200")

    def most(load):
        kv_bytes = 36 * 2 * 2 * 128 * 2 * load.tokens
        rates = [
            rate
            for rate in range(1, 400)
            if (found := steady_state(model, gpu, "bf16", kv_bytes, load, rate)) and found.in_progress <= 256
        ]
        return max(rates)

    own_image = RequestLoad(text_tokens=190, image_tokens=576, image_patches=2304, output_tokens=128)
    assert most(own_image) == pytest.approx(63.3, rel=0.1)
    assert most(replace(own_image, image_patches=0)) == pytest.approx(105.9, rel=0.1), "one image shared by all"
    alone = steady_state(model, gpu, "bf16", 0, replace(own_image, text_tokens=189), 1e-6)
    assert alone.step_s == pytest.approx(1.87e-3, rel=0.1), "time per output token of one request"


@pytest.mark.parametrize(("num_requests", "measured_ms"), [(1, 1.87), (32, 3.10), (64, 3.40), (128, 4.08), (256, 5.40)])
def test_decode_steps_of_the_3b_shape_take_as_long_as_an_h200_took(num_requests, measured_ms):
    """Steps with 600 tokens per request: docs/log/2026-11-19.md."""
    model, gpu = configured_model("3b", named_size("3b"), EngineConfig()), gpu_named("H200")
    kv_bytes = 600 * bytes_per_page(model.shape, 1, "model", torch.bfloat16)
    assert decode_step_s(model, gpu, "bf16", kv_bytes, num_requests) == pytest.approx(measured_ms / 1e3, rel=0.1)


# ------------------------------------------------------------------ the engine's own numbers


@pytest.fixture(scope="module", params=VISION_LANGUAGE)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("capacity") / request.param
    initialize_random(path, VISION_LANGUAGE[request.param].sizes["tiny"], dtype=torch.bfloat16)
    return path


def test_pages_and_bytes_are_those_of_the_engine(folder):
    config = load_model(folder, device="cpu").config
    model = configured_model("tiny", config, SETTINGS)
    plan = plan_serving(model, gpu_named("24"), RequestLoad(text_tokens=100), config=SETTINGS)
    for fit in plan.fits[:2]:
        engine_config = replace(SETTINGS, kv_format=fit.kv_format)
        loaded = load_model(folder, device="cpu")
        assert sum(parameter.nbytes for parameter in loaded.parameters()) == fit.weight_bytes
        runner = make_runner(loaded, engine_config, pixels=GREY)
        cache = runner.cache
        assert cache.num_pages == cpu_pages(engine_config, fit.page_bytes, model.max_length)
        scales = 0 if cache.scales is None else cache.scales.nbytes
        assert cache.entries.nbytes + scales == cache.num_pages * fit.page_bytes
        if fit.kv_format == "model":
            with Engine.load(folder, device="cpu", config=engine_config) as engine:
                assert engine.num_pages == cache.num_pages
                assert engine.page_size * fit.pages_per_request >= plan.load.tokens


def test_buffers_of_the_dry_run_are_those_of_a_runner(folder):
    loaded = load_model(folder, device="cpu")
    runner = make_runner(loaded, replace(SETTINGS, num_pages=1, max_length=16), pixels=GREY)
    attributes = [one for owner in (runner.forward_pass, runner.images) for one in vars(owner).values()]
    buffers = sum(one.nbytes for one in attributes if isinstance(one, torch.Tensor)) + runner.cache.entries.nbytes
    planned = configured_model("tiny", loaded.config, SETTINGS, 16).step_bytes
    assert planned > buffers


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_pages_on_a_gpu_are_those_of_the_engine(folder):
    """The engine measures what a plan takes from a dry run and an allowance for CUDA itself."""
    settings = EngineConfig(gpu_memory_utilization=0.1, num_workers=0, cuda_graphs=False)
    total = torch.cuda.get_device_properties(0).total_memory
    model = configured_model("tiny", meta_model(folder)[0].config, settings)
    plan = plan_serving(model, Gpu(name="this", gib=total / GIB), RequestLoad(text_tokens=100), config=settings)
    with Engine.load(folder, device="cuda", config=settings) as engine:
        assert engine.num_pages == pytest.approx(plan.fits[0].num_pages, rel=0.15)


def test_compressed_weights_have_the_planned_bytes(folder, tmp_path):
    plain, _ = meta_model(folder)
    planned = configured_model("tiny", plain.config, SETTINGS).weight_bytes
    for scheme, built_in in (("fp8", "fp8"), ("int8", "int8-rtn"), ("w4a16", "w4a16-rtn")):
        compress(folder, tmp_path / scheme, scheme=BUILT_IN[built_in], device="cpu")
        loaded = load_model(tmp_path / scheme, device="cpu")
        assert sum(parameter.nbytes for parameter in loaded.parameters()) == planned[scheme], scheme
        stored, quantization = meta_model(tmp_path / scheme)
        assert quantization is not None
        served = configured_model("tiny", stored.config, SETTINGS, stored=stored)
        assert list(served.weight_bytes) == [STORED]


def test_schemes_quantize_the_parts_that_compress_quantizes():
    for scheme, (form, parts) in QUANTIZED_PARTS.items():
        rules = BUILT_IN[{"w4a16": "w4a16-gptq"}.get(scheme, scheme)].rules
        assert {rule.form for rule in rules} == {form}
        assert {rule.part for rule in rules} == set(parts)


def test_image_tokens_are_those_of_the_processor(folder):
    sizes = [(672, 448), (100, 300)]
    processor = Processor.load(folder)
    parts = [{"type": "image", "image": Image.new("RGB", size)} for size in sizes]
    inputs = processor([[{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]])
    tokens, patches = image_cost(str(folder), sizes)
    assert (tokens, patches) == (len(inputs.image_token_index), len(inputs.patches))
    assert image_cost(size_name(VISION_LANGUAGE[folder.name], "tiny"), sizes) == (tokens, patches)


# ------------------------------------------------------------------ decisions


def test_a_scheme_that_keeps_up_is_preferred_to_one_that_only_fits():
    model = configured_model("7b", named_size("7b"), EngineConfig())
    load = RequestLoad(text_tokens=512, image_tokens=576, image_patches=2304, output_tokens=64, requests_per_s=30)
    plan = plan_serving(model, gpu_named("H100"), load)
    slow, fast = plan.fits[0], plan.chosen
    assert slow.fits
    assert not slow.keeps_up
    assert fast.scheme == "fp8"
    assert math.ceil(fast.times.in_progress) == fast.needed


def test_a_gpu_that_is_too_small_is_named_with_what_to_do():
    model = configured_model("72b", named_size("72b"), EngineConfig())
    plan = plan_serving(model, gpu_named("24"), RequestLoad(text_tokens=100))
    assert plan.chosen is None
    assert "more ranks: --gpus N --tensor-parallel-size N" in plan.lines()[-1]
    crowded = plan_serving(
        configured_model("3b", named_size("3b"), EngineConfig()),
        gpu_named("24"),
        RequestLoad(text_tokens=8192, concurrency=5000),
    )
    assert "Use more GPUs, or shorter requests" in crowded.lines()[-1]


def test_loads_that_contradict_themselves_are_refused():
    with pytest.raises(ConfigError, match="Little's law"):
        RequestLoad(text_tokens=100, requests_per_s=1, concurrency=1)
    with pytest.raises(ConfigError, match="Raise --text-tokens"):
        RequestLoad(text_tokens=100, output_tokens=200)
    model = described_model(parameters=1e9, num_layers=2, num_heads=2, head_dim=64, num_kv_heads=None, max_length=512)
    with pytest.raises(ConfigError, match="context length is 512"):
        plan_serving(model, GPUS[0], RequestLoad(text_tokens=1024))


def test_an_engine_on_several_ranks_is_planned_with_a_rank_s_part_of_everything():
    alone, ranks = served_model("7b"), served_model("7b", num_ranks=4)
    tower = 2 * ranks.num_tower_parameters
    assert ranks.weight_bytes["bf16"] - tower < (alone.weight_bytes["bf16"] - tower) / 3.5
    assert ranks.shape == alone.shape._replace(num_kv_heads=1)
    plan = plan_serving(ranks, gpu_named("H200"), RequestLoad(text_tokens=1024, requests_per_s=5.0), num_gpus=4)
    assert plan.num_replicas == 1
    assert "--tensor-parallel-size 4" in "\n".join(plan.lines())
    with pytest.raises(ConfigError, match="not whole engines"):
        plan_serving(ranks, gpu_named("H200"), RequestLoad(text_tokens=1024), num_gpus=6)


@pytest.mark.parametrize(
    ("size", "num_ranks", "ms"), [("72b", 8, "6.7 / 11.1 / 18.1"), ("32b", 2, "9.6 / 14.9 / 25.8")], ids=["72b", "32b"]
)
def test_predictions_in_the_documentation_are_those_of_the_plan(size, num_ranks, ms):
    plan = plan_serving(
        served_model(size, num_ranks=num_ranks), gpu_named("H200"), RequestLoad(text_tokens=1024), num_gpus=num_ranks
    )
    found = [line.split(" ms per token")[0].split()[-1] for line in plan.lines() if "ms per token with" in line]
    assert " / ".join(found) == ms
    assert f"| {ms} |" in (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


def test_layouts_of_several_gpus_are_compared_for_the_ranks_that_divide_the_model():
    by_ranks = {size: served_model("7b", num_ranks=size) for size in (1, 2, 4)}
    lines = list(compare_layouts(by_ranks, gpu_named("H200"), RequestLoad(text_tokens=1024), num_gpus=4))
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["4 x 1 rank", "2 x 2 ranks", "1 x 4 ranks"]
    few = [float(line.split(" ms per token")[0].split()[-1]) for line in lines[1:]]
    assert few == sorted(few, reverse=True), "more ranks take less time per token"

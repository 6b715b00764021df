"""The engine gives the tokens of `transformers` for every family.

Covers chunked prefill, small caches, preemption, images and videos.
"""

import dataclasses
import random

import pytest
import torch
from engine.making_adapters import write_adapters
from engine.tiny import make_core, plain, request_of, run_all
from model.hugging_face import CONVERSATIONS, ONE_PER_FAMILY, SHAPES, Oracle, make_checkpoint, picture

from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.model import generate, load_model
from saccade.processor import Processor

NUM_TOKENS = 32
SETTINGS = EngineConfig(
    page_size=4, num_pages=180, max_length=720, max_requests=3, max_step_tokens=48, max_encoder_patches=64,
    encoder_cache_tokens=512, num_workers=0,
)  # fmt: skip


@pytest.fixture(scope="module", params=[SHAPES[0], *ONE_PER_FAMILY], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("families") / "checkpoint", request.param)


def test_32_greedy_tokens_are_those_of_transformers(folder):
    """All conversations run at once with a KV cache for two: requests are chunked, preempted and resumed."""
    oracle = Oracle(folder)
    conversations = [CONVERSATIONS[name] for name in ("text-only", "1100x60", "multi-image", "28x28", "multi-turn")]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    with Engine.load(folder, device="cpu", config=SETTINGS) as engine:
        first = [completion.token_ids for completion in engine.generate(conversations, sampling)]
        again = [completion.token_ids for completion in engine.generate(conversations[::-1], sampling)]
    for messages, tokens in zip(conversations, first, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert tokens == oracle.following(oracle.inputs(messages, add_generation_prompt=True), tokens)
    assert again[::-1] == first, "with images and prefixes that are cached"


def test_a_video_gets_the_tokens_of_plain_generation(folder):
    """Frames that are separate images are cached and computed separately."""
    frames = [picture(140, 84, seed) for seed in range(5)]
    parts = [{"type": "video", "video": frames, "fps": 1.5}, {"type": "text", "text": "What happens?"}]
    messages = [{"role": "user", "content": [*parts, {"type": "image", "image": picture(90, 60)}]}]
    processor = Processor.load(folder)
    if processor.rules.video_id is None:
        pytest.skip(
            "this family takes no videos; the processor refuses them "
            "(test_videos_are_refused_by_families_that_take_none)"
        )
    inputs = processor([messages], add_generation_prompt=True)
    expected = generate(load_model(folder, device="cpu"), inputs, max_new_tokens=NUM_TOKENS)
    with Engine.load(folder, device="cpu", config=SETTINGS) as engine:
        for _ in range(2):
            [completion] = engine.generate([messages], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
            assert [completion.token_ids] == expected
            assert completion.num_prompt_tokens == inputs.num_tokens


def test_an_adapter_that_is_served_is_the_adapter_merged(folder, tmp_path):
    options = {"r": 4, "lora_alpha": 6, "target_modules": r".*language_model.*_proj"}
    adapters = write_adapters(folder, tmp_path, everything=options)
    conversations = [CONVERSATIONS["28x28"], CONVERSATIONS["text-only"]]
    sampling = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)
    with Engine.load(tmp_path / "everything-merged", device="cpu", config=SETTINGS) as engine:
        expected = engine.generate(conversations, sampling)
    config = dataclasses.replace(SETTINGS, max_adapters=1)
    with Engine.load(folder, device="cpu", config=config, adapters=adapters) as engine:
        served = engine.generate(conversations, sampling, options=RequestOptions(adapter="everything"))
    for ours, theirs in zip(served, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [one.logprob for one in ours.logprobs] == pytest.approx(
            [one.logprob for one in theirs.logprobs], abs=1e-4
        )


def test_padded_steps_and_encodings_give_the_same_tokens(folder):
    """Padded to the sizes of captured CUDA graphs."""
    from engine.test_engine_equals_generate import EagerGraphs

    from saccade.engine.device.encoder import Encoder, patch_budgets
    from saccade.engine.device.startup import run_blank_request

    prompts, expected = plain(folder, 1, 8, 8)
    core, processor = make_core(folder, SETTINGS), Processor.load(folder)
    runner = core._runner
    runner.forward_pass.graphs = EagerGraphs(runner)
    runner.images.encoder = Encoder(
        runner.model,
        pixel_mean=processor.images.mean,
        pixel_std=processor.images.std,
        budgets=patch_budgets(1024, runner.model.config.vision.patches_per_token),
    )
    assert run_blank_request(runner) is None  # the warm-up ends with this request
    assert runner.num_registered == 0
    requests = [
        (request_of(f"r{i}", prompt, SamplingParams(max_tokens=len(expected[i]), ignore_eos=True)), prompt)
        for i, prompt in enumerate(prompts)
    ]
    random.Random(0).shuffle(requests)
    found = {
        request.id: one.token_ids
        for (request, _), one in zip(requests, run_all(core, requests, at_once=3), strict=True)
    }
    assert [found[f"r{i}"] for i in range(len(prompts))] == expected


@pytest.mark.gpu
def test_cuda_graphs_give_the_tokens_of_plain_generation_on_the_cpu(folder):
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, expected = plain(folder, 1, 8, 8)
    core = make_core(folder, dataclasses.replace(SETTINGS, max_step_tokens=128), device="cuda", dtype="fp32")
    requests = [
        (request_of(f"r{i}", prompt, SamplingParams(max_tokens=len(tokens), ignore_eos=True)), prompt)
        for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
    ]
    assert [one.token_ids for one in run_all(core, requests, at_once=3)] == expected

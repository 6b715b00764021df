"""The engine on a GPU: CUDA graphs, steps in flight without synchronization, log-probabilities as in training."""

import dataclasses
import warnings

import pytest
import torch
from engine.tiny import make_core, plain, request_of, run_all, training_inputs
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.device.startup import warm_up
from saccade.engine.sampling_params import SamplingParams
from saccade.model import load_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


CONFIG = EngineConfig(num_pages=400, max_length=1024, max_requests=16, max_step_tokens=128, encoder_cache_tokens=2048)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cuda_graphs": False},
        {"num_pages": 64},
        {"max_draft_tokens": 4},
        {"prefix_cache": False, "encoder_cache": False, "page_size": 1, "num_pages": 2000},
        {"max_requests": 3, "page_size": 64},
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_generation_on_the_cpu(folder, changes):
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, expected = plain(folder, 0, 40, 16)
    core = make_core(folder, dataclasses.replace(CONFIG, **changes), device="cuda", dtype="fp32")
    requests = [
        (request_of(f"r{i}", prompt, SamplingParams(max_tokens=len(tokens))), prompt)
        for i, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True))
    ]
    outputs = run_all(core, requests, at_once=5)
    assert [collected.token_ids for collected in outputs] == expected


@pytest.mark.parametrize(("kv_format", "times"), [("model", 1.5), ("int8", 2.5), ("fp8", 8.0)])
def test_log_probabilities_are_as_close_to_fp32_as_those_of_the_training_forward(folder, kv_format, times):
    """In bf16 both differ from fp32; the engine's RMS error is at most `times` that of the training forward."""
    prompts, _ = plain(folder, 0, 40, 16)
    core = make_core(folder, dataclasses.replace(CONFIG, kv_format=kv_format), device="cuda", dtype="bf16")
    sampling = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
    requests = [(request_of(f"r{i}", prompt, sampling), prompt) for i, prompt in enumerate(prompts[:24])]
    outputs = run_all(core, requests)
    models = {dtype: load_model(folder, device="cuda", dtype=dtype).requires_grad_(False) for dtype in ("fp32", "bf16")}
    of_engine, of_training = [], []
    for prompt, collected in zip(prompts, outputs, strict=False):
        ids = torch.tensor(collected.token_ids)[:, None]
        inputs = training_inputs(prompt, collected.token_ids).to("cuda")
        with torch.no_grad():
            exact, rounded = (
                model(inputs)
                .log_softmax(-1, dtype=torch.float32)[len(prompt.token_ids) - 1 : -1]
                .cpu()
                .gather(1, ids)[:, 0]
                for model in (models["fp32"], models["bf16"])
            )
        of_engine.append(torch.tensor([entry.logprob for entry in collected.logprobs]) - exact)
        of_training.append(rounded - exact)
    engine, training = (torch.cat(errors).square().mean().sqrt() for errors in (of_engine, of_training))
    print(f"{kv_format}: engine {engine:.5f}, training forward {training:.5f}")
    assert engine < times * training


def test_launching_a_step_never_synchronizes(folder):
    """With prompts, images, penalties and log-probabilities, only reading synchronizes."""
    prompts, _ = plain(folder, 0, 40, 16)
    core = make_core(folder, CONFIG, device="cuda", dtype="bf16")
    warm_up(core._runner)
    run_all(core, [(request_of(f"w{i}", p, SamplingParams(max_tokens=8)), p) for i, p in enumerate(prompts[:8])])
    run = core._run

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core._run = watched
    sampling = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, logprobs=2, presence_penalty=0.5, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outputs = run_all(core, [(request_of(f"r{i}", p, sampling), p) for i, p in enumerate(prompts[8:20])])
    assert all(collected.last.finish_reason == "length" for collected in outputs)


def test_nothing_is_captured_after_the_warm_up(folder):
    prompts, _ = plain(folder, 0, 40, 16)
    core = make_core(folder, dataclasses.replace(CONFIG, max_draft_tokens=0), device="cuda", dtype="bf16")
    warm_up(core._runner)
    run_all(core, [(request_of(f"r{i}", p, SamplingParams(max_tokens=8)), p) for i, p in enumerate(prompts)], at_once=3)
    assert (core.statistics.num_late_captures, core.statistics.num_eager_steps) == (0, 0)


def test_features_are_not_overwritten_while_a_step_reads_them(folder):
    """The encoder cache has few slots, so that every image replaces one that a step in flight reads."""
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, expected = plain(folder, 0, 40, 16)
    config = dataclasses.replace(CONFIG, encoder_cache_tokens=64, encoder_cache=False, prefix_cache=False)
    core = make_core(folder, config, device="cuda", dtype="fp32")
    with_images = [i for i, prompt in enumerate(prompts) if prompt.images]
    requests = [
        (request_of(f"r{i}", prompts[i], SamplingParams(max_tokens=len(expected[i]))), prompts[i]) for i in with_images
    ]
    assert [collected.token_ids for collected in run_all(core, requests)] == [expected[i] for i in with_images]

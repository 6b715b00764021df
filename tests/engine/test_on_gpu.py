"""The same on a GPU: recorded steps, pipelined, with nothing waited for; log-probabilities those of the training forward."""

import dataclasses
import warnings

import pytest
import torch
from engine.tiny import make_core, plain, request_of, run_all
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.config import EngineConfig
from saccade.engine.request import SamplingParams
from saccade.model import load_model
from saccade.processor import ModelInputs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("engine") / "checkpoint", SHAPES[0])


CONFIG = EngineConfig(num_pages=400, max_length=1024, max_requests=16, max_step_tokens=128, image_pool_tokens=2048)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cuda_graphs": False},
        {"num_pages": 64},
        {"max_draft_tokens": 4},
        {"prefix_cache": False, "image_cache": False, "page_size": 1, "num_pages": 2000},
        {"max_requests": 3, "page_size": 64},
    ],
    ids=str,
)
def test_tokens_are_those_of_plain_generation_on_the_cpu(folder, changes):
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts, answers = plain(folder, 0, 40, 16)
    core = make_core(folder, dataclasses.replace(CONFIG, **changes), device="cuda", dtype="fp32")
    requests = [
        (request_of(f"r{i}", prompt, SamplingParams(max_tokens=len(answer))), prompt)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    heard = run_all(core, requests, at_once=5)
    assert [collected.token_ids for collected in heard] == answers


@pytest.mark.parametrize(("kv_format", "bound"), [("model", 0.02), ("fp8", 0.1), ("int8", 0.05)])
def test_log_probabilities_are_those_of_the_training_forward_within_bf16(folder, kv_format, bound):
    prompts, _ = plain(folder, 0, 40, 16)
    core = make_core(folder, dataclasses.replace(CONFIG, kv_format=kv_format), device="cuda", dtype="bf16")
    sampling = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
    requests = [(request_of(f"r{i}", prompt, sampling), prompt) for i, prompt in enumerate(prompts[:12])]
    heard = run_all(core, requests)
    model = load_model(folder, device="cuda", dtype="bf16").requires_grad_(False)
    for prompt, collected in zip(prompts, heard, strict=False):
        with torch.no_grad():
            logits = model(row_of(prompt, collected.token_ids).to("cuda"))
        expected = logits.log_softmax(-1, dtype=torch.float32)[len(prompt.token_ids) - 1 : -1].cpu()
        found = torch.tensor([entry.logprob for entry in collected.logprobs])
        wanted = expected.gather(1, torch.tensor(collected.token_ids)[:, None])[:, 0]
        assert (found - wanted).abs().max() < bound


def row_of(prompt, answer) -> ModelInputs:
    """Prompt and answer as one row of training."""
    from saccade.processor.inputs import patch_segments

    num_prompt, first = len(prompt.token_ids), int(prompt.positions.max()) + 1
    later = torch.arange(first, first + len(answer)).expand(3, -1)
    grids = torch.tensor([image.grid for image in prompt.images], dtype=torch.int64).reshape(-1, 3)
    index = [i for image in prompt.images for i in range(image.span.start, image.span.end)]
    patches = [torch.from_numpy(image.patches) for image in prompt.images]
    num_tokens = num_prompt + len(answer)
    return ModelInputs(
        token_ids=torch.tensor([*prompt.token_ids, *answer]),
        cu_seqlens=torch.tensor([0, num_tokens], dtype=torch.int32),
        positions=torch.cat([torch.from_numpy(prompt.positions.copy()), later], dim=1),
        is_learned=torch.zeros(num_tokens, dtype=torch.bool),
        patches=torch.cat(patches) if patches else torch.zeros(0, 1176, dtype=torch.uint8),
        patch_cu_seqlens=patch_segments(grids),
        image_grids=grids,
        image_token_index=torch.tensor(index, dtype=torch.int64),
        pixel_mean=(0.48145466, 0.4578275, 0.40821073),
        pixel_std=(0.26862954, 0.26130258, 0.27577711),
        max_seqlen=num_tokens,
    )


def test_launching_a_step_waits_for_nothing(folder):
    """Prompts, images, penalties and log-probabilities: only reading waits."""
    prompts, _ = plain(folder, 0, 40, 16)
    core = make_core(folder, CONFIG, device="cuda", dtype="bf16")
    run_all(core, [(request_of(f"w{i}", p, SamplingParams(max_tokens=8)), p) for i, p in enumerate(prompts[:8])])
    launch = core._launch

    def watched(plan):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    core._launch = watched
    sampling = SamplingParams(max_tokens=8, temperature=0.7, top_p=0.9, logprobs=2, presence_penalty=0.5, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        heard = run_all(core, [(request_of(f"r{i}", p, sampling), p) for i, p in enumerate(prompts[8:20])])
    assert all(collected.request.finish_reason == "length" for collected in heard)

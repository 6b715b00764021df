"""Context parallel = one rank: attention, exchange of features, and runs on layouts with context ranks."""

import json

import pytest
import torch
from closeness import BOUNDS, assert_close
from train.context_ranks import random_case
from train.recorded import FEW, LORA, MODELS, STEPS, run_cases
from train.running import losses, read_recipe, run_together, write_recipe, write_shards

from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.data.toy import toy_sample
from saccade.kernels import launch
from saccade.kernels.attention import attention_reference
from saccade.model.context_parallel import attend_to_sequence
from saccade.model.families import named_size
from saccade.model.initialize import initialize_random
from saccade.train.context_batches import ContextGroup, SequenceShare
from saccade.train.stages import train


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_attention_of_ragged_packs_equals_one_rank(num_ranks, tmp_path):
    """Outputs and gradients of segments of 1 to 96 tokens, with few and many rows."""
    call = {"call": "train.context_ranks:compare_attention"}
    jobs = [
        call | {"block_size": 8, "to": str(tmp_path / "many")},
        call | {"block_size": 1024, "to": str(tmp_path / "few")},
        call | {"path": "reference", "block_size": 3, "to": str(tmp_path / "reference")},
        {"call": "train.context_ranks:exchange"},
    ]
    run_together(jobs, tmp_path, num_ranks=num_ranks)
    for name in ("many", "few", "reference"):
        for rank in range(num_ranks):
            assert json.loads((tmp_path / f"{name}.{rank}").read_text()) < 2e-6


LAYOUTS = {
    "context 4": ["parallel.context=4"],
    "context 4, ddp": ["parallel.context=4", "parallel.strategy=ddp"],
    "context 2 x shard 2": ["parallel.context=2", "parallel.shard=2"],
    "context 2 x replicate 2": ["parallel.context=2", "parallel.replicate=2"],
    "context 2 x replicate 2, ddp": ["parallel.context=2", "parallel.strategy=ddp"],
}
SETTINGS = {
    "full": [],
    "recompute": ["parallel.recompute_language=full", "parallel.recompute_vision=selective"],
    "lora": LORA,
}
CASES = [("context 2 x shard 2", "qwen3_vl", "recompute")]
"""The layout of `make test`; the others are slow."""
OTHERS = [case for case in ((a, b, c) for a in LAYOUTS for b in MODELS for c in SETTINGS) if case not in CASES]


def test_runs_with_context_ranks_equal_one_device(tmp_path):
    """Text-only sequences, images of several sizes, accumulation, empty micro-batches; in blocks of 16 tokens."""
    run_cases(tmp_path, CASES, LAYOUTS, SETTINGS, steps=[*STEPS, *FEW])


@pytest.mark.slow
def test_all_other_runs_with_context_ranks_equal_one_device(tmp_path):
    run_cases(tmp_path, OTHERS, LAYOUTS, SETTINGS)


def recipe(folder, name, shards):
    return write_recipe(folder / f"{name}.toml", run=folder / name, checkpoint=folder / "checkpoint", shards=shards)


@pytest.mark.slow
def test_runs_resume_on_other_layouts_and_bad_images_leave_the_loss_on_all_ranks(tmp_path):
    """One device, then two layouts with context ranks, then one device again, in the middle of an epoch."""
    initialize_random(tmp_path / "checkpoint", named_size("tiny"), dtype=torch.float32)
    shards = write_shards(tmp_path / "shards", text_every=2, sides=(56, 84))
    damaged = write_damaged(tmp_path / "damaged")
    train(read_recipe(recipe(tmp_path, "whole", shards), *STEPS), device="cpu")
    moving, bad = recipe(tmp_path, "moving", shards), recipe(tmp_path, "bad", damaged)
    train(read_recipe(moving, *STEPS, "stages.0.steps=3"), device="cpu")
    more = ["stages.0.steps=4", "stages.0.data.augment={crop_scale=[0.5, 1.0], flip=0.5, erase=0.5}"]
    train(read_recipe(recipe(tmp_path, "bad-one", damaged), *STEPS, *more), device="cpu")
    jobs = [
        {"recipe": str(moving), "set": [*STEPS, "stages.0.steps=5", *LAYOUTS["context 2 x shard 2"]]},
        {"recipe": str(moving), "set": [*STEPS, "stages.0.steps=8", *LAYOUTS["context 4, ddp"]]},
        {"recipe": str(bad), "set": [*STEPS, *more, "stages.0.data.num_workers=1", *LAYOUTS["context 4"]]},
    ]
    run_together(jobs, tmp_path, num_ranks=4)
    train(read_recipe(moving, *STEPS), device="cpu")
    assert losses(tmp_path / "moving") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    assert losses(tmp_path / "bad") == pytest.approx(losses(tmp_path / "bad-one"), abs=1e-5)
    names = [
        {json.loads(line)["sample_id"] for line in (tmp_path / run / "bad_samples.jsonl").read_text().splitlines()}
        for run in ("bad", "bad-one")
    ]
    assert names[0] == names[1] != set()


def write_damaged(folder):
    """Samples with two images of different size each; some are cut after their header, one in its header."""
    with ShardWriter(folder, max_samples=16) as writer:
        for number in range(24):
            first, second = (toy_sample(number, side=side).members["png"] for side in (84, 56))
            if number % 7 == 3:
                second = second[: len(second) // 2]
            talk = [
                {"role": "user", "content": "<image><image>Which is larger?"},
                {"role": "assistant", "content": "the first " * (1 + number % 3)},
            ]
            members = {"0.png": first, "1.png": second, "json": json.dumps({"messages": talk}).encode()}
            writer.write(Sample(key=f"{number:08d}", source="damaged", members=members))
    return folder


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_kernels_take_the_rows_of_every_rank(device):
    """Queries of each rank with all keys, in the tiled kernels, give the output and gradients of the sequence."""
    lengths, block_size, dtype = ([1, 37, 1, 20], 8, torch.float32)
    if device == "cuda":
        lengths, block_size, dtype = ([1, 5000, 700, 1, 9000, 1682], 512, torch.bfloat16)
    inputs, tensors, _ = random_case(lengths, 0)
    q, k, v, d_out = (x.to(device, dtype).requires_grad_() for x in tensors)
    starts, longest = inputs.cu_seqlens.to(device), max(lengths)
    bounds = {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": True}
    expected = attention_reference(q.float(), k.float(), v.float(), starts, starts, **bounds)
    gradients = torch.autograd.grad(expected, (q, k, v), d_out.float())
    out = torch.empty_like(q)
    with launch.forced("triton"):
        for rank in range(3):
            context = ContextGroup(rank, 3, block_size=block_size)
            share = SequenceShare(inputs, context, image_ranks=[], image_tokens=[]).inputs().to(device)
            assert len(share.rows) > 1
            out = out.index_copy(0, share.tokens, attend_to_sequence(q[share.tokens], k, v, share))
        found = torch.autograd.grad(out, (q, k, v), d_out)
    for name, got, right in zip(("out", "dq", "dk", "dv"), (out, *found), (expected, *gradients), strict=True):
        assert_close(name, got, right, BOUNDS[dtype])

"""Time of the steps that one rank of a tensor-parallel engine computes, next to what `saccade plan` predicts for it.

    python -m bench.rank_step 72b --ranks 8 [--requests 1 16 64 256] [--context 1024] [--gpu H200]

The model has random weights, the shape of a named size (`saccade models`: 72b, qwen2_vl/72b) and this rank's part of
every matrix. Nothing is exchanged: what a rank waits for the others, and the collectives themselves, are neither in the
times nor in the predictions. Steps run as in the engine, the next one queued before the last one's tokens are read.
`ratio` is measured / predicted; the exit status is 1 if one differs by more than `--within`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

import numpy as np
import torch

from saccade.device import resolve_device
from saccade.engine.config import EngineConfig
from saccade.engine.core.step import Chunk, SlotStart, StepPlan
from saccade.engine.device.kv_cache import bytes_per_page, pages_for
from saccade.engine.device.rank_exchange import LoneRank
from saccade.engine.device.results import StepHandle
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.device.startup import profile_largest_step
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Request
from saccade.model.config import ModelConfig
from saccade.model.families import named_size
from saccade.model.merged_projections import merge_storage
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import connect, shard_model
from saccade.model.vlm import VLM
from saccade.plan.gpus import gpu_named
from saccade.plan.served_model import ServedModel, configured_model
from saccade.plan.throughput import decode_step_s, exchange_s

_STEPS, _WARM_UP_STEPS = 40, 10


def config_of(size: str, layers: int | None) -> ModelConfig:
    """The config of a named size, with fewer decoder layers if asked."""
    config = named_size(size)
    if layers is None:
        return config
    return dataclasses.replace(config, language=dataclasses.replace(config.language, num_layers=layers))


def make_runner(config: ModelConfig, num_ranks: int, num_requests: int, context: int) -> Runner:
    """A runner of rank 0 with random weights."""
    device, exchange = resolve_device("auto"), LoneRank(0, num_ranks)
    with torch.device("meta"):
        model = VLM(config).to(torch.bfloat16).eval()
    shard_model(model, TensorRank(0, num_ranks))
    model.to_empty(device=device).requires_grad_(False)
    for parameter in model.requires_grad_(False).parameters():
        parameter.normal_(std=0.02)
    model.tie_head()
    connect(model, exchange)
    merge_storage(model)
    pages = pages_for(context + _STEPS + 8, 16) * num_requests
    engine = EngineConfig(max_requests=num_requests, num_pages=pages, max_length=context + 256)
    grey = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)
    return Runner(model, engine, pixels=grey, num_pages=pages, max_length=context + 256, exchange=exchange)


@torch.inference_mode()
def decode_ms(runner: Runner, num_requests: int, context: int) -> float:
    """Time of a decode step, with CUDA graphs; one step is queued while the device runs another."""
    num_pages = pages_for(context + _STEPS + 8, 16)
    prompt = TokenPrompt(token_ids=[1] * context, positions=np.tile(np.arange(context), (3, 1)))
    names = [f"{num_requests}-{slot}" for slot in range(num_requests)]
    for name in names:
        runner.register(Request(id=name, token_ids=prompt.token_ids), prompt)
    plans = [
        StepPlan(
            number=number,
            chunks=tuple(
                Chunk(
                    request_id=name, slot=slot, start=context + number, num_tokens=1,
                    new_pages=tuple(range(slot * num_pages, (slot + 1) * num_pages)) if number == 0 else (),
                    images=(), reads_last_token=True, drafts=(), samples=True,
                )
                for slot, name in enumerate(names)
            ),
            started=tuple(SlotStart(name, slot, ()) for slot, name in enumerate(names)) if number == 0 else (),
        )
        for number in range(_STEPS)
    ]  # fmt: skip
    ends, queued = [], list[StepHandle]()
    for plan in plans:
        queued.append(runner.sample(runner.forward(plan)))
        if len(queued) == 2:
            queued.pop(0).read()
            ends.append(time.perf_counter())
    queued.pop().read()
    for name in names:
        runner.unregister(name)
    measured = ends[_WARM_UP_STEPS:]
    return (measured[-1] - measured[0]) / (len(measured) - 1) * 1e3


def predicted_ms(model: ServedModel, gpu: str, num_requests: int, context: int) -> float:
    """The plan's time of a decode step of one rank, without the exchanges."""
    kv_bytes = bytes_per_page(model.shape, 1, "model", torch.bfloat16) * (context + _STEPS // 2)
    found = decode_step_s(model, gpu_named(gpu), "bf16", kv_bytes, num_requests)
    assert found is not None, "a GPU by name"
    return (found - exchange_s(model, gpu_named(gpu), num_requests, num_requests)) * 1e3


def main() -> None:
    """Measure and print one JSON object per number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="a size of `saccade models`")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="decoder layers, if not all")
    parser.add_argument("--gpu", default="H200", help="name of this GPU for the plan")
    parser.add_argument("--within", type=float, default=0.1, help="largest difference from the plan")
    args = parser.parse_args()
    config = config_of(args.size, args.layers)
    planned = configured_model(args.size, config, EngineConfig(), num_ranks=args.ranks)
    runner = make_runner(config, args.ranks, max(args.requests), args.context)
    profile_largest_step(runner)
    forward = runner.forward_pass
    with runner.on_stream(), torch.inference_mode():
        if forward.graphs is not None:
            forward.run_padding()  # kernels are loaded before they are captured
            forward.capture()
            while forward.graphs.capture_next():
                pass
        runner.warm_up_sampler()
    runner.forget_warm_up()
    ratios = []
    for num_requests in args.requests:
        ms, plan_ms = (
            decode_ms(runner, num_requests, args.context), predicted_ms(planned, args.gpu, num_requests, args.context)
        )  # fmt: skip
        ratios.append(ms / plan_ms)
        step = {"size": args.size, "ranks": args.ranks, "requests": num_requests, "context": args.context}
        times = {"ms": round(ms, 3), "plan_ms": round(plan_ms, 3), "ratio": round(ms / plan_ms, 3)}
        print(json.dumps(step | times), flush=True)
    sys.exit(any(abs(ratio - 1) > args.within for ratio in ratios))


if __name__ == "__main__":
    main()

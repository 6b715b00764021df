"""Time of the steps that one rank of a tensor-parallel engine computes, without the other ranks: nothing is exchanged.

    python -m bench.rank_step qwen2-vl-72b --ranks 8 [--requests 1 16 64 256] [--context 1024]

The model has random weights, the shape of a named size (`saccade models`) and this rank's part of every matrix. What a
rank waits for the others, and the collectives themselves, are not in the times.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time

import torch

from saccade.engine.config import EngineConfig
from saccade.engine.core.step import Chunk, SlotStart, StepPlan
from saccade.engine.device.kv_cache import pages_for
from saccade.engine.device.rank_exchange import LoneRank
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.device.startup import profile_largest_step
from saccade.engine.prompt import TokenPrompt
from saccade.engine.request import Request
from saccade.model.families import named_size
from saccade.model.merged_projections import merge_storage
from saccade.model.shard import TensorRank
from saccade.model.tensor_parallel import connect, shard_model
from saccade.model.vlm import VLM

_STEPS = 30


def make_runner(size: str, num_ranks: int, num_requests: int, context: int, layers: int | None) -> Runner:
    """A runner of rank 0 with random weights."""
    config = named_size(size)
    if layers is not None:
        config = dataclasses.replace(config, language=dataclasses.replace(config.language, num_layers=layers))
    device, exchange = torch.device("cuda"), LoneRank(0, num_ranks)
    with torch.device("meta"):
        model = VLM(config).to(torch.bfloat16).eval().requires_grad_(False)
    shard_model(model, TensorRank(0, num_ranks))
    model.to_empty(device=device)
    for parameter in model.parameters():
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
    """Time of a decode step, with CUDA graphs."""
    import numpy as np

    num_pages = pages_for(context + _STEPS + 8, 16)
    prompt = TokenPrompt(token_ids=[1] * context, positions=np.tile(np.arange(context), (3, 1)))
    for slot in range(num_requests):
        runner.register(Request(id=f"{num_requests}-{slot}", token_ids=prompt.token_ids), prompt)
    times = []
    for number in range(_STEPS):
        chunks = tuple(
            Chunk(
                request_id=f"{num_requests}-{slot}", slot=slot, start=context + number, num_tokens=1,
                new_pages=tuple(range(slot * num_pages, (slot + 1) * num_pages)) if number == 0 else (),
                images=(), reads_last_token=True, drafts=(), samples=True,
            )
            for slot in range(num_requests)
        )  # fmt: skip
        started = tuple(SlotStart(f"{num_requests}-{slot}", slot, ()) for slot in range(num_requests))
        plan = StepPlan(number=number, chunks=chunks, started=started if number == 0 else ())
        begin = time.perf_counter()
        runner.sample(runner.forward(plan)).read()
        times.append(time.perf_counter() - begin)
    for slot in range(num_requests):
        runner.unregister(f"{num_requests}-{slot}")
    return sorted(times[_STEPS // 3 :])[len(times[_STEPS // 3 :]) // 2] * 1e3


def main() -> None:
    """Measure and print one JSON object per number of requests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", help="a size of `saccade models`")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, help="decoder layers, if not all")
    args = parser.parse_args()
    runner = make_runner(args.size, args.ranks, max(args.requests), args.context, args.layers)
    profile_largest_step(runner)
    with runner.on_stream(), torch.inference_mode():
        runner.forward_pass.run_padding()  # kernels are loaded before they are captured
        runner.forward_pass.capture()
        runner.warm_up_sampler()
    runner.forget_warm_up()
    for num_requests in args.requests:
        step = {"size": args.size, "ranks": args.ranks, "requests": num_requests, "context": args.context}
        print(json.dumps(step | {"ms": round(decode_ms(runner, num_requests, args.context), 3)}), flush=True)


if __name__ == "__main__":
    main()

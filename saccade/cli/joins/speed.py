"""How fast a checkpoint is on this machine: the engine on requests of `saccade bench serve`, without a server."""

import json
import statistics
import time
from pathlib import Path
from typing import Any


def measure_speed(
    folder: Path, device: str, seed: int, *, num_alone: int = 8, num_at_once: int = 32
) -> dict[str, float]:
    """Medians of `ttft_ms` and `tpot_ms` of single requests, and `output_tokens_per_s` of many at once."""
    from saccade.engine import Engine, SamplingParams
    from saccade.serve.load.workload import Workload

    workload = Workload(num_requests=2 * num_alone + num_at_once + 1, seed=seed)
    warm_up, *asked = [json.loads(body)["messages"] for body in workload.bodies("")]
    first, whole, at_once = asked[:num_alone], asked[num_alone : 2 * num_alone], asked[2 * num_alone :]
    with Engine.load(folder, device=device) as engine:

        def seconds(conversations: list[Any], num_tokens: int) -> float:
            began = time.perf_counter()
            completions = engine.generate(conversations, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            assert all(one.failure is None for one in completions), "the requests are valid"
            return time.perf_counter() - began

        num_tokens = workload.num_output
        seconds([warm_up], num_tokens)
        ttft_s = statistics.median(seconds([one], 1) for one in first)
        whole_s = statistics.median(seconds([one], num_tokens) for one in whole)
        rate = len(at_once) * num_tokens / seconds(at_once, num_tokens)
    return {
        "ttft_ms": 1e3 * ttft_s,
        "tpot_ms": 1e3 * (whole_s - ttft_s) / (num_tokens - 1),
        "output_tokens_per_s": rate,
    }

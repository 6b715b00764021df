"""How fast a checkpoint is on this machine: the engine on requests of `saccade bench serve`, without a server."""

import json
import queue
import statistics
import time
from pathlib import Path
from typing import Any


def measure_speed(
    folder: Path, device: str, seed: int, *, num_alone: int = 8, num_at_once: int = 32
) -> dict[str, float]:
    """Medians of `ttft_ms` and `tpot_ms` of single requests, and `output_tokens_per_s` of many at once."""
    from saccade.engine import Engine, SamplingParams
    from saccade.engine.request import CompletionDelta
    from saccade.serve.load.workload import Workload

    workload = Workload(num_requests=num_alone + num_at_once + 1, seed=seed)
    warm_up, *asked = [json.loads(body)["messages"] for body in workload.bodies("")]
    num_tokens = workload.num_output
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    with Engine.load(folder, device=device) as engine:

        def stream_s(conversation: Any) -> tuple[float, float]:
            """Seconds until the first delta of an answer, and from it to the last."""
            deltas: queue.SimpleQueue[tuple[float, bool]] = queue.SimpleQueue()

            def on_delta(delta: CompletionDelta) -> None:
                deltas.put((time.perf_counter(), delta.completion is not None))

            began = time.perf_counter()
            engine.submit(engine.preprocess(conversation), sampling, on_delta)
            first, is_last = deltas.get()
            last = first
            while not is_last:
                last, is_last = deltas.get()
            return first - began, last - first

        stream_s(warm_up)
        ttft_s, rest_s = map(statistics.median, zip(*map(stream_s, asked[:num_alone]), strict=True))
        began = time.perf_counter()
        completions = engine.generate(asked[num_alone:], sampling)
        assert all(one.failure is None for one in completions), "the requests are valid"
        rate = num_at_once * num_tokens / (time.perf_counter() - began)
    return {
        "ttft_ms": 1e3 * ttft_s,
        "tpot_ms": 1e3 * rest_s / (num_tokens - 1),
        "output_tokens_per_s": rate,
    }

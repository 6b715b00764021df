"""Host time of an engine step with many decode requests, without a GPU: the time that the device hides if it is slower.

    python -m bench.serve_host [--requests 256] [--steps 100] [--profile]

This runs the engine's own code with a tiny model of one layer, whose forward pass is skipped like a CUDA graph that
takes no time. Scheduler, input building, reading and the front end are complete; sampling uses the CPU's kernels
instead of the GPU's. One thread runs everything, so that nothing waits for the interpreter lock. Medians over the
steps, in microseconds:

    plan, forward, sample, read, update    parts of `EngineCore.step`; `other` is its remaining time
    deliver                                the front end: detokenize and call back (streamed or not)
    send, receive                          only with the core in its own process: encode and decode the outputs
"""

import argparse
import cProfile
import gc
import pstats
import socket
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.engine import CompletionDelta, Engine
from saccade.engine.config import EngineConfig
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import Message
from saccade.engine.device.loading import load_runner
from saccade.engine.device.results import StepHandle
from saccade.engine.device.runner import PixelScale, Runner
from saccade.engine.device.step_inputs import StepSize
from saccade.engine.frames.connection import Connection
from saccade.engine.frames.plain import outputs_from_plain
from saccade.engine.frontend.preprocessing.preprocessor import Preprocessor
from saccade.engine.request import RequestOutput
from saccade.engine.sampling_params import SamplingParams
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.initialize import initialize_random
from saccade.processor import Processor

Times = dict[str, list[float]]
NUM_PROMPT, WARM_UP = 32, 20


def make_checkpoint(folder: Path) -> None:
    """Write a checkpoint of one layer of width 32."""
    language = LanguageConfig(
        vocab_size=512, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, rope_theta=1e6,
        rope_sections=(2, 3, 3), norm_eps=1e-6, max_positions=4096,
    )  # fmt: skip
    vision = VisionConfig(num_layers=1, hidden_size=32, num_heads=2, intermediate_size=32, full_attention_layers=(0,))
    config = ModelConfig(vision=vision, language=language, tied_head=True, family="qwen2_5_vl")
    initialize_random(folder, config, dtype=torch.float32)


class NoGraphs:
    """CUDA graphs that compute nothing."""

    num_late_captures = num_eager_runs = 0

    def __init__(self, runner: Runner) -> None:
        self._logits = runner.forward_pass.logits.normal_()

    def fitting(self, size: StepSize) -> StepSize:
        """Return the size itself, as if it were captured."""
        return size

    def run(self, size: StepSize) -> torch.Tensor:
        """Return logits without computing them."""
        return self._logits[: size.num_samples]


class SameThread:
    """A transport that handles messages at once, in the caller's thread."""

    def __init__(self, core: EngineCore) -> None:
        self.info, self.statistics, self._core = core.info, core.statistics, core

    def send(self, message: Message) -> None:
        """Handle a message."""
        self._core.handle(message)

    def close(self) -> None:
        """Do nothing."""


def timed(times: list[float], call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a call so that its duration in microseconds is appended to `times`."""

    def measured(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = call(*args, **kwargs)
        times.append((time.perf_counter() - begin) * 1e6)
        return result

    return measured


def make_core(folder: Path, processor: Processor, num_requests: int, times: Times) -> EngineCore:
    """A core without device work whose parts are timed."""
    config = EngineConfig(max_requests=num_requests, max_length=2048, max_draft_tokens=0, num_pages=num_requests * 16)
    pixels = PixelScale(mean=processor.images.mean, std=processor.images.std)
    runner = load_runner(folder, config, pixels=pixels, device="cpu")
    runner.forward_pass.graphs = NoGraphs(runner)  # type: ignore[assignment]
    core = EngineCore(runner)
    for name, owner in {"plan": core.scheduler, "update": core.scheduler, "forward": runner, "sample": runner}.items():
        setattr(owner, name, timed(times[name], getattr(owner, name)))
    StepHandle.read = timed(times["read"], StepHandle.read)  # type: ignore[method-assign]
    return core


def measure(folder: Path, num_requests: int, num_steps: int, *, streams: bool, profiler: cProfile.Profile) -> Times:
    """Run `num_steps` decode steps of `num_requests` requests; returns the times of their parts."""
    processor, times = Processor.load(folder), defaultdict(list)
    original = StepHandle.read
    core = make_core(folder, processor, num_requests, times)
    preprocessor = Preprocessor(folder, num_workers=0, processed_image_cache_bytes=2**20)
    engine = Engine(lambda on_outputs, on_stop: SameThread(core), processor, preprocessor)
    rng = np.random.default_rng(0)
    num_deltas = 0

    def on_delta(delta: CompletionDelta) -> None:
        nonlocal num_deltas
        num_deltas += 1

    sampling = SamplingParams(max_tokens=num_steps + WARM_UP + 200, ignore_eos=True)
    for _ in range(num_requests):
        prompt = engine.preprocess_tokens(rng.integers(1, 256, NUM_PROMPT).tolist())
        engine.submit(prompt, sampling, on_delta, streams=streams)
    while core.scheduler.num_decoding < num_requests:
        core.step() if core.has_work else time.sleep(0.01)
    for _ in range(WARM_UP):
        engine._front_end.deliver(core.step())
    for values in times.values():
        values.clear()
    near, far = map(Connection, socket.socketpair())
    step, deliver = timed(times["step"], core.step), timed(times["deliver"], engine._front_end.deliver)

    def send(outputs: list[RequestOutput]) -> None:
        near.send({"outputs": outputs, "statistics": vars(core.statistics)})

    def receive() -> list[RequestOutput]:
        message, _ = far.receive()
        return outputs_from_plain(message["outputs"])

    send, receive = timed(times["send"], send), timed(times["receive"], receive)
    gc.collect()
    gc.freeze()  # as `Engine.load` does
    for _ in range(num_steps):
        profiler.enable()
        outputs = step()
        deliver(outputs)
        profiler.disable()
        send(outputs)
        assert receive() == outputs, "outputs are equal after encoding and decoding"
    for request_id in core.scheduler.request_ids():
        engine.cancel(request_id)
    for connection in (near, far):
        connection.close()
    engine.close()
    StepHandle.read = original  # type: ignore[method-assign]
    return times


def main() -> None:
    """Measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--profile", action="store_true", help="functions by time, instrumented")
    options = parser.parse_args()
    torch.set_num_threads(1)
    profiler = cProfile.Profile() if options.profile else None
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name))
        for streams in (False, True):
            idle = profiler or NoProfile()
            times = measure(Path(name), options.requests, options.steps, streams=streams, profiler=idle)
            medians = {part: statistics.median(values) for part, values in times.items()}
            parts = ("plan", "forward", "sample", "read", "update")
            medians["other"] = medians["step"] - sum(medians[part] for part in parts)
            shown = ("step", *parts, "other", "deliver", "send", "receive")
            print(
                "streamed" if streams else "not streamed", *(f"{part} {medians[part]:.0f}" for part in shown), sep="  "
            )
    if profiler is not None:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


class NoProfile:
    """A profiler that does nothing."""

    def enable(self) -> None:
        """Do nothing."""

    def disable(self) -> None:
        """Do nothing."""


if __name__ == "__main__":
    main()

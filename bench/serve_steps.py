"""Profile engine steps: kernels by name, GPU idle time between steps, host time by function.

    python -m bench.serve_steps [--size 3b] [--requests 1 256] [--context 600] [--host]

Random weights; the engine core is driven directly, without preprocessing.
"""

import argparse
import cProfile
import pstats
import time
from collections import defaultdict

import numpy as np
import torch

from bench.train_step import random_model
from saccade.engine.config import EngineConfig
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import AddRequest
from saccade.engine.device.loading import make_runner
from saccade.engine.device.runner import PixelScale
from saccade.engine.prompt import PromptImage, TokenPrompt
from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.model.initialize import named_size
from saccade.model.merged_projections import merge_storage
from saccade.processor.positions import TextSpan, VisionSpan, mrope_positions


def text_prompt(rng: np.random.Generator, length: int) -> TokenPrompt:
    """Return a prompt of random token ids."""
    ids = [int(i) for i in rng.integers(1, 150_000, length)]
    return TokenPrompt(token_ids=ids, positions=mrope_positions([TextSpan(length)]))


def image_prompt(rng: np.random.Generator) -> TokenPrompt:
    """Return a prompt with an image of 672 x 672 pixels and 62 text tokens."""
    patches = rng.integers(0, 256, (2304, 588), dtype=np.uint8)
    span = ImageSpan(key=rng.bytes(32), start=1, num_tokens=576, num_patches=2304)
    ids = [151652, *[151655] * 576, 151653, *(int(i) for i in rng.integers(1, 150_000, 62))]
    positions = mrope_positions([TextSpan(1), VisionSpan(1, 24, 24), TextSpan(63)])
    image = PromptImage(span=span, grid=(1, 48, 48), patches=patches)
    return TokenPrompt(token_ids=ids, positions=positions, images=(image,))


def add(core: EngineCore, name: str, prompt: TokenPrompt, num_tokens: int) -> None:
    """Add a request with exactly this many output tokens."""
    request = Request(
        id=name,
        token_ids=prompt.token_ids,
        images=tuple(image.span for image in prompt.images),
        sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
    )
    core.handle(AddRequest(request=request, prompt=prompt))


def run_out(core: EngineCore) -> None:
    """Run steps until no request is open."""
    while core.has_work:
        core.step()


def kernels(trace: torch.profiler.profile, num_steps: int) -> None:
    """Print microseconds per step and kernel, and GPU utilization."""
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in trace.events():
        if event.device_type.name == "CUDA":
            found[event.name].append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()
    busy, end, first = 0.0, 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    print(
        f"  span {(end - first) / num_steps:.0f} us a step, busy {busy / (end - first):.1%}, "
        f"{len(spans) / num_steps:.0f} kernels"
    )
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:14]:
        print(
            f"  {sum(times) / num_steps:9.1f} us {len(times) / num_steps:6.1f} x {sum(times) / len(times):7.2f}  "
            f"{name[:110]}"
        )


def main() -> None:
    """Profile decode steps of one and of many requests, then the first token of an image prompt."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--host", action="store_true")
    options = parser.parse_args()
    model = random_model(named_size(options.size)).eval().requires_grad_(False)
    merge_storage(model)
    config = EngineConfig(prefix_cache=False, max_requests=256, max_length=8192)
    scale = PixelScale(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
    core = EngineCore(make_runner(model, config, pixels=scale))
    rng = np.random.default_rng(0)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    for count in options.requests:
        for number in range(count):
            add(core, f"a{count}-{number}", text_prompt(rng, options.context), 200)
        for _ in range(20 + options.context * count // config.max_step_tokens):
            core.step()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(40):
            core.step()
        print(f"{count} requests of {options.context} tokens: {(time.perf_counter() - begin) / 40 * 1e3:.3f} ms a step")
        with torch.profiler.profile(activities=activities) as trace:
            for _ in range(20):
                core.step()
            torch.cuda.synchronize()
        kernels(trace, 20)
        if options.host:
            profiler = cProfile.Profile()
            profiler.enable()
            for _ in range(40):
                core.step()
            profiler.disable()
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        run_out(core)
    for number in range(4):
        add(core, f"warm{number}", image_prompt(rng), 2)
        run_out(core)
    times = []
    for number in range(10):
        prompt = image_prompt(rng)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        add(core, f"image{number}", prompt, 1)
        run_out(core)
        times.append((time.perf_counter() - begin) * 1e3)
    print(f"first token of a preprocessed image: {sorted(times)[5]:.1f} ms")
    with torch.profiler.profile(activities=activities) as trace:
        add(core, "image", image_prompt(rng), 1)
        run_out(core)
        torch.cuda.synchronize()
    kernels(trace, 1)
    if options.host:
        profiler = cProfile.Profile()
        profiler.enable()
        for number in range(5):
            add(core, f"profiled{number}", image_prompt(rng), 1)
            run_out(core)
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()

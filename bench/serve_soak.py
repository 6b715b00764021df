"""Random load for a long time: memory stays flat and the invariants hold at the end.

    python -m bench.serve_soak [--minutes 30] [--checkpoint FOLDER | --size tiny] [--at-once 24]

Text, one or several images, shared and new, shared prefixes, all sampling parameters, streams left early, broken images.
Memory of the process, its workers and the GPU is measured every few seconds; the slope is that of a linear fit to the second half, in
MB per hour.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench.serve import make_checkpoint
from saccade.engine import Engine, EngineConfig, RequestOptions, SamplingParams
from saccade.engine.transport.thread import CoreThread


def descendants(pid: int) -> list[int]:
    """All descendants of a process."""
    found = []
    for child in subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split():
        found += [int(child), *descendants(int(child))]
    return found


def resident_mb() -> float:
    """Memory of this process and its descendants, without file mappings, which depend on other processes."""
    return sum(proportional_mb(pid) for pid in [os.getpid(), *descendants(os.getpid())])


def proportional_mb(pid: int) -> float:
    """Proportional set size without files; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(float(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) / 1024


class Load:
    """Random conversations and sampling parameters."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.noise = np.random.default_rng(seed)
        self.shared = [self._image() for _ in range(6)]
        self.prefixes = ["", "You are a careful assistant. " * 6, "Look closely and answer in one word. " * 3]

    def _image(self) -> Image.Image:
        height, width = (28 * self.rng.randint(2, 8) for _ in range(2))
        return Image.fromarray(self.noise.integers(0, 256, (height, width, 3), dtype=np.uint8))

    def conversation(self) -> list[dict[str, object]]:
        """Up to three images, one in fifty of them broken."""
        rng = self.rng
        parts: list[dict[str, object]] = [
            {"type": "text", "text": rng.choice(self.prefixes) + "x" * rng.randint(1, 80)}
        ]
        for _ in range(rng.choice([0, 0, 1, 1, 2, 3])):
            image: object = rng.choice(self.shared) if rng.random() < 0.5 else self._image()
            parts.append({"type": "image", "image": b"no picture" if rng.random() < 0.02 else image})
        return [{"role": "user", "content": parts}]

    def sampling(self) -> SamplingParams:
        """Random sampling parameters."""
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice([0.0, 0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            logprobs=rng.choice([None, None, 0, 5]),
            stop=rng.choice([(), (), ("ab",)]),
            max_tokens=rng.randint(1, 48),
            ignore_eos=rng.random() < 0.5,
        )


async def client(engine: Engine, load: Load, until: float, endings: dict[str, int]) -> None:
    """A client that sends one request after another."""
    while time.monotonic() < until:
        leaves_after = load.rng.randint(1, 30) if load.rng.random() < 0.1 else None
        options = RequestOptions(priority=load.rng.randint(-1, 1))
        stream = engine.stream(load.conversation(), load.sampling(), options=options)
        reason = "left"
        async for delta in stream:
            if delta.completion is not None:
                reason = delta.completion.finish_reason
            if leaves_after is not None:
                leaves_after -= 1
                if leaves_after <= 0:
                    break
        await stream.aclose()  # type: ignore[attr-defined]
        endings[reason] = endings.get(reason, 0) + 1


async def run(engine: Engine, options: argparse.Namespace) -> list[tuple[float, float, float]]:
    """Memory over time: minutes, host MB, device MB."""
    load, endings, samples = Load(0), {}, []  # type: ignore[var-annotated]
    begin = time.monotonic()
    until = begin + options.minutes * 60
    clients = [asyncio.create_task(client(engine, load, until, endings)) for _ in range(options.at_once)]
    while time.monotonic() < until:
        await asyncio.sleep(min(10.0, options.minutes * 60 / 20))
        device = torch.cuda.memory_reserved() / 2**20 if torch.cuda.is_available() else 0.0
        samples.append(((time.monotonic() - begin) / 60, resident_mb(), device))
        if len(samples) % 12 == 1:
            print(
                f"{samples[-1][0]:6.1f} min {samples[-1][1]:8.1f} MB host {device:8.1f} MB device {endings}", flush=True
            )
    await asyncio.gather(*clients)
    print(f"requests by ending: {json.dumps(endings)}")
    return samples


def main() -> None:
    """Run the load, measure memory, check the invariants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--at-once", type=int, default=24)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = options.checkpoint or Path(folder) / "checkpoint"
        if options.checkpoint is None:
            make_checkpoint(checkpoint, options.size)
        config = EngineConfig(
            num_pages=600, max_length=2048, max_requests=16, max_step_tokens=256, encoder_cache_tokens=1024,
            num_workers=options.workers, processed_image_cache_bytes=16 << 20,
        )  # fmt: skip
        with Engine.load(checkpoint, config=config) as engine:
            samples = asyncio.run(run(engine, options))
            time.sleep(2)  # the engine checks its invariants when it has been idle for a second
            gc.collect()
            assert not engine.has_failed
            client = engine._front_end.core
            assert isinstance(client, CoreThread)
            assert not client._core.wants_check, "the invariants were not checked"
            print(f"invariants hold; {engine.statistics}")
    half = np.array(samples[len(samples) // 2 :])
    for name, column in (("host", 1), ("device", 2)):
        slope = np.polyfit(half[:, 0], half[:, column], 1)[0] * 60
        print(
            f"{name}: {half[0, column]:.1f} MB halfway, {half[-1, column]:.1f} MB at the end, slope {slope:+.1f} MB per hour"
        )


if __name__ == "__main__":
    main()

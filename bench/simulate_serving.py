"""Open-loop serving on a simulated GPU: the effect of a scheduler change on latencies.

    python -m bench.simulate_serving [--rates 32 64] [--bursts 36] [--seconds 10] [--seeds 3] [--breakdown]
                                     [--set target_step_ms=13]

The engine core, its scheduler and the workload of `bench.open_loop` are real; the runner, the clock and the
preprocessing workers are simulated. The time of a step is that of the 3B shape on an H200, interpolated over decode
requests and captured sizes, plus its parts of the vision encoder. The constants are measured there (2026-11-18). Use
the simulation to compare policies, not for absolute latencies; docs/log compares it with the device.
"""

import argparse
import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.open_loop import Arrival, bursts, percentiles, poisson
from saccade.engine.config import EngineConfig
from saccade.engine.core.loop import EngineCore
from saccade.engine.core.messages import AddRequest
from saccade.engine.core.step import ENCODER_PARTS, ChunkResult, EncodeResult, ImageToEncode, StepPlan, StepResult
from saccade.engine.core.step_runner import DeviceCounters, DeviceInfo
from saccade.engine.device.step_inputs import step_size
from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams
from saccade.processor.patches import ImageSettings

DECODE_MS = {1: 1.9, 2: 2.3, 4: 2.4, 8: 2.8, 16: 2.9, 24: 3.1, 32: 3.2, 64: 3.6, 128: 4.3, 256: 5.2}
"""Time of decode steps by number of requests."""
MIXED_MS = {
    16: 3.1, 64: 3.4, 128: 3.8, 192: 4.2, 256: 4.5, 384: 5.5, 512: 6.6, 640: 7.7, 768: 8.7, 896: 9.6, 1024: 10.7,
    1280: 13.1, 1536: 15.4, 2048: 20.1, 3072: 29.4, 4096: 39.1, 4352: 41.5,
}  # fmt: skip
"""Time of steps with prompts and decode requests, by captured size; measured while serving up to 1024."""
ENCODE_MS = {
    256: 1.9, 576: 2.8, 896: 3.4, 1024: 3.6, 1280: 4.2, 1536: 4.8, 2048: 6.0, 2304: 6.7, 2560: 7.6, 3072: 8.6,
    4864: 13.8, 5120: 15.1, 6400: 18.2, 8192: 23.2, 32768: 94.0,
}  # fmt: skip
"""Time of a vision encoder pass by its patch budget, including uploads; the last entry is extrapolated."""
BUDGET_PADDING = 60
"""Average padding of a pass, in patches."""
DECODE_REQUEST_MS = 0.008
"""Time of each decode request of a step with prompts, after the first eight."""
IMAGES = ImageSettings()
LAUNCH_S, READ_S, ENCODE_S, MESSAGE_S, POLL_S = 0.0006, 0.00015, 0.0008, 0.0007, 0.0005
"""Host time to plan and launch a step, read a step, launch a pass, and send a message to another process; maximum wait
for a message. Launches are estimates for a core in its own process."""


def encode_ms(num_patches: int) -> float:
    """Time of a vision encoder pass."""
    return _interpolate(ENCODE_MS, num_patches + BUDGET_PADDING)


def preprocess_ms(images: Sequence[tuple[int, int]]) -> float:
    """Time until a request's prompt is ready: its images are copied and hashed one after another."""
    return 0.9 + sum(0.3 + 4.5e-6 * height * width for height, width in images)


class Work:
    """Device work: a step, or parts of an encoder pass."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.begun_at: float | None = None
        self.ended_at: float | None = None


class Gpu:
    """A stream of device work, and the simulated time."""

    def __init__(self) -> None:
        self.now = self._free_at = 0.0
        self._queued: deque[Work] = deque()

    def launch(self, seconds: float) -> Work:
        """Queue work that takes `seconds`."""
        self._queued.append(work := Work(seconds))
        work.begun_at = max(self.now, self._free_at)
        self._free_at = work.begun_at + seconds
        return work

    def run_until(self, time: float) -> None:
        """Advance the simulated time to `time`."""
        self.now = max(self.now, time)
        while self._queued and self._end_of(self._queued[0]) <= self.now:
            work = self._queued.popleft()
            work.ended_at = self._end_of(work)

    def wait(self, work: Work) -> None:
        """Advance the simulated time to the end of `work`."""
        self.run_until(self._end_of(work))

    @staticmethod
    def _end_of(work: Work) -> float:
        assert work.begun_at is not None, "the work was launched"
        return work.begun_at + work.seconds


class SimulatedRunner:
    """A runner without a device; has the methods that the core uses."""

    num_registered = 0

    def __init__(self, config: EngineConfig, gpu: Gpu) -> None:
        self.config, self.gpu = config, gpu
        self.info = DeviceInfo(
            max_length=8192,
            vocab_size=151936,
            num_pages=100_000,
            max_draft_tokens=0,
            max_pass_patches=8192,
            is_cpu=False,
        )
        self.chunks: dict[str, list[Work]] = {}
        """Steps with a chunk of a request's prompt, by request id."""
        self.requests: dict[str, Request] = {}
        self._pass: tuple[ImageToEncode, ...] = ()
        self._parts_left, self._part_s = 0, 0.0

    def register(self, request: Request, prompt: object, adapter_slot: int | None) -> None:
        """Store a request."""
        self.requests[request.id] = request

    def unregister(self, request_id: str) -> None:
        """Drop an ended request."""
        self.requests.pop(request_id, None)

    def counters(self) -> DeviceCounters:
        """Zero, as all sizes are captured."""
        return DeviceCounters(0, 0, 0)

    def prepare_more(self) -> bool:
        """Do nothing."""
        return False

    def encode_ms(self, num_patches: int) -> float:
        """Time of an encoder pass."""
        return encode_ms(num_patches) if num_patches else 0.0

    def run_encoder(self, plan: StepPlan) -> tuple[EncodeResult, ...]:
        """Launch the encoder parts of a plan; returns the images whose encoding ends with it."""
        if plan.images:
            spans = [self.requests[image.request_id].images[image.image_index] for image in plan.images]
            self._pass, self._parts_left = plan.images, plan.pass_parts
            self._part_s = encode_ms(sum(span.num_patches for span in spans)) / 1e3 / plan.pass_parts
        if not self._pass or not plan.encoder_parts:
            return ()
        self.gpu.launch(plan.encoder_parts * self._part_s)
        self.gpu.run_until(self.gpu.now + ENCODE_S * plan.encoder_parts / ENCODER_PARTS)
        self._parts_left -= plan.encoder_parts
        if self._parts_left:
            return ()
        images, self._pass = self._pass, ()
        return tuple([EncodeResult(image.key) for image in images])

    def forward(self, plan: StepPlan) -> "SimulatedStep":
        """Launch a step."""
        images = self.run_encoder(plan)
        self.gpu.run_until(self.gpu.now + LAUNCH_S)
        work = self.gpu.launch(self._step_ms(plan) / 1e3)
        for chunk in plan.chunks:
            if not chunk.reads_last_token:
                self.chunks.setdefault(chunk.request_id, []).append(work)
        return SimulatedStep(self.gpu, plan, work, images)

    def _step_ms(self, plan: StepPlan) -> float:
        if not plan.chunks:
            return 0.0
        num_decode = sum(chunk.reads_last_token for chunk in plan.chunks)
        num_tokens = sum(chunk.num_tokens for chunk in plan.chunks) - num_decode
        if num_tokens == 0:
            return _interpolate(DECODE_MS, num_decode)
        size = step_size(
            num_decode=num_decode,
            num_tokens=num_tokens,
            num_chunks=1,
            num_samples=1,
            max_requests=self.config.max_requests,
        )
        mixed_ms = _interpolate(MIXED_MS, size.num_tokens if size is not None else num_tokens + num_decode)
        return mixed_ms + DECODE_REQUEST_MS * max(0, num_decode - 8)

    def sample(self, forward: "SimulatedStep", masks: object) -> "SimulatedStep":
        """Return the step: sampling is part of its time."""
        return forward

    def close(self) -> None:
        """Do nothing."""


class SimulatedStep(NamedTuple):
    """A step in flight."""

    gpu: Gpu
    plan: StepPlan
    work: Work
    images: tuple[EncodeResult, ...]

    @property
    def is_done(self) -> bool:
        """Whether the step has ended."""
        return self.work.ended_at is not None

    def read(self) -> StepResult:
        """Wait for the step's end and return its result."""
        self.gpu.wait(self.work)
        self.gpu.run_until(self.gpu.now + READ_S)
        chunks = tuple([ChunkResult(chunk.request_id, (1,) if chunk.samples else ()) for chunk in self.plan.chunks])
        return StepResult(number=self.plan.number, chunks=chunks, images=self.images, duration_s=self.work.seconds)


def _interpolate(table: dict[int, float], x: int) -> float:
    return float(np.interp(x, list(table), list(table.values())))


def requests_of(arrivals: Sequence[Arrival]) -> Iterator[tuple[float, Request]]:
    """Each request with the time when it reaches the core."""
    for number, arrival in enumerate(arrivals):
        token_ids, spans = [1] * 40, []
        for index, (height, width) in enumerate(arrival.images):
            _, rows, columns = IMAGES.grid(height, width)
            num_tokens = rows * columns // 4
            key = f"{number}-{index}".encode()
            spans.append(
                ImageSpan(key=key, start=len(token_ids) + 1, num_tokens=num_tokens, num_patches=4 * num_tokens)
            )
            token_ids += [2, *[3] * num_tokens, 4]
        token_ids += [5 + number] * arrival.num_text
        sampling = SamplingParams(max_tokens=arrival.num_output, ignore_eos=True)
        request = Request(id=str(number), token_ids=token_ids, images=tuple(spans), sampling=sampling)
        yield arrival.arrival_s + preprocess_ms(arrival.images) / 1e3 + MESSAGE_S, request


class Simulation:
    """One run of a workload."""

    def __init__(
        self, arrivals: Sequence[Arrival], config: EngineConfig, requests: Iterable[tuple[float, Request]] | None = None
    ) -> None:
        self.arrivals, self.gpu = arrivals, Gpu()
        self.runner = SimulatedRunner(config, self.gpu)
        self._core = EngineCore(self.runner, clock=lambda: self.gpu.now)  # type: ignore[arg-type]
        self._inbox = deque(sorted(requests or requests_of(arrivals), key=lambda item: item[0]))
        self.ready_at = {request.id: time for time, request in self._inbox}
        self.times: list[list[float]] = [[] for _ in arrivals]
        self._run()

    def _run(self) -> None:
        while self._inbox or self._core.has_work:
            if not self._core.has_work:
                self.gpu.run_until(self._inbox[0][0])
            while self._inbox and self._inbox[0][0] <= self.gpu.now:
                self._add()
            for output in self._core.step(self._poll):
                if output.token_ids:
                    self.times[int(output.request_id)].append(self.gpu.now + MESSAGE_S)

    def _add(self) -> None:
        self._core.handle(AddRequest(request=self._inbox.popleft()[1], prompt=None))  # type: ignore[arg-type]

    def _poll(self) -> None:
        until = self.gpu.now + POLL_S
        has_message = bool(self._inbox) and self._inbox[0][0] < until
        self.gpu.run_until(max(self.gpu.now, self._inbox[0][0]) if has_message else until)
        if has_message:
            self._add()

    def ttft_ms(self) -> list[float]:
        """Time to the first token of each request."""
        return [(times[0] - one.arrival_s) * 1e3 for times, one in zip(self.times, self.arrivals, strict=True)]

    def gaps_ms(self) -> list[float]:
        """Inter-token latencies of all requests."""
        return [gap * 1e3 for times in self.times for gap in np.diff(times)]

    def breakdown_ms(self) -> Iterator[tuple[float, ...]]:
        """Stages of each request: preprocessing, queue, chunks before the last, the last chunk, sending."""
        for number, arrival in enumerate(self.arrivals):
            steps = self.runner.chunks[str(number)]
            first, last, ended = steps[0].begun_at or 0.0, steps[-1].begun_at or 0.0, steps[-1].ended_at or 0.0
            moments = [arrival.arrival_s, self.ready_at[str(number)], first, last, ended, self.times[number][0]]
            yield tuple(np.diff(moments) * 1e3)


def show(name: str, runs: Sequence[Simulation]) -> str:
    """One line of percentiles, averaged over runs."""
    parts = []
    for values in ([run.ttft_ms() for run in runs], [run.gaps_ms() for run in runs]):
        found = [percentiles(np.array(one)) for one in values]
        parts.append(" / ".join(f"{np.mean([one[p] for one in found]):.1f}" for p in ("p50", "p95", "p99", "max")))
    return f"{name}  TTFT p50/95/99/max {parts[0]} ms  gap {parts[1]} ms"


def main() -> None:
    """Simulate and print every rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="*", default=[32, 64])
    parser.add_argument("--bursts", type=float, nargs="*", default=[], help="rates of requests that arrive in bursts")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="an EngineConfig setting")
    parser.add_argument("--breakdown", action="store_true", help="mean times from arrival to first token")
    options = parser.parse_args()
    settings: dict[str, Any] = {name: json.loads(value) for name, value in (item.split("=", 1) for item in options.set)}
    config = EngineConfig(**{"max_length": 8192, "max_draft_tokens": 0} | settings)
    wanted = [(f"{rate:g}/s", poisson, rate) for rate in options.rates]
    wanted += [(f"{rate:g}/s bursts", bursts, rate) for rate in options.bursts]
    for label, draw, rate in wanted:
        runs = [Simulation(draw(rate, options.seconds, seed), config) for seed in range(options.seeds)]
        print(show(label, runs), flush=True)
        if options.breakdown:
            names = ("ready", "first chunk begins", "last chunk begins", "last chunk", "sent")
            means = np.mean([times for run in runs for times in run.breakdown_ms()], axis=0)
            print("   " + ", ".join(f"{name} {mean:.1f}" for name, mean in zip(names, means, strict=True)) + " ms")


if __name__ == "__main__":
    main()

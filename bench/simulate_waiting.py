"""Predictive batching on the simulated device: requests wait a few milliseconds for company, or go at once.

    python -m bench.simulate_waiting [--seconds 10] [--seeds 6]

A request that is ready for the core is held for up to `WAITS_S` if a forecast of arrivals says that another one will be
ready by then; both go together, and share a pass of the encoder and the steps of their prompts. `known` knows the
arrivals, so no forecast can be better. `rate` waits where a next arrival within the wait is likely, given the averaged
interval between the latest arrivals. `always` waits for the whole time or the next request.

Goodput is requests per second whose TTFT and mean gap between tokens are within an objective.
"""

import argparse
import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from bench.open_loop import Arrival, poisson
from bench.simulate_serving import MESSAGE_S, Simulation, preprocess_ms, requests_of
from saccade.engine.config import EngineConfig
from saccade.engine.request import ImageSpan, Request
from saccade.engine.sampling_params import SamplingParams

Forecast = Literal["none", "known", "rate", "always"]
Who = Literal["all", "images", "decoding"]
WAITS_S = (0.002, 0.005, 0.010)
OBJECTIVES = ((0.05, 0.015), (0.1, 0.015), (0.1, 0.03), (0.2, 0.03), (0.5, 0.03))
"""TTFT and mean gap between tokens, in seconds."""
RATES = {"poisson": (32, 48, 64, 72), "bursts": (32, 48, 64), "image-groups": (16, 24, 32)}
"""Requests per second up to the knee and above it."""


class Gate(NamedTuple):
    """Which requests wait, on whose forecast, and how long."""

    forecast: Forecast = "none"
    who: Who = "all"
    """All requests, those with images, or those that arrive while other requests decode."""
    wait_s: float = 0.0


class GatedSimulation(Simulation):
    """A simulation whose requests pass a gate before they reach the core."""

    def __init__(
        self, arrivals: Sequence[Arrival], config: EngineConfig, requests: Sequence[tuple[float, Request]], gate: Gate
    ) -> None:
        self._gate = gate
        self._held: set[str] = set()
        self._seen: set[str] = set()
        self._interval_s, self._last = 1.0, 0.0
        self.num_together = 0
        """Requests that went with one that had waited for them."""
        super().__init__(arrivals, config, requests)

    def _add(self) -> None:
        ready, request = self._inbox[0]
        if request.id not in self._seen:
            self._seen.add(request.id)
            self._interval_s += (ready - self._last - self._interval_s) / 8
            self._last = ready
            if not self._held and self._waits(request):
                self._hold(request)
                return
            self.num_together += bool(self._held)
        self._held.discard(request.id)
        super()._add()
        self._release()

    def _waits(self, request: Request) -> bool:
        gate = self._gate
        if gate.forecast == "none" or (gate.who == "images" and not request.images):
            return False
        if gate.who == "decoding" and not self._core.scheduler.num_running:
            return False
        match gate.forecast:
            case "known":
                return len(self._inbox) > 1 and self._inbox[1][0] <= self.gpu.now + gate.wait_s
            case "rate":
                return 1 - math.exp(-gate.wait_s / self._interval_s) >= 0.5
            case _:
                return True

    def _hold(self, request: Request) -> None:
        self._inbox.popleft()
        self._held.add(request.id)
        until = self.gpu.now + self._gate.wait_s
        index = next((index for index, (ready, _) in enumerate(self._inbox) if ready > until), len(self._inbox))
        self._inbox.insert(index, (until, request))

    def _release(self) -> None:
        for item in [item for item in self._inbox if item[1].id in self._held]:
            self._inbox.remove(item)
            self._inbox.appendleft((self.gpu.now, item[1]))
            self._held.discard(item[1].id)

    def goodput(self, ttft_s: float, gap_s: float, seconds: float) -> float:
        """Requests per second within an objective."""
        gaps = [(times[-1] - times[0]) / max(1, len(times) - 1) for times in self.times]
        waits = [ttft / 1e3 for ttft in self.ttft_ms()]
        return sum(wait <= ttft_s and gap <= gap_s for wait, gap in zip(waits, gaps, strict=True)) / seconds


def bursts(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """The requests of `poisson` in bursts of 4 on average, 5 ms apart."""
    rng = np.random.default_rng(seed)
    now, left, arrivals = 0.0, 0, []
    for one in poisson(rate, seconds, seed):
        if not left:
            now, left = now + rng.exponential(4 / rate), int(rng.geometric(1 / 4))
        left -= 1
        now += rng.exponential(0.005)
        arrivals.append(one._replace(arrival_s=now))
    return arrivals


def image_groups(rate: float, seconds: float, seed: int) -> tuple[list[Arrival], list[tuple[float, Request]]]:
    """Groups of 5 requests in random order that share 3 images of 1280 x 720 and 1,000 of 1,300 tokens of text."""
    rng = np.random.default_rng(seed)
    groups = rng.permutation(int(rate * seconds)) // 5
    now, arrivals, requests = 0.0, [], []
    for number, group in enumerate(groups):
        now += rng.exponential(1 / rate)
        arrivals.append(Arrival(now, 1300, 256, [(720, 1280)] * 3))
        spans = tuple(
            ImageSpan(key=f"{group}-{place}".encode(), start=41 + 922 * place, num_tokens=920, num_patches=3680)
            for place in range(3)
        )
        ids = [1] * 40 + [2, *[3] * 920, 4] * 3 + [5 + int(group)] * 1000 + [100_000 + number] * 300
        sampling = SamplingParams(max_tokens=256, ignore_eos=True)
        request = Request(id=str(number), token_ids=ids, images=spans, sampling=sampling)
        requests.append((now + preprocess_ms(arrivals[-1].images) / 1e3 + MESSAGE_S, request))
    return arrivals, requests


def traces(name: str, rate: float, seconds: float, seed: int) -> tuple[list[Arrival], list[tuple[float, Request]]]:
    """Arrivals and requests of a trace."""
    if name == "image-groups":
        return image_groups(rate, seconds, seed)
    arrivals = (poisson if name == "poisson" else bursts)(rate, seconds, seed)
    return arrivals, list(requests_of(arrivals))


def gates() -> Iterator[Gate]:
    """The gates to compare with none."""
    for wait_s in WAITS_S:
        for who in ("all", "images", "decoding"):
            yield Gate("known", who, wait_s)
        yield Gate("rate", "all", wait_s)
        yield Gate("always", "all", wait_s)


def main() -> None:
    """Print goodput without waiting, and the change of each gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seeds", type=int, default=6)
    options = parser.parse_args()
    config = EngineConfig(max_length=8192, max_draft_tokens=0)
    for name, rates in RATES.items():
        for rate in rates:
            drawn = [traces(name, rate, options.seconds, seed) for seed in range(options.seeds)]
            base: list[float] = []
            for gate in (Gate(), *gates()):
                runs = [GatedSimulation(*one[:1], config, one[1], gate) for one in drawn]
                goods = [float(np.mean([run.goodput(*one, options.seconds) for run in runs])) for one in OBJECTIVES]
                waits = np.concatenate([run.ttft_ms() for run in runs])
                base = base or goods
                change = [
                    "    -  " if not old else f"{new / old - 1:+7.1%}" for new, old in zip(goods, base, strict=True)
                ]
                cells = " ".join(f"{good:7.1f}" for good in goods) if gate.forecast == "none" else " ".join(change)
                together = np.mean([run.num_together for run in runs]) / np.mean([len(run.arrivals) for run in runs])
                print(
                    f"{name} {rate}/s  {gate.forecast:<6} {gate.who:<8} {gate.wait_s * 1e3:4.0f} ms  {cells}  "
                    f"TTFT p50 {np.percentile(waits, 50):6.1f} p90 {np.percentile(waits, 90):6.1f} ms  "
                    f"{together:.0%} joined",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Run the quickstart with several seeds, kill it once half-way, and compare its scores with the baselines.

    python -m bench.quickstart_seeds --seeds 0 1 2

The first seed is killed with SIGKILL when training has saved its second state; the run after it continues from there.
Then each is started once more, which finds everything done. On every seed the interval of the trained model must lie
above those of the same model with other images and of the untrained model. Times are given with the CPU time of all
processes and the load average.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

METRICS = {"vqa": "vqa_accuracy", "captioning": "cider"}


def main() -> None:
    """Print one line per run and per score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    all_apart = True
    with tempfile.TemporaryDirectory(prefix="quickstart-") as root:
        for seed in options.seeds:
            folder = Path(root) / f"seed-{seed}"
            words = [sys.executable, "-m", "saccade", "quickstart", "--dir", str(folder), "--seed", str(seed)]
            words += ["--steps", str(options.steps), "--no-serve", "--json"]
            if seed == options.seeds[0]:
                print(f"seed {seed}: killed after {kill_half_way(words, folder):.0f} s", flush=True)
            for attempt in ("run", "again"):
                wall_s, cpu_s = timed(words)
                load = "/".join(f"{value:.1f}" for value in os.getloadavg())
                print(f"seed {seed}: {attempt} {wall_s:.1f} s, {cpu_s:.1f} s of CPU time, load {load}", flush=True)
            all_apart &= compare(seed, folder / "results")
    sys.exit(0 if all_apart else "a baseline is not below the trained model")


def kill_half_way(words: list[str], folder: Path) -> float:
    """Start it, wait for the second state of training, kill all of its processes. Returns the seconds it ran."""
    began = time.perf_counter()
    process = subprocess.Popen(words, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(folder.glob("run/state/step-*"))) < 2 and process.poll() is None:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return time.perf_counter() - began


def timed(words: list[str]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a run that must succeed."""
    began, before = time.perf_counter(), _children_s()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began, _children_s() - before


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(seed: int, results: Path) -> bool:
    """Print the leading metric of each task with its interval; whether every baseline's interval is below."""
    folders = {"trained": results} | {path.name: path for path in sorted((results / "baselines").iterdir())}
    all_apart = True
    for task, metric in METRICS.items():
        scores = {name: _score(folder, task, metric) for name, folder in folders.items()}
        all_apart &= all(one["high"] < scores["trained"]["low"] for name, one in scores.items() if name != "trained")
        shown = [f"{name} {one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]" for name, one in scores.items()]
        print(f"seed {seed}: {task} {metric}: {', '.join(shown)}", flush=True)
    return all_apart


def _score(folder: Path, task: str, metric: str) -> Any:
    return json.loads((folder / "scores.json").read_text())["tasks"][task]["metrics"][metric]


if __name__ == "__main__":
    main()

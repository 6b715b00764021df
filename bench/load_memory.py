"""Host memory while making and loading the 3B shape: `python bench/load_memory.py [--size 3b] [--folder DIR]`.

Each step runs in a process of its own; the figure is the process's peak over the size of the weights. It needs 8 GB of
disk and, for loading, 9 GB of memory.
"""

import argparse
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def peak_bytes() -> int:
    """Most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def init(folder: Path, size: str) -> str:
    """Make the checkpoint."""
    from saccade.model.initialize import initialize_random, named_size

    start, before = time.perf_counter(), peak_bytes()
    initialize_random(folder, named_size(size))
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    num_files = len(list(folder.glob("*.safetensors")))
    gain = (peak_bytes() - before) / stored
    seconds = time.perf_counter() - start
    return f"init {size}: {stored / 1e9:.2f} GB in {num_files} files, peak {gain:.2f}x the weights, {seconds:.0f} s"


def load(folder: Path, size: str) -> str:
    """Load it on the CPU."""
    from saccade.model.weights import load_model

    start, before = time.perf_counter(), peak_bytes()
    model = load_model(folder, device="cpu")
    held = sum(parameter.nbytes for parameter in model.parameters())
    gain = (peak_bytes() - before) / held
    return f"load {size}: {held / 1e9:.2f} GB, peak {gain:.3f}x the weights, {time.perf_counter() - start:.0f} s"


def main() -> None:
    """Run both steps in fresh processes and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--step", choices=["init", "load"])
    options = parser.parse_args()
    if options.step:
        print({"init": init, "load": load}[options.step](options.folder, options.size))
        return
    scratch = Path(tempfile.mkdtemp(prefix="saccade-load-"))
    try:
        for step in ("init", "load"):
            command = [
                sys.executable,
                __file__,
                "--size",
                options.size,
                "--folder",
                str((options.folder or scratch) / "checkpoint"),
            ]
            subprocess.run([*command, "--step", step], check=True)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main()

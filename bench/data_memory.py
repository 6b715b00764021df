"""Memory of a stream over 20 epochs: resident size of the trainer and its workers.

    python -m bench.data_memory [--epochs 20]

Packed sequences of 4096 tokens from 600 photos, two workers; the process tree's proportional set size is read after
every epoch.
"""

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

import numpy as np
import torch

from bench.data import write_tars
from saccade.data.loader import open_stream
from saccade.model.initialize import initialize_random, named_size


def tree_mb() -> float:
    """Proportional set size of this process and all below it."""
    import psutil

    total, me = 0, psutil.Process(os.getpid())
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # exited meanwhile
            total += process.memory_full_info().pss
    return total / 2**20


def main() -> None:
    """Stream, sample, fit a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tars(folder / "tars", 600)
        initialize_random(folder / "checkpoint", named_size("tiny"), dtype=torch.float32)
        sizes, seen = [], 0
        with open_stream(
            folder / "tars", checkpoint=folder / "checkpoint", max_seq_len=4096, num_epochs=options.epochs
        ) as stream:
            for batch in stream:
                seen += sum(len(sequence.sample_ids) for sequence in batch.sequences)
                if seen >= 600 * (len(sizes) + 1):
                    sizes.append(tree_mb())
                    print(f"epoch {len(sizes):2}: {sizes[-1]:.1f} MB", flush=True)
    half = sizes[len(sizes) // 4 :]
    slope, _ = np.polyfit(np.arange(len(half)), half, 1)
    print(f"slope after the first quarter: {slope:+.2f} MB per epoch of 600 samples; spread {np.std(half):.1f} MB")


if __name__ == "__main__":
    main()

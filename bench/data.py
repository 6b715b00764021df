"""CPU cost of reading and decoding, compared with webdataset, mosaicml-streaming and litdata where they are installed.

    python -m bench.data [--samples 2000] [--folder FOLDER]        (or saccade bench data)

The same photo-like JPEGs (512 x 512, about 90 KB) with captions are stored as WebDataset tars, MDS shards and litdata
chunks. Each reader runs in its own process, on warm files; measured is the CPU time of the whole process tree per
sample, without imports and opening, the best of three passes. Readers shuffle with their own means.

read      the bytes of image and text, in the process itself
worker    the same in one worker process (torch's DataLoader, litdata's own), which returns sizes and keeps the bytes
decode    image to RGB, bicubic to 336 x 336, uint8, stacked by 32: with Pillow, or simplejpeg and torch's resize
stream    (ours alone) packed sequences of native-resolution images as a trainer receives them, from two workers
"""

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Item = tuple[bytes, bytes]
"""An image and its text, both encoded."""

WORDS = "a the red old small dog house tree street woman runs sits near photo of".split()


# ------------------------------------------------------------------ the same samples in three layouts


def photo(number: int, side: int = 512) -> bytes:
    """Smooth colour, edges and grain: about as hard to compress as a photo."""
    from PIL import Image

    rng = np.random.default_rng(number)
    small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC), dtype=np.int16)
    y, x = np.mgrid[:side, :side]
    edges = ((x * rng.uniform(0.5, 2) + y) // rng.integers(20, 60) % 2 * 40).astype(np.int16)[..., None]
    grain = rng.normal(0, 14, (side, side, 1)).astype(np.int16)
    file = io.BytesIO()
    Image.fromarray(np.clip(smooth + edges + grain, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
    return file.getvalue()


def items(count: int) -> Iterator[tuple[str, Item]]:
    """Keys, images, captions."""
    pictures = [photo(number) for number in range(min(count, 200))]  # drawing is slow, and reading costs the same
    for number in range(count):
        rng = np.random.default_rng(number)
        text = " ".join(rng.choice(WORDS, rng.integers(6, 24)))
        yield f"{number:08d}", (pictures[number % len(pictures)], text.encode())


def write_tars(folder: Path, count: int) -> None:
    """WebDataset tars of 500 samples, and their index."""
    from saccade.data.index_builder import build_index
    from saccade.data.sample import Sample
    from saccade.data.shards import ShardWriter

    with ShardWriter(folder, max_samples=500) as writer:
        for key, (picture, text) in items(count):
            writer.write(Sample(key=key, source="bench", members={"jpg": picture, "txt": text}))
    build_index(folder, num_workers=1)


def write_mds(folder: Path, count: int) -> None:
    """MosaicML's shards."""
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "txt": "bytes"}, size_limit=1 << 26) as writer:
        for _, (picture, text) in items(count):
            writer.write({"jpg": picture, "txt": text})


def write_litdata(folder: Path, count: int) -> None:
    """litdata's chunks."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for number, (_, (picture, text)) in enumerate(items(count)):
        writer.add_item(number, {"jpg": picture, "txt": text})
    writer.done()
    writer.merge()


# ------------------------------------------------------------------ readers


def read_saccade(folder: Path) -> Callable[[int], Iterable[Item]]:
    """Our index and `pread`, in the two-level permuted order of an epoch."""
    from saccade.data.index import open_index
    from saccade.data.order import EpochOrder

    index = open_index(folder / "tars")

    def epoch(number: int) -> Iterator[Item]:
        order = EpochOrder(index.kept_sizes, seed=0, epoch=number, window_shards=16)
        for begin in range(0, len(order), 256):
            shards, rows = order.locate(np.arange(begin, min(begin + 256, len(order))))
            for shard, row in zip(shards.tolist(), rows.tolist(), strict=True):
                members = index.read_sample(shard, row).members
                yield members["jpg"], members["txt"]

    return epoch


def read_webdataset(folder: Path) -> Callable[[int], Iterable[Item]]:
    """webdataset with its shard shuffle and a buffer of 1000."""
    import webdataset

    tars = sorted(str(path) for path in (folder / "tars").glob("*.tar"))

    def epoch(number: int) -> Iterator[Item]:
        dataset = (
            webdataset.WebDataset(tars, shardshuffle=100, seed=number, empty_check=False)
            .shuffle(1000)
            .to_tuple("jpg", "txt")
        )
        yield from dataset

    return epoch


def read_mosaic(folder: Path) -> Callable[[int], Iterable[Item]]:
    """mosaicml-streaming, local, shuffled."""
    from streaming import StreamingDataset

    dataset = StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=32)

    def epoch(number: int) -> Iterator[Item]:
        del number
        for sample in dataset:
            yield sample["jpg"], sample["txt"]

    return epoch


def read_litdata(folder: Path) -> Callable[[int], Iterable[Item]]:
    """litdata, local, shuffled."""
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder / "litdata"), shuffle=True)

    def epoch(number: int) -> Iterator[Item]:
        del number
        for sample in dataset:
            yield sample["jpg"], sample["txt"]

    return epoch


READERS = {
    "saccade": read_saccade,
    "webdataset": read_webdataset,
    "mosaicml-streaming": read_mosaic,
    "litdata": read_litdata,
}
MODULES = {"saccade": "saccade", "webdataset": "webdataset", "mosaicml-streaming": "streaming", "litdata": "litdata"}


# ------------------------------------------------------------------ decoders


def with_pillow(picture: bytes) -> Any:
    """Decode with Pillow, as most pipelines do."""
    import torch
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB").resize((336, 336), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(image)).permute(2, 0, 1).contiguous()


def with_ours(picture: bytes) -> Any:
    """The processor's own decoder, with every check it makes, and its fast resize."""
    import torch

    from saccade.processor.image import MediaLimits, load_image
    from saccade.processor.torch_resize import torch_resize

    pixels = torch_resize(load_image(picture, MediaLimits()), 336, 336)
    return torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).contiguous()


def with_same(picture: bytes) -> Any:
    """simplejpeg and torch's resize bare, for the peers."""
    import simplejpeg
    import torch

    pixels = torch.from_numpy(simplejpeg.decode_jpeg(picture, colorspace="RGB")).permute(2, 0, 1)[None]
    return torch.nn.functional.interpolate(pixels, (336, 336), mode="bicubic", antialias=True)[0].contiguous()


DECODERS = {"pillow": with_pillow, "saccade": with_ours, "simplejpeg + torch": with_same}


# ------------------------------------------------------------------ one measurement in one process


def cpu_seconds() -> float:
    """CPU time of this process and all its descendants, alive or gone; of this process to the microsecond."""
    import resource

    import psutil

    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    alive = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(u.ru_utime + u.ru_stime for u in used) + sum(times.user + times.system for times in alive)


class _Passes:
    """Epochs of a reader as an iterable dataset, opened in the worker."""

    def __init__(self, reader: str, folder: Path) -> None:
        self.reader, self.folder = reader, folder
        self.epoch: Callable[[int], Iterable[Item]] | None = None
        self.number = 0

    def __iter__(self) -> Iterator[Item]:
        self.epoch = self.epoch or READERS[self.reader](self.folder)
        self.number += 1
        return iter(self.epoch(self.number))


def _sizes(batch: list[Any]) -> list[int]:
    """The sizes of the items: all that leaves the worker."""
    return [len(item["jpg"]) if isinstance(item, dict) else len(item[0]) for item in batch]


def worker_loader(reader: str, folder: Path) -> Iterable[list[int]]:
    """One worker process, batches of 32, kept alive over the passes."""
    from torch.utils.data import DataLoader, IterableDataset

    options: dict[str, Any] = {"batch_size": 32, "num_workers": 1, "collate_fn": _sizes, "persistent_workers": True}
    if reader in ("litdata", "mosaicml-streaming"):  # map to the worker themselves
        if reader == "litdata":
            from litdata import StreamingDataLoader, StreamingDataset

            return StreamingDataLoader(StreamingDataset(str(folder / "litdata"), shuffle=True), **options)
        from streaming import StreamingDataset as MosaicDataset

        return DataLoader(MosaicDataset(local=str(folder / "mds"), shuffle=True, batch_size=32), **options)
    if reader == "saccade":  # as our own workers start
        from saccade.workers.process import keep_freed_memory

        options["worker_init_fn"] = lambda number: keep_freed_memory()
    kind = type("Passes", (_Passes, IterableDataset), {})
    return DataLoader(kind(reader, folder), **options)


def measure_worker(reader: str, folder: Path) -> dict[str, Any]:
    """CPU milliseconds per sample of the best of three passes through one worker."""
    loader = worker_loader(reader, folder)
    best, count = float("inf"), 0
    for number in range(4):
        begin, seen = cpu_seconds(), 0
        for sizes in loader:
            seen += len(sizes)
        if number:
            best, count = min(best, (cpu_seconds() - begin) / seen), seen
    return {"cpu_ms": round(best * 1e3, 4), "samples": count}


def measure(reader: str, decoder: str | None, folder: Path) -> dict[str, Any]:
    """CPU milliseconds per sample of the best of three passes."""
    if reader == "stream":
        return measure_stream(folder)
    if decoder == "worker":
        return measure_worker(reader, folder)
    if decoder:
        import torch

        torch.set_num_threads(1)
    epoch = READERS[reader](folder)
    best, count = float("inf"), 0
    for number in range(4):  # the first pass opens files and fills caches
        begin, seen, stack = cpu_seconds(), 0, []
        for picture, _ in epoch(number):
            seen += 1
            if decoder:
                stack.append(DECODERS[decoder](picture))
                if len(stack) == 32:
                    torch.stack(stack)
                    stack = []
        if number:
            best, count = min(best, (cpu_seconds() - begin) / seen), seen
    return {"cpu_ms": round(best * 1e3, 4), "samples": count}


def measure_stream(folder: Path) -> dict[str, Any]:
    """Packed sequences as the trainer receives them, two workers, after the first six batches."""
    from saccade.data.loader import open_stream

    with open_stream(
        folder / "tars", checkpoint=folder / "checkpoint", max_seq_len=16384, num_workers=2, prefetch=2
    ) as stream:
        batches = iter(stream)
        for _ in range(6):
            next(batches)
        begin, wall = cpu_seconds(), time.perf_counter()
        samples = sum(len(next(batches).sample_ids) for _ in range(12))
        cpu, wall = cpu_seconds() - begin, time.perf_counter() - wall
    return {"cpu_ms": round(cpu / samples * 1e3, 3), "samples": samples, "samples_per_s": round(samples / wall, 1)}


def child(reader: str, decoder: str | None, folder: Path) -> dict[str, Any]:
    """Measure in a fresh process."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.data", "--folder", str(folder), "--child", reader]
    command += ["--decoder", decoder] if decoder else []
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        return {"failed": (run.stderr.strip().splitlines() or ["?"])[-1][:100]}
    return dict(json.loads(run.stdout.strip().splitlines()[-1]))


def has(module: str) -> bool:
    """Whether a peer is installed."""
    from importlib.util import find_spec

    return find_spec(module) is not None


def make_all(folder: Path, count: int) -> None:
    """Write every layout whose library is installed, and a checkpoint for the packed stream."""
    import torch

    from saccade.model.initialize import initialize_random, named_size

    writers = {"tars": ("saccade", write_tars), "mds": ("streaming", write_mds), "litdata": ("litdata", write_litdata)}
    for name, (module, write) in writers.items():
        if has(module) and not (folder / name).exists():
            try:
                write(folder / name, count)
            except (ImportError, RuntimeError) as error:  # a peer that does not run here is reported as failed
                print(f"{name}: not written: {error}", file=sys.stderr)
    if not (folder / "checkpoint").exists():
        initialize_random(folder / "checkpoint", named_size("tiny"), dtype=torch.float32)


def measurements(folder: Path, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """All measurements, with their ratio to ours."""
    found = []
    readers = [name for name in READERS if has(MODULES[name])]
    tasks: list[tuple[str, str, str | None]] = [("read", name, None) for name in readers]
    tasks += [("worker", name, "worker") for name in readers]
    tasks += [("decode", "saccade", "saccade"), ("decode", "saccade", "pillow")]
    tasks += [("decode", name, decoder) for name in readers[1:] for decoder in ("simplejpeg + torch", "pillow")]
    tasks += [("stream", "stream", None)]
    ours: dict[str, float] = {}
    for task, reader, decoder in tasks:
        shown = decoder if task == "decode" else None
        row = {"task": task, "reader": reader, "decoder": shown} | child(reader, decoder, folder)
        if "cpu_ms" in row:
            ours.setdefault(task, row["cpu_ms"])
            row["ours_over_it"] = round(ours[task] / row["cpu_ms"], 3)
        numbers = row.get("failed") or f"{row['cpu_ms']:>8.3f} ms CPU   ours is {row['ours_over_it']:.2f}x"
        say(
            f"{task:<8}{reader:<20}{shown or '':<20}{numbers}"
            + (f"   {row['samples_per_s']} samples/s" if "samples_per_s" in row else "")
        )
        found.append(row)
    return found


def run(samples: int, folder: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Write the layouts, measure every reader; `say` gets each line."""
    with tempfile.TemporaryDirectory() as scratch:
        target = folder or Path(scratch)
        make_all(target, samples)
        return measurements(target, say)


def main() -> None:
    """The command line, also of the measuring child process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="keep and reuse the layouts here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--decoder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.child, options.decoder, options.folder)))
    else:
        run(options.samples, options.folder, print)


if __name__ == "__main__":
    main()

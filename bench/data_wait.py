"""How long a trainer waits for data from a slow store: 100 ms per request, a consumer at the pace of training steps.

    python -m bench.data_wait

The store is an HTTP server on loopback that answers each request after 100 ms. The stream has two workers, an empty
cache and lanes; one step is one batch, and the consumer sleeps for its duration, as a GPU would compute. The first
batches, while queues and cache are empty, are not counted.
"""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
import threading
import time
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench.data import photo
from saccade.data.loader import open_stream
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.data.sources import open_sources
from saccade.data.storage import StorageConfig
from saccade.model.initialize import initialize_random, named_size

WARM_UP = 3
"""Batches that are not counted."""


class SlowStore(SimpleHTTPRequestHandler):
    """Files of a folder by ranges; every request takes `latency_s` longer."""

    protocol_version = "HTTP/1.1"

    def __init__(self, *arguments: object, latency_s: float, **options: object) -> None:
        self.latency_s = latency_s
        super().__init__(*arguments, **options)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Answer a range."""
        time.sleep(self.latency_s)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = Path(self.translate_path(self.path))
        if asked is None or not path.is_file():
            super().do_GET()
            return
        begin, end = int(asked[1]), int(asked[2])
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin + 1)
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/{path.stat().st_size}")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silence."""


def write_shards(folder: Path, num_samples: int) -> None:
    """Photos of 256 pixels with a caption."""
    pictures = [photo(number, 256) for number in range(100)]
    with ShardWriter(folder, max_samples=200) as writer:
        for number in range(num_samples):
            text = f"A photo with the number {number}."
            writer.write(Sample(f"{number:08d}", "set", {"jpg": pictures[number % 100], "txt": text.encode()}))


def main() -> None:
    """Measure with and without reading ahead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-s", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--latency-s", type=float, default=0.1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        initialize_random(root / "checkpoint", named_size("tiny"))
        write_shards(root / "served" / "set", 4000)
        open_sources(root / "served" / "set", checkpoint=root / "checkpoint", num_workers=1)
        handler = functools.partial(SlowStore, latency_s=options.latency_s, directory=str(root / "served"))
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/set"
        print("read ahead  waited  share  downloaded  requests  chunks ahead / when needed / from the cache")
        for num_ahead in (4, 0):
            storage = StorageConfig(
                cache_folder=str(root / f"cache-{num_ahead}"), chunk_bytes=1 << 18, num_ahead=num_ahead
            )
            waited = 0.0
            with open_stream(
                url, checkpoint=root / "checkpoint", max_seq_len=2048, global_batch_size=4, num_lanes=4,
                unit_bytes=1 << 20, window_shards=2, packing_buffer_size=100, num_workers=2, storage=storage,
            ) as stream:  # fmt: skip
                for _ in range(WARM_UP):
                    next(stream)
                    time.sleep(options.step_s)
                for _ in range(options.steps):
                    began = time.perf_counter()
                    next(stream)
                    waited += time.perf_counter() - began
                    time.sleep(options.step_s)
                counters = stream.storage_counters
            share = waited / (waited + options.steps * options.step_s)
            print(
                f"{num_ahead:10}  {waited:5.2f}s  {share:5.1%}  {counters.num_bytes / 1e6:7.1f}MB  "
                f"{counters.num_requests:8}  {counters.num_ahead} / {counters.num_misses} / {counters.num_hits}"
            )
        server.shutdown()


if __name__ == "__main__":
    main()

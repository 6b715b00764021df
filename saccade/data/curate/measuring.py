"""Features of all shards, measured in parallel: Daft hands shards to worker processes, of this machine or of a Ray cluster.

Daft's part is to place the work: one shard at a time to each worker, workers in processes of their own, on a cluster when told, progress
as shards finish. What happens to a shard is `features.py`, plain numpy. (Daft can decode and hash images itself, but takes a truncated
JPEG for a whole one with a grey lower half, and is at 627 photos of 224 pixels a second where reduced decoding is at 3,000.)
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from saccade.data.curate.features import is_measured, write_features
from saccade.data.index import Progress, ShardIndex
from saccade.errors import ConfigError, DataError

_LOG = logging.getLogger(__name__)


def measure_features(
    index: ShardIndex,
    *,
    num_workers: int | None = None,
    ray_address: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> int:
    """Measure the shards that have no features yet; the number of shards measured.

    `num_workers` None is one process per core; with one, this process does the work itself. With `ray_address` the processes
    are those of that cluster, whose machines must see the shards and the index under the same paths. A shard that cannot be
    read does not keep the others from being measured; the error comes at the end.
    """
    missing = [shard for shard in range(len(index.shards)) if not is_measured(index, shard)]
    if not missing:
        return 0
    _LOG.info("%s: measuring %d of %d shards", index.path, len(missing), len(index.shards))
    absent = set(missing)
    done = [entry for shard, entry in enumerate(index.entries) if shard not in absent]
    num_done, num_samples, num_bytes = len(done), sum(e.num_samples for e in done), sum(e.num_bytes for e in done)
    is_alone = not ray_address and (num_workers == 1 or len(missing) == 1)
    results = _measure_here(index, missing) if is_alone else _measure_by_daft(index, missing, num_workers, ray_address)
    complaints = []
    for shard, complaint in results:
        if complaint:
            complaints.append(complaint)
            continue
        num_done += 1
        num_samples += index.entries[shard].num_samples
        num_bytes += index.entries[shard].num_bytes
        if on_progress:
            on_progress(Progress(num_done, len(index.shards), num_samples, num_bytes))
    if complaints:
        others = f" ({len(complaints) - 1} more shards failed)" if len(complaints) > 1 else ""
        raise DataError(complaints[0] + others)
    return len(missing)


def _measure(index: ShardIndex, shard: int) -> str:
    """What is wrong with the shard; nothing where it is measured."""
    try:
        write_features(index, shard)
    except DataError as error:
        return str(error)
    return ""


def _measure_here(index: ShardIndex, shards: Sequence[int]) -> Iterator[tuple[int, str]]:
    for shard in shards:
        yield shard, _measure(index, shard)


def _measure_by_daft(
    index: ShardIndex, shards: Sequence[int], num_workers: int | None, ray_address: str | None
) -> Iterator[tuple[int, str]]:
    daft = _start_daft(ray_address)

    @daft.cls(max_concurrency=num_workers or _num_cores(ray_address), use_process=True)
    class Worker:
        """In a process of its own, one shard at a time."""

        def __init__(self, index: ShardIndex) -> None:
            self._index = index
            warnings.simplefilter("ignore")  # Daft would print them among our own output

        @daft.method.batch(return_dtype=daft.DataType.string(), batch_size=1)  # type: ignore[untyped-decorator]
        def measure(self, shards: Any) -> list[str]:
            return [_measure(self._index, shard) for shard in shards.to_pylist()]

    table = daft.from_pydict({"shard": list(shards)})
    if ray_address:
        table = table.into_partitions(len(shards))  # a cluster places partitions; on one machine batches are enough
    plan = table.select(table["shard"], Worker(index).measure(table["shard"]).alias("complaint"))
    try:
        for row in plan.iter_rows():
            yield row["shard"], row["complaint"]
    except RuntimeError as error:
        raise DataError(
            f"a worker that measured {index.path} ended unexpectedly ({error}); memory may have run out. "
            "What was finished is kept: run again, with fewer workers if memory was short"
        ) from error


def _start_daft(ray_address: str | None) -> ModuleType:
    """Daft on this machine or on a Ray cluster, without its telemetry and its own progress bar."""
    os.environ.setdefault("DAFT_ANALYTICS_ENABLED", "0")
    os.environ.setdefault("DAFT_PROGRESS_BAR", "0")
    import daft

    if ray_address:
        try:
            daft.set_runner_ray(ray_address, noop_if_initialized=True)
        except ImportError as error:
            raise ConfigError(f"{ray_address}: Ray is not installed. Run pip install 'saccade[ray]'") from error
    return daft


def _num_cores(ray_address: str | None) -> int:
    if not ray_address:
        return len(os.sched_getaffinity(0))
    return int(import_module("ray").cluster_resources()["CPU"])

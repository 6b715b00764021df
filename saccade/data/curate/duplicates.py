"""Find samples that repeat a better one, by stages over partitions (`partitions.py`, `exchange.py`).

    exact           the same image bytes, in the same order
    near, by image  the same images resized, encoded again, cropped, mirrored, turned, brighter, grey (`image_match`)
    near, by text   a Jaccard similarity of the texts above the threshold

Each drops all samples but the best. What repeats a captioned image is a setting (`keep_one_per`); samples with
questions or a conversation are compared by image and text, since two questions about one chart are two samples. Samples
without images repeat each other when their texts are equal.

Equal things meet in the partition of their key. Likely copies meet in clusters of similar images (`image_search.py`) or
buckets of similar texts, are verified where the worse one is, and follow the best one that they repeat (`leaders.py`):
groups are stars, not chains. An image is verified with the `MAX_CANDIDATES` most similar better ones (0.1-0.3 ms each),
a text with the best `MAX_COMPARED` of each of its buckets. Memory is that of one partition, whatever the number of
samples, and so is the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from saccade.data.curate import image_search
from saccade.data.curate.comparisons import Images, Texts
from saccade.data.curate.exchange import Rows, Runner
from saccade.data.curate.image_search import (
    LIKELY,
    NUM_PROBES,
    NUM_VIEWS,
    SEEN,
    Clusters,
    best_at_home,
    likely_pairs,
    view_vectors,
)
from saccade.data.curate.leaders import EDGE, find_leaders, read_leaders, wanted
from saccade.data.curate.partitions import Dropper, Partitions
from saccade.data.curate.sample_table import Ids, SampleTable
from saccade.data.curate.text_features import NUM_BANDS

MAX_COMPARED = 32
"""Texts of a bucket that every other one is compared with: the best."""
_EQUAL = np.dtype([("keys", "u8", 3), ("quality", "u8"), ("sample", "u8"), ("file", "u8", 2)])
"""A sample with what makes it equal to others."""
_IMAGE = np.dtype([("content", "u8", 2), ("quality", "u8"), ("image", "u8")])
_TWIN = np.dtype([("image", "u8"), ("first", "u8")])
"""An image and the best one with the same bytes."""
_TRAINED = np.dtype([("order", "u8"), ("image", "u8"), ("vector", "i1", image_search.DIMS)])
_PICTURE = np.dtype([("image", "u8"), ("picture", "u8")])
"""An image and the one that it repeats."""
_BANDED = np.dtype([("band", "u4"), ("key", "u4"), ("quality", "u8"), ("sample", "u8")])
_BATCH = 2**20  # rows that are compared at a time


@dataclass(frozen=True)
class Step:
    """A step of curation: it sees the samples that the earlier steps kept."""

    partitions: Partitions
    name: str
    before: tuple[str, ...]
    """The earlier steps."""

    def dropper(self, partition: int) -> Dropper:
        """What drops samples."""
        return self.partitions.dropper(self.name, partition)

    def kept(self, partition: int) -> list[SampleTable]:
        """The samples of each shard that the earlier steps kept."""
        return list(self.partitions.kept(partition, self.before))


def drop_exact_duplicates(runner: Runner, step: Step) -> None:
    """Drop all but the best of the samples with the same image bytes."""
    num = step.partitions.num_partitions
    runner.run(f"{step.name}-files", _send_files, step, num)
    runner.run(f"{step.name}-firsts", _drop_equal_files, step, num)


def drop_shared_texts(runner: Runner, step: Step) -> None:
    """Drop all samples whose caption more images share than the settings allow."""
    num = step.partitions.num_partitions
    runner.run(f"{step.name}-texts", _send_texts, step, num)
    runner.run(f"{step.name}-shared", _drop_frequent_texts, step, num)


def count_shared_images(runner: Runner, step: Step) -> int:
    """Samples whose image bytes another sample has as well."""
    num = step.partitions.num_partitions
    runner.run(f"{step.name}-files", _send_image_files, step, num)
    return sum(result["shared"] for result in runner.run(f"{step.name}-count", _count_shared, step, num))


def drop_near_duplicate_images(runner: Runner, step: Step) -> None:
    """Drop all but the best of the samples whose images are copies of each other.

    Samples with the same image bytes are left to `drop_exact_duplicates`.
    """
    num = step.partitions.num_partitions
    counts = runner.run(f"{step.name}-contents", _send_contents, step, num)
    search = _Search(step, sum(count["images"] for count in counts))
    runner.run(f"{step.name}-twins", _find_twins, step, num)
    if Clusters.num_trained(search.num_images):
        runner.run(f"{step.name}-vectors", _send_vectors, search, num)
    runner.run(f"{step.name}-centres", _train, search, 1)
    runner.run(f"{step.name}-views", _send_views, search, num)
    runner.run(f"{step.name}-pairs", _find_pairs, step, num)
    runner.run(f"{step.name}-closest", _keep_closest, step, num)
    where = find_leaders(runner, step.partitions, Images(), step.name)
    found = _Found(step, where)
    runner.run(f"{step.name}-pictures", _send_pictures, found, num)
    runner.run(f"{step.name}-samples", _send_samples, found, num)
    runner.run(f"{step.name}-firsts", _drop_same_pictures, step, num)


def drop_near_duplicate_texts(runner: Runner, step: Step) -> None:
    """Drop all but the best of the samples with nearly the same text."""
    num = step.partitions.num_partitions
    runner.run(f"{step.name}-bands", _send_bands, step, num)
    runner.run(f"{step.name}-buckets", _find_text_pairs, step, num)
    where = find_leaders(runner, step.partitions, Texts(step.partitions.settings.min_text_similarity), step.name)
    runner.run(f"{step.name}-drop", _drop_followers, _Found(step, where), num)


# ------------------------------------------------------------------ equal samples


def _send_equals(step: Step, partition: int, keys_of: Callable[[SampleTable], tuple[Rows, NDArray[np.bool_]]]) -> None:
    sender = step.partitions.exchange(f"{step.name}-equals", _EQUAL).sender(partition)
    for samples in step.kept(partition):
        rows, is_meant = keys_of(samples)
        rows = rows[is_meant]
        sender.send(step.partitions.of_keys(*rows["keys"].T), rows)
    sender.close()


def _rows_of(samples: SampleTable, keys: Sequence[NDArray[np.uint64]]) -> Rows:
    rows = np.zeros(len(samples), _EQUAL)
    for number, key in enumerate(keys):
        rows["keys"][:, number] = key
    rows["quality"], rows["sample"] = samples.qualities, samples.ids
    rows["file"] = np.stack(file_keys(samples), 1)
    return rows


def _send_files(step: Step, partition: int) -> dict[str, int]:
    for_captions = step.partitions.settings.keep_one_per != "image"

    def keys_of(samples: SampleTable) -> tuple[Rows, NDArray[np.bool_]]:
        keys = [*file_keys(samples), text_keys(samples, for_captions)]
        return _rows_of(samples, keys), np.ones(len(samples), bool)

    _send_equals(step, partition, keys_of)
    return {}


def _send_texts(step: Step, partition: int) -> dict[str, int]:
    _send_equals(step, partition, lambda samples: (_rows_of(samples, [samples.text_hashes]), ~samples.is_conversation))
    return {}


def _send_image_files(step: Step, partition: int) -> dict[str, int]:
    _send_equals(step, partition, lambda samples: (_rows_of(samples, file_keys(samples)), samples.has_image))
    return {}


def _equals(step: Step, partition: int) -> tuple[Rows, NDArray[np.int64], NDArray[np.int64]]:
    """Rows by key, the best first; for each row the first one with its keys, and the number of those."""
    rows = step.partitions.exchange(f"{step.name}-equals", _EQUAL).rows(partition)
    rows = rows[np.lexsort((rows["sample"], rows["quality"], *rows["keys"].T))]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows["keys"][1:] != rows["keys"][:-1]).any(1)
    begins = np.flatnonzero(is_first)
    sizes = np.diff(np.append(begins, len(rows)))
    return rows, np.repeat(begins, sizes), np.repeat(sizes, sizes)


def _drop_equal_files(step: Step, partition: int) -> dict[str, int]:
    rows, first, _ = _equals(step, partition)
    worse = np.flatnonzero(first != np.arange(len(rows)))
    dropper = step.dropper(partition)
    dropper.drop(rows["sample"][worse], "exact duplicate", rows["sample"][first[worse]])
    return dropper.close()


def _drop_same_pictures(step: Step, partition: int) -> dict[str, int]:
    rows, first, _ = _equals(step, partition)
    worse = np.flatnonzero((rows["file"] != rows["file"][first]).any(1))
    dropper = step.dropper(partition)
    dropper.drop(rows["sample"][worse], "near-duplicate image", rows["sample"][first[worse]])
    return dropper.close()


def _drop_frequent_texts(step: Step, partition: int) -> dict[str, int]:
    limit = step.partitions.settings.max_images_per_text
    assert limit is not None, "the step runs only with a limit"
    rows, _, sizes = _equals(step, partition)
    dropper = step.dropper(partition)
    dropper.drop(rows["sample"][sizes > limit], "text shared by many images")
    return dropper.close()


def _count_shared(step: Step, partition: int) -> dict[str, int]:
    _, _, sizes = _equals(step, partition)
    return {"shared": int((sizes > 1).sum())}


def file_keys(samples: SampleTable) -> list[NDArray[np.uint64]]:
    """Two keys [n] for the image bytes of a sample."""
    return [_sequence_keys(samples.images.contents[:, half], samples) for half in (0, 1)]


def _sequence_keys(values: NDArray[np.uint64], samples: SampleTable) -> NDArray[np.uint64]:
    """[n]: one key for the values of a sample's images in their order."""
    images = samples.images
    mixed = (values ^ (images.positions.astype(np.uint64) << np.uint64(40))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = np.zeros(len(samples), np.uint64)
    np.add.at(keys, images.owners, mixed ^ (mixed >> np.uint64(32)))
    return keys


def text_keys(samples: SampleTable, for_captions: bool) -> NDArray[np.uint64]:
    """[n]: the hash of the text if texts are compared, else 0."""
    is_compared = samples.is_conversation | ~samples.has_image | for_captions
    return np.where(is_compared, samples.text_hashes, np.uint64(0))


# ------------------------------------------------------------------ images: likely copies


@dataclass(frozen=True)
class _Search:
    step: Step
    num_images: int


def _send_contents(step: Step, partition: int) -> dict[str, int]:
    """Send every image to the partition of its bytes."""
    sender = step.partitions.exchange(f"{step.name}-images", _IMAGE).sender(partition)
    num_images = 0
    for samples in step.kept(partition):
        rows = np.empty(len(samples.images.owners), _IMAGE)
        rows["content"], rows["image"] = samples.images.contents, samples.image_ids
        rows["quality"] = samples.qualities[samples.images.owners]
        sender.send(step.partitions.of_keys(*rows["content"].T), rows)
        num_images += len(rows)
    sender.close()
    return {"images": num_images}


def _find_twins(step: Step, partition: int) -> dict[str, int]:
    """Tell images with the same bytes, and the best of them: the others are not searched for."""
    rows = step.partitions.exchange(f"{step.name}-images", _IMAGE).rows(partition)
    rows = rows[np.lexsort((rows["image"], rows["quality"], *rows["content"].T))]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows["content"][1:] != rows["content"][:-1]).any(1)
    first = rows["image"][np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))]
    twins = np.empty(int((~is_first).sum()), _TWIN)
    twins["image"], twins["first"] = rows["image"][~is_first], first[~is_first]
    for name, to in (("twins", "image"), ("firsts", "first")):
        sender = step.partitions.exchange(f"{step.name}-{name}-of", _TWIN).sender(partition)
        sender.send(step.partitions.of_ids(twins[to]), twins)
        sender.close()
    return {"twins": len(twins)}


def _distinct(step: Step, partition: int) -> list[tuple[SampleTable, NDArray[np.int64]]]:
    """The samples of each shard, and which of their images are the best with their bytes."""
    twins = np.sort(step.partitions.exchange(f"{step.name}-twins-of", _TWIN).rows(partition)["image"])
    return [(samples, np.flatnonzero(~np.isin(samples.image_ids, twins))) for samples in step.kept(partition)]


def _send_vectors(search: _Search, partition: int) -> dict[str, int]:
    """Send the vectors of some images, chosen by their bytes, to train the centres of clusters."""
    step = search.step
    share = min(1.0, Clusters.num_trained(search.num_images) / search.num_images)
    sender = step.partitions.exchange(f"{step.name}-trained", _TRAINED).sender(partition)
    for samples, images in _distinct(step, partition):
        order = samples.images.contents[images, 0]
        is_chosen = order <= np.uint64(int(share * (2**64 - 1)) if share < 1 else 2**64 - 1)
        chosen = images[is_chosen]
        rows = np.empty(len(chosen), _TRAINED)
        rows["order"], rows["image"] = order[is_chosen], samples.image_ids[chosen]
        rows["vector"] = view_vectors(samples.thumbnails(chosen))[:, 0]
        sender.send(np.zeros(len(rows), np.int64), rows)
    sender.close()
    return {}


def _train(search: _Search, _: int) -> dict[str, int]:
    """Train the centres and write them for the other stages."""
    step = search.step
    rows = step.partitions.exchange(f"{step.name}-trained", _TRAINED).rows(0)
    rows = rows[np.lexsort((rows["image"], rows["order"]))]
    clusters = Clusters.train(rows["vector"], search.num_images)
    step.partitions.folder.write(f"{step.name}-clusters", clusters.to_bytes())
    return {"clusters": len(clusters)}


def _send_views(search: _Search, partition: int) -> dict[str, int]:
    """Send every distinct image to its home cluster, and its views to those nearest to them."""
    step = search.step
    clusters = Clusters.from_bytes(step.partitions.folder.read(f"{step.name}-clusters") or b"")
    sender = step.partitions.exchange(f"{step.name}-seen", SEEN).sender(partition)
    num_images = 0
    for samples, images in _distinct(step, partition):
        rows = seen(
            clusters,
            samples.thumbnails(images),
            samples.image_ids[images],
            samples.qualities[samples.images.owners[images]],
        )
        sender.send(rows["cluster"].astype(np.int64) % step.partitions.num_partitions, rows)
        num_images += len(images)
    sender.close()
    return {"images": num_images}


def seen(clusters: Clusters, thumbnails: NDArray[np.uint8], images: Ids, qualities: NDArray[np.uint64]) -> Rows:
    """The rows of images: at home in one cluster, looking into those nearest to each view."""
    vectors = view_vectors(thumbnails)
    nearest = clusters.nearest(vectors.reshape(-1, image_search.DIMS), NUM_PROBES)
    num_probes = nearest.shape[1]
    nearest = nearest.reshape(len(images), NUM_VIEWS * num_probes)
    rows = np.empty((len(images), 1 + nearest.shape[1]), SEEN)
    rows["cluster"][:, 0], rows["cluster"][:, 1:] = nearest[:, 0], nearest
    rows["at_home"] = np.arange(rows.shape[1]) == 0
    rows["quality"], rows["item"] = qualities[:, None], images[:, None]
    rows["vector"][:, 0] = vectors[:, 0]
    rows["vector"][:, 1:] = np.repeat(vectors, num_probes, axis=1)
    return rows.reshape(-1)


def _find_pairs(step: Step, partition: int) -> dict[str, int]:
    """Find the likely copies in the clusters of a partition."""
    exchange = step.partitions.exchange(f"{step.name}-seen", SEEN)
    home, num_pending = [np.zeros(0, SEEN)], 0
    for rows in exchange.parts(partition):
        home.append(rows[rows["at_home"]])
        num_pending += len(home[-1])
        if num_pending > _BATCH:
            home, num_pending = [best_at_home(np.concatenate(home))], 0
    at_home = best_at_home(np.concatenate(home))
    sender = step.partitions.exchange(f"{step.name}-likely", LIKELY).sender(partition)
    num_pairs = 0
    for rows in _batches(exchange.parts(partition)):
        pairs = likely_pairs(at_home, rows[~rows["at_home"]])
        sender.send(step.partitions.of_ids(pairs["worse"]), pairs)
        num_pairs += len(pairs)
    sender.close()
    return {"pairs": num_pairs}


def _batches(parts: Iterable[Rows]) -> Iterator[Rows]:
    """The same rows, small parts together."""
    pending: list[Rows] = []
    for rows in parts:
        pending.append(rows)
        if sum(map(len, pending)) > _BATCH:
            yield np.concatenate(pending)
            pending = []
    if pending:
        yield np.concatenate(pending)


def _keep_closest(step: Step, partition: int) -> dict[str, int]:
    """Ask for the most similar better images of each one."""
    pairs = np.zeros(0, LIKELY)
    for part in _batches(step.partitions.exchange(f"{step.name}-likely", LIKELY).parts(partition)):
        pairs = image_search.most_similar(np.concatenate([pairs, part]))
    _want(step, partition, pairs)
    return {"pairs": len(pairs)}


def _want(step: Step, partition: int, pairs: Rows) -> None:
    """Have pairs verified."""
    edges = np.empty(len(pairs), EDGE)
    for name in EDGE.names or ():
        edges[name] = pairs[name]
    sender = wanted(step.partitions, step.name).sender(partition)
    sender.send(step.partitions.of_ids(edges["better"]), edges)
    sender.close()


# ------------------------------------------------------------------ images: samples


@dataclass(frozen=True)
class _Found:
    step: Step
    leaders: str
    """Where the leaders are."""


def _send_pictures(found: _Found, partition: int) -> dict[str, int]:
    """Tell images with the same bytes as one that follows whom it follows."""
    step = found.step
    followers = read_leaders(step.partitions, found.leaders, partition)
    twins = step.partitions.exchange(f"{step.name}-firsts-of", _TWIN).rows(partition)
    at = np.minimum(np.searchsorted(followers["worse"], twins["first"]), max(0, len(followers) - 1))
    follows = followers["worse"][at] == twins["first"] if len(followers) else np.zeros(len(twins), bool)
    rows = np.empty(len(twins), _PICTURE)
    rows["image"], rows["picture"] = twins["image"], twins["first"]
    rows["picture"][follows] = followers["leader"][at[follows]]
    sender = step.partitions.exchange(f"{step.name}-picture-of", _PICTURE).sender(partition)
    sender.send(step.partitions.of_ids(rows["image"]), rows)
    sender.close()
    return {}


def _send_samples(found: _Found, partition: int) -> dict[str, int]:
    """Send every sample to the partition of the pictures it shows."""
    step = found.step
    for_captions = step.partitions.settings.keep_one_per == "image and text"
    followers = read_leaders(step.partitions, found.leaders, partition)
    known = step.partitions.exchange(f"{step.name}-picture-of", _PICTURE).rows(partition)
    images = np.concatenate([followers["worse"], known["image"]])
    order = np.argsort(images)
    images, pictures = images[order], np.concatenate([followers["leader"], known["picture"]])[order]

    def keys_of(samples: SampleTable) -> tuple[Rows, NDArray[np.bool_]]:
        shown = samples.image_ids
        if len(images):
            at = np.minimum(np.searchsorted(images, shown), len(images) - 1)
            shown = np.where(images[at] == shown, pictures[at], shown)
        keys = [_sequence_keys(shown, samples), _sequence_keys(shown * np.uint64(0xD6E8FEB86659FD93), samples)]
        return _rows_of(samples, [*keys, text_keys(samples, for_captions)]), np.ones(len(samples), bool)

    _send_equals(step, partition, keys_of)
    return {}


# ------------------------------------------------------------------ texts


def _send_bands(step: Step, partition: int) -> dict[str, int]:
    """Send every sample to the partitions of its MinHash keys."""
    sender = step.partitions.exchange(f"{step.name}-banded", _BANDED).sender(partition)
    for samples in step.kept(partition):
        rows = np.empty((len(samples), NUM_BANDS), _BANDED)
        rows["band"], rows["key"] = np.arange(NUM_BANDS), samples.text_bands()
        rows["quality"], rows["sample"] = samples.qualities[:, None], samples.ids[:, None]
        flat = rows.reshape(-1)
        sender.send(step.partitions.of_keys(flat["band"].astype(np.uint64), flat["key"].astype(np.uint64)), flat)
    sender.close()
    return {}


def _find_text_pairs(step: Step, partition: int) -> dict[str, int]:
    """Ask for the comparison of every text with the best of its buckets."""
    rows = step.partitions.exchange(f"{step.name}-banded", _BANDED).rows(partition)
    pairs = np.unique(np.concatenate([np.zeros(0, EDGE), *text_pairs(rows)]))
    _want(step, partition, pairs)
    return {"pairs": len(pairs)}


def text_pairs(rows: Rows) -> Iterator[Rows]:
    """Pairs of samples in a bucket: every one with the best `MAX_COMPARED`, with repeats."""
    rows = rows[np.lexsort((rows["sample"], rows["quality"], rows["key"], rows["band"]))]
    is_first = np.ones(len(rows), bool)
    is_first[1:] = (rows["key"][1:] != rows["key"][:-1]) | (rows["band"][1:] != rows["band"][:-1])
    begins = np.flatnonzero(is_first)
    rank = np.arange(len(rows)) - np.repeat(begins, np.diff(np.append(begins, len(rows))))
    rest = np.arange(len(rows))
    for number in range(MAX_COMPARED):
        rest = rest[rank[rest] > number]
        better = rows[rest - rank[rest] + number]
        pairs = np.empty(len(rest), EDGE)
        pairs["worse"], pairs["better"], pairs["quality"] = rows["sample"][rest], better["sample"], better["quality"]
        yield np.unique(pairs)


def _drop_followers(found: _Found, partition: int) -> dict[str, int]:
    followers = read_leaders(found.step.partitions, found.leaders, partition)
    dropper = found.step.dropper(partition)
    dropper.drop(followers["worse"], "near-duplicate text", followers["leader"])
    return dropper.close()

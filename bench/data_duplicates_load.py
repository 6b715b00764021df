"""Recall of near-duplicate search, per edit, when its clusters are as full as those of 2e9 images; rate and memory.

    python -m bench.data_duplicates_load photos/ [--images 2e9] [--num-copies 300]

Parts of the photos stand for foreign images. Most of them train the clusters that 2e9 images would have; the others,
of other photos, say how images lie around the centre of their cluster. With these distances every cluster that a copy
is at home in, or looks into, is filled with as many foreign images and views as 2e9 images would bring, times the
measured excess of the clusters that photos are in. All of them count as better than the copy, and every view as an
image of its own, so they take up places among its candidates. A copy is found if it meets its photo in a cluster,
fewer than `MAX_CANDIDATES` foreign images are more similar, and the thumbnails agree. Search and verification are those
of curation. False pairs are counted by `bench.data_duplicates`.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.data_duplicates import EDITS, encode, load, read_photos
from saccade.data.curate.duplicates import seen
from saccade.data.curate.image_match import COPY, same_picture
from saccade.data.curate.image_search import (
    CLUSTER_SIZE,
    MAX_CANDIDATES,
    MIN_SIMILARITY,
    NUM_PROBES,
    NUM_VIEWS,
    SEEN,
    Clusters,
    best_at_home,
    likely_pairs,
    view_vectors,
)
from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.curate.thumbnails import SIDE, small_picture, thumbnails

Floats = NDArray[np.float32]
_HELD_OUT = 0.1
_PART = 8192
_MAX_OFFSETS = 2**17  # more views than these are simulated by counting each several times


def parts_of(photos: list[bytes], num_each: int, random: np.random.Generator) -> NDArray[np.uint8]:
    """Thumbnails of random parts of photos, 20 to 75 % of each side."""
    pictures = []
    for photo in photos:
        image = load(photo)
        for _ in range(num_each):
            width = int(image.width * random.uniform(0.2, 0.75))
            height = min(image.height, max(SIDE, int(width * image.height / image.width * random.uniform(0.7, 1.4))))
            left, top = random.integers(0, image.width - width + 1), random.integers(0, image.height - height + 1)
            box = (left, top, left + width, top + height)
            part = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box, reducing_gap=2.0)
            pictures.append(thumbnails(np.asarray(part)[None])[0])
    return np.stack(pictures)


class Offsets:
    """Vectors of foreign images around the centre of a cluster."""

    def __init__(self, offsets: Floats, num: int) -> None:
        self.offsets, self.weight = offsets, num / len(offsets)
        self._squares = (offsets * offsets).sum(1)

    def num_closer(self, centre: Floats, vectors: Floats, similarity: float) -> float:
        """How many are more similar to one of these vectors."""
        products = self.offsets @ np.column_stack([centre, vectors.T])
        lengths = np.sqrt(np.maximum(self._squares + 2 * products[:, 0] + centre @ centre, 1))
        similarities = (products[:, 1:] + centre @ vectors.T) * (127 / lengths[:, None])
        return float((similarities > similarity).any(1).sum() * self.weight)


@dataclass(frozen=True)
class Crowd:
    """The foreign images of a cluster."""

    at_home: Offsets
    looking: Offsets

    @staticmethod
    def measure(
        clusters: Clusters, others: NDArray[np.uint8], photo: NDArray[np.int64], random: np.random.Generator
    ) -> Crowd:
        """From images that the clusters were not trained with, and the photo that each is a part of."""
        vectors = view_vectors(others)
        nearest = np.concatenate(
            [clusters.nearest(part.reshape(-1, part.shape[2]), NUM_PROBES) for part in np.array_split(vectors, 20)]
        ).reshape(len(others), NUM_VIEWS, NUM_PROBES)
        home = nearest[:, 0, 0]
        some = random.permutation(len(home))[:2000]
        is_other = photo[some][:, None] != photo  # parts of one photo are more alike than two photos
        shared = [(home[some][:, None] == home) & is_other]
        shared += [(nearest[some, view, rank][:, None] == home) & is_other for view in (0, 6, 12) for rank in range(4)]
        counts = [each.sum() / is_other.sum() for each in shared]
        excess = [float(share) * len(clusters) for share in (counts[0], np.mean(counts[1:]))]
        print(
            f"{len(clusters):,} clusters; those that photos are in have {excess[0]:.1f} times the mean of images at "
            f"home, and {excess[1]:.1f} times of views that look into them"
        )
        centres = clusters.fine.astype(np.float32)
        whole = (vectors[:, 0] - centres[home])[random.integers(0, len(home), _MAX_OFFSETS)]
        number, view, rank = (random.integers(0, size, _MAX_OFFSETS) for size in nearest.shape)
        views = vectors[number, view] - centres[nearest[number, view, rank]]
        num_home, num_looking = (CLUSTER_SIZE * times for times in (excess[0], excess[1] * NUM_VIEWS * NUM_PROBES))
        return Crowd(Offsets(whole[: round(num_home)], round(num_home)), Offsets(views, round(num_looking)))

    def num_closer(self, clusters: Clusters, rows: NDArray[np.void], similarity: float) -> float:
        """Foreign images that are more similar to an image (its rows in all clusters) than its copy is."""
        closer = 0.0
        for cluster in np.unique(rows["cluster"]):
            here, centre = rows[rows["cluster"] == cluster], clusters.fine[cluster].astype(np.float32)
            views = here[~here["at_home"]]["vector"].astype(np.float32)
            closer += self.at_home.num_closer(centre, np.unique(views, axis=0), similarity)
            if here["at_home"].any():
                whole = here[here["at_home"]]["vector"].astype(np.float32)
                closer += self.looking.num_closer(centre, whole, similarity)
        return closer


def recall(
    clusters: Clusters, crowd: Crowd | None, photos: NDArray[np.uint8], copies: NDArray[np.uint8]
) -> list[float]:
    """Shares of the copies that meet their photo in a cluster, that become candidates, that are verified; and found."""
    met, listed = np.zeros(len(copies), bool), np.zeros(len(copies), bool)
    for number in range(len(copies)):
        both = np.stack([photos[number], copies[number]])
        rows = seen(clusters, both, np.arange(2).astype(np.uint64), np.arange(2).astype(np.uint64))
        pairs = likely_pairs(best_at_home(rows[rows["at_home"]]), rows[~rows["at_home"]])
        met[number] = len(pairs) > 0
        if met[number]:
            own = rows[rows["item"] == 1]
            closer = crowd.num_closer(clusters, own, float(pairs["similarity"][0])) if crowd is not None else 0
            listed[number] = closer < MAX_CANDIDATES
    verified = same_picture(photos, copies, COPY)
    return [float(share.mean()) for share in (met, listed, verified, listed & verified)]


def measure_rate(clusters: Clusters, pictures: NDArray[np.uint8], crowd: Crowd) -> None:
    """CPU time of an image: its rows, its products in full clusters, its verification."""
    ids = np.arange(len(pictures)).astype(np.uint64)
    begin = time.process_time()
    seen(clusters, pictures, ids, ids)
    rows_s = (time.process_time() - begin) / len(pictures)
    centre = clusters.fine[0].astype(np.float32)
    home, looking = (
        _full_cluster(offsets, centre) for offsets in (crowd.at_home.offsets[:_PART], crowd.looking.offsets[:_PART])
    )
    looking["at_home"] = False
    begin = time.process_time()
    pairs = likely_pairs(best_at_home(home), looking)
    fullness = len(crowd.at_home.offsets) * crowd.at_home.weight / len(home)
    pairs_s = (time.process_time() - begin) / len(looking) * NUM_VIEWS * NUM_PROBES * fullness
    one = np.arange(2000) % len(pictures)
    begin = time.process_time()
    same_picture(pictures[one], pictures[one[::-1]], COPY)
    verify_s = (time.process_time() - begin) / len(one)
    total = rows_s + pairs_s + verify_s * MAX_CANDIDATES
    print(
        f"per image: rows {rows_s * 1e3:.2f} ms, pairs {pairs_s * 1e3:.2f} ms ({len(pairs)} of {len(looking)} views), "
        f"{MAX_CANDIDATES} candidates {verify_s * MAX_CANDIDATES * 1e3:.2f} ms: {1 / total:.0f} images/s of one core; "
        f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB resident"
    )


def _full_cluster(offsets: Floats, centre: Floats) -> NDArray[np.void]:
    vectors = offsets + centre
    rows = np.zeros(len(vectors), SEEN)
    rows["vector"] = np.round(vectors * (127 / np.linalg.norm(vectors, axis=1, keepdims=True)))
    rows["item"] = rows["quality"] = np.random.default_rng(len(rows)).permutation(len(rows))
    rows["at_home"] = True
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="folder of tars with photos (jpg), no two of them copies")
    parser.add_argument("--images", type=float, default=2e9)
    parser.add_argument("--num-copies", type=int, default=300)
    parser.add_argument("--parts", type=int, default=100, help="parts of each photo")
    options = parser.parse_args()
    random = np.random.default_rng(0)
    photos = read_photos(options.shards)
    held = round(len(photos) * _HELD_OUT)
    trained = view_of_whole(parts_of(photos[held:], options.parts, random))
    clusters = Clusters.train(trained, int(options.images))
    crowd = Crowd.measure(clusters, parts_of(photos[:held], 20, random), np.repeat(np.arange(held), 20), random)
    chosen = random.permutation(len(photos))[: options.num_copies].tolist()
    originals = thumbnails(np.stack([small_picture(photos[number], DECODE_LIMITS) for number in chosen]))
    measure_rate(clusters, originals, crowd)
    print(f"{'edit':32}    met  listed  verified  recall   of {len(chosen)} copies; similarity above {MIN_SIMILARITY}")
    for name, edit in EDITS.items():
        edited = [encode(edit(load(photos[number]), random), random) for number in chosen]
        copies = thumbnails(np.stack([small_picture(data, DECODE_LIMITS) for data in edited]))
        shares = recall(clusters, crowd, originals, copies)
        print(f"{name:32} " + "  ".join(f"{share:6.1%}" for share in shares), flush=True)


def view_of_whole(pictures: NDArray[np.uint8]) -> NDArray[np.int8]:
    """Vectors of the whole images, a part at a time."""
    return np.concatenate([view_vectors(part)[:, 0] for part in np.array_split(pictures, -(-len(pictures) // _PART))])


if __name__ == "__main__":
    main()

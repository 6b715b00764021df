"""Images of the packed sequences of all data and context ranks, encoded by ranks with equal work.

    grids of all ranks -> who encodes each image -> patches to their encoders -> features back to their readers

Packing gives sequences about as many patches, which leaves little to win when images are many. Where they are few, one
rank has an image and the others wait for it. Ranks tell each other the grids of their images on the host, and compute
the same assignment: images move from the rank with most work to that with least while this makes the larger of the two
smaller. Every rank runs the tower once per micro-batch, on a blank image if it has none, so that those of FSDP and DDP
run the same modules. Gradients of features return to the encoder, and those of tower and projector are summed over all
ranks as before.

Legend: P patches, M image tokens, F features of an image token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.data.image_shares import image_cost
from saccade.model.context_parallel import exchange_rows
from saccade.model.vlm import VLM
from saccade.parallel_dims import LOSS
from saccade.processor.patches import Grid
from saccade.world import World

Encode = Callable[[Tensor, Tensor], Tensor]
"""`VLM.encode_images`."""
_TOLERANCE = 0.01
"""Share of their difference by which two ranks have to become more equal, or an image stays."""


def balance_images(model: VLM, world: World) -> None:
    """Let a model encode the images that balance its work with that of other ranks. Collective over all ranks."""
    group, cpu_group = world.separate_group(*LOSS), world.cpu_group_of(*LOSS)
    if group is not None and cpu_group is not None:
        vars(model)["encode_images"] = partial(_encode, model, model.encode_images, group, cpu_group)


def _encode(
    model: VLM,
    encode: Encode,
    group: dist.ProcessGroup,
    cpu_group: dist.ProcessGroup,
    pixels: Tensor,
    image_grids: Tensor,
) -> Tensor:
    """[M, F]: features of this rank's images, in reading order. See `VLM.encode_images`."""
    rank, num_ranks = group.rank(), group.size()
    grids_of: list[list[Grid]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(grids_of, [(t, h, w) for t, h, w in image_grids.tolist()], group=cpu_group)
    grids = [grid for of_rank in grids_of for grid in of_rank]
    readers = [reader for reader, of_rank in enumerate(grids_of) for _ in of_rank]
    patches = [model.vision.num_patches([grid]) for grid in grids]
    tokens = [model.vision.layout([grid]).sizes.num_tokens for grid in grids]
    encoders = encoders_of([image_cost(count) for count in patches], readers, num_ranks)
    read = [image for image, reader in enumerate(readers) if reader == rank]
    sent = sorted(read, key=lambda image: encoders[image])
    encoded = [image for image, encoder in enumerate(encoders) if encoder == rank]
    given_PC = exchange_rows(
        _selected(pixels, [patches[image] for image in read], [read.index(image) for image in sent]),
        _sizes(patches, sent, encoders, num_ranks), _sizes(patches, encoded, readers, num_ranks), group,
    )  # fmt: skip
    if encoded:
        features_MF = encode(given_PC, torch.tensor([grids[image] for image in encoded]))
    else:
        grid, num_patches = model.vision.square_grid(0)
        features_MF = encode(pixels.new_zeros(num_patches, pixels.shape[1]), torch.tensor([grid]))[:0]
    found_MF = exchange_rows(
        features_MF, _sizes(tokens, encoded, readers, num_ranks), _sizes(tokens, sent, encoders, num_ranks), group
    )
    return _selected(found_MF, [tokens[image] for image in sent], [sent.index(image) for image in read])


def encoders_of(costs: Sequence[float], readers: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that encodes each image, given the rank that reads it: few images move, the costliest first."""
    encoders, work = list(readers), [0.0] * num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    for image, reader in enumerate(readers):
        work[reader] += costs[image]
        held[reader].append(image)
    while True:
        busiest, idlest = (choose(range(num_ranks), key=lambda rank: work[rank]) for choose in (max, min))
        gap = work[busiest] - work[idlest]
        movable = [image for image in held[busiest] if costs[image] < (1.0 - _TOLERANCE) * gap]
        if not movable:
            return encoders
        # The larger of the two becomes smallest with half of the gap.
        image = min(movable, key=lambda image: (abs(costs[image] - gap / 2), image))
        encoders[image] = idlest
        held[busiest].remove(image)
        held[idlest].append(image)
        work[busiest] -= costs[image]
        work[idlest] += costs[image]


def _sizes(sizes: Sequence[int], images: Sequence[int], ranks: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Rows of these images for each rank."""
    found = [0] * num_ranks
    for image in images:
        found[ranks[image]] += sizes[image]
    return tuple(found)


def _selected(rows: Tensor, sizes: Sequence[int], order: Sequence[int]) -> Tensor:
    """Consecutive items of these sizes in another order."""
    if [*order] == [*range(len(sizes))]:
        return rows
    starts = list(accumulate(sizes, initial=0))
    index = [row for item in order for row in range(starts[item], starts[item + 1])]
    return rows.index_select(0, torch.tensor(index, dtype=torch.int64, device=rows.device))

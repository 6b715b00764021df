"""This rank's part of a tensor, and the whole it is a part of. Plain tensors are their own part and whole."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_of(x: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself."""
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        local: Tensor = x.to_local()
        return local


def whole_of(parameter: Tensor, local: Tensor) -> Tensor:
    """`local` as this rank's shard of a tensor that is sharded like `parameter`; other dims than the first may differ.

    Built from an outline without memory, for `DTensor.from_local` would move a host tensor to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return local
    assert all(place.is_replicate() or place.is_shard(0) for place in parameter.placements), "sharded by rows"
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    whole = torch.empty(shape, device="meta")
    outline = DTensor.from_local(
        torch.empty_like(local, device="meta"),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=whole.stride(),
    )
    return DTensor(local, outline._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def shard_of(whole: Tensor, parameter: DTensor) -> Tensor:
    """This rank's shard of a tensor that every rank has in full. No communication."""
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard: Tensor = replicated.redistribute(placements=parameter.placements).to_local()
    return shard

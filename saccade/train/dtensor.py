"""Local shards and full tensors. A plain tensor is its own local shard."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local_tensor(x: Tensor) -> Tensor:
    """This rank's shard of a DTensor, or the tensor itself."""
    if not isinstance(x, DTensor):
        return x
    with torch.no_grad():
        local: Tensor = x.to_local()
        return local


def dtensor_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Wrap `local` as this rank's shard of a DTensor sharded like `parameter`; dims other than the first may differ.

    `DTensor.from_local` is called on meta tensors because it would move a host tensor to the mesh's device.
    """
    if not isinstance(parameter, DTensor):
        return local
    assert all(placement.is_replicate() or placement.is_shard(0) for placement in parameter.placements), (
        "sharded on dim 0"
    )
    shape = torch.Size((parameter.shape[0], *local.shape[1:]))
    spec = DTensor.from_local(
        torch.empty_like(local, device="meta"),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )._spec
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_shard(full: Tensor, parameter: DTensor) -> Tensor:
    """This rank's shard of a tensor that every rank holds in full. No communication."""
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    shard: Tensor = replicated.redistribute(placements=parameter.placements).to_local()
    return shard


def copy_full_tensor(target: Tensor, full: Tensor) -> None:
    """Copy a full tensor into `target`, of which this rank may hold only a shard. No communication."""
    if not isinstance(target, DTensor):
        target.copy_(full)
        return
    [axis] = [axis for axis, placement in enumerate(target.placements) if placement.is_shard()]
    chunks = full.chunk(target.device_mesh.size(axis))  # like FSDP: the last ranks may hold less, or nothing
    rank = target.device_mesh.get_local_rank(axis)
    if rank < len(chunks):
        target.to_local().copy_(chunks[rank])

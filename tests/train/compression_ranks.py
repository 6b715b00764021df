"""What the ranks of tests of compressed gradients run."""

import torch
import torch.distributed as dist

from saccade.parallel_dims import ParallelDims
from saccade.train.gradient_compression import CompressedReduceScatter


def reduce(world, job):
    """One step is within the rounding of the format, and the sum of many steps within that of one step."""
    relative = {"bf16": 2.0**-8, "int8": 1.0 / 127}[job["rounding"]]
    with world.arranged(ParallelDims(shard=world.size)):
        group, length = dist.group.WORLD, 3000  # not a multiple of the values with one scale
        generator = torch.Generator().manual_seed(world.rank)
        comm, total, exact_total = CompressedReduceScatter(job["rounding"]), 0.0, 0.0
        bias = torch.randn(world.size * length, generator=generator)
        for _ in range(20):
            gradient = bias + 0.1 * torch.randn(world.size * length, generator=generator)
            exact = gradient.clone()
            dist.all_reduce(exact)
            exact = exact.view(world.size, -1)[world.rank] / world.size
            found = torch.empty(length)
            comm(found, gradient.clone(), group, dist.ReduceOp.AVG)
            largest = float(gradient.abs().max())
            assert float((found - exact).abs().max()) <= 2 * relative * largest
            total, exact_total = total + found, exact_total + exact
            assert float((total - exact_total).abs().max()) <= 2 * relative * largest, "errors do not add up"
        fp32 = 20 * 4 * length * (world.size - 1)
        share = {"bf16": 0.5, "int8": 0.25}[job["rounding"]]
        assert share <= comm.sent_bytes / fp32 <= share * 1.03

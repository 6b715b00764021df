"""A training job, the GPUs it is planned for, and the layouts that are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from saccade.errors import ConfigError
from saccade.model.config import ModelConfig
from saccade.model.tensor_parallel import possible_ranks
from saccade.parallel_dims import ParallelDims
from saccade.plan.gpus import Gpu
from saccade.plan.prices import Network

_MIN_TOKENS = 8192
"""Tokens of a context rank, at least: with fewer, kernels are short and gathers are not."""
_NODES_PER_COPY = (1, 4)
"""Numbers of nodes that one sharded copy may have, besides all."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Equal GPUs, in nodes."""

    gpu: Gpu
    """Each of them."""
    num_gpus: int
    """Number of GPUs."""
    network: Network
    """Links between nodes, and GPUs of a node."""

    def __post_init__(self) -> None:
        if self.gpu.bf16 is None or self.gpu.bandwidth is None:
            raise ConfigError(f"the speed of a GPU of {self.gpu.gib:g} GiB is not known. Give its name, such as H100")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: all parameters, with AdamW."""

    config: ModelConfig
    """The model."""
    seq_len: int
    """Tokens of a packed sequence, at most."""
    global_batch_size: int
    """Packed sequences of a step."""
    patches: int | None = None
    """Mean vision patches of a packed sequence; None: those of the mixture in `ragged.py`."""


def candidates(job: Job, cluster: Cluster) -> Iterator[ParallelDims]:
    """Layouts of exactly these GPUs: tensor ranks within a node, context where sequences are long, up to 8 stages."""
    per_node = cluster.network.gpus_per_node
    layers = job.config.language.num_layers
    for tensor in (size for size in possible_ranks(job.config.language) if size <= per_node and per_node % size == 0):
        for context in (size for size in (1, 2, 4, 8, 16, 32) if size == 1 or job.seq_len // size >= _MIN_TOKENS):
            for pipeline in (size for size in (1, 2, 4, 8) if size == 1 or layers >= 2 * size):
                ranks, rest = divmod(cluster.num_gpus, tensor * context * pipeline)
                if rest or not ranks:
                    continue
                of_nodes = (nodes * per_node // (tensor * context) for nodes in _NODES_PER_COPY if pipeline == 1)
                for shard in sorted({ranks, *(size for size in of_nodes if size > 0 and ranks % size == 0)}):
                    dims = ParallelDims(
                        pipeline=pipeline, replicate=ranks // shard, shard=shard, context=context, tensor=tensor
                    )
                    if dims.count("shard", "context") > 1 or dims.replicate == 1:
                        yield dims

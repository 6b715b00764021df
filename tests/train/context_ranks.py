"""What the ranks of tests of context parallelism run."""

import contextlib
import json
from pathlib import Path

import torch

from saccade.kernels import launch
from saccade.model.attention import PackedAttention
from saccade.model.context_parallel import ContextAttention, exchange_rows
from saccade.parallel_dims import ParallelDims
from saccade.processor.inputs import ModelInputs
from saccade.train.context_batches import ContextGroup, SequenceShare

PACKS = [[1, 37, 1, 1, 50, 6], [96], [5, 1, 2], [33, 30, 1], [1] * 9]
"""Lengths of the conversations of packed sequences."""
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 16


def packed(lengths):
    """Inputs with these conversations, without images."""
    total = sum(lengths)
    empty = ModelInputs.empty(patch_dim=12, pixel_mean=(0.5,), pixel_std=(0.5,), num_tokens=total)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return ModelInputs(
        **vars(empty) | {"token_ids": torch.arange(total), "cu_seqlens": starts, "max_seqlen": max(lengths)}
    )


def random_case(lengths, seed):
    """Inputs, q, k, v, the gradient of the output, and a rotary table, the same on every rank."""
    inputs = packed(lengths)
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    tensors = [torch.randn(sum(lengths), count, HEAD_DIM, generator=generator) for count in heads]
    angles = torch.randn(sum(lengths), HEAD_DIM // 2, generator=generator)
    return inputs, tensors, (angles.cos(), angles.sin())


def run_attention(attend, tensors):
    *qkv, d_out = tensors
    qkv = [x.clone().requires_grad_() for x in qkv]
    out = attend(0, *qkv)
    return [out.detach(), *torch.autograd.grad(out, qkv, d_out)]


def compare_attention(world, job):
    """The largest difference from one rank, relative to the largest value, of outputs and gradients.

    Segments of one token have no gradients of queries and keys except rounding: differences are relative to 1 at least.
    """
    dims = ParallelDims(context=world.size)
    worst = 0.0
    path = launch.forced(job["path"]) if "path" in job else contextlib.nullcontext()
    with world.arranged(dims) as arranged, path:
        context = ContextGroup(arranged.rank, arranged.size, arranged.group("context"), block_size=job["block_size"])
        for seed, lengths in enumerate(job.get("packs", PACKS)):
            for window in (None, 7):
                inputs, tensors, table = random_case(lengths, seed)
                share = SequenceShare(inputs, context, image_ranks=[], image_tokens=[], window=window).inputs()
                own = [x[share.tokens] for x in tensors]
                table_of_share = tuple(x[share.tokens] for x in table)
                found = run_attention(ContextAttention(table_of_share, share, window), own)
                whole = PackedAttention(table, inputs.cu_seqlens, inputs.max_seqlen, window)
                for got, expected in zip(found, run_attention(whole, tensors), strict=True):
                    error = (got - expected[share.tokens]).abs().max() / expected.abs().max().clamp(min=1.0)
                    worst = max(worst, float(error))
    Path(job["to"]).with_suffix(f".{world.rank}").write_text(json.dumps(worst))


def exchange(world, job):
    """Rows come back by the backward pass of an exchange."""
    with world.arranged(ParallelDims(context=world.size)) as arranged:
        sizes = [[(sender * 2 + receiver) % 3 for receiver in range(world.size)] for sender in range(world.size)]
        rows = torch.full((sum(sizes[world.rank]), 2), float(world.rank), requires_grad=True)
        arrives = tuple(sizes[sender][world.rank] for sender in range(world.size))
        received = exchange_rows(rows, tuple(sizes[world.rank]), arrives, arranged.group("context"))
        expected = [float(sender) for sender, count in enumerate(arrives) for _ in range(count)]
        assert received[:, 0].tolist() == expected
        (received * (1.0 + world.rank)).sum().backward()
        back = [1.0 + receiver for receiver, count in enumerate(sizes[world.rank]) for _ in range(count)]
        assert rows.grad[:, 0].tolist() == back

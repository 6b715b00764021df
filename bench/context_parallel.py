"""Context parallelism: balance of the plan, of images and of kernels, and two ranks on one GPU.

    python -m bench.context_parallel balance     pairs of tokens and a schedule of the kernels' tiles, costliest rank;
                                                 images; any machine
    python -m bench.context_parallel kernels     time of each rank's share of attention on one GPU
    python -m bench.context_parallel ranks       two processes on one GPU (or CPU) equal one

Packs have 128k tokens of documents with log-normal lengths (deviation 1). `kernels` has the heads of the 3B model and
runs the shares of the ranks one after another: it measures what context parallelism costs apart from communication.
`ranks` exchanges through gloo and host memory: it shows that the kernels compute the same, not how fast.
"""

import argparse
import heapq
import json
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from bench.kernels.timing import gpu_ms, queued_ms
from saccade.data.context_plan import ContextShare, attended, plan_context
from saccade.data.image_shares import balance, image_cost
from saccade.data.packing import pack
from saccade.kernels.attention import attention
from saccade.model import context_parallel
from saccade.model.attention import PackedAttention
from saccade.model.context_parallel import ContextAttention, ContextInputs, attend_to_sequence
from saccade.processor.inputs import ModelInputs
from saccade.train.context_batches import ContextGroup, SequenceShare, _attention_rows

NUM_TOKENS, NUM_RANKS = 131072, 8
MEANS = (1024, 4096, 16384, 65536)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 2, 128


def log_normal_pack(mean: int, num_tokens: int, seed: int) -> list[int]:
    """Lengths of documents; the last one is cut at the end of the pack."""
    rng, lengths = np.random.default_rng(seed), []
    while (used := sum(lengths)) < num_tokens:
        lengths.append(min(int(rng.lognormal(np.log(mean) - 0.5, 1.0)) + 1, num_tokens - used))
    return lengths


def inputs_of(lengths: Sequence[int]) -> ModelInputs:
    """A packed sequence without images."""
    total = sum(lengths)
    empty = ModelInputs.empty(patch_dim=12, pixel_mean=(0.5,), pixel_std=(0.5,), num_tokens=total)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return ModelInputs(**vars(empty) | {"cu_seqlens": starts, "max_seqlen": max(lengths)})


def share_of(inputs: ModelInputs, rank: int, num_ranks: int, device: str, group: object = None) -> ContextInputs:
    """One rank's share, on the device."""
    context = ContextGroup(rank, num_ranks, group)
    return SequenceShare(inputs, context, image_ranks=[], image_tokens=[]).inputs().to(device)


# ------------------------------------------------------------------ balance


def balances(num_packs: int) -> Iterator[dict[str, object]]:
    """Largest over mean: pairs of tokens, and work of images, for several means of document lengths."""
    for mean in MEANS:
        ratios, scheduled, seconds = [], [], 0.0
        for seed in range(num_packs):
            lengths = log_normal_pack(mean, NUM_TOKENS, seed)
            begin = time.perf_counter()
            shares = plan_context(lengths, NUM_RANKS)
            seconds += time.perf_counter() - begin
            counts = attended(lengths)
            pairs = [int(counts[share.tokens].sum()) for share in shares]
            ratios.append(max(pairs) / np.mean(pairs))
            times = [kernel_steps(share) for share in shares]
            scheduled.append([max(each) / np.mean(each) for each in zip(*times, strict=True)])
        yield {
            "documents": mean, "pairs max/mean": round(float(np.mean(ratios)), 4), "worst": round(max(ratios), 4),
            "scheduled forward max/mean": round(float(np.mean(scheduled, 0)[0]), 4),
            "backward": round(float(np.mean(scheduled, 0)[1]), 4),
            "worst scheduled": round(float(np.max(scheduled)), 4), "plan ms": round(1e3 * seconds / num_packs, 2),
        }  # fmt: skip
    for max_seq_len, context in ((16384, 1), (16384, 2), (65536, 4), (NUM_TOKENS, NUM_RANKS)):
        yield {"max_seq_len": max_seq_len, "context": context} | image_balance(max_seq_len, context, num_packs)


def kernel_steps(share: ContextShare) -> tuple[float, float]:
    """Time of a rank's attention, forward and backward, in steps of one tile of 64 queries by 64 keys on an H200.

    Tiles are those of the kernels, given in order to the first of the programs that run at once (two per
    multiprocessor, one of the gradients of keys). A tile takes `_FIXED_STEPS` besides its products.
    """
    rows = _attention_rows(share.pieces, None)
    queries, position = rows.query_tiles[:, 1], rows.query_tiles[:, 4] + rows.query_tiles[:, 3] - rows.query_tiles[:, 1]
    halves = []
    for half in (0, 64):  # a listed tile is two programs
        exists = rows.query_tiles[:, 4] + half < queries
        keys = torch.minimum(rows.query_tiles[:, 3], position + half + 64)
        halves.append(torch.where(exists, -(-keys // 64) + _FIXED_STEPS, 0))
    of_queries = torch.stack(halves, 1).flatten().tolist()
    of_keys = []
    for _, _, first, begin, end in rows.key_tiles.tolist():
        ends, counts = rows.rows[begin:end, 3], rows.rows[begin:end, 1]
        seen = (ends - torch.maximum(ends - counts, torch.tensor(first))).clamp(min=0)
        of_keys.append(NUM_HEADS / NUM_KV_HEADS * float((-(-seen // 32)).sum()) + 2 * _FIXED_STEPS)
    forward = _scheduled(of_queries, NUM_HEADS, 2 * _NUM_SMS)
    return forward, _GRADIENT_STEP * forward + _scheduled(of_keys, NUM_KV_HEADS, _NUM_SMS)


_NUM_SMS, _FIXED_STEPS = 132, 3.0
_GRADIENT_STEP = 1.4
"""Time of a step of dQ relative to forward (and to a step of 32 queries by 128 keys of dK and dV)."""


def _scheduled(durations: Sequence[float], num_heads: int, num_slots: int) -> float:
    """When the last program ends: every duration once per head, each begun by the first slot that is free."""
    free = [0.0] * num_slots
    for duration in durations:
        for _ in range(num_heads):
            heapq.heappush(free, heapq.heappop(free) + duration)
    return max(free)


def image_balance(max_seq_len: int, context: int, num_buffers: int) -> dict[str, float]:
    """Work of images of the busiest rank of 8 data ranks x context, relative to the mean, over micro-batches.

    Two thirds of the samples have one to four images of log-normal sizes (median 1,500 patches), the others text only.
    Packing spreads patches over sequences, the images of a sequence are divided over its context ranks.
    """
    over_all, over_data = [], []
    for seed in range(max(1, num_buffers // 10)):
        rng = np.random.default_rng(seed)
        counts = np.where(rng.random(4096) < 2 / 3, rng.integers(1, 5, 4096), 0)
        images = [np.clip(rng.lognormal(np.log(1500), 0.7, n).astype(int) + 4, 4, 12288) for n in counts]
        patches = [int(of_sample.sum()) for of_sample in images]
        tokens = [int(text) + total // 4 for text, total in zip(rng.lognormal(5.3, 0.8, 4096), patches, strict=True)]
        sequences = pack(tokens, patches, max_seq_len=max_seq_len, max_patches=4 * max_seq_len).sequences
        work = []
        for sequence in sequences:
            costs = [image_cost(int(one)) for sample in sequence for one in images[sample]]
            work.append(np.bincount(balance(costs, context), costs, context))
        for first in range(0, len(work) - 7, 8):
            ranks = np.stack(work[first : first + 8])
            over_all.append(ranks.max() / ranks.mean())
            over_data.append(ranks.sum(1).max() / ranks.sum(1).mean())
    return {
        "images of data ranks max/mean": round(float(np.mean(over_data)), 4),
        "of all ranks": round(float(np.mean(over_all)), 4),
        "worst": round(float(max(over_all)), 4),
    }


# ------------------------------------------------------------------ kernels


def kernel_times(num_packs: int, means: Sequence[int], timing: str) -> Iterator[dict[str, object]]:
    """Forward and backward of every rank's share, measured and scheduled, and an eighth of the whole sequence's."""
    for mean in means:
        for seed in range(num_packs):
            inputs = inputs_of(log_normal_pack(mean, NUM_TOKENS, seed))
            q, k, v = _random(NUM_TOKENS, "cuda", torch.bfloat16)
            starts = inputs.cu_seqlens.cuda()
            longest = inputs.max_seqlen
            whole = _times(
                lambda q, k, v, starts=starts, longest=longest: attention(
                    q, k, v, starts, starts, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
                ),
                (q, k, v),
            )
            shares = [share_of(inputs, rank, NUM_RANKS, "cuda") for rank in range(NUM_RANKS)]
            if timing == "events":
                ranks = [
                    _times(lambda q, k, v, share=share: attend_to_sequence(q, k, v, share), (q[share.tokens], k, v))
                    for share in shares
                ]
            else:
                ranks = _times_in_turn(shares, q, k, v)
            plan = plan_context(inputs.cu_seqlens.diff().tolist(), NUM_RANKS)
            scheduled = list(zip(*map(kernel_steps, plan), strict=True))
            row: dict[str, object] = {"documents": mean, "pack": seed, "timing": timing}
            row["pieces"] = [len(share.pieces) for share in plan]
            row["tiles of queries, of keys"] = [[len(one.query_tiles), len(one.key_tiles)] for one in shares]
            row["scheduled"] = [[round(one) for one in steps] for steps in scheduled]
            for part, of_whole, of_ranks, steps in zip(
                ("forward", "backward"), whole, zip(*ranks, strict=True), scheduled, strict=True
            ):
                row |= {
                    f"{part} ms": [round(ms, 3) for ms in of_ranks],
                    f"{part} max/mean": round(max(of_ranks) / float(np.mean(of_ranks)), 4),
                    f"{part} scheduled": round(max(steps) / float(np.mean(steps)), 4),
                    f"{part} of an eighth": round(max(of_ranks) * NUM_RANKS / of_whole, 3),
                }
            yield row


def _times_in_turn(shares: Sequence[ContextInputs], q: Tensor, k: Tensor, v: Tensor) -> list[tuple[float, float]]:
    """Milliseconds of forward and backward of each rank: medians of rounds in which the ranks take turns.

    Everything is queued before the GPU begins, so that launches take no time, and clocks that change meet all ranks.
    """
    runs: list[tuple[Callable[[], object], Callable[[], object]]] = []
    for share in shares:
        leaves = [x.detach().requires_grad_() for x in (q[share.tokens], k, v)]
        out = attend_to_sequence(*leaves, share)
        d_out = torch.randn_like(out)
        runs.append(
            (
                torch.no_grad()(lambda leaves=leaves, share=share: attend_to_sequence(*leaves, share)),
                lambda out=out, leaves=leaves, d_out=d_out: torch.autograd.grad(out, leaves, d_out, retain_graph=True),
            )
        )
    times = np.array([[[queued_ms(run) for run in both] for both in runs] for _ in range(_NUM_ROUNDS + 2)])
    return [(float(forward), float(backward)) for forward, backward in np.median(times[2:], axis=0)]


_NUM_ROUNDS = 15


def _times(run: Callable[..., Tensor], tensors: Sequence[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and backward."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    out = run(*leaves)
    d_out = torch.randn_like(out)
    with torch.no_grad():
        forward = gpu_ms(lambda: run(*leaves))
    return forward, gpu_ms(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))


def _random(num_tokens: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    return [torch.randn(num_tokens, n, HEAD_DIM, generator=generator).to(device, dtype) for n in heads]


# ------------------------------------------------------------------ two ranks on one device


def compare_ranks(rank: int, port: int, device: str, num_tokens: int) -> None:
    """Attention of two ranks and of one, both in the compute dtype, against fp32."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    worst: dict[str, float] = {}
    for seed, mean in enumerate((16, 256, 4096)):
        inputs = inputs_of(log_normal_pack(mean, num_tokens, seed))
        share = share_of(inputs, rank, 2, device, dist.group.WORLD)
        table = torch.randn(num_tokens, HEAD_DIM // 2, generator=torch.Generator().manual_seed(1)).to(device)
        cos_sin = (table.cos(), table.sin())
        exact = _random(num_tokens, device, torch.float32)
        whole = inputs.to(device)
        reference = _gradients(PackedAttention(cos_sin, whole.cu_seqlens, whole.max_seqlen), exact)
        single = _gradients(PackedAttention(cos_sin, whole.cu_seqlens, whole.max_seqlen), [x.to(dtype) for x in exact])
        of_share = tuple(x[share.tokens] for x in cos_sin)
        own = [x.to(dtype)[share.tokens] for x in exact]
        with mock.patch.multiple(
            context_parallel, all_gather_single=_gather_on_host, reduce_scatter_single=_reduce_on_host
        ):
            found = _gradients(ContextAttention(of_share, share), own)
        for name, got, one, right in zip(("out", "dq", "dk", "dv"), found, single, reference, strict=True):
            at = share.tokens
            worst[name] = max(worst.get(name, 0.0), _error(got, right[at]))
            worst[f"{name}, one rank"] = max(worst.get(f"{name}, one rank", 0.0), _error(one[at], right[at]))
    if rank == 0:
        print(json.dumps({name: float(f"{value:.3g}") for name, value in worst.items()}))
    for name in ("out", "dq", "dk", "dv"):
        limit = 1.5 * worst[f"{name}, one rank"] + 2e-6
        assert worst[name] <= limit, f"{name}: {worst[name]:.2e} is more than rounding, {limit:.2e}"
    dist.destroy_process_group()


def _gradients(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(0, *leaves)
    d_out = torch.ones_like(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).square().mean().sqrt() / expected.float().square().mean().sqrt())


def _gather_on_host(output: Tensor, given: Tensor, group: object = None) -> None:
    whole = torch.empty(output.shape, dtype=output.dtype)
    dist.all_gather(list(whole.chunk(dist.get_world_size())), given.cpu(), group=group)
    output.copy_(whole)


def _reduce_on_host(output: Tensor, given: Tensor, group: object = None) -> None:
    total = given.cpu()
    dist.all_reduce(total, group=group)
    output.copy_(total.chunk(dist.get_world_size())[dist.get_rank()])


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("balance", "kernels", "ranks"))
    parser.add_argument("--packs", type=int, help="packs of each mean length (default: 50; 2 with kernels)")
    parser.add_argument("--documents", type=int, nargs="+", default=MEANS, help="mean lengths, for kernels")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="of the two ranks")
    parser.add_argument("--tokens", type=int, default=16384, help="of a pack of the two ranks")
    parser.add_argument("--timing", default="queued", choices=("events", "queued"), help="of kernels")
    options = parser.parse_args()
    if options.part == "ranks":
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        del store
        spawn(compare_ranks, (port, options.device, options.tokens), nprocs=2)
        return
    rows = (
        balances(options.packs or 50)
        if options.part == "balance"
        else kernel_times(options.packs or 2, options.documents, options.timing)
    )
    for row in rows:
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

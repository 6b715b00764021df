# mypy: allow-untyped-decorators
"""One-shot all-reduce of few rows over peer memory, alone or with the residual sum and the norm that follow.

Legend: N ranks, T rows, D columns.

    peer_all_reduce:       x = round(x_0 + x_1 + ... + x_(N-1)), the rows of all ranks, in place
    peer_all_reduce_norm:  s = round(that sum) + residual,  y = rms_norm(s);   returns (y, s)

x [T, D], residual and the norm's weight share one dtype. Each rank adds up the rows of all ranks in fp32, in the order
of the ranks, so all have the same bits; s and y are rounded as `add_rms_norm` rounds them. Forward only.

Every rank has a buffer that all GPUs can read (`PeerBuffers`). A program computes one row:

    own row -> a slot of the own buffer -> a flag in every rank's buffer -> wait for the flags of all -> read their rows

A row moves N - 1 times over the links into each GPU, which suits messages of some hundred KB: larger ones take less
time through NCCL, which moves them twice at most. There are two slots, used in turn, and no barrier at the end: a rank
that writes a slot again has seen the flags of the use in between, and a rank sets those when its kernel that read the
slot has ended. So the calls of a rank must be on one stream, and all ranks make the same calls.

Flags are numbers of uses that only increase, and the counter of uses is in device memory: calls can be captured in CUDA
graphs. Flags are set with release and read with acquire semantics at system scope. A rank that has polled `max_polls`
times (minutes) for a rank that died returns NaN, then and in all later calls, so that no kernel runs for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade.kernels import launch
from saccade.kernels.launch import tl, triton
from saccade.kernels.rms_norm import add_rms_norm_reference, normalize

MAX_RANKS = 8
"""Maximum number of ranks."""
_FLAG_BYTES = 8


def peer_all_reduce_reference(parts: Sequence[Tensor]) -> Tensor:
    """The first formula above: the sum of the ranks' rows."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def peer_all_reduce_norm_reference(
    parts: Sequence[Tensor], residual_TD: Tensor, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The second formula: (norm, what was normalised)."""
    return add_rms_norm_reference(peer_all_reduce_reference(parts), residual_TD, weight_D, eps)


@dataclass(frozen=True, kw_only=True)
class PeerBuffers:
    """The buffers of all ranks, as one rank uses them. A buffer has flags [rows, MAX_RANKS], then slots [2, rows]."""

    rank: int
    """This rank."""
    addresses: Tensor
    """[N] int64: where each rank's buffer is in this rank's address space. It begins as zeros, aligned to 256 bytes."""
    uses: Tensor
    """[rows + 1] int64, zeros at first: uses of each row; whether a rank was lost."""
    max_columns: int
    """Maximum number of columns; a multiple of 128."""
    dtype: torch.dtype
    """Dtype of the rows."""
    max_polls: int = 2**27
    """Times that a program polls the flags, each 0.5 to 1.5 us."""

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a call."""
        return len(self.uses) - 1

    @staticmethod
    def num_bytes(max_rows: int, max_columns: int, dtype: torch.dtype) -> int:
        """Size of a buffer."""
        return max_rows * (MAX_RANKS * _FLAG_BYTES + 2 * max_columns * dtype.itemsize)

    def fit(self, x: Tensor) -> bool:
        """Whether a tensor can be summed with them. It depends on its shape and dtype, which all ranks have alike."""
        return x.dim() == 2 and x.dtype == self.dtype and len(x) <= self.max_rows and x.shape[1] <= self.max_columns


@triton.jit(do_not_specialize=["rank", "max_polls"])
def _all_reduce_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    y: tl.tensor,
    total: tl.tensor,
    addresses: tl.tensor,
    uses: tl.tensor,
    x_stride: tl.int64,
    residual_stride: tl.int64,
    rank: tl.int32,
    max_polls: tl.int32,
    eps: tl.float32,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    FLAGS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One row. FLAGS: flags of a row, one for each possible rank."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_row = d < D
    dtype = x.dtype.element_ty
    w = tl.zeros([BLOCK_D], tl.float32)
    if HAS_NORM:
        w += tl.load(weight + d, mask=in_row, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    # The own row to its slot; the barrier puts the stores of all threads before the flags.
    use = tl.load(uses + row) + 1
    was_lost = tl.load(uses + MAX_ROWS) != 0
    slot = MAX_ROWS * FLAGS * 8 + ((use & 1) * MAX_ROWS + row) * ROW_BYTES
    own_buffer = tl.load(addresses + rank)
    own_row = tl.multiple_of((own_buffer + slot).to(tl.pointer_type(dtype)), 16)
    tl.store(own_row + d, tl.load(x + row * x_stride + d, mask=in_row, other=0.0), mask=in_row)
    tl.debug_barrier()

    # flags[row, rank] = use in every buffer; then wait until flags[row, :] of the own buffer are at least that.
    ranks = tl.arange(0, BLOCK_RANKS)
    is_rank = ranks < NUM_RANKS
    buffers = tl.load(addresses + ranks, mask=is_rank, other=0)
    theirs = (buffers + (row * FLAGS + rank) * 8).to(tl.pointer_type(tl.int64))
    tl.atomic_xchg(theirs, tl.zeros_like(buffers) + use, mask=is_rank, sem="release", scope="sys")
    own = (own_buffer + (row * FLAGS + ranks) * 8).to(tl.pointer_type(tl.int64))
    limit = tl.where(was_lost, 0, max_polls)
    num_polls = 0
    num_missing = NUM_RANKS
    while (num_missing > 0) & (num_polls <= limit):
        flags = tl.atomic_add(own, tl.zeros_like(buffers), mask=is_rank, sem="acquire", scope="sys")
        num_missing = tl.sum((is_rank & (flags < use)).to(tl.int32), 0)
        num_polls += 1
    tl.debug_barrier()
    is_lost = was_lost | (num_missing > 0)

    # sum of the rows, in the order of the ranks
    sums = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(NUM_RANKS):
        their_row = tl.multiple_of((tl.load(addresses + i) + slot).to(tl.pointer_type(dtype)), 16)
        sums += tl.load(their_row + d, mask=in_row, other=0.0, cache_modifier=".cg").to(tl.float32)
    out = tl.where(is_lost, float("nan"), sums).to(dtype)
    offset = row * D + d
    if HAS_NORM:
        out += tl.load(residual + row * residual_stride + d, mask=in_row, other=0.0)
        tl.store(total + offset, out, mask=in_row)
        normed, _ = normalize(out.to(tl.float32)[None, :], w, eps, D, dtype)
        tl.store(y + offset[None, :], normed.to(dtype), mask=in_row[None, :])
    else:
        tl.store(x + row * x_stride + d, out, mask=in_row)
    tl.store(uses + row, use)
    if is_lost:
        tl.store(uses + MAX_ROWS, 1)


def _run(x_TD: Tensor, buffers: PeerBuffers, norm: tuple[Tensor, Tensor, float] | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel: (y, s), or x twice. `norm`: residual, weight and eps."""
    num_rows, dim = x_TD.shape
    if not buffers.fit(x_TD) or x_TD.stride(1) != 1:
        raise ValueError(
            f"peer_all_reduce: {x_TD.dtype} {tuple(x_TD.shape)} does not fit buffers of {buffers.max_rows} x "
            f"{buffers.max_columns} {buffers.dtype}"
        )
    residual_TD, weight_D, eps = (x_TD, x_TD, 0.0) if norm is None else norm
    if residual_TD.shape != x_TD.shape or residual_TD.dtype != x_TD.dtype or residual_TD.stride(1) != 1:
        raise ValueError(
            f"peer_all_reduce: residual {residual_TD.dtype} {tuple(residual_TD.shape)} of x {tuple(x_TD.shape)}"
        )
    y_TD, total_TD = (x_TD, x_TD) if norm is None else (x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape))
    block = triton.next_power_of_2(dim)
    num_ranks = len(buffers.addresses)
    if num_rows:
        _all_reduce_kernel[(num_rows,)](
            x_TD, residual_TD, weight_D, y_TD, total_TD, buffers.addresses, buffers.uses, x_TD.stride(0),
            residual_TD.stride(0), buffers.rank, buffers.max_polls, eps, D=dim, BLOCK_D=block, NUM_RANKS=num_ranks,
            BLOCK_RANKS=triton.next_power_of_2(num_ranks), FLAGS=MAX_RANKS, MAX_ROWS=buffers.max_rows,
            ROW_BYTES=buffers.max_columns * x_TD.element_size(), HAS_NORM=norm is not None,
            num_warps=min(16, max(1, block // 512)), **launch.overlap_options(x_TD.device),
        )  # fmt: skip
    return y_TD, total_TD


def peer_all_reduce(x_TD: Tensor, buffers: PeerBuffers) -> Tensor:
    """Replace `x_TD` by the sum of the tensors of all ranks, each of which calls this."""
    return _run(x_TD, buffers)[0]


def peer_all_reduce_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, buffers: PeerBuffers
) -> tuple[Tensor, Tensor]:
    """(`rms_norm` of the sum of all ranks' `x_TD` and the residual, that sum). Each rank calls this."""
    return _run(x_TD, buffers, (residual_TD, weight_D, eps))

# mypy: allow-untyped-decorators
"""Fused output projection and cross entropy: the full logits are never materialised.

Legend: T tokens, D hidden size, V vocabulary (of this rank, when it is sharded), C tokens per chunk.

    logits = cap(hidden weight^T),  cap(x) = softcap * tanh(x / softcap) or x
    loss   = sum_t (lse_t - logits[t, labels[t]] + z_loss * lse_t^2) / count,      lse_t = log sum_v exp(logits[t, v])

over the tokens whose label is not `ignore_index`. With `label_smoothing` e the target logit is (1 - e) logits[t,
labels[t]] + e * mean_v logits[t, v], for which the loss kernel reads each row once more, from L2. hidden [T, D] and
weight [V, D] in one float dtype, labels [T] integers, `count` a number or a tensor on the device (usually the labelled
tokens of the global batch); the loss is a fp32 scalar.

The gradients are computed in the forward pass, chunk by chunk: logits (matmul), loss and d loss / d logits written over
them (one kernel), then the gradients of hidden and weight (two matmuls). Ignored tokens are dropped before the first
matmul and cost nothing. Without `num_labels` the host synchronises once to read the number of labelled tokens.

Precision. Logits and their gradients are rounded to the input dtype once; maximum, sum and loss are fp32. The weight's
gradient has the weight's dtype: each chunk is summed in fp32 inside its matmul and rounded as it is added, which in
bf16 adds a relative RMS error of 0.11 % * sqrt(chunks) to the 0.4 % of the rounded logits: 0.6 % in all for 16 chunks,
measured. (A fp32 sum would need 1.2 GiB more at 151936 x 2048.) Gradients are those of the sum, scaled by 1 / count in
backward, so small fp16 probabilities do not vanish.

Memory beyond the inputs: the two gradients, and C * V logits within `max_bytes`. At 16384 x 2048 x 151936 in bf16 that
is 594 + 64 + 297 MiB. Work: 6 T D V flop (2 T D V without gradients), and about 10 bytes moved per logit.

With `group`, `weight` is this rank's rows `vocab_start ..` of a vocabulary sharded over the group, while hidden and
labels are the same on every rank: maxima, sums and target logits are reduced per chunk, the gradient of hidden once at
the end.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from saccade.kernels import launch
from saccade.kernels._loss_kernels import gradient_kernel, loss_kernel, statistics_kernel
from saccade.kernels.launch import triton

CHUNK_BYTES = 320 * 2**20
"""Default bound on the logits of a chunk. Larger chunks add fewer times to the weight's gradient."""
_CHUNK_MULTIPLE = 128
"""Tokens per chunk are a multiple of this, the row tile of the matrix product."""
_HIDDEN_SPLITS = 2
"""Parts of the vocabulary in the sum of the gradient of hidden: C x D has too few tiles for the GPU."""
_LOSS_BLOCK = 8192
_LOSS_WARPS = 16
"""Logits per step and warps of the loss kernel: one row per program, 32 bytes per thread and step."""


def linear_cross_entropy_reference(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    count: Tensor | float,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    num_labels: int | None = None,
    max_bytes: int = CHUNK_BYTES,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """The formula above with all logits in fp32. `num_labels` and `max_bytes` are unused."""
    del num_labels, max_bytes
    is_labelled = labels_T != ignore_index
    labels, hidden = labels_T[is_labelled].long() - vocab_start, hidden_TD[is_labelled].float()
    if group is not None:
        hidden = _ShareWithShards.apply(hidden, group)  # type: ignore[no-untyped-call]
    logits = hidden @ weight_VD.float().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    is_here = (labels >= 0) & (labels < len(weight_VD))
    target = logits.gather(1, labels.clamp(0, len(weight_VD) - 1).unsqueeze(1)).squeeze(1) * is_here
    if label_smoothing:
        target = (1 - label_smoothing) * target + label_smoothing * logits.mean(1)
    peak = logits.detach().amax(1)
    if group is not None:
        dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    total = (logits - peak.unsqueeze(1)).exp().sum(1)
    if group is not None:
        total, target = _SumOverShards.apply(torch.stack([total, target]), group)  # type: ignore[no-untyped-call]
    lse = peak + total.log()
    return (lse - target + z_loss * lse.square()).sum() / count


class _ShareWithShards(torch.autograd.Function):
    """The same tensor on every rank, which each uses for its shard: its gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _SumOverShards(torch.autograd.Function):
    """The sum over the ranks. Every rank computes the same loss from it, so the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def labelled_rows(labels_T: Tensor, ignore_index: int, num_labels: int) -> tuple[Tensor, Tensor]:
    """Row indices and labels of the first `num_labels` labelled tokens, without synchronisation.

    If there are fewer, the remaining entries are row 0 with `ignore_index`.
    """
    is_labelled = labels_T != ignore_index
    index = torch.where(is_labelled, is_labelled.cumsum(0) - 1, num_labels).clamp_(max=num_labels)
    rows = index.new_zeros(num_labels + 1).scatter_(0, index, torch.arange(len(labels_T), device=labels_T.device))
    labels = labels_T.new_full((num_labels + 1,), ignore_index).scatter_(0, index, labels_T)
    return rows[:-1], labels[:-1]


def _chunks(num_rows: int, row_bytes: int, max_bytes: int) -> Iterator[slice]:
    """Slices of nearly equal size over the rows, each within the byte budget (but at least one row)."""
    most = max(1, max_bytes // row_bytes)
    most = most // _CHUNK_MULTIPLE * _CHUNK_MULTIPLE or most
    num_chunks = max(1, -(-num_rows // most))
    size = max(1, -(-num_rows // num_chunks))
    size = min(most, -(-size // _CHUNK_MULTIPLE) * _CHUNK_MULTIPLE)
    for start in range(0, num_rows, size):
        yield slice(start, min(start + size, num_rows))


def _losses_and_logit_gradients(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    ignore_index: int,
    softcap: float | None,
    z_loss: float,
    label_smoothing: float,
    group: dist.ProcessGroup | None,
    vocab_start: int,
    want_gradient: bool,
) -> Tensor:
    """The loss of each row, fp32 [C]; the logits become their gradients."""
    C, V = logits_CV.shape
    losses_C = logits_CV.new_empty(C, dtype=torch.float32)
    shape = {
        "CAPPED": softcap is not None,
        "BLOCK": min(_LOSS_BLOCK, triton.next_power_of_2(V)),
        "num_warps": _LOSS_WARPS,
    }
    cap, stride = softcap or 1.0, logits_CV.stride(0)
    if group is None:
        loss_kernel[(C,)](
            logits_CV, labels_C, losses_C, stride, V, ignore_index, cap, z_loss, label_smoothing,
            SMOOTHED=label_smoothing > 0.0, GRADIENT=want_gradient, **shape,
        )  # fmt: skip
        return losses_C
    peaks, totals, targets = logits_CV.new_empty((3, C), dtype=torch.float32)
    statistics_kernel[(C,)](
        logits_CV, labels_C, peaks, totals, targets, stride, V, ignore_index, vocab_start, cap, **shape
    )
    peak = peaks.clone()
    dist.all_reduce(peak, dist.ReduceOp.MAX, group)
    sums = torch.stack([totals * (peaks - peak).exp(), targets])
    dist.all_reduce(sums, group=group)
    lse = peak + sums[0].log()
    if want_gradient:
        gradient_kernel[(C,)](
            logits_CV, labels_C, lse, stride, V, ignore_index, vocab_start, cap, z_loss, **shape
        )  # fmt: skip
    return torch.where(labels_C == ignore_index, 0.0, lse - sums[1] + z_loss * lse.square())


def _hidden_gradient(logit_gradients_CV: Tensor, weight_VD: Tensor, num_splits: int) -> Tensor:
    """[C, D]: gradients of the logits times the weight, summed over equal parts of the vocabulary in parallel."""
    V = len(weight_VD)
    # The parts must start at 16-byte boundaries.
    if num_splits == 1 or V % (8 * num_splits) or not weight_VD.is_contiguous():
        return logit_gradients_CV @ weight_VD
    parts_SCV = logit_gradients_CV.view(-1, num_splits, V // num_splits).transpose(0, 1)
    return torch.bmm(parts_SCV, weight_VD.view(num_splits, V // num_splits, -1)).sum(0)


def _loss_and_gradients(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int,
    softcap: float | None,
    z_loss: float,
    label_smoothing: float,
    num_labels: int | None,
    max_bytes: int,
    group: dist.ProcessGroup | None,
    vocab_start: int,
    want_hidden: bool,
    want_weight: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The summed loss, and its gradients for hidden and weight if they are needed."""
    T, V = len(labels_T), len(weight_VD)
    num_found = (labels_T != ignore_index).sum()
    bound = int(num_found) if num_labels is None else min(num_labels, T)
    rows, labels = (None, labels_T) if bound == T else labelled_rows(labels_T, ignore_index, bound)

    grad_hidden = torch.zeros_like(hidden_TD) if want_hidden else None
    grad_weight = torch.empty_like(weight_VD) if want_weight and bound else None
    aligned_V = -(-V // 8) * 8  # rows of logits start at 16-byte boundaries, for the tensor cores
    buffer, losses = None, []
    for chunk in _chunks(bound, aligned_V * hidden_TD.element_size(), max_bytes):
        if buffer is None:
            buffer = hidden_TD.new_empty((chunk.stop, aligned_V))
        logits_CV = buffer[: chunk.stop - chunk.start, :V]
        hidden_CD = hidden_TD[chunk] if rows is None else hidden_TD[rows[chunk]]
        torch.mm(hidden_CD, weight_VD.T, out=logits_CV)
        losses.append(
            _losses_and_logit_gradients(
                logits_CV, labels[chunk], ignore_index=ignore_index, softcap=softcap, z_loss=z_loss,
                label_smoothing=label_smoothing, group=group, vocab_start=vocab_start,
        want_gradient=want_hidden or want_weight,
            )
        )  # fmt: skip
        if grad_hidden is not None:
            grad_CD = _hidden_gradient(logits_CV, weight_VD, _HIDDEN_SPLITS)
            if rows is None:
                grad_hidden[chunk] = grad_CD
            else:
                grad_hidden.index_add_(0, rows[chunk], grad_CD)  # unused entries add zero to row 0
        if grad_weight is not None:
            if chunk.start == 0:
                torch.mm(logits_CV.T, hidden_CD, out=grad_weight)
            else:
                grad_weight.addmm_(logits_CV.T, hidden_CD)
    if want_weight and grad_weight is None:
        grad_weight = torch.zeros_like(weight_VD)
    if group is not None and grad_hidden is not None:
        dist.all_reduce(grad_hidden, group=group)
    loss = torch.cat(losses).sum() if losses else hidden_TD.new_zeros((), dtype=torch.float32)
    # More labelled tokens than `num_labels` would be dropped silently: the loss becomes NaN, without a synchronisation.
    return torch.where(num_found > bound, float("nan"), loss), grad_hidden, grad_weight


class _LinearCrossEntropy(torch.autograd.Function):
    """Computes the gradients in forward and scales them in backward, in place: one backward per forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        count: Tensor | float,
        options: dict[str, Any],
    ) -> Tensor:
        loss, *ctx.gradients = _loss_and_gradients(hidden_TD, weight_VD, labels_T, **options)
        ctx.count = count
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.gradients is None:
            raise RuntimeError(
                "linear_cross_entropy: backward was called twice; its gradients were handed out the first time"
            )
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        scale = grad_loss / ctx.count
        for gradient in (grad_hidden, grad_weight):
            if gradient is not None:
                gradient.mul_(scale)
        return grad_hidden, grad_weight, None, None, None


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    count: Tensor | float,
    ignore_index: int = -100,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    num_labels: int | None = None,
    max_bytes: int = CHUNK_BYTES,
    group: dist.ProcessGroup | None = None,
    vocab_start: int = 0,
) -> Tensor:
    """Cross entropy of `hidden` projected by `weight`, see the top of this file.

    `num_labels` is an upper bound on the labels that are not ignored, which avoids a synchronisation; if there are
    more, the loss is NaN.
    """
    if (
        hidden_TD.shape[1] != weight_VD.shape[1]
        or len(labels_T) != len(hidden_TD)
        or hidden_TD.dtype != weight_VD.dtype
    ):
        raise ValueError(
            f"linear_cross_entropy: hidden {tuple(hidden_TD.shape)} {hidden_TD.dtype}, weight {tuple(weight_VD.shape)} "
            f"{weight_VD.dtype} and labels {tuple(labels_T.shape)} do not fit"
        )
    if label_smoothing and group is not None:
        raise ValueError("linear_cross_entropy: labels of a sharded vocabulary cannot be smoothed")
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "softcap": softcap,
        "z_loss": z_loss,
        "label_smoothing": label_smoothing,
        "num_labels": num_labels,
        "max_bytes": max_bytes,
        "group": group,
        "vocab_start": vocab_start,
    }
    if launch.choose_path("linear_cross_entropy", *launch.available_paths(hidden_TD, "triton")) == "reference":
        return linear_cross_entropy_reference(hidden_TD, weight_VD, labels_T, count=count, **options)
    is_learning = torch.is_grad_enabled()
    options["want_hidden"] = is_learning and hidden_TD.requires_grad
    options["want_weight"] = is_learning and weight_VD.requires_grad
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weight_VD, labels_T, count, options
    )
    return loss

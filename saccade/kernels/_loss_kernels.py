# mypy: allow-untyped-decorators
"""The kernels of `linear_cross_entropy.py`: one program per row of logits, which their gradients replace."""

from saccade.kernels.launch import tl, triton


@triton.jit
def _load_logits(
    row: tl.tensor, column: tl.tensor, V: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr
) -> tl.tensor:
    """Some logits of a row in fp32, capped; -inf past its end."""
    x = tl.load(row + column, mask=column < V, other=float("-inf")).to(tl.float32)
    if CAPPED:
        x = tl.where(
            column < V, softcap * (2 * tl.sigmoid(2 * x / softcap) - 1), float("-inf")
        )  # softcap tanh(x / softcap)
    return x


@triton.jit
def _max_and_sum(
    row: tl.tensor, V: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """max_v x[v] and sum_v exp(x[v] - max) of one row, in one pass."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    column = tl.arange(0, BLOCK)
    peak = tl.full([], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        x = _load_logits(row, start + column, V, softcap, CAPPED)
        new_peak = tl.maximum(peak, tl.max(x, 0))
        sums = sums * tl.exp2((peak - new_peak) * LOG2_E) + tl.exp2(x * LOG2_E - new_peak * LOG2_E)
        peak = new_peak
    return peak, tl.sum(sums, 0)


@triton.jit
def _mean_logit(
    row: tl.tensor, V: tl.tensor, softcap: tl.tensor, CAPPED: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """mean_v x[v] of one row."""
    column = tl.arange(0, BLOCK)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        x = _load_logits(row, start + column, V, softcap, CAPPED)
        sums += tl.where(start + column < V, x, 0.0)
    return tl.sum(sums, 0) / V


@triton.jit
def _write_gradient(
    row: tl.tensor,
    V: tl.tensor,
    label: tl.tensor,
    lse: tl.tensor,
    is_labelled: tl.tensor,
    softcap: tl.tensor,
    z_loss: tl.tensor,
    smoothing: tl.tensor,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """d loss / d logits of one row, in place of the logits: p (1 + 2 z lse) - target, times 1 - tanh^2 with a cap.

    The target is [v = label]; SMOOTHED: (1 - smoothing) [v = label] + smoothing / V.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    weight = tl.where(is_labelled, 1 + 2 * z_loss * lse, 0.0)
    hot = tl.where(is_labelled, label, -1).to(tl.int32)
    for start in tl.range(0, V, BLOCK, num_stages=3):
        column = start + tl.arange(0, BLOCK)
        x = _load_logits(row, column, V, softcap, CAPPED)
        gradient = tl.exp2(x * LOG2_E - lse * LOG2_E) * weight - tl.where(column == hot, 1.0, 0.0)
        if SMOOTHED:
            gradient += tl.where(is_labelled, tl.where(column == hot, smoothing, 0.0) - smoothing / V, 0.0)
        if CAPPED:
            tanh = tl.where(column < V, x / softcap, 0.0)
            gradient *= 1 - tanh * tanh
        tl.store(row + column, gradient.to(row.dtype.element_ty), mask=column < V)


@triton.jit(do_not_specialize=["ignore_index"])
def loss_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    losses: tl.tensor,
    stride: tl.tensor,
    V: tl.tensor,
    ignore_index: tl.tensor,
    softcap: tl.tensor,
    z_loss: tl.tensor,
    smoothing: tl.tensor,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: its loss, and with GRADIENT d loss / d logits in place of its logits. The second pass reads L2."""
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * stride
    label = tl.load(labels + t)
    is_labelled = label != ignore_index
    peak, total = _max_and_sum(row, V, softcap, CAPPED, BLOCK)
    lse = peak + tl.log(total)
    target = _load_logits(row, tl.where(is_labelled, label, 0).to(tl.int64), V, softcap, CAPPED)
    if SMOOTHED:
        target += smoothing * (_mean_logit(row, V, softcap, CAPPED, BLOCK) - target)
    tl.store(losses + t, tl.where(is_labelled, lse - target + z_loss * lse * lse, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # the target is read by every thread before one of them overwrites it
        _write_gradient(row, V, label, lse, is_labelled, softcap, z_loss, smoothing, CAPPED, SMOOTHED, BLOCK)


@triton.jit(do_not_specialize=["ignore_index", "vocab_start"])
def statistics_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    peaks: tl.tensor,
    totals: tl.tensor,
    targets: tl.tensor,
    stride: tl.tensor,
    V: tl.tensor,
    ignore_index: tl.tensor,
    vocab_start: tl.tensor,
    softcap: tl.tensor,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The share of a vocabulary shard in the loss of one row: maximum, sum, and target logit (0 if it is elsewhere)."""
    t = tl.program_id(0).to(tl.int64)
    row = logits + t * stride
    label = tl.load(labels + t)
    is_here = (label != ignore_index) & (label >= vocab_start) & (label < vocab_start + V)
    peak, total = _max_and_sum(row, V, softcap, CAPPED, BLOCK)
    target = _load_logits(row, tl.where(is_here, label - vocab_start, 0).to(tl.int64), V, softcap, CAPPED)
    tl.store(peaks + t, peak)
    tl.store(totals + t, total)
    tl.store(targets + t, tl.where(is_here, target, 0.0))


@triton.jit(do_not_specialize=["ignore_index", "vocab_start"])
def gradient_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    lses: tl.tensor,
    stride: tl.tensor,
    V: tl.tensor,
    ignore_index: tl.tensor,
    vocab_start: tl.tensor,
    softcap: tl.tensor,
    z_loss: tl.tensor,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """d loss / d logits of one row of a vocabulary shard, in place of its logits, with the log-sum-exp of all."""
    t = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + t)
    _write_gradient(
        logits + t * stride,
        V,
        label - vocab_start,
        tl.load(lses + t),
        label != ignore_index,
        softcap,
        z_loss,
        0.0,
        CAPPED,
        False,
        BLOCK,
    )

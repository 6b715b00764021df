# mypy: allow-untyped-decorators
"""One row of logits: scans, sums, thresholds, and draws of a token, for the kernels of `sampler.py`."""

from saccade.kernels.launch import tl, triton


@triton.jit
def load_logits(row: tl.tensor, token: tl.tensor, V: tl.tensor) -> tl.tensor:
    """Logits in fp32, -inf past the vocabulary."""
    return tl.load(row + token, mask=token < V, other=float("-inf")).to(tl.float32)


@triton.jit
def first_of_best(best: tl.tensor, token: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest value over the lanes, and the lowest token id that has it."""
    value = tl.max(best, 0)
    return value, tl.min(tl.where(best == value, token, 2147483647), 0)


@triton.jit
def scan(row: tl.tensor, V: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Largest logit (+inf if one is NaN), its token, smallest finite logit, and the largest logit of every lane."""
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_token = tl.full([TILE], 2147483647, tl.int32)
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in tl.range(0, V, TILE, num_stages=3):
        x = load_logits(row, start + lane, V)
        x = tl.where(x == x, x, float("inf"))
        best_token = tl.where(x > best, start + lane, best_token)
        best = tl.maximum(best, x)
        least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
    peak, token = first_of_best(best, best_token)
    return peak, token, tl.min(least, 0), best


@triton.jit
def mass(
    row: tl.tensor,
    V: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    low: tl.tensor,
    STRICT: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """sum of exp((x - peak) / temperature) over the logits at or (STRICT) above `low`."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    sums = tl.zeros([TILE], tl.float32)
    for start in tl.range(0, V, TILE, num_stages=3):
        x = load_logits(row, start + tl.arange(0, TILE), V)
        counts = x > low if STRICT else x >= low
        sums += tl.where(counts, tl.exp2((x - peak) * inverse_temperature * LOG2_E), 0.0)
    return tl.sum(sums, 0)


@triton.jit
def around(
    row: tl.tensor, V: tl.tensor, probe: tl.tensor, TILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Number of logits above `probe`, the smallest of them, and the largest of the others."""
    count = tl.zeros([TILE], tl.int32)
    above = tl.full([TILE], float("inf"), tl.float32)
    below = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, V, TILE, num_stages=3):
        x = load_logits(row, start + tl.arange(0, TILE), V)
        count += tl.where(x > probe, 1, 0)
        above = tl.minimum(above, tl.where(x > probe, x, float("inf")))
        below = tl.maximum(below, tl.where(x > probe, float("-inf"), x))
    return tl.sum(count, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def kth_largest(
    row: tl.tensor,
    V: tl.tensor,
    k: tl.tensor,
    least: tl.tensor,
    peak: tl.tensor,
    lanes: tl.tensor,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The k-th largest logit, by bisection.

    At least k logits reach a value that k lanes reach, so a lower bound comes from registers alone; if few of the top k
    share a lane, one more pass over the row is enough.
    """
    low = least
    high = peak
    for _ in range(16):
        middle = low + (high - low) * 0.5
        is_reached = tl.sum(tl.where(lanes >= middle, 1, 0), 0) >= k
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    # From here on: at least k logits >= low, fewer than k > high, and every pass moves one of them onto a logit.
    high = peak
    probe = low
    while low < high:
        count, above, below = around(row, V, probe, TILE)
        low = tl.where(count >= k, above, low)
        high = tl.where(count > k, high, tl.where(count == k, above, below))
        probe = low + (high - low) * 0.5
        probe = tl.where(probe < high, probe, low)
    return tl.minimum(low, high)


@triton.jit
def keep_best(
    x: tl.tensor,
    token: tl.tensor,
    bits: tl.tensor,
    kept: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    best: tl.tensor,
    best_token: tl.tensor,
    best_x: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Per lane, the kept token with the largest p / noise so far, and its logit."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    # 23 random bits as the mantissa of a number in [1, 2), less 1 - 2^-24: uniform in (0, 1), never 0 or 1.
    uniform = ((bits >> 9) | 0x3F800000).to(tl.float32, bitcast=True) - 0.999999940395355224609375
    score = tl.exp2((x - peak) * inverse_temperature * LOG2_E) / -tl.log(uniform)
    is_better = kept & (score > best)
    return tl.where(is_better, score, best), tl.where(is_better, token, best_token), tl.where(is_better, x, best_x)


@triton.jit
def draw(
    row: tl.tensor,
    V: tl.tensor,
    peak: tl.tensor,
    inverse_temperature: tl.tensor,
    low: tl.tensor,
    barred: tl.tensor,
    seed: tl.tensor,
    position: tl.tensor,
    SPAN: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The token with the largest p / noise among logits >= `low` and > `barred`, and its logit."""
    LANES: tl.constexpr = TILE // 4
    lane = tl.arange(0, LANES)
    best = tl.full([LANES], -1.0, tl.float32)
    best_token = tl.full([LANES], 2147483647, tl.int32)
    best_x = tl.full([LANES], float("-inf"), tl.float32)
    for start in range(0, V, TILE):
        t0 = start + lane // SPAN * (4 * SPAN) + lane % SPAN
        x0 = load_logits(row, t0, V)
        x1 = load_logits(row, t0 + SPAN, V)
        x2 = load_logits(row, t0 + 2 * SPAN, V)
        x3 = load_logits(row, t0 + 3 * SPAN, V)
        largest = tl.max(tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3)), 0)
        if (largest >= low) & (largest > barred):
            b0, b1, b2, b3 = tl.philox(seed, start // 4 + lane, lane * 0 + position, lane * 0, lane * 0)
            best, best_token, best_x = keep_best(
                x0, t0, b0, (x0 >= low) & (x0 > barred), peak, inverse_temperature, best, best_token, best_x
            )
            best, best_token, best_x = keep_best(
                x1, t0 + SPAN, b1, (x1 >= low) & (x1 > barred), peak, inverse_temperature, best, best_token, best_x
            )
            best, best_token, best_x = keep_best(
                x2, t0 + 2 * SPAN, b2, (x2 >= low) & (x2 > barred), peak, inverse_temperature, best, best_token, best_x
            )
            best, best_token, best_x = keep_best(
                x3, t0 + 3 * SPAN, b3, (x3 >= low) & (x3 > barred), peak, inverse_temperature, best, best_token, best_x
            )
    _, token = first_of_best(best, best_token)
    return token, tl.max(tl.where(best_token == token, best_x, float("-inf")), 0)

# mypy: allow-untyped-decorators
"""One tile of packed attention: its segment and keys, loads, stores and products.

A head dim that is not a power of two is split into two that are (80 = 64 + 16) rather than padded to 128: tiles have
two chunks of columns, MAIN and TAIL. If TAIL is 0, the second is unused.
"""

from saccade.kernels.launch import tl, triton

NO_MAX = tl.constexpr(-1.0e30)  # finite, so that a row whose keys are all masked has no inf - inf
LISTED_TILE = 128
"""Rows of a listed tile: programs with smaller tiles share one."""
_LISTED_TILE = tl.constexpr(LISTED_TILE)


@triton.jit
def locate(
    cu_seqlens: tl.tensor, tile: tl.tensor, num_segments: tl.tensor, first: tl.tensor, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The segment of a tile, and the index of the tile in that segment. `first` is cu_seqlens[0].

    Segment s owns the tiles from (cu_seqlens[s] - first) // BLOCK + s up to those of segment s + 1: always enough for
    its rows, at most one too many. A grid of T // BLOCK + num_segments tiles thus covers any lengths, which the host
    need not know.
    """
    low = tile * 0
    high = low + num_segments
    while high - low > 1:
        middle = (low + high) // 2
        is_reached = (tl.load(cu_seqlens + middle) - first) // BLOCK + middle <= tile
        low = tl.where(is_reached, middle, low)
        high = tl.where(is_reached, high, middle)
    return low, tile - ((tl.load(cu_seqlens + low) - first) // BLOCK + low)


@triton.jit
def span(cu_seqlens: tl.tensor, segment: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """First row and number of rows of a segment."""
    row = tl.load(cu_seqlens + segment)
    return row, tl.load(cu_seqlens + segment + 1) - row


@triton.jit
def queries_of_program(
    cu_seqlens_q: tl.tensor,
    cu_seqlens_k: tl.tensor,
    program: tl.tensor,
    num_segments: tl.tensor,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """First query and number of queries of the program's row, the same of its keys, and where its tile begins.

    LISTED: `cu_seqlens_q` is the list of tiles, five numbers each, see `context_attention.py`. A negative start means
    that there is no tile.
    """
    if LISTED:
        tile = cu_seqlens_q + program // (_LISTED_TILE // BLOCK) * 5
        q_row, num_queries = tl.load(tile), tl.load(tile + 1)
        k_row, num_keys = tl.load(tile + 2), tl.load(tile + 3)
        m0 = tl.load(tile + 4) + program % (_LISTED_TILE // BLOCK) * BLOCK
        m0 = tl.where(m0 < num_queries, m0, -1)
    else:
        segment, tile = locate(cu_seqlens_q, program, num_segments, 0, BLOCK)
        q_row, num_queries = span(cu_seqlens_q, segment)
        k_row, num_keys = span(cu_seqlens_k, segment)
        m0 = (tl.cdiv(num_queries, BLOCK) - 1 - tile) * BLOCK  # the longest rows of a causal segment go first
    return q_row, num_queries, k_row, num_keys, m0


@triton.jit
def keys_of_program(
    cu_seqlens_k: tl.tensor, program: tl.tensor, num_segments: tl.tensor, BLOCK: tl.constexpr, LISTED: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """First key and number of keys of the program's segment, where its tile begins, and the rows that read it.

    LISTED: `cu_seqlens_k` is the list of tiles. Otherwise a segment is the only row that reads its keys.
    """
    if LISTED:
        tile = cu_seqlens_k + program // (_LISTED_TILE // BLOCK) * 5
        k_row, num_keys = tl.load(tile), tl.load(tile + 1)
        n0 = tl.load(tile + 2) + program % (_LISTED_TILE // BLOCK) * BLOCK
        first, end = tl.load(tile + 3), tl.load(tile + 4)
    else:
        first, tile = locate(cu_seqlens_k, program, num_segments, 0, BLOCK)
        k_row, num_keys = span(cu_seqlens_k, first)
        n0 = tile * BLOCK
        end = first + 1
    return k_row, num_keys, n0, first, end


@triton.jit
def load_tile(
    source: tl.tensor,
    source_tail: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
    TMA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load rows `first` .. `first + BLOCK` of the segment that starts at `row`, in two chunks of columns.

    Through pointers, rows outside the segment read as zero. Through descriptors (TMA) they read as arbitrary data: the
    caller masks them. The offset of the first row is 64-bit; within a tile 32 bits do (see `rows_of`).
    """
    if TMA:
        main = source.load([row + first, column])
        tail = main
        if TAIL > 0:
            tail = source_tail.load([row + first, column + MAIN])
    else:
        rows = tl.arange(0, BLOCK)
        is_inside = ((rows + first >= 0) & (rows + first < num_rows))[:, None]
        pointers = source + (row + first).to(tl.int64) * stride + column + rows[:, None] * stride
        main = tl.load(pointers + tl.arange(0, MAIN)[None, :], mask=is_inside, other=0.0)
        tail = main
        if TAIL > 0:
            columns = MAIN + tl.arange(0, TAIL)[None, :]
            tail = tl.load(pointers + columns, mask=is_inside & (columns < HEAD_DIM), other=0.0)
    return main, tail


@triton.jit
def store_tile(
    target: tl.tensor,
    main: tl.tensor,
    tail: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    num_rows: tl.tensor,
    stride: tl.tensor,
    column: tl.tensor,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    TAIL: tl.constexpr,
) -> None:
    """Store a tile where `load_tile` would load it; rows outside the segment are not written."""
    rows = tl.arange(0, BLOCK)
    is_inside = (rows + first < num_rows)[:, None]
    pointers = target + (row + first).to(tl.int64) * stride + column + rows[:, None] * stride
    tl.store(pointers + tl.arange(0, MAIN)[None, :], main.to(target.dtype.element_ty), mask=is_inside)
    if TAIL > 0:
        columns = MAIN + tl.arange(0, TAIL)[None, :]
        tl.store(pointers + columns, tail.to(target.dtype.element_ty), mask=is_inside & (columns < HEAD_DIM))


@triton.jit
def zero_tile(BLOCK: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """A zero accumulator, in two chunks of columns."""
    return tl.zeros([BLOCK, MAIN], tl.float32), tl.zeros([BLOCK, TAIL if TAIL > 0 else 16], tl.float32)


@triton.jit
def dot_rows(a: tl.tensor, a_tail: tl.tensor, b: tl.tensor, b_tail: tl.tensor, TAIL: tl.constexpr) -> tl.tensor:
    """a @ b^T over both chunks. fp32 inputs keep their precision (three TF32 products)."""
    product = tl.dot(a, tl.trans(b), input_precision="tf32x3")
    if TAIL > 0:
        product = tl.dot(a_tail, tl.trans(b_tail), product, input_precision="tf32x3")
    return product


@triton.jit
def add_dot(
    sums: tl.tensor, sums_tail: tl.tensor, weights: tl.tensor, b: tl.tensor, b_tail: tl.tensor, TAIL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """sums + weights @ b, both chunks; the weights are rounded to b's dtype, for the tensor cores."""
    weights = weights.to(b.dtype)
    sums = tl.dot(weights, b, sums, input_precision="tf32x3")
    if TAIL > 0:
        sums_tail = tl.dot(weights, b_tail, sums_tail, input_precision="tf32x3")
    return sums, sums_tail


@triton.jit
def attends(position: tl.tensor, key: tl.tensor, CAUSAL: tl.constexpr, WINDOW: tl.constexpr) -> tl.tensor:
    """Whether the query at `position` attends to `key`."""
    seen = key == key
    if CAUSAL:
        seen = key <= position
    if WINDOW is not None:
        seen = seen & (key >= position - WINDOW)
    return seen


@triton.jit
def keys_of_tile(
    position: tl.tensor,
    num_keys: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Key range of the queries from `position` on: [begin, full_begin) and [full_end, end) need a mask."""
    begin = num_keys * 0
    end = num_keys
    full_end = num_keys
    if CAUSAL:
        end = tl.minimum(num_keys, position + BLOCK_M)
        full_end = tl.minimum(num_keys, tl.maximum(position + 1, 0))
    full_begin = begin
    full_end = full_end // BLOCK_N * BLOCK_N
    if WINDOW is not None:
        begin = tl.maximum(position - WINDOW, 0) // BLOCK_N * BLOCK_N
        full_end = tl.maximum(full_end, begin)
        full_begin = tl.cdiv(tl.maximum(position + BLOCK_M - 1 - WINDOW, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, end

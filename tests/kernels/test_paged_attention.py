from typing import NamedTuple

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import launch
from saccade.kernels import paged_attention as module
from saccade.kernels._paged_decode import DecodeTiles, plan_decode
from saccade.kernels._paged_prefill import Schedule, schedule_prefill
from saccade.kernels.paged_attention import (
    QUANTIZED_MAX,
    NewTokens,
    paged_attention,
    paged_attention_reference,
    write_pages,
    write_pages_reference,
)

COMPRESSED = pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
DECODE = [5, 129, 1, 70]


class Case(NamedTuple):
    """The arguments of `paged_attention`."""

    tensors: tuple[torch.Tensor, ...]
    options: dict


def turned_nowhere(num_tokens, head_dim, device):
    """An angle table of zero angles."""
    return torch.ones(num_tokens, head_dim // 2, device=device), torch.zeros(num_tokens, head_dim // 2, device=device)


def empty_cache(num_pages, num_heads, page_size, head_dim, cache_dtype, device):
    """Pages of NaN, or with NaN scales: a read before a write shows."""
    shape = (num_pages, num_heads, page_size, head_dim)
    if cache_dtype in QUANTIZED_MAX:
        pages = torch.ones(shape, device=device).to(cache_dtype)
        scales = torch.full(shape[:3], float("nan"), device=device)
        return pages, pages.clone(), scales, scales.clone()
    pages = torch.full(shape, float("nan"), dtype=cache_dtype, device=device)
    return pages, pages.clone(), None, None


def make_case(new, context, heads, device, dtype, page_size=16, cache_dtype=None, bound=None):
    """Requests with `new` tokens each, over `context` keys in shuffled pages; slots of no request are poisoned."""
    num_heads, num_kv_heads, head_dim = heads
    width = max(1, *(-(-length // page_size) for length in context))
    pages = torch.randperm(len(context) * width)
    table = torch.full((len(context), width), len(pages), dtype=torch.int32)  # the last page is padding
    cache = empty_cache(len(pages) + 1, num_kv_heads, page_size, head_dim, cache_dtype or dtype, device)
    for request, length in enumerate(context):
        num_pages = -(-length // page_size)
        table[request, :num_pages] = pages[request * width : request * width + num_pages]
        slots = (
            table[request].long().repeat_interleave(page_size)[:length] * page_size + torch.arange(length) % page_size
        )
        rows = (torch.randn(length, n, head_dim, device=device).to(dtype) for n in (1, num_kv_heads, num_kv_heads))
        write_pages_reference(*rows, turned_nowhere(length, head_dim, device), slots.to(device), *cache)
    q = torch.randn(sum(new), num_heads, head_dim, device=device).to(dtype)
    starts = torch.tensor([0, *new], device=device).cumsum(0).int()
    tensors = (q, cache[0], cache[1], table.to(device), starts, torch.tensor(context, device=device).int())
    options = {"max_seqlen_q": max(new), "max_context_length": bound or max(1, *context)}
    return Case(tensors, options | {"key_scales_NGP": cache[2], "value_scales_NGP": cache[3]})


def expected_of(case):
    """The reference, in fp32 throughout."""
    q, key_pages, value_pages, *rest = case.tensors
    if case.options["key_scales_NGP"] is None:
        key_pages, value_pages = key_pages.float(), value_pages.float()
    return paged_attention_reference(q.float(), key_pages, value_pages, *rest, **case.options)


def run_triton(case):
    with launch.forced("triton"):
        return paged_attention(*case.tensors, **case.options)


def expect_equal(case, dtype):
    assert_close("out", run_triton(case), expected_of(case), BOUNDS[dtype])


@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 80), (2, 2, 128), (32, 1, 256)], ids=str)
def test_decode_equals_the_reference(heads, device, dtype):
    lengths = DECODE if heads[0] < 32 or device == "cuda" else DECODE[2:]  # many heads take the interpreter long
    expect_equal(make_case([1] * len(lengths), lengths, heads, device, dtype), dtype)


@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 80), (2, 1, 128)], ids=str)
def test_prompt_chunks_and_decode_mix_in_one_call(heads, device, dtype):
    expect_equal(make_case([7, 1, 33, 1, 0, 2], [7, 60, 129, 1, 9, 70], heads, device, dtype), dtype)


@pytest.mark.parametrize(
    ("new", "num_decode"), [([1, 1, 1, 9, 0, 3], 3), ([1, 1], 2), ([1, 70, 1], 1)], ids=["mixed", "decode alone", "few"]
)
@pytest.mark.parametrize("num_splits", [None, 3], ids=["whole", "split"])
def test_decode_requests_keep_their_schedule_with_prefill(new, num_decode, num_splits, device, one_dtype, monkeypatch):
    """Two launches; the tokens of the second come after those of the first."""
    if num_splits is not None:
        monkeypatch.setattr(module, "schedule_prefill", lambda **sizes: many_splits(num_splits))
    case = make_case(new, [40, 300, 7, 90, 50, 130][: len(new)], (4, 2, 64), device, one_dtype)
    case.options["num_decode"] = num_decode
    expect_equal(case, one_dtype)


def test_fewer_requests_decode_than_there_is_room_for(device, one_dtype):
    """The prefill tokens follow those of the decode requests, as in a captured graph."""
    case = make_case([1, 1, 0, 0, 5, 3], [40, 300, 0, 0, 90, 50], (4, 2, 64), device, one_dtype)
    case.options["num_decode"] = 4
    expect_equal(case, one_dtype)


@pytest.mark.parametrize("new", [[1, 1, 1], [1, 9, 3]], ids=["decode", "mixed"])
def test_requests_find_their_rows_of_a_larger_page_table(new, device, one_dtype):
    case = make_case(new, [40, 300, 7], (4, 2, 64), device, one_dtype)
    q, keys, values, table, *rest = case.tensors
    larger = torch.full((7, table.shape[1]), 10**6, dtype=torch.int32, device=device)
    rows = torch.tensor([5, 0, 3], device=device).int()
    larger[rows.long()] = table
    options = case.options | {"table_rows_R": rows, "num_decode": 1}
    expect_equal(Case((q, keys, values, larger, *rest), options), one_dtype)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"])
@pytest.mark.parametrize("new", [[1, 1, 1, 1], [1, 9, 0, 3, 1, 70]], ids=["decode", "mixed"])
@pytest.mark.parametrize("page_size", [1, 8])
def test_gathered_on_the_cpu_equals_the_reference(new, page_size, cache_dtype):
    context = DECODE if len(new) == 4 else [5, 40, 3, 3, 129, 70]
    case = make_case(new, context, (4, 2, 64), "cpu", torch.float32, page_size, cache_dtype)
    with launch.forced("library"):
        actual = paged_attention(*case.tensors, **case.options)
    assert_close("out", actual, expected_of(case), BOUNDS[torch.float32])


@pytest.mark.parametrize("path", ["library", "triton"])
@pytest.mark.parametrize("window", [0, 1, 20, 64, 128, 10**4])
def test_a_sliding_window_equals_the_reference(window, path, device, one_dtype):
    """Contexts shorter, as long and longer than the window; decode, whole prompts and chunks with a cache."""
    if path == "library" and device == "cuda":
        pytest.skip("pages are gathered on a CPU alone: test_a_sliding_window_equals_the_reference[triton] runs here")
    case = make_case([1, 1, 1, 33, 9, 70], [5, 129, 65, 33, 140, 70], (4, 2, 64), device, one_dtype, 8)
    case.options.update({"window": window, "num_decode": 3})
    with launch.forced(path):
        assert_close("out", paged_attention(*case.tensors, **case.options), expected_of(case), BOUNDS[one_dtype])


@pytest.mark.parametrize("num_splits", [1, 3])
def test_splits_and_ranges_of_a_sliding_window_give_the_same(num_splits, device, one_dtype, monkeypatch):
    monkeypatch.setattr(module, "schedule_prefill", lambda **sizes: many_splits(num_splits))
    case = make_case([1] * 4 + [9, 17], [1000, 1, 16, 129, 300, 17], (2, 1, 64), device, one_dtype)
    tiles = DecodeTiles(16, 2, 3, programs_per_sm=4 if device == "cuda" else 20, min_keys=16)
    plan = plan_decode(*case.tensors[4:], case.tensors[1], num_decode=4, tiles=tiles, window=100)
    case.options.update({"window": 100, "num_decode": 4, "decode_plan": plan})
    expect_equal(case, one_dtype)


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 32, 64, 128])
def test_every_page_size_gives_the_same(page_size, device, one_dtype):
    expect_equal(make_case([1, 3], [70, 129], (2, 1, 64), device, one_dtype, page_size), one_dtype)


@COMPRESSED
def test_compressed_cache_equals_the_reference_on_the_same_cache(cache_dtype, device, dtype):
    for new in ([1, 1, 1], [1, 5, 20]):
        expect_equal(make_case(new, [5, 129, 70], (4, 2, 64), device, dtype, cache_dtype=cache_dtype), dtype)


@COMPRESSED
def test_compressed_cache_is_close_to_the_plain_one(cache_dtype, device, one_dtype):
    torch.manual_seed(1)
    plain = make_case([1] * 4, DECODE, (4, 2, 64), device, one_dtype)
    torch.manual_seed(1)
    compressed = make_case([1] * 4, DECODE, (4, 2, 64), device, one_dtype, cache_dtype=cache_dtype)
    bound = 0.02 if cache_dtype == torch.int8 else 0.06
    assert_close("out", run_triton(compressed), expected_of(plain), bound)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_any_number_of_splits_of_a_prompt_gives_the_same(num_splits, device, one_dtype, monkeypatch):
    case = make_case([1, 9, 3], [5, 129, 70], (2, 1, 64), device, one_dtype)
    monkeypatch.setattr(module, "schedule_prefill", lambda **sizes: many_splits(num_splits))
    expect_equal(case, one_dtype)


def test_prefill_splits_fill_the_gpu_and_stay_within_bounds():
    shape = {"H": 16, "G": 2, "head_dim": 128, "cache_bytes": 2, "num_sms": 132}
    few = schedule_prefill(num_tokens=16, num_requests=1, max_context_length=65536, max_seqlen_q=16, **shape)
    many = schedule_prefill(num_tokens=4096, num_requests=8, max_context_length=4096, max_seqlen_q=2048, **shape)
    short = schedule_prefill(num_tokens=16, num_requests=1, max_context_length=2047, max_seqlen_q=16, **shape)
    assert [few.num_splits, many.num_splits, short.num_splits] == [22, 1, 1]
    assert many.block_m == 64


RAGGED = [0, 1, 15, 16, 17, 1000, 0, 129, 64]


def many_splits(num_splits):
    """Splits of 16 keys: 1000 keys have 62 of them."""
    return Schedule(block_m=16, block_n=16, num_warps=2, num_stages=3, num_splits=num_splits, min_split=16)


@pytest.mark.parametrize(
    "min_keys",
    [16, pytest.param(48, marks=pytest.mark.slow), 10**5],
    ids=["small ranges", "ranges of three tiles", "one range"],
)
def test_ranges_of_ragged_requests_combine_again_and_again(min_keys, device, one_dtype):
    lengths = RAGGED if device == "cuda" else [min(length, 300) for length in RAGGED]
    case = make_case([1] * 9, lengths, (6, 2, 80), device, one_dtype)
    expected = expected_of(case)
    tiles = DecodeTiles(16, 2, 3, programs_per_sm=4 if device == "cuda" else 20, min_keys=min_keys)
    plan = plan_decode(*case.tensors[4:], case.tensors[1], num_decode=9, tiles=tiles)
    case.options["decode_plan"] = plan
    for _ in range(20 if device == "cuda" else 2):
        assert_close("out", run_triton(case), expected, BOUNDS[one_dtype])


def test_a_plan_of_fewer_requests_than_decode_is_made_again(device, one_dtype):
    """A step of one token each, some of them the last chunk of a prompt that samples nothing."""
    case = make_case([1, 1, 1, 1], [40, 17, 33, 5], (4, 2, 64), device, one_dtype)
    plan = plan_decode(*case.tensors[4:], case.tensors[1], num_decode=2)
    case.options.update({"max_seqlen_q": 1, "num_decode": 2, "decode_plan": plan})
    expect_equal(case, one_dtype)


@pytest.mark.parametrize("programs_per_sm", [1, 2, 5, 30])
def test_decode_ranges_cover_every_tile_once(programs_per_sm, device):
    lengths = torch.tensor(RAGGED * 3, device=device).int()
    starts = torch.arange(len(lengths) + 1, device=device).int()
    starts[6:] -= 1  # the sixth request has no new token: nothing of it is read
    keys = torch.empty(1, 2, 16, 128, device=device, dtype=torch.float16)
    tiles = DecodeTiles(16, 2, 3, programs_per_sm=programs_per_sm, min_keys=32)
    ranges, cu_tiles, *_ = plan_decode(starts, lengths, keys, num_decode=len(lengths), tiles=tiles)
    num_tiles = [-(-length // 16) for length in lengths.tolist()]
    num_tiles[5] = 0
    per_program, *bounds = cu_tiles.tolist()
    assert bounds == [0, *torch.tensor(num_tiles).cumsum(0).tolist()]
    assert per_program == max(2, -(-sum(num_tiles) // (len(ranges) - 1)))
    begins = [bounds[request] + tile for request, tile in ranges.tolist()]
    assert begins == [min(p * per_program, bounds[-1]) for p in range(len(ranges))]
    assert begins[-1] == bounds[-1]
    assert all(request == len(lengths) or tile < num_tiles[request] for request, tile in ranges.tolist())


def test_requests_without_tokens_or_context_disturb_nobody(device, dtype):
    case = make_case([1, 0, 1, 1], [9, 30, 0, 20], (4, 2, 64), device, dtype)
    case.options["max_seqlen_q"] = 1
    expected = expected_of(case)
    assert (expected[1] == 0).all(), "no context: zeros"
    assert_close("out", run_triton(case), expected, BOUNDS[dtype])


def test_bounds_larger_than_the_batch_change_nothing(device, one_dtype):
    case = make_case([1, 1], [9, 30], (4, 2, 64), device, one_dtype)
    q, *rest = case.tensors
    padded = Case(
        (torch.cat([q, q.new_full((3, 4, 64), float("nan"))]), *rest), case.options | {"max_context_length": 10**6}
    )
    assert_close("out", run_triton(padded)[:2], expected_of(case), BOUNDS[one_dtype])


def test_strided_inputs_are_read_in_place(device, one_dtype):
    case = make_case([1, 3], [9, 30], (4, 2, 64), device, one_dtype)
    q, keys, values, *rest = case.tensors
    fused = torch.cat([q, torch.full_like(q, float("nan"))], dim=1)
    by_token = [
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values)
    ]  # pages as [N, P, G, K] in memory
    assert not by_token[0].is_contiguous()
    strided = Case((fused[:, :4], *by_token, *rest), case.options)
    assert_close("out", run_triton(strided), expected_of(case), BOUNDS[one_dtype])


def test_a_result_off_by_twice_the_bound_is_refused(device, dtype):
    case = make_case([1] * 4, DECODE, (4, 2, 64), device, dtype)
    with pytest.raises(AssertionError, match="relative RMS"):
        assert_close("out", perturbed(run_triton(case), BOUNDS[dtype]), expected_of(case), BOUNDS[dtype])


def new_tokens(num_tokens, heads, device, dtype):
    """q, k, v as slices of one fused projection, and an angle table."""
    num_heads, num_kv_heads, head_dim = heads
    fused = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2, device=device) * 6.28
    return list(fused.split([num_heads, num_kv_heads, num_kv_heads], dim=1)), (angles.cos(), angles.sin())


@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 80), (3, 3, 128)], ids=str)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=["plain", "int8", "fp8"])
def test_written_pages_equal_the_reference(heads, cache_dtype, device, dtype):
    if cache_dtype == torch.float8_e4m3fn and device == "cpu":
        pytest.skip("Triton's interpreter loses the carry when it rounds to fp8")
    num_tokens = 7
    inputs, table = new_tokens(num_tokens, heads, device, dtype)
    slots = torch.randperm(8 * 4, device=device)[:num_tokens]
    slots[2], slots[5] = 8 * 4, -1  # padding
    results = {}
    for write in (write_pages, write_pages_reference):
        cache = empty_cache(8, heads[1], 4, heads[2], cache_dtype or dtype, device)
        q, k, v = (x.clone() for x in inputs)
        with launch.forced("triton"):
            write(q, k, v, table, slots, *cache)
        results[write] = (q, k, *(x.float().nan_to_num(-7.0) for x in cache if x is not None))
    for name, actual, expected in zip(
        ("q", "k", "keys", "values", "scales", "scales"), *results.values(), strict=False
    ):
        assert_close(name, actual, expected, BOUNDS[dtype] if cache_dtype is None else 2e-2)


def test_tokens_written_are_the_tokens_read(device, one_dtype):
    """Eight tokens, written and attended to one by one, equal one chunk of eight."""
    heads = (4, 2, 64)
    (q, k, v), table = new_tokens(8, heads, device, one_dtype)
    slots = torch.tensor([12, 13, 14, 15, 0, 1, 2, 3], device=device)  # pages 3, then 0
    pages = torch.tensor([[3, 0]], device=device).int()
    outs = []
    with launch.forced("triton"):
        chunk, cache = [x.clone() for x in (q, k, v)], empty_cache(4, 2, 4, 64, one_dtype, device)
        write_pages(*chunk, table, slots, *cache)
        one = torch.tensor([0, 8], device=device).int()
        whole = paged_attention(chunk[0], *cache[:2], pages, one, one[1:], max_seqlen_q=8)
        cache = empty_cache(4, 2, 4, 64, one_dtype, device)
        for i in range(8):
            step = [x[i : i + 1].clone() for x in (q, k, v)]
            write_pages(*step, tuple(x[i : i + 1] for x in table), slots[i : i + 1], *cache)
            lengths = torch.tensor([i + 1], device=device).int()
            outs.append(paged_attention(step[0], *cache[:2], pages, one.clamp(max=1), lengths, max_seqlen_q=1))
    assert_close("out", torch.cat(outs), whole, BOUNDS[one_dtype])


def expect_stored_and_attended(case, heads, dtype, num_padding=0):
    """The last key of a request is not in its page yet: decode stores and returns what `write_pages` and decode do."""
    q, key_pages, value_pages, table, starts, lengths = case.tensors
    page_size, num_tokens = key_pages.shape[2], len(lengths)
    (q, k, v), angles = new_tokens(num_tokens + num_padding, heads, key_pages.device, dtype)
    last = (lengths - 1).long()
    slots = table[torch.arange(num_tokens), last // page_size].long() * page_size + last % page_size
    slots = torch.cat([slots, torch.full((num_padding,), key_pages.shape[0] * page_size, device=slots.device)])
    rows = [x.transpose(1, 2).flatten(0, 1) for x in (key_pages, value_pages)]  # copies
    outs, caches = [], []
    for stores_in_decode in (False, True):
        cache = [x.unflatten(0, (-1, page_size)).transpose(1, 2).contiguous() for x in rows]
        for pages in cache:
            pages.transpose(1, 2)[slots[:num_tokens] // page_size, slots[:num_tokens] % page_size] = float("nan")
        step = [x.clone() for x in (q, k, v)]
        new = NewTokens(step[1], step[2], angles, slots)
        with launch.forced("triton"):
            if not stores_in_decode:
                write_pages(*step, angles, slots, *cache)
            options = case.options | {"new": new if stores_in_decode else None}
            outs.append(paged_attention(step[0], *cache, table, starts, lengths, **options)[:num_tokens])
        caches.append([x.float().nan_to_num(-7.0) for x in cache])
    assert_close("out", outs[1], outs[0].float(), BOUNDS[dtype])
    for actual, expected in zip(*reversed(caches), strict=True):
        assert_close("pages", actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize("heads", [(4, 2, 64), (7, 1, 80), (2, 2, 128)], ids=str)
def test_decode_stores_its_tokens_itself(heads, device, dtype):
    case = make_case([1] * 4, DECODE, heads, device, dtype)
    expect_stored_and_attended(case, heads, dtype)
    expect_stored_and_attended(case, heads, dtype, num_padding=2)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("min_keys", [16, 64])
def test_tokens_are_stored_by_the_program_with_the_last_tile(min_keys, window, device, one_dtype, monkeypatch):
    heads = (4, 2, 64)
    case = make_case([1] * 4, [300, 17, 16, 33], heads, device, one_dtype)
    tiles = DecodeTiles(16, 4, 3, min_keys=min_keys)
    plan = plan_decode(*case.tensors[4:], case.tensors[1], num_decode=4, tiles=tiles, window=window or None)
    options = case.options | {"decode_plan": plan, "window": window or None}
    expect_stored_and_attended(Case(case.tensors, options), heads, one_dtype)


@COMPRESSED
def test_tokens_of_a_compressed_cache_and_of_prompts_are_stored_before(cache_dtype, device, one_dtype):
    if cache_dtype == torch.float8_e4m3fn and device == "cpu":
        pytest.skip("Triton's interpreter loses the carry when it rounds to fp8")
    heads = (4, 2, 64)
    (q, k, v), angles = new_tokens(4, heads, device, one_dtype)
    slots = torch.tensor([12, 13, 14, 15], device=device)
    pages, four = torch.tensor([[3]], device=device).int(), torch.tensor([0, 4], device=device).int()
    for cache_format, new in ((cache_dtype, 1), (one_dtype, 4)):
        outs = []
        for is_given in (False, True):
            *plain, key_scales, value_scales = empty_cache(4, 2, 4, 64, cache_format, device)
            step = [x[:new].clone() for x in (q, k, v)]
            table = tuple(x[:new] for x in angles)
            with launch.forced("triton"):
                if not is_given:
                    write_pages(*step, table, slots[:new], *plain, key_scales, value_scales)
                outs.append(
                    paged_attention(
                        step[0], *plain, pages, four.clamp(max=new), four[1:].clamp(max=new), max_seqlen_q=new,
                        key_scales_NGP=key_scales, value_scales_NGP=value_scales,
                        new=NewTokens(*step[1:], table, slots[:new]) if is_given else None,
                    )
                )  # fmt: skip
        assert torch.equal(*outs)


def test_what_does_not_fit_is_refused(device):
    case = make_case([1], [9], (4, 2, 64), device, torch.float32)
    q, keys, values, *rest = case.tensors
    with pytest.raises(ValueError, match="do not fit"):
        paged_attention(q[:, :3], keys, values, *rest, **case.options)
    with pytest.raises(ValueError, match="use q's dtype"):
        paged_attention(q.half(), keys, values, *rest, **case.options)
    with pytest.raises(ValueError, match="need scales"):
        paged_attention(q, keys.to(torch.int8), values.to(torch.int8), *rest, **case.options)
    with pytest.raises(ValueError, match="power of two"):
        paged_attention(q, keys[:, :, :12], values[:, :, :12], *rest, **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "cache_dtype"),
    [(64, None), (80, None), (128, None), (256, None), (128, torch.int8), (128, torch.float8_e4m3fn)],
    ids=["64", "80", "128", "256", "128 int8", "128 fp8"],
)
@pytest.mark.parametrize("new", [1, 100], ids=["decode", "mixed"])
def test_real_sizes_equal_the_reference(new, head_dim, cache_dtype):
    dtype = torch.bfloat16
    context = [1000, 1, 4096, 2049, 500]
    case = make_case([new, 1, new, 1, new], context, (16, 2, head_dim), "cuda", dtype, 16, cache_dtype)
    expect_equal(case, dtype)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_pages_beyond_two_to_the_31_elements_are_found():
    num_pages = 2**31 // (2 * 16 * 128) + 64
    keys = torch.zeros(num_pages, 2, 16, 128, dtype=torch.bfloat16, device="cuda")
    values = torch.zeros_like(keys)
    (q, k, v), table = new_tokens(40, (16, 2, 128), "cuda", torch.bfloat16)
    slots = num_pages * 16 - 40 + torch.arange(40, device="cuda")
    pages = torch.arange(num_pages - 3, num_pages, device="cuda").int().unsqueeze(0)
    slots = (pages[0].long().repeat_interleave(16) * 16 + torch.arange(48, device="cuda") % 16)[:40]
    starts, lengths = torch.tensor([0, 40], device="cuda").int(), torch.tensor([40], device="cuda").int()
    write_pages(q, k, v, table, slots, keys, values)
    out = paged_attention(q, keys, values, pages, starts, lengths, max_seqlen_q=40)
    near = tuple(x[num_pages - 3 :].clone().float() for x in (keys, values))
    expected = paged_attention_reference(q.float(), *near, pages - (num_pages - 3), starts, lengths, max_seqlen_q=40)
    assert_close("out", out, expected, BOUNDS[torch.bfloat16])


@pytest.mark.gpu
def test_one_captured_graph_serves_changing_lengths():
    bound, dtype = 4096, torch.bfloat16
    case = make_case([1] * 8, [4096] * 8, (16, 2, 128), "cuda", dtype, bound=bound)
    lengths = case.tensors[-1]
    run_triton(case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_triton(case)
    for fill in ([1, 7, 129, 4096, 1000, 16, 17, 2048], [4096] * 8, [3] * 8):
        lengths.copy_(torch.tensor(fill))
        graph.replay()
        assert_close("out", out, expected_of(case), BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("block_n", [16, 32, 64])
def test_tiles_of_the_sweep_are_right(block_n):
    case = make_case([1] * 3, [1000, 1, 300], (16, 2, 128), "cuda", torch.bfloat16)
    base = DecodeTiles(block_n, num_warps=4, num_stages=3)
    for changes in ({}, {"num_warps": 2}, {"num_stages": 5}, {"programs_per_sm": 1, "min_keys": 128}):
        plan = plan_decode(*case.tensors[4:], case.tensors[1], num_decode=3, tiles=base._replace(**changes))
        expect_equal(Case(case.tensors, case.options | {"decode_plan": plan}), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("context", [[65536], [4096, 1, 0, 130, 2049, 4096]], ids=["one long", "ragged"])
def test_captured_ranges_combine_in_every_replay(context):
    """One graph has four calls on one plan, like the layers of a model."""
    case = make_case([1] * len(context), context, (16, 2, 128), "cuda", torch.bfloat16)
    lengths = case.tensors[-1]

    def attend():
        plan = plan_decode(*case.tensors[4:], case.tensors[1], num_decode=len(context))
        return [paged_attention(*case.tensors, **case.options, decode_plan=plan) for _ in range(4)]

    attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = attend()
    full = lengths.clone()
    for fill in (full, full // 2, full.clamp(max=17), full):
        lengths.copy_(fill)
        for _ in range(5):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
        for out in outs:
            assert_close("out", out, expected_of(case), BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_padding", [0, 2])
def test_a_plan_of_a_cpu_step_writes_and_reads_as_the_references_do(num_padding, dtype):
    """Two layers share a plan with decode, a whole prompt, and a chunk; padding is rotated and not stored."""
    new, context, (H, G, K), page_size = [1, 7, 1, 4], [20, 7, 3, 30], (4, 2, 64), 8
    case = make_case(new, context, (H, G, K), "cpu", dtype, page_size)
    _, keys, values, table, starts, lengths = case.tensors
    ends = [
        table[r, p // page_size] * page_size + p % page_size
        for r in range(4)
        for p in range(context[r] - new[r], context[r])
    ]
    num_slots = len(keys) * page_size
    slots = torch.tensor([*map(int, ends), *[num_slots] * num_padding])
    angles = torch.randn(len(slots), K // 2)
    cos_sin = angles.cos(), angles.sin()
    plan = module.plan_gather(
        cos_sin, slots, table, starts, lengths, num_slots=num_slots, page_size=page_size, num_kv_heads=G
    )
    for _ in range(2):
        q, k, v = (torch.randn(len(slots), heads, K).to(dtype) for heads in (H, G, G))
        expected = [x.clone() for x in (q, k, v)]
        caches = [(keys.clone(), values.clone()) for _ in range(2)]
        write_pages_reference(*expected, cos_sin, slots, *caches[0])
        write_pages(q, k, v, cos_sin, slots, *caches[1], gather_plan=plan)
        for actual, wanted in zip((q, k, *caches[1]), (*expected[:2], *caches[0]), strict=True):
            assert_close("written", actual.nan_to_num(), wanted.nan_to_num(), BOUNDS[dtype])
        out = paged_attention(q, *caches[1], table, starts, lengths, max_seqlen_q=7, gather_plan=plan)
        wanted = paged_attention_reference(
            expected[0].float(), *(x.float() for x in caches[0]), table, starts, lengths, max_seqlen_q=7
        )
        assert_close("out", out, wanted, BOUNDS[dtype])

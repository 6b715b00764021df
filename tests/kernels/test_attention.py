import functools
import subprocess
import sys

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import _attention_tiled as tiled
from saccade.kernels import _attention_window as window_kernels
from saccade.kernels import attention as module
from saccade.kernels import launch
from saccade.kernels.attention import (
    attention,
    attention_reference,
    rope_attention,
    rope_attention_reference,
)

NAMES = ("out", "dq", "dk", "dv")
SMALL = tiled.AttentionTiles(32, 16, 4, 1)


@pytest.fixture
def tiles(monkeypatch, device):
    """Small tiles on the CPU, so that short segments have several; the real ones on the GPU."""

    def use(chosen):
        for key in tiled.CONFIGS:
            monkeypatch.setitem(tiled.CONFIGS, key, chosen)
        monkeypatch.setattr(tiled, "FP32_TILES", chosen)

    if device == "cpu":
        use(SMALL)
    return use


def starts(lengths, device):
    return torch.tensor([0, *lengths], device=device).cumsum(0).int()


def inputs(lengths_q, lengths_k, heads, device, dtype):
    """q, k, v and d_out of random numbers, and the arguments that describe the segments."""
    num_heads, num_kv_heads, head_dim = heads
    sizes = ((sum(lengths_q), num_heads), *((sum(lengths_k), num_kv_heads),) * 2, (sum(lengths_q), num_heads))
    tensors = [torch.randn(*size, head_dim, device=device).to(dtype) for size in sizes]
    segments = {
        "cu_seqlens_q": starts(lengths_q, device),
        "cu_seqlens_k": starts(lengths_k, device),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    return tensors, segments


def out_and_gradients(run, tensors):
    *qkv, d_out = tensors
    qkv = [x.detach().requires_grad_() for x in qkv]
    out = run(*qkv)
    return out, *torch.autograd.grad(out, qkv, d_out.to(out.dtype))


def expect_path_equals_reference(path, tensors, segments, bound, **mask):
    with launch.forced(path):
        actual = out_and_gradients(functools.partial(attention, **segments, **mask), tensors)
    reference = functools.partial(attention_reference, **segments, **mask)
    expected = out_and_gradients(reference, [x.float() for x in tensors])
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert_close(name, a, e, bound)
    return actual, expected


HEADS = (2, 1, 80)  # most tests share it: on a GPU every other choice is compiled again
RAGGED = [1, 7, 0, 45, 33]
MASKS = {
    "full": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 11},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_tiled_kernels_equal_the_reference(mask, tiles, device, dtype):
    lengths = RAGGED if mask["causal"] else [70, 1, 0, 9]  # full and short would go to the window kernels
    tensors, segments = inputs(lengths, lengths, HEADS, device, dtype)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[dtype], **mask)


@pytest.mark.parametrize("mask", [MASKS["causal"], MASKS["window"]], ids=["causal", "window"])
def test_queries_after_a_cache_and_queries_without_keys_equal_the_reference(mask, tiles, device):
    tensors, segments = inputs([1, 20, 5, 3, 0], [40, 34, 2, 0, 4], HEADS, device, torch.float32)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float32], **mask)


@pytest.mark.parametrize("head_dim", [5, 20])
def test_heads_of_any_size_run_in_kernels(head_dim, tiles, device, dtype):
    """The heads are padded with channels of zeros: the reference would make a GPU wait for the host."""
    tensors, segments = inputs([20, 7], [20, 7], (2, 1, head_dim), device, dtype)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[dtype], causal=True)


def test_a_window_wider_than_its_tiles_equals_the_reference(tiles, device):
    tiles(tiled.AttentionTiles(16, 16, 4, 1))
    tensors, segments = inputs([75], [81], (1, 1, 16), device, torch.float32)
    for window in (34, 46):
        expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float32], causal=True, window=window)


@pytest.mark.parametrize("options", [{"tma": True}, {"overlap": True}, {"tma": True, "overlap": True}], ids=str)
def test_streaming_options_change_nothing(options, tiles, device):
    blocks = (32, 16) if device == "cpu" else (128, 64)
    tiles(tiled.AttentionTiles(*blocks, 8, 2, **options))
    tensors, segments = inputs([33, 20], [33, 29], HEADS, device, torch.float16)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float16], **MASKS["window"])


def test_a_chunk_wider_than_its_head_takes_nothing_from_the_next(tiles, device):
    tiles(
        tiled.AttentionTiles(32, 16, 4, 1, tma=True)
        if device == "cpu"
        else tiled.AttentionTiles(64, 64, 4, 2, tma=True)
    )
    tensors, segments = inputs([33, 20], [33, 20], (4, 2, 24), device, torch.float16)  # 24 = 16 + 16, of which 8 masked
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float16], causal=True)


def test_split_groups_sum_to_the_same_gradients(tiles, device, monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda _: 1000)
    tensors, segments = inputs([20, 13], [20, 13], HEADS, device, torch.float32)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float32], causal=True)


@pytest.mark.parametrize(("head_dim", "heads_per_program"), [(64, 1), (72, 1), (80, 1), (80, 2)])
def test_window_kernels_equal_the_reference(head_dim, heads_per_program, device, dtype, monkeypatch):
    num_stages = 2 if heads_per_program > 1 and dtype != torch.float32 else 1  # two of fp32 exceed shared memory
    for kernel, config in window_kernels.CONFIGS.items():
        changed = config._replace(heads=heads_per_program, num_stages=num_stages)
        monkeypatch.setitem(window_kernels.CONFIGS, kernel, changed)
    tensors, segments = inputs([16, 7, 0, 64], [16, 7, 0, 64], (2, 2, head_dim), device, dtype)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[dtype], causal=False)


@pytest.mark.parametrize(("head_dim", "heads_per_program"), [(64, 1), (72, 2), (80, 2)])
def test_windows_rotated_as_they_are_loaded_equal_the_reference(
    head_dim, heads_per_program, device, dtype, monkeypatch
):
    changed = window_kernels.CONFIGS["rotated"]._replace(heads=heads_per_program)
    monkeypatch.setitem(window_kernels.CONFIGS, "rotated", changed)
    (q, k, v, _), segments = inputs([16, 7, 0, 64], [16, 7, 0, 64], (2, 2, head_dim), device, dtype)
    angles = 3 * torch.randn(len(q), head_dim // 2, device=device)
    arguments = (angles.cos(), angles.sin()), segments["cu_seqlens_q"]
    with torch.no_grad(), launch.forced("triton"):
        actual = rope_attention(q, k, v, *arguments, max_seqlen=64, causal=False)
    expected = rope_attention_reference(q.float(), k.float(), v.float(), *arguments, max_seqlen=64, causal=False)
    assert_close("out", actual, expected, BOUNDS[dtype])
    with pytest.raises(AssertionError):
        assert_close("out", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


def test_windows_of_views_of_one_projection_are_rotated_in_place_of_copies(device):
    qkv = torch.randn(37, 3, 2, 80, device=device)
    angles = torch.randn(37, 40, device=device)
    table, cu_seqlens = (angles.cos(), angles.sin()), starts([20, 17], device)
    with torch.no_grad(), launch.forced("triton"):
        actual = rope_attention(*qkv.unbind(1), table, cu_seqlens, max_seqlen=20, causal=False)
    expected = rope_attention_reference(*qkv.unbind(1), table, cu_seqlens, max_seqlen=20, causal=False)
    assert_close("out", actual, expected, BOUNDS[torch.float32])


def test_tables_and_heads_that_do_not_fit_are_refused(device):
    (q, k, v, _), segments = inputs([10], [10], (2, 2, 32), device, torch.float32)
    options = {"cu_seqlens": segments["cu_seqlens_q"], "max_seqlen": 10, "causal": False}
    for num_tokens, num_frequencies in ((4, 16), (10, 8)):
        table = (torch.zeros(num_tokens, num_frequencies, device=device),) * 2
        with pytest.raises(ValueError, match="tables"):
            rope_attention(q, k, v, table, **options)
    with pytest.raises(ValueError, match="do not fit"):
        rope_attention(q, k[:9], v[:9], (torch.zeros(10, 16, device=device),) * 2, **options)


def test_rotated_attention_has_gradients(device):
    (q, k, v, d_out), segments = inputs([16, 30], [16, 30], (2, 2, 16), device, torch.float32)
    angles = torch.randn(46, 8, device=device)
    arguments = {"table": (angles.cos(), angles.sin()), "cu_seqlens": segments["cu_seqlens_q"]}
    runs = [
        functools.partial(run, **arguments, max_seqlen=30, causal=False)
        for run in (rope_attention, rope_attention_reference)
    ]
    with launch.forced("triton"):
        actual = out_and_gradients(runs[0], [q, k, v, d_out])
    for name, a, e in zip(NAMES, actual, out_and_gradients(runs[1], [q, k, v, d_out]), strict=True):
        assert_close(name, a, e, BOUNDS[torch.float32])


def test_window_kernels_take_other_lengths_for_keys(device):
    tensors, segments = inputs([16, 7, 1, 0], [3, 20, 0, 5], (1, 1, 16), device, torch.float32)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float32], causal=False)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize(
    "lengths", [([20, 1, 0, 13], [31, 1, 4, 13]), ([128, 128], [128, 128])], ids=["ragged", "equal"]
)
def test_library_paths_equal_the_reference(mask, lengths, device, dtype):
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("no library path takes packed fp32 on a GPU")
    tensors, segments = inputs(*lengths, (4, 2, 64), device, dtype)
    expect_path_equals_reference("library", tensors, segments, BOUNDS[dtype], **mask)


@pytest.mark.parametrize("num_heads", [(2, 1, 1), (2, 2, 2)], ids=["tiled", "window"])
def test_views_of_a_fused_row_equal_copies(num_heads, tiles, device):
    dtype, causal = torch.float16, num_heads[1] == 1
    q, k, v = torch.randn(33, sum(num_heads), 80, device=device).to(dtype).split(num_heads, dim=1)
    (*_, d_out), segments = inputs([20, 13], [20, 13], (2, 2, 80), device, dtype)
    assert not q.is_contiguous()
    expect_path_equals_reference("triton", [q, k, v, d_out], segments, BOUNDS[dtype], causal=causal)


@pytest.mark.parametrize(("heads", "causal"), [(HEADS, True), ((2, 2, 80), False)], ids=["tiled", "window"])
def test_any_strides_equal_copies(heads, causal, tiles, device):
    (*qkv, d_out), segments = inputs([9, 4], [9, 4], heads, device, torch.float32)
    tensors = [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in qkv] + [d_out[:1].expand(13, -1, -1)]
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.float32], causal=causal)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the NaN, in the interpreter
@pytest.mark.parametrize(("heads", "causal"), [(HEADS, True), ((2, 2, 80), False)], ids=["tiled", "window"])
def test_a_segment_of_nan_harms_no_other(heads, causal, tiles, device):
    if device == "cpu":
        tiles(SMALL._replace(tma=True))  # which reads past the ends of a segment; on Hopper it ships so
    tensors, segments = inputs([10, 20, 7], [10, 20, 7], heads, device, torch.float16)
    run = functools.partial(attention, **segments, causal=causal)
    with launch.forced("triton"):
        clean = out_and_gradients(run, tensors)
        for x in tensors:
            x[10:30] = float("nan")
        dirty = out_and_gradients(run, tensors)
    for name, a, e in zip(NAMES, dirty, clean, strict=True):
        assert torch.equal(a[:10], e[:10]), name
        assert torch.equal(a[30:], e[30:]), name


def test_nothing_to_attend_to_gives_zero(device):
    q, k = torch.randn(3, 2, 16, device=device, requires_grad=True), torch.randn(0, 2, 16, device=device)
    out = attention(q, k, k, starts([3], device), starts([0], device), max_seqlen_q=3, max_seqlen_k=0, causal=False)
    assert_close("out", out, torch.zeros(3, 2, 16), 0.0)
    out.sum().backward()
    empty = attention(k, q, q, starts([0], device), starts([3], device), max_seqlen_q=0, max_seqlen_k=3, causal=False)
    assert empty.shape == (0, 2, 16)


def test_a_window_without_causal_is_refused(device):
    q = torch.randn(3, 2, 16, device=device)
    cu = starts([3], device)
    with pytest.raises(ValueError, match="causal"):
        attention(q, q, q, cu, cu, max_seqlen_q=3, max_seqlen_k=3, causal=False, window=2)


@pytest.mark.parametrize(("heads", "causal"), [(HEADS, True), ((2, 2, 80), False)], ids=["tiled", "window"])
def test_an_error_of_twice_the_bound_is_noticed(heads, causal, tiles, device):
    dtype = torch.float16
    tensors, segments = inputs([20, 13], [20, 13], heads, device, dtype)
    actual, expected = expect_path_equals_reference("triton", tensors, segments, BOUNDS[dtype], causal=causal)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        with pytest.raises(AssertionError, match=name):
            assert_close(name, perturbed(a, BOUNDS[dtype]), e, BOUNDS[dtype])


def test_every_rule_names_known_paths_and_every_call_has_one():
    for rule in module._RULES:
        assert set(rule.order) <= set(module._CANDIDATES)
    for head_dim in (16, 80, 128, 256):
        for causal in (True, False):
            tensors, segments = inputs([5], [5], (1, 1, head_dim), "cpu", torch.float32)
            call = module._Call(*tensors[:3], *segments.values(), causal, None)
            assert module._candidates(call)


GPU_SHAPES = {
    "text": ([1, 7, 129, 0, 1000, 513], (16, 2, 128), {"causal": True}),
    "text window": ([700, 129, 64], (8, 2, 128), {"causal": True, "window": 256}),
    "vision 80": ([2304, 1, 129, 576], (16, 16, 80), {"causal": False}),
    "vision 72": ([729, 128, 3], (16, 16, 72), {"causal": False}),
    "vision 64": ([300, 77], (12, 12, 64), {"causal": False}),
    "96": ([300, 77], (4, 2, 96), {"causal": True}),
    "256": ([300, 77], (4, 1, 256), {"causal": True}),
    "windows": ([64] * 40 + [16, 32, 48, 1, 0], (16, 16, 80), {"causal": False}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_real_shapes_equal_the_reference(shape, device):
    dtype = torch.bfloat16
    lengths, heads, mask = shape
    tensors, segments = inputs(lengths, lengths, heads, device, dtype)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[dtype], **mask)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_segment_of_30000_tokens_equals_the_reference(causal, device):
    """Only the last 64 queries are compared, without 30000 x 30000 scores; dK and dV come from these queries."""
    tensors, segments = inputs([64], [30000], (2, 1, 128), device, torch.bfloat16)
    expect_path_equals_reference("triton", tensors, segments, BOUNDS[torch.bfloat16], causal=causal)
    (q, k, v, d_out), segments = inputs([30000], [30000], (2, 1, 128), device, torch.bfloat16)
    with launch.forced("triton"):
        ours = out_and_gradients(functools.partial(attention, **segments, causal=causal), (q, k, v, d_out))
    with launch.forced("library"):
        theirs = out_and_gradients(functools.partial(attention, **segments, causal=causal), (q, k, v, d_out))
    for name, a, e in zip(NAMES, ours, theirs, strict=True):
        assert_close(name, a, e, 2 * BOUNDS[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.parametrize(("length", "causal"), [(64, False), (256, True)], ids=["window", "tiled"])
def test_offsets_beyond_32_bits(length, causal, device):
    """The last segment beyond 2^31 elements gives the same result as the segment alone."""
    num_segments = 2**31 // (length * 16 * 128) + 2
    lengths = [length] * num_segments
    shape = (length * num_segments, 16, 128)
    qkv = [torch.empty(shape, device=device, dtype=torch.bfloat16).zero_() for _ in range(3)]
    last = [torch.randn(length, 16, 128, device=device, dtype=torch.bfloat16) for _ in range(4)]
    for x, tail in zip(qkv, last, strict=False):
        x[-length:] = tail
    d_out = torch.zeros(shape, device=device, dtype=torch.bfloat16)
    d_out[-length:] = last[3]
    assert d_out.numel() > 2**31
    whole = {"cu_seqlens_q": starts(lengths, device), "cu_seqlens_k": starts(lengths, device)}
    bounds = {"max_seqlen_q": length, "max_seqlen_k": length, "causal": causal}
    with launch.forced("triton"):
        actual = out_and_gradients(functools.partial(attention, **whole, **bounds), [*qkv, d_out])
        alone = {"cu_seqlens_q": starts([length], device), "cu_seqlens_k": starts([length], device)}
        expected = out_and_gradients(functools.partial(attention, **alone, **bounds), last)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a[-length:], e), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "causal"), [([300, 77, 500], True), ([64, 30, 64], False)], ids=["tiled", "window"]
)
def test_two_runs_agree_to_the_bit_and_never_wait_for_the_gpu(lengths, causal, device):
    tensors, segments = inputs(lengths, lengths, (16, 16, 80), device, torch.bfloat16)
    run = functools.partial(attention, **segments, causal=causal)
    with launch.forced("triton"):
        first = out_and_gradients(run, tensors)
        torch.cuda.set_sync_debug_mode("error")
        try:
            second = out_and_gradients(run, tensors)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_kernel_modules_import_and_work_without_triton():
    names = ("attention", "rms_norm", "rope", "swiglu")
    code = "import sys; sys.modules['triton'] = None; import torch; " + "; ".join(
        f"from saccade.kernels.{name} import *" for name in names
    )
    code += "; x = torch.randn(3, 16); rms_norm(x, x[0], 1e-6); swiglu(x, x)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)

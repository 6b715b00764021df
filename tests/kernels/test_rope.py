import pytest
import torch
from closeness import BOUNDS, assert_close, compare_with_reference, perturbed

from saccade.kernels import launch
from saccade.kernels.rope import frequencies, mrope_cos_sin, mrope_reference, rope, rope_reference, vision_cos_sin

CASES = [(1, 2, 1, 16), (7, 3, 1, 8), (9, 2, 2, 80), (0, 2, 2, 16)]  # tokens, heads, key heads, head dim


def inputs(num_tokens, num_heads, num_kv_heads, head_dim, device, dtype):
    q = torch.randn(num_tokens, num_heads, head_dim, device=device).to(dtype)
    k = torch.randn(num_tokens, num_kv_heads, head_dim, device=device).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2, device=device) * 100
    return q, k, (angles.cos(), angles.sin())


def expect_equal(q, k, table, dtype):
    names = ("q", "k", "dq", "dk")
    return compare_with_reference(
        lambda q, k: rope(q, k, table), lambda q, k: rope_reference(q, k, table), (q, k), names, dtype
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rotation_and_its_gradient_equal_the_reference(case, device, dtype):
    expect_equal(*inputs(*case, device, dtype), dtype)


def test_views_of_a_fused_row_equal_copies(device, dtype):
    _, _, table = inputs(5, 1, 1, 16, device, dtype)
    qkv = torch.randn(5, 6, 16, device=device).to(dtype)
    expect_equal(qkv[:, :3], qkv[:, 3:5], table, dtype)
    expect_equal(qkv[:, :3].transpose(0, 1).contiguous().transpose(0, 1), qkv[:, 3:5], table, dtype)
    expect_equal(torch.randn(5, 16, 3, device=device).to(dtype).transpose(1, 2), qkv[:, 3:5], table, dtype)


def test_the_same_position_on_all_axes_is_ordinary_rope(device):
    positions = torch.arange(9, device=device)
    cos, _ = mrope_cos_sin(positions.expand(3, -1), 10000.0, (2, 3, 3))
    exponent = torch.arange(8, device=device) / 8
    assert_close("cos", cos, (positions[:, None].float() * 10000.0**-exponent).cos(), 1e-5)


def test_vision_rope_is_half_by_rows_and_half_by_columns(device):
    cos, sin = vision_cos_sin(torch.tensor([[2, 2], [5, 7]], device=device), 16)
    assert torch.equal(cos[0, :4], cos[1, :4])
    assert not torch.equal(sin[0, 4:], sin[1, 4:])


def test_a_table_of_another_size_is_refused(device):
    q, k, (cos, sin) = inputs(4, 2, 2, 16, device, torch.float32)
    with pytest.raises(ValueError, match="do not fit"):
        rope(q, k, (cos[:3], sin[:3]))


def test_an_error_of_twice_the_bound_is_noticed(device, dtype):
    for name, a, e in zip(
        ("q", "k", "dq", "dk"), *expect_equal(*inputs(5, 2, 2, 16, device, dtype), dtype), strict=True
    ):
        with pytest.raises(AssertionError, match=name):
            assert_close(name, perturbed(a, BOUNDS[dtype]), e, BOUNDS[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [(16384, 16, 2, 128), (36864, 16, 16, 80), (1000, 16, 16, 72)], ids=str)
def test_real_shapes_equal_the_reference(case, device, dtype):
    expect_equal(*inputs(*case, device, dtype), dtype)


@pytest.mark.gpu
@pytest.mark.whole_gpu
def test_offsets_beyond_32_bits(device):
    num_tokens = 2**31 // (16 * 128) + 8
    q = torch.zeros(num_tokens, 16, 128, device=device, dtype=torch.bfloat16)
    q[-8:] = torch.randn(8, 16, 128, device=device)
    k = q[:, :2]
    angles = torch.rand(num_tokens, 64, device=device)
    with launch.forced("triton"), torch.no_grad():
        turned, _ = rope(q, k, (angles.cos(), angles.sin()))
    expected, _ = rope_reference(q[-8:].float(), k[-8:].float(), (angles[-8:].cos(), angles[-8:].sin()))
    assert_close("q", turned[-8:], expected, BOUNDS[torch.bfloat16])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_of_whole_heads_on_a_cpu_equals_the_reference(dtype):
    q, k, angles = torch.randn(7, 3, 64).to(dtype), torch.randn(7, 2, 64).to(dtype), torch.randn(7, 32)
    table = angles.cos(), angles.sin()
    with torch.no_grad():
        for actual, expected in zip(rope(q, k, table), rope_reference(q, k, table), strict=True):
            assert actual.dtype == dtype
            assert_close("rotated", actual, expected, BOUNDS[dtype])


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 30])
@pytest.mark.parametrize(
    ("sections", "is_interleaved"), [((16, 24, 24), False), ((24, 20, 20), True), ((6, 5, 5), False)]
)
@pytest.mark.parametrize("longest", [10, 1_000_000])
def test_tables_of_positions_equal_the_reference(num_tokens, sections, is_interleaved, longest, device):
    positions = torch.randint(longest, (3, num_tokens), dtype=torch.int32, device=device)
    with launch.forced("triton"):
        cos, sin = mrope_cos_sin(positions, 1e6, sections, is_interleaved=is_interleaved)
    expected_cos, expected_sin = mrope_reference(
        positions, *frequencies(sections, 1e6, positions.device, is_interleaved)
    )
    torch.testing.assert_close(cos, expected_cos, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin, expected_sin, rtol=0, atol=2e-7)

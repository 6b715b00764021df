import pytest
import torch
import torch.nn.functional as F
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import grouped_lora as module
from saccade.kernels import launch
from saccade.kernels.grouped_lora import (
    add_lora,
    add_lora_reference,
    group_tokens,
    group_tokens_reference,
    grouped_lora,
    grouped_lora_reference,
    lora_swiglu,
    lora_swiglu_reference,
)
from saccade.kernels.swiglu import swiglu

NUM_ADAPTERS = 5


def inputs(num_tokens, num_inputs, part_sizes, device, dtype, rank=16):
    """y, x, A, B, scales and slots: some tokens have no adapter, the others have random ones."""
    parts, outputs = len(part_sizes), sum(part_sizes)
    y, x = (torch.randn(num_tokens, size, device=device).to(dtype) for size in (outputs, num_inputs))
    lora_A = (torch.randn(NUM_ADAPTERS, parts, rank, num_inputs, device=device) / num_inputs**0.5).to(dtype)
    lora_B = torch.randn(NUM_ADAPTERS, outputs, rank, device=device).to(dtype) / 4
    scale = torch.tensor([0.5, 1.0, 2.0, 1.5, 0.25], device=device)
    slot = torch.randint(0, NUM_ADAPTERS + 1, (num_tokens,), device=device, dtype=torch.int32)
    return y, x, lora_A, lora_B, scale, group_tokens(slot, NUM_ADAPTERS), part_sizes


def slot_of_tokens(groups, num_tokens):
    """[T]: the slots of all tokens, from their groups."""
    slot = torch.full((num_tokens,), -1, dtype=torch.int32, device=groups.slots.device)
    for number, tokens in zip(groups.slots.tolist(), groups.tokens.long(), strict=True):
        if number >= 0:
            slot[tokens[tokens >= 0]] = number
    return slot


@pytest.mark.parametrize("num_slots", [1, 5, 40])
@pytest.mark.parametrize("num_tokens", [1, 15, 64, 65, 300])
def test_tokens_are_grouped_in_their_order(num_tokens, num_slots, device):
    for most in (0, 1, num_slots):
        slot = torch.randint(0, most + 1, (num_tokens,), device=device, dtype=torch.int32)
        expected = group_tokens_reference(slot, num_slots)
        with launch.forced("triton"):
            groups = group_tokens(slot, num_slots)
        assert torch.equal(groups.slots.cpu(), expected.slots)
        is_used = expected.slots >= 0
        assert torch.equal(groups.tokens.cpu()[is_used], expected.tokens[is_used])
        assert torch.equal(slot_of_tokens(groups, num_tokens), slot)


def test_any_choice_of_slots_has_room(device):
    """One token more than full tiles of every slot gives the maximum number of tiles."""
    for num_tokens, num_slots in ((3, 5), (16 * 6 + 6, 5), (16 * 2 + 3, 2)):
        slot = torch.arange(num_tokens, device=device, dtype=torch.int32) % (num_slots + 1)
        assert torch.equal(slot_of_tokens(group_tokens(slot, num_slots), num_tokens), slot)


def expect(y, *rest, dtype):
    expected = grouped_lora_reference(y.clone(), *rest)
    with launch.forced("triton"):
        actual = grouped_lora(y, *rest)
    assert actual is y
    assert_close("out", actual, expected.float(), BOUNDS[dtype])
    return actual, expected


@pytest.mark.parametrize("num_tokens", [1, 7, 16, 129])
@pytest.mark.parametrize("part_sizes", [(33,), (40, 24), (144, 16, 16)], ids=str)
def test_every_token_gets_its_own_adapter(num_tokens, part_sizes, device, dtype):
    expect(*inputs(num_tokens, 200, part_sizes, device, dtype), dtype=dtype)


def test_the_reference_is_one_adapter_at_a_time(device):
    y, x, lora_A, lora_B, scale, groups, sizes = inputs(9, 24, (10, 6), device, torch.float32)
    actual = grouped_lora_reference(y.clone(), x, lora_A, lora_B, scale, groups, sizes)
    for token, number in enumerate(slot_of_tokens(groups, 9).tolist()):
        expected = y[token].clone()
        if number:
            A, B = lora_A[number - 1], lora_B[number - 1]
            updates = [F.linear(F.linear(x[token], A[0]), B[:10]), F.linear(F.linear(x[token], A[1]), B[10:])]
            expected += scale[number - 1] * torch.cat(updates)
        assert torch.allclose(actual[token], expected, atol=1e-5)


def test_tokens_without_an_adapter_stay_as_they_are(device, dtype):
    y, x, lora_A, lora_B, scale, groups, sizes = inputs(40, 64, (32,), device, dtype)
    before = y.clone()
    no_adapter = torch.zeros(40, dtype=torch.int32, device=device)
    for one in (group_tokens(no_adapter, NUM_ADAPTERS), groups):
        with launch.forced("triton"):
            grouped_lora(y, x, lora_A, lora_B, scale, one, sizes)
        unchanged = (slot_of_tokens(one, 40) == 0).nonzero().flatten()
        assert len(unchanged) > 0
        assert torch.equal(y[unchanged], before[unchanged])


def test_the_adapters_of_others_do_not_matter(device, dtype):
    y, x, lora_A, lora_B, scale, groups, sizes = inputs(30, 64, (32, 16), device, dtype)
    lora_A[2], lora_B[2] = float("nan"), float("nan")
    slot = slot_of_tokens(groups, 30)
    without = group_tokens(torch.where(slot == 3, 1, slot), NUM_ADAPTERS)
    expect(y, x, lora_A, lora_B, scale, without, sizes, dtype=dtype)


def low_of_all(x, lora_A):
    """[T, S * P * R]: the product with the matrices A of all adapters."""
    return F.linear(x, lora_A.flatten(0, 2))


@pytest.mark.parametrize("num_tokens", [1, 16, 41, 259])
@pytest.mark.parametrize("part_sizes", [(33,), (40, 24), (144, 16, 16)], ids=str)
def test_low_of_all_adapters_gives_what_each_own_gives(num_tokens, part_sizes, device, dtype):
    y, x, lora_A, *rest = inputs(num_tokens, 96, part_sizes, device, dtype)
    low = low_of_all(x, lora_A)
    assert_close(
        "reference",
        add_lora_reference(y.clone(), low, *rest),
        grouped_lora_reference(y.clone(), x, lora_A, *rest).float(),
        BOUNDS[dtype],
    )
    outputs = y.shape[1]
    product = torch.cat([y, low], dim=1)  # as one product gives it: rows are apart
    with launch.forced("triton"):
        actual = add_lora(product[:, :outputs], product[:, outputs:], *rest)
    assert_close("out", actual, add_lora_reference(y.clone(), low, *rest).float(), BOUNDS[dtype])
    assert torch.equal(product[:, outputs:], low)


@pytest.mark.parametrize("num_tokens", [1, 41, 259])
@pytest.mark.parametrize("rank", [16, 32])
def test_the_gated_activation_has_the_adapters_of_both_halves(num_tokens, rank, device, dtype):
    y, x, lora_A, lora_B, scale, groups, _ = inputs(num_tokens, 96, (136, 136), device, dtype, rank=rank)
    product = torch.cat([y, low_of_all(x, lora_A)], dim=1)
    args = (product[:, :272], product[:, 272:], lora_B, scale, groups)
    before = product.clone()
    with launch.forced("triton"):
        actual = lora_swiglu(*args)
        separate = add_lora(y.clone(), *args[1:], (136, 136))
        expected = swiglu(separate[:, :136], separate[:, 136:])
    assert torch.equal(product, before)
    assert torch.equal(actual, expected)  # the same roundings
    assert_close("reference", actual, lora_swiglu_reference(*args).float(), BOUNDS[dtype])


@pytest.mark.parametrize("rank", [16, 32, 64])
def test_any_rank_many_splits_and_rows_apart(rank, device, dtype, monkeypatch):
    monkeypatch.setattr(module, "_num_splits", lambda *_: 3)
    y, x, *rest = inputs(20, 900, (48,), device, dtype, rank=rank)
    wide_y, wide_x = torch.cat([y, y], dim=1), torch.cat([x, x], dim=1)
    expect(wide_y[:, 48:], wide_x[:, 900:], *rest, dtype=dtype)
    assert torch.equal(wide_y[:, :48], y)


def test_large_steps_have_large_tiles(device):
    expect(*inputs(module._MAX_SMALL + 3, 48, (16,), device, torch.float32), dtype=torch.float32)


def test_no_tokens_are_no_work(device):
    assert grouped_lora(*inputs(0, 16, (8,), device, torch.float32)).shape == (0, 8)


def test_shapes_that_do_not_fit_are_refused(device):
    y, x, lora_A, lora_B, scale, groups, sizes = inputs(3, 32, (16,), device, torch.float32)
    for wrong in (
        (y, x[:, 1:], lora_A, lora_B, scale, groups, sizes),
        (y, x, lora_A, lora_B[:, 1:], scale, groups, sizes),
        (y, x, lora_A, lora_B, scale, groups, (8, 8)),
        (
            y,
            x,
            lora_A,
            lora_B,
            scale,
            group_tokens(torch.zeros(2, dtype=torch.int32, device=device), NUM_ADAPTERS),
            sizes,
        ),
        (y, x, lora_A[:, :, :8], lora_B[:, :, :8], scale, groups, sizes),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            grouped_lora(*wrong)
    low = low_of_all(x, lora_A)
    with pytest.raises(ValueError, match="do not fit"):
        add_lora(y, low[:, 1:], lora_B, scale, groups, sizes)
    with pytest.raises(ValueError, match="do not fit"):
        lora_swiglu(y, low, lora_B, scale, groups)


def test_an_error_of_twice_the_bound_is_noticed(device, dtype):
    actual, expected = expect(*inputs(12, 64, (32,), device, dtype), dtype=dtype)
    with pytest.raises(AssertionError, match="out"):
        assert_close("out", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.gpu
def test_a_captured_graph_follows_the_slots(device):
    y, x, lora_A, lora_B, scale, groups, sizes = inputs(64, 2048, (2048, 256, 256), device, torch.bfloat16)
    out = torch.empty_like(y)
    grouped_lora(out.copy_(y), x, lora_A, lora_B, scale, groups, sizes)
    graph = torch.cuda.CUDAGraph()
    slot = slot_of_tokens(groups, 64)
    with torch.cuda.graph(graph):
        groups = group_tokens(slot, NUM_ADAPTERS)
        grouped_lora(out.copy_(y), x, lora_A, lora_B, scale, groups, sizes)
    for _ in range(3):
        slot.copy_(torch.randint_like(slot, 0, NUM_ADAPTERS + 1))
        graph.replay()
        expected = grouped_lora_reference(y.clone(), x, lora_A, lora_B, scale, groups, sizes)
        assert_close("out", out, expected.float(), BOUNDS[torch.bfloat16])

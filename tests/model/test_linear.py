"""Projections: one forward for training and inference, storage that callers do not see."""

import copy

import pytest
import torch
from torch import nn

from saccade.model import adapters, load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.model.layers import FeedForward, RMSNorm
from saccade.model.linear import Linear, checkpoint_shapes, projections
from saccade.model.merged_projections import RowAdapters, merge_storage, project
from saccade.model.prepacked_linear import prepack_storage


class Attention(nn.Module):
    merged_projections = (("q", "k"),)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = Linear(16, 24), Linear(16, 8)


@pytest.fixture
def merged():
    torch.manual_seed(0)
    module = Attention()
    before = copy.deepcopy(module)
    merge_storage(module)
    return module, before


def test_parts_of_merged_storage_keep_their_names_and_values(merged):
    module, before = merged
    for (name, part), (expected_name, expected) in zip(
        module.named_parameters(), before.named_parameters(), strict=True
    ):
        assert name == expected_name
        assert torch.equal(part, expected)
    storages = {parameter.untyped_storage().data_ptr() for parameter in (module.q.weight, module.k.weight)}
    assert len(storages) == 1, "no second copy"


def test_merged_projections_compute_what_their_parts_compute(merged):
    module, before = merged
    x = torch.randn(5, 16)
    with torch.no_grad():
        for actual, expected in zip(project(x, module.q, module.k), project(x, before.q, before.k), strict=True):
            assert torch.allclose(actual, expected, atol=1e-6)


def test_merged_projections_can_be_trained(merged):
    module, before = merged
    x = torch.randn(5, 16)
    for one in (module, before):
        sum(y.square().sum() for y in project(x, one.q, one.k)).backward()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter -= 0.01 * parameter.grad
    with torch.no_grad():
        for actual, expected in zip(project(x, module.q, module.k), project(x, before.q, before.k), strict=True):
            assert torch.allclose(actual, expected, atol=1e-5)


@pytest.mark.parametrize(
    "replace",
    [
        lambda module: module.to(torch.float64).to(torch.float32),
        lambda module: copy.deepcopy(module),
        lambda module: setattr(module.q, "weight", nn.Parameter(module.q.weight.detach().clone())) or module,
    ],
    ids=["moved", "copied", "set"],
)
def test_a_part_whose_weight_is_replaced_is_read_from_then_on(merged, replace):
    module = replace(merged[0])
    with torch.no_grad():
        module.q.weight.zero_()
        q, k = project(torch.randn(5, 16), module.q, module.k)
    assert torch.equal(q, module.q.bias.expand_as(q))
    assert k.any()


def test_prepacked_projections_compute_what_plain_ones_compute(merged):
    module, before = merged
    prepack_storage(module)
    x = torch.randn(5, 16)
    with torch.no_grad():
        expected = project(x, before.q, before.k)
        for actual in (project(x, module.q, module.k), (module.q(x), module.k(x))):
            assert all(torch.allclose(a, e, atol=1e-6) for a, e in zip(actual, expected, strict=True))
    assert not list(module.parameters()), "the plain weights are gone"


@pytest.mark.parametrize("num_rows", [1, 3, 700])
@pytest.mark.parametrize("has_residual", [True, False])
def test_the_norm_of_a_sum_is_the_same_left_to_the_projection_or_computed_before(num_rows, has_residual):
    torch.manual_seed(0)
    norm, mlp = RMSNorm(16, 1e-6), FeedForward(16, 20, bias=True)
    nn.init.normal_(norm.weight)
    x, residual = torch.randn(num_rows, 16), torch.randn(num_rows, 16) if has_residual else None
    with_gradients = norm.add_norm(x, residual)
    assert isinstance(with_gradients.input, torch.Tensor)
    expected = mlp(with_gradients.input)
    for _ in ("apart", "merged"):
        with torch.no_grad():
            left = norm.add_norm(x, residual)
            assert torch.allclose(mlp(left.input), expected, atol=1e-5)
            assert torch.equal(left.total, with_gradients.total)
        merge_storage(mlp)


@pytest.mark.parametrize("bias", [True, False])
def test_adapters_are_computed_in_the_product_of_their_projections(bias, monkeypatch):
    monkeypatch.setattr(adapters, "_MAX_LOW_SHARE", 10)
    parts = [Linear(24, size, bias=bias).requires_grad_(False) for size in (32, 16)]
    before = copy.deepcopy(parts)
    stack = adapters.AdapterStack(parts, torch.tensor([2.0, 0.5]), 16, torch.float32)
    monkeypatch.setattr(stack, "add", None)  # it would compute A x separately
    x, slots = torch.randn(6, 24), torch.tensor([0, 1, 2, 2, 0, 1], dtype=torch.int32)
    matrices = {
        (slot, part): (torch.randn(8, 24), torch.randn(size, 8))
        for slot in (0, 1)
        for part, size in enumerate((32, 16))
    }
    for (slot, part), pair in matrices.items():
        stack.set(slot, part, pair)
    for part in parts:
        part.adapters = stack
    with torch.inference_mode():
        outputs = project(x, *parts, chosen=RowAdapters(slots, 2))
    for number, (part, out) in enumerate(zip(before, outputs, strict=True)):
        expected = part.linear(x)
        for token, slot in enumerate(slots.tolist()):
            if slot:
                A, B = matrices[slot - 1, number]
                expected[token] += (2.0, 0.5)[slot - 1] * (B @ (A @ x[token]))
        assert torch.allclose(out, expected, atol=1e-4)


def test_padding_is_in_memory_alone():
    mlp = FeedForward(16, 20, bias=True)
    assert (mlp.up_proj.out_features, mlp.down_proj.in_features) == (24, 24)
    shapes = checkpoint_shapes(mlp)
    assert shapes["up_proj.weight"] == (20, 16)
    assert shapes["up_proj.bias"] == (20,)
    assert shapes["down_proj.weight"] == (16, 20)


def test_a_loaded_model_is_merged_and_holds_each_weight_once(tmp_path):
    initialize_random(tmp_path / "model", named_size("tiny"))
    model = load_model(tmp_path / "model", device="cpu")
    total = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
    assert total == sum(p.nbytes for p in model.parameters())
    layer = model.language.layers[0]
    assert len({p.weight.untyped_storage().data_ptr() for p in (layer.self_attn.q_proj, layer.self_attn.v_proj)}) == 1
    assert {"vision.patch_embed.proj", "projector.mlp.0", "head"} <= {name for name, _ in projections(model)}

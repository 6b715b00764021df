import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import _cublaslt
from saccade.kernels import linear as module
from saccade.kernels._cublaslt import CublasLt, CublasLtError, cublaslt
from saccade.kernels.linear import MIN_TOKENS, can_prepack, linear, linear_reference, prepack


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 129])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (7, 129), (96, 64)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_prepacked_weight_gives_the_products_of_the_plain_one(num_tokens, num_outputs, num_inputs, has_bias, dtype):
    x, weight = torch.randn(num_tokens, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    assert can_prepack(weight)
    actual = linear(x, prepack(weight), bias)
    expected = linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    assert actual.shape == (num_tokens, num_outputs)
    assert actual.dtype == dtype
    assert_close("out", actual, expected, BOUNDS[dtype])
    assert torch.equal(linear(x, weight, bias), linear_reference(x, weight, bias))


def test_rows_and_weights_may_have_any_stride():
    x, weight = torch.randn(5, 200)[:, 3:67], torch.randn(64, 32).t()
    assert_close("out", linear(x, prepack(weight)), linear_reference(x, weight), BOUNDS[torch.float32])


def test_a_row_does_not_depend_on_the_number_of_rows():
    x, packed = torch.randn(40, 64), prepack(torch.randn(96, 64))
    whole = linear(x, packed)
    assert all(torch.equal(linear(x[:count], packed), whole[:count]) for count in range(1, 40))


def test_a_wrong_result_is_noticed():
    x, weight = torch.randn(7, 64), torch.randn(96, 64)
    bound = BOUNDS[torch.float32]
    with pytest.raises(AssertionError):
        assert_close("out", perturbed(linear(x, prepack(weight)), bound), linear_reference(x, weight), bound)


# ------------------------------------------------------------------ without a workspace, on a GPU


def gpu_inputs(num_tokens, num_outputs, num_inputs, dtype=torch.bfloat16, *, has_bias=True):
    x = torch.randn(num_tokens, num_inputs, device="cuda").to(dtype)
    weight = (torch.randn(num_outputs, num_inputs, device="cuda") * num_inputs**-0.5).to(dtype)
    return x, weight, torch.randn(num_outputs, device="cuda").to(dtype) if has_bias else None


def expect_without_workspace(x, weight, bias):
    """Check that the library computes the product itself, correctly."""
    assert module._can_run_without_workspace(x, weight, bias)
    library = cublaslt(x.device)
    assert library is not None
    expected = linear_reference(x.float(), weight.float(), None if bias is None else bias.float())
    for actual in (library.linear(x, weight, bias), linear(x, weight, bias)):
        assert actual.dtype == x.dtype
        assert_close("out", actual, expected, BOUNDS[x.dtype])
    return actual, expected


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(256, 64, 64), (300, 72, 136), (640, 2560, 2048), (4352, 6848, 1280)])
def test_products_without_a_workspace_equal_the_reference(shape, has_bias, dtype):
    actual, expected = expect_without_workspace(*gpu_inputs(*shape, dtype, has_bias=has_bias))
    with pytest.raises(AssertionError):
        assert_close("out", perturbed(actual, BOUNDS[dtype]), expected, BOUNDS[dtype])


@pytest.mark.gpu
@torch.no_grad()
def test_rows_of_a_wider_tensor_and_weights_at_odd_places_need_no_workspace():
    x, weight, bias = gpu_inputs(300, 96, 128)
    wide = torch.zeros(300, 160, dtype=x.dtype, device="cuda")
    wide[:, 8:136] = x
    memory = torch.zeros(96 * 128 + 8, dtype=x.dtype, device="cuda")
    moved = memory[8:].view(96, 128).copy_(weight)  # aligned to 16 bytes, not to 256
    expect_without_workspace(wide[:, 8:136], moved, bias)


@pytest.mark.gpu
@torch.no_grad()
def test_each_layer_of_a_captured_graph_has_its_own_bias():
    x, weight, bias = gpu_inputs(256, 64, 64)
    other = bias + 1
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        linear(x, weight, bias)
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        outputs = linear(x, weight, bias), linear(x, weight, other)
        graph.capture_end()
        x.normal_()
        graph.replay()
    stream.synchronize()
    for actual, own in zip(outputs, (bias, other), strict=True):
        expected = linear_reference(x.float(), weight.float(), own.float())
        assert_close("out", actual, expected, BOUNDS[torch.bfloat16])


@pytest.mark.gpu
@torch.no_grad()
def test_what_needs_a_workspace_or_has_odd_rows_is_left_to_torch():
    x, weight, bias = gpu_inputs(MIN_TOKENS - 1, 64, 64)
    assert not module._can_run_without_workspace(x, weight, bias)
    for shape in ((300, 64, 20), (300, 20, 64)):
        assert not module._can_run_without_workspace(*gpu_inputs(*shape))
    x, weight, bias = gpu_inputs(300, 64, 64)
    assert not module._can_run_without_workspace(x, weight.float(), bias)
    assert not module._can_run_without_workspace(x.float(), weight.float(), None)
    with torch.enable_grad():
        assert not module._can_run_without_workspace(x, weight, bias)


class NoAlgorithms:
    """A library without algorithms."""

    def __init__(self):
        self.num_queries = 0

    def __getattr__(self, name):
        return lambda *arguments: 0

    def cublasLtMatmulAlgoGetHeuristic(self, *arguments):  # noqa: N802
        self.num_queries += 1
        return 15  # not supported


def test_a_shape_without_an_algorithm_is_asked_for_once(monkeypatch):
    library = NoAlgorithms()
    products, key = CublasLt(library), (256, 64, 64, 64, torch.bfloat16, False, 256)
    for _ in range(3):
        with pytest.raises(CublasLtError):
            products._product(key)
    assert library.num_queries == 1
    monkeypatch.setattr(_cublaslt, "_MAX_SHAPES", 1)
    with pytest.raises(CublasLtError, match="other shapes"):
        products._product((512, *key[1:]))


def test_a_process_without_the_library_has_none(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _cublaslt._loaded_library() is None

import pytest
import torch
from closeness import BOUNDS, assert_close, perturbed

from saccade.kernels import launch
from saccade.kernels.layer_norm import layer_norm, layer_norm_reference

EPS = 1e-6


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1, 16), (7, 129), (3, 5, 48), (0, 32)], ids=str)
def test_library_path_equals_the_reference(shape, has_bias, device, dtype):
    x, d_y = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], device=device).to(dtype) for _ in range(2))
    bias = bias if has_bias else None

    def run(function, cast):
        inputs = [cast(t).detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        y = function(inputs[0], inputs[1], inputs[2] if has_bias else None, EPS)
        return y, *torch.autograd.grad(y, inputs, cast(d_y))

    with launch.forced("library"):
        actual = run(layer_norm, lambda t: t)
    expected = run(layer_norm_reference, lambda t: t.float())
    for name, a, e in zip(("y", "dx", "dweight", "dbias"), actual, expected, strict=False):
        assert_close(name, a, e, BOUNDS[dtype])
        if x.numel():
            with pytest.raises(AssertionError, match=name):
                assert_close(name, perturbed(a, BOUNDS[dtype]), e, BOUNDS[dtype])

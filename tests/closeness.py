"""How close is close: the error of a whole tensor relative to the size of what was expected, and bounds per dtype."""

import torch
from torch import Tensor

from saccade.kernels import launch

BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Bounds for an output rounded once and inputs rounded alike: twice the unit roundoff, and a few reordered sums."""


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """RMS of the difference over RMS of `expected`, in fp64; the RMS of `actual` if only zeros are expected."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if expected.numel() == 0:
        return 0.0
    error, size = (actual - expected).square().mean().sqrt().item(), expected.square().mean().sqrt().item()
    return error / size if size > 0 else error


def assert_close(name: str, actual: Tensor, expected: Tensor, bound: float) -> None:
    """Same shape, finite, and within `bound`."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.isfinite(actual.double()).all(), (
        f"{name}: {(~torch.isfinite(actual.double())).sum()} values not finite"
    )
    error = relative_rms(actual, expected.to(actual.device))
    assert error <= bound, f"{name}: relative RMS error {error:.2e}, bound {bound:.2e}"


def perturbed(x: Tensor, bound: float) -> Tensor:
    """`x` with noise of twice the bound, which `assert_close` must refuse."""
    noise = torch.where(torch.rand_like(x, dtype=torch.float32) < 0.5, -1.0, 1.0)
    return x.float() + 2.0 * bound * x.float().square().mean().sqrt() * noise


def compare_with_reference(function, reference, inputs, names, dtype, d_outs=None, factor=1.0):
    """Outputs and gradients of a kernel and of its reference in fp32, which must agree; returns both."""

    def run(function, cast):
        leaves = [cast(x).detach().requires_grad_() for x in inputs]
        outs = function(*leaves)
        outs = (outs,) if isinstance(outs, Tensor) else outs
        nonlocal d_outs
        d_outs = d_outs or [torch.randn_like(x, dtype=torch.float32).to(dtype) for x in outs]
        return *outs, *torch.autograd.grad(outs, leaves, [cast(d) for d in d_outs])

    with launch.forced("triton"):
        actual = run(function, lambda x: x)
    expected = run(reference, lambda x: x.float())
    for name, a, e in zip(names, actual, expected, strict=True):
        assert_close(name, a, e, factor * BOUNDS[dtype])
    return actual, expected

"""One way to compare tensors: error relative to the reference's RMS."""

import torch
from torch import Tensor


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in fp64; NaN anywhere gives NaN, which passes no bound."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp_min(1e-30))


def assert_close(name: str, actual: Tensor, expected: Tensor, bound: float) -> None:
    """Fail with the figure, so that a log tells how far off it was."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_rms(actual, expected)
    assert error <= bound, f"{name}: relative RMS error {error:.2e} over the bound {bound:.0e}"
    assert not torch.isnan(actual).any(), f"{name}: NaN"

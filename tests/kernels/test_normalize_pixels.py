import pytest
import torch

from saccade.kernels import launch
from saccade.kernels.normalize_pixels import normalize_pixels, normalize_pixels_reference
from saccade.processor.inputs import normalize_patches

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def pixels(device, num_patches=7, patch_dim=3 * 2 * 14 * 14):
    return torch.randint(256, (num_patches, patch_dim), dtype=torch.uint8, device=device)


@pytest.mark.parametrize("num_patches", [1, 7, 129])
def test_the_kernel_equals_the_reference(num_patches, device, dtype):
    x = pixels(device, num_patches)
    with launch.forced("triton"):
        actual = normalize_pixels(x, MEAN, STD, dtype)
    expected = normalize_pixels_reference(x, MEAN, STD, torch.float32)
    # One rounding to the dtype, and a few of fp32 before it, where the pixel is near the mean.
    assert actual.dtype == dtype
    bound = torch.finfo(dtype).eps * expected.abs() + 1e-6
    assert bool(((actual.float() - expected).abs() <= bound).all())
    assert not bool(((actual.float() + 3 * bound - expected).abs() <= bound).all())


def test_the_reference_is_what_the_processor_computes(device):
    x = pixels(device)
    torch.testing.assert_close(
        normalize_pixels_reference(x, MEAN, STD, torch.float32), normalize_patches(x, MEAN, STD), rtol=1e-6, atol=1e-6
    )


def test_every_channel_has_its_own_mean_and_deviation(device):
    x = torch.full((2, 6), 255, dtype=torch.uint8, device=device)
    with launch.forced("triton"):
        out = normalize_pixels(x, (0.0, 0.5, 1.0), (1.0, 0.25, 2.0), torch.float32)
    torch.testing.assert_close(out[1].cpu(), torch.tensor([1.0, 1.0, 2.0, 2.0, 0.0, 0.0]))


def test_no_patches_are_no_pixels(device):
    with launch.forced("triton"):
        assert normalize_pixels(pixels(device, 0), MEAN, STD, torch.float16).shape == (0, 1176)


@pytest.mark.parametrize("x", [torch.zeros(2, 6), torch.zeros(2, 7, dtype=torch.uint8)], ids=["floats", "channels"])
def test_what_does_not_fit_is_refused(x):
    with pytest.raises(ValueError, match="normalize_pixels"):
        normalize_pixels(x, MEAN, STD, torch.float32)

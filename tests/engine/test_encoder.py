"""Padding to a budget and CUDA graphs do not change the features of images."""

import dataclasses
import random
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from closeness import assert_close
from model.hugging_face import SHAPES, make_checkpoint

from saccade.engine.core.step import ENCODER_PARTS
from saccade.engine.device.encoder import Encoder, patch_budgets
from saccade.engine.prompt import PromptImage
from saccade.engine.request import ImageSpan
from saccade.kernels import launch
from saccade.model import load_model
from saccade.model.config import VisionConfig
from saccade.model.vision.patch_layout import budget_sizes, padded_layout
from saccade.model.vlm import VLM
from saccade.processor.families import load_rules
from saccade.processor.inputs import normalize_patches
from saccade.processor.patches import video_patches

MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
BUDGETS = patch_budgets(1024, 4)
VISION = VisionConfig(
    num_layers=2, hidden_size=64, num_heads=2, intermediate_size=64, full_attention_layers=(1,)
)  # fmt: skip

BATCHES = {
    "one image with much padding": [(1, 2, 2)],
    "one image": [(1, 16, 12)],
    "an image of odd sides": [(1, 18, 22)],
    "several images": [(1, 8, 8), (1, 2, 14), (1, 20, 6), (1, 10, 10)],
    "a video and an image": [(3, 6, 10), (1, 12, 8)],
    "an image that fills the budget": [(1, 16, 16)],
    "a video between images": [(1, 4, 6), (1, 8, 4), (2, 4, 4), (1, 4, 4)],
    "images that fill the budget": [(1, 16, 16), (1, 8, 16), (2, 8, 8)],
    "one token short of the budget": [(1, 2, 254), (1, 16, 16)],
}


def image_of(grid: tuple[int, int, int], seed: int) -> PromptImage:
    """A prompt image: a still image with one frame, or a video."""
    num_patches, patch_dim = int(np.prod(grid)), 588 if grid[0] == 1 else 1176
    patches = np.random.default_rng(seed).integers(0, 256, (num_patches, patch_dim), dtype=np.uint8)
    span = ImageSpan(key=bytes([seed]) * 32, start=0, num_tokens=num_patches // 4, num_patches=num_patches)
    return PromptImage(span=span, grid=grid, patches=patches)


def images_of(grids, seed: int = 0) -> list[PromptImage]:
    return [image_of(grid, seed + i) for i, grid in enumerate(grids)]


def plain(model, images: list[PromptImage]) -> torch.Tensor:
    """Features without padding."""
    frames = [torch.from_numpy(image.patches).view(-1, 3, image.patches.shape[1] // 588, 196) for image in images]
    patches = torch.cat([part.expand(-1, 3, 2, 196).flatten(1) for part in frames]).to(model.head.weight.device)
    with torch.no_grad():
        return model.encode_images(
            normalize_patches(patches, MEAN, STD), torch.tensor([image.grid for image in images])
        )


def encoder_of(model, budgets=BUDGETS) -> Encoder:
    return Encoder(model, pixel_mean=MEAN, pixel_std=STD, budgets=budgets)


@pytest.fixture(scope="module", params=[SHAPES[0], SHAPES[5]], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("encoder") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device="cpu").requires_grad_(False)


@pytest.mark.parametrize("grids", BATCHES.values(), ids=BATCHES)
def test_padded_features_are_those_of_the_images_alone(model, grids):
    images = images_of(grids)
    assert_close("features", encoder_of(model).encode(images), plain(model, images), 1e-5)


@pytest.mark.skipif(
    not launch.is_interpreting(), reason="the tests of captured features below run the kernels on a GPU"
)
def test_padded_features_are_the_same_with_the_captured_kernels(model):
    images = images_of([(1, 4, 6), (1, 2, 2)])
    with launch.forced("triton"):
        found = encoder_of(model, (48,)).encode(images)
    assert_close("features", found, plain(model, images), 1e-5)


def test_without_budgets_images_are_not_padded(model):
    images = images_of(BATCHES["several images"])
    assert torch.equal(encoder_of(model, ()).encode(images), plain(model, images))


@pytest.mark.parametrize("grids", [[(1, 2, 2)] * 100, [(1, 32, 34)]], ids=["too many", "too large"])
def test_images_that_fit_no_budget_are_not_padded(model, grids):
    images = images_of(grids)
    assert torch.equal(encoder_of(model).encode(images), plain(model, images))


@pytest.mark.parametrize("budgets", [BUDGETS, ()], ids=["padded", "eager"])
def test_a_whole_image_has_the_features_of_its_patches(model, budgets):
    """Resized or not, with other images in the same pass."""
    tower, rng = model.vision, np.random.default_rng(0)
    images, expected = [], []
    for seed, (grid, size) in enumerate([((1, 8, 6), (112, 84)), ((1, 4, 10), (61, 130)), ((1, 6, 6), (84, 85))]):
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        image = image_of(grid, seed)
        patches = tower.patchify(torch.from_numpy(pixels), grid).numpy()
        images += [dataclasses.replace(image, patches=pixels), image_of((1, 4, 4), seed + 10)]
        expected += [dataclasses.replace(image, patches=patches), images[-1]]
    assert torch.equal(encoder_of(model, budgets).encode(images), encoder_of(model, budgets).encode(expected))


def test_whole_images_of_as_many_pixels_as_allowed_fit_the_buffers(model, folder):
    """70 x 70 pixels become 56 x 56, four tokens: 1.56 times the bytes of its patches, and not aligned."""
    rules, pixels = load_rules(folder), np.random.default_rng(0).integers(0, 256, (70, 70, 3), dtype=np.uint8)
    size = rules.images.cell * 2
    small = dataclasses.replace(rules, images=dataclasses.replace(rules.images, max_pixels=size**2))
    grid = small.image_grid(70, 70)
    assert small.can_patchify_on_device(70, 70)
    assert not small.can_patchify_on_device(90, 90)
    images = [dataclasses.replace(image_of(grid, seed), patches=pixels) for seed in range(BUDGETS[-1] // np.prod(grid))]
    patches, _ = video_patches([pixels], small.images)
    expected = normalize_patches(torch.from_numpy(np.tile(patches, (len(images), 1))), MEAN, STD)
    with torch.no_grad():
        features = model.encode_images(expected, torch.tensor([grid] * len(images)))
    assert torch.equal(encoder_of(model).encode(images), features)


def test_features_do_not_depend_on_earlier_batches(model):
    """The same images give the same bits after any other batch, padding included."""
    encoder = encoder_of(model)
    for seed, grids in enumerate([*BATCHES.values(), *reversed(BATCHES.values())]):
        images = images_of(grids, seed)
        assert torch.equal(encoder.encode(images), encoder_of(model).encode(images))


def test_budgets_increase_by_256_patches_at_most_and_small_ones_by_less():
    budgets = patch_budgets(32768, 4)
    assert (budgets[0], budgets[-1], len(budgets)) == (256, 8192, 51)
    for before, after in pairwise(budgets):
        assert before < after <= before + (128 if before < 5120 else 256)


@pytest.mark.parametrize("max_patches", [1, 256, 257, 3000, 8192])
def test_the_largest_budget_covers_max_encoder_patches(max_patches):
    budgets = patch_budgets(max_patches, 4)
    assert budgets[-1] >= max_patches
    assert len(budgets) == 1 or budgets[-2] < max_patches


@pytest.mark.parametrize("side", [224, 336, 448, 672, 896, 1008])
def test_budgets_have_capacity_for_ordinary_images(side):
    """One image alone, and as many as fit into a budget."""
    grid = (1, side // 28 * 2, side // 28 * 2)
    num_patches = grid[1] * grid[2]
    for count in {1, 8192 // num_patches}:
        budget = next(budget for budget in patch_budgets(8192, 4) if budget >= count * num_patches)
        assert padded_layout([grid] * count, budget, VISION) is not None


def test_every_patch_of_a_padded_layout_has_one_window_and_one_image():
    rng = random.Random(0)
    num_refused = 0
    for _ in range(200):
        grids = [(rng.choice([1, 1, 3]), 2 * rng.randint(1, 20), 2 * rng.randint(1, 20)) for _ in range(3)]
        num_patches = sum(int(np.prod(grid)) for grid in grids)
        budget = next(budget for budget in patch_budgets(1 << 15, 4) if budget >= num_patches)
        layout, capacity = padded_layout(grids, budget, VISION), budget_sizes(budget, VISION)
        if layout is None:
            num_refused += 1
            continue
        buffer = np.full(capacity.total, 12345, np.int32)
        layout.write(buffer, capacity)
        token_order, reading_order, positions, images, windows = capacity.split(buffer)
        assert sorted(token_order) == list(range(budget // 4))
        assert (token_order[reading_order] == np.arange(budget // 4)).all()
        assert reading_order[: num_patches // 4].max() < num_patches // 4, "images come before padding"
        assert set(positions) <= set(range(budget))
        for starts, longest in ((images, capacity.max_image), (windows, capacity.max_window)):
            lengths = np.diff(starts)
            assert (starts[0], starts[-1]) == (0, budget)
            assert set(lengths) <= set(range(longest + 1))
    assert num_refused < 20


@pytest.mark.parametrize("num_parts", [ENCODER_PARTS, 3 * ENCODER_PARTS])
def test_a_pass_that_is_not_captured_runs_in_parts_as_well(folder, monkeypatch, num_parts):
    """The cases have more parts than blocks, and on a CPU several groups of images."""
    monkeypatch.setattr("saccade.engine.device.encoder._CPU_PATCHES", 24)
    model = load_model(folder, device="cpu").requires_grad_(False)
    encoder, images = encoder_of(model, budgets=()), images_of([(1, 4, 6), (1, 2, 2)])
    encoder.start(images, num_parts)
    assert encoder.run(1) is None
    assert encoder.run(num_parts - 2) is None
    features = encoder.run(1)
    assert torch.equal(features, encoder.encode(images))
    assert encoder.pass_ms(1000) == 0.0, "the host waits for it"


# ------------------------------------------------------------------ CUDA graphs


GPU_BATCHES = [[(1, 16, 12)], [(1, 18, 22), (1, 2, 2)], [(3, 6, 10), (1, 24, 20)], [(1, 16, 16)]]
GPU_BOUNDS = {"fp32": 1e-4, "bf16": 2e-2}


@pytest.fixture
def stream():
    """The default stream cannot be captured."""
    made = torch.cuda.Stream()
    made.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(made):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_BOUNDS)
def test_captured_features_are_those_of_the_images_alone(folder, dtype, stream):
    """Eager, then captured, then replayed, each time with other images."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = load_model(folder, device="cuda", dtype=dtype).requires_grad_(False)
    encoder = encoder_of(model)
    for turn in range(4):
        for seed, grids in enumerate(GPU_BATCHES):
            images = images_of(grids, seed + 10 * turn)
            assert_close(dtype, encoder.encode(images).float(), plain(model, images).float(), GPU_BOUNDS[dtype])
    assert encoder.num_captured == 3, "two of the batches share a budget"


@pytest.mark.gpu
@pytest.mark.parametrize("shares", [(1, 1, 1, 1), (3, 1), (1, 3), (2, 2), (4,)], ids=str)
def test_a_pass_in_parts_has_the_features_of_a_whole_one(folder, stream, shares):
    """Whatever else the device computes between the parts."""
    config = load_model(folder, device="cpu").config
    config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, num_layers=5))
    model = VLM(config).to(device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    encoder, other = encoder_of(model), encoder_of(model)
    for grids in GPU_BATCHES:
        images = images_of(grids)
        whole = encoder.encode(images).clone()
        encoder.start(images)
        found = []
        for num_parts in shares:
            found.append(encoder.run(num_parts))
            other.encode(images_of(grids, 9))
        *before, last = found
        assert before == [None] * len(before)
        assert torch.equal(last, whole)


@pytest.mark.gpu
def test_passes_are_timed_at_start(folder, stream):
    model = load_model(folder, device="cuda", dtype="bf16").requires_grad_(False)
    encoder = encoder_of(model)
    assert encoder.pass_ms(64) == 0.0
    encoder.warm_up()
    largest = encoder.pass_ms(1 << 20)
    assert encoder.pass_ms(0) == 0.0
    assert 0 < encoder.pass_ms(64) < largest
    assert encoder.pass_ms(1 << 21) == pytest.approx(2 * largest)


@pytest.mark.gpu
def test_a_replay_gives_the_bits_of_the_first_run(folder, stream):
    model = load_model(folder, device="cuda", dtype="bf16").requires_grad_(False)
    encoder = encoder_of(model)
    for grids in GPU_BATCHES:
        images, others = images_of(grids), images_of(grids, 50)
        first = encoder.encode(images).clone()
        for _ in range(2):
            different = encoder.encode(others).clone()
            assert torch.equal(encoder.encode(images), first)
            assert not torch.equal(different, first)


@pytest.mark.gpu
def test_calls_queued_on_a_busy_gpu_keep_their_own_pixels(folder, stream):
    """There are more calls than host buffers. A buffer is reused when its copy is complete; nothing else waits."""
    model = load_model(folder, device="cuda", dtype="bf16").requires_grad_(False)
    encoder = encoder_of(model)
    batches = [images_of([(1, 16, 12)], seed) for seed in range(6)]
    expected = [encoder.encode(images).clone() for images in batches]
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = [encoder.encode(images).clone() for images in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))

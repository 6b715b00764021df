"""Packed model inputs, and the processor that makes them."""

import dataclasses
import io
import json
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from saccade.errors import CheckpointError, ImageError, UserError
from saccade.processor import MediaLimits, ModelInputs, Processor


def picture(width, height, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def ask(*parts):
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


def image(width, height, seed=0):
    return {"type": "image", "image": picture(width, height, seed)}


def video(num_frames, width, height, **options):
    return {"type": "video", "video": [picture(width, height, seed) for seed in range(num_frames)], **options}


CONVERSATIONS = [
    ask("hello"),
    [*ask(image(56, 84), "what?"), {"role": "assistant", "content": "noise"}],
    ask("a", image(60, 60, 1), "b", image(140, 56, 2)),
    ask(video(3, 56, 84, fps=1), image(56, 56, 3), "and?"),
    ask("bye"),
]


def assert_same_row(actual, expected):
    for field in dataclasses.fields(ModelInputs):
        left, right = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(left, Tensor):
            assert left.dtype == right.dtype, field.name
            assert torch.equal(left, right), field.name
        else:
            assert left == right, field.name


@pytest.fixture(scope="module")
def rows(processor):
    return [processor.preprocess(conversation) for conversation in CONVERSATIONS]


# ------------------------------------------------------------------ packing


def test_the_processor_packs_what_prepare_makes(processor, rows):
    assert_same_row(processor(CONVERSATIONS), ModelInputs.pack(rows))


@settings(deadline=None, derandomize=True, max_examples=40)
@given(order=st.lists(st.integers(0, len(CONVERSATIONS) - 1), min_size=2, max_size=8), data=st.data())
def test_a_pack_of_packs_is_the_pack_at_once(rows, order, data):
    chosen = [rows[number] for number in order]
    cut = data.draw(st.integers(1, len(chosen) - 1))
    nested = ModelInputs.pack([ModelInputs.pack(chosen[:cut]), ModelInputs.pack(chosen[cut:])])
    assert_same_row(nested, ModelInputs.pack(chosen))


def test_a_pack_of_one_is_itself(rows):
    for row in rows:
        assert_same_row(ModelInputs.pack([row]), row)


def test_each_conversation_is_found_again_in_the_pack(rows):
    packed = ModelInputs.pack(rows)
    assert packed.num_conversations == len(rows)
    assert packed.num_tokens == sum(row.num_tokens for row in rows)
    assert packed.max_seqlen == max(row.num_tokens for row in rows)
    bounds, first_patch = packed.cu_seqlens.tolist(), 0
    for row, start, end in zip(rows, bounds, bounds[1:], strict=False):
        assert torch.equal(packed.token_ids[start:end], row.token_ids)
        assert torch.equal(packed.positions[:, start:end], row.positions)
        assert torch.equal(packed.loss_mask[start:end], row.loss_mask)
        inside = (packed.image_token_index >= start) & (packed.image_token_index < end)
        assert torch.equal(packed.image_token_index[inside] - start, row.image_token_index)
        assert torch.equal(packed.patches[first_patch : first_patch + len(row.patches)], row.patches)
        first_patch += len(row.patches)
    assert first_patch == len(packed.patches)


def test_every_field_has_the_shape_and_type_it_promises(rows):
    packed = ModelInputs.pack(rows)
    num_tokens = packed.num_tokens
    assert (packed.token_ids.shape, packed.token_ids.dtype) == ((num_tokens,), torch.int64)
    assert (packed.cu_seqlens.shape, packed.cu_seqlens.dtype) == ((len(rows) + 1,), torch.int32)
    assert (packed.positions.shape, packed.positions.dtype) == ((3, num_tokens), torch.int64)
    assert (packed.loss_mask.shape, packed.loss_mask.dtype) == ((num_tokens,), torch.bool)
    assert (packed.patches.shape[1], packed.patches.dtype) == (1176, torch.uint8)
    assert (packed.image_grids.shape, packed.image_grids.dtype) == ((5, 3), torch.int64)
    assert packed.image_token_index.dtype == torch.int64
    assert len(packed.image_token_index) * 4 == len(packed.patches)


def test_text_alone_has_no_patches(processor):
    row = processor.preprocess(ask("hi"))
    assert row.patches.shape == (0, 1176)
    assert row.image_grids.shape == (0, 3)
    assert row.image_token_index.tolist() == []
    assert row.normalized_patches().shape == (0, 1176)


def test_a_videos_time_runs_with_its_frame_rate(processor):
    per_second = processor.rules.tokens_per_second
    for fps in (0.5, 1, 2, 4):
        row = processor.preprocess(ask(video(6, 56, 56, fps=fps)))
        times = row.positions[0, row.image_token_index].unique()
        assert (times - times[0]).tolist() == [int(pair * 2 / fps * per_second) for pair in range(3)]
    unstated = processor.preprocess(ask(video(6, 56, 56)))
    assert torch.equal(unstated.positions, processor.preprocess(ask(video(6, 56, 56, fps=2))).positions)


def test_an_image_takes_as_many_tokens_as_its_grid_has_cells(processor):
    row = processor.preprocess(ask(image(120, 300)))
    assert row.image_grids.tolist() == [list(processor.images.grid(300, 120))]
    assert len(row.image_token_index) == row.image_grids.prod() // 4
    assert (row.token_ids[row.image_token_index] == processor.rules.image_id).all()
    assert (row.token_ids == processor.rules.image_id).sum() == len(row.image_token_index)


# ------------------------------------------------------------------ devices and pixels


def test_moving_a_row_keeps_the_grids_on_the_cpu(rows):
    moved = ModelInputs.pack(rows).to("meta")
    for field in dataclasses.fields(ModelInputs):
        value = getattr(moved, field.name)
        if isinstance(value, Tensor):
            assert value.device.type == ("cpu" if field.name == "image_grids" else "meta"), field.name
    assert_same_row(rows[2].to("cpu"), rows[2])


@pytest.mark.parametrize(("width", "height"), [(28, 28), (644, 364), (1100, 60), (13, 200)])
def test_normalized_patches_are_hugging_faces_pixel_values(processor, width, height):
    pil = picture(width, height)
    row = processor.preprocess(ask({"type": "image", "image": pil}))
    reference = Qwen2VLImageProcessorPil()(images=[pil], return_tensors="pt")
    assert row.image_grids.tolist() == reference["image_grid_thw"].tolist()
    normalized = row.normalized_patches()
    assert normalized.dtype == torch.float32
    torch.testing.assert_close(normalized, reference["pixel_values"], atol=1e-5, rtol=0)


def test_patches_that_are_floats_already_pass_as_they_are(rows):
    floats = torch.randn(rows[1].patches.shape)
    row = dataclasses.replace(rows[1], patches=floats)
    assert row.normalized_patches() is floats


# ------------------------------------------------------------------ reading the checkpoint folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def change(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))


def test_the_processor_needs_no_weights(copy, rows):
    assert_same_row(Processor.load(str(copy)).preprocess(CONVERSATIONS[2]), rows[2])


def test_limits_are_obeyed(copy):
    strict = Processor.load(copy, limits=MediaLimits(max_side=50, allow_local_files=False))
    with pytest.raises(ImageError, match=r"image 1: .*longest side may be 50"):
        strict.preprocess(ask(image(56, 56)))
    with pytest.raises(ImageError, match="image 1: images given as a path are not read here"):
        strict.preprocess(ask({"type": "image_url", "image_url": {"url": "/etc/hostname"}}))


def test_a_request_is_limited_as_a_whole(copy):
    """Frames, bytes and pixels of all images and videos are summed before anything is decoded."""
    limits = MediaLimits(max_frames=5, max_request_pixels=4 * 56 * 56, max_request_bytes=9000)
    strict = Processor.load(copy, limits=limits)
    assert strict.preprocess(ask(video(3, 56, 56), image(56, 56))).num_tokens
    with pytest.raises(ImageError, match=r"video 2: 6 frames, over the limit of 5 per request. Sample fewer frames"):
        strict.preprocess(ask(video(3, 28, 28), video(3, 28, 28)))
    with pytest.raises(ImageError, match="video 1: frame 5: images and frames of 15680 pixels so far, over the limit"):
        strict.preprocess(ask(video(5, 56, 56)))
    with pytest.raises(ImageError, match="image 2: images and frames of 18816 pixels so far, over the limit of 12544"):
        strict.preprocess(ask(image(112, 56), image(112, 112)))
    encoded = io.BytesIO()
    picture(56, 56).save(encoded, "BMP")  # 9462 bytes
    with pytest.raises(ImageError, match="image 1: images and videos of 9462 bytes so far, over the limit of 9000"):
        strict.preprocess(ask({"type": "image", "image": encoded}))


def test_pixels_of_a_request_are_counted_before_they_are_decoded(copy):
    """A header with too large a size is refused although the file ends after it."""
    encoded = io.BytesIO()
    picture(56, 56).save(encoded, "PNG")
    header = encoded.getvalue()[:60]
    strict = Processor.load(copy, limits=MediaLimits(max_request_pixels=2 * 56 * 56))
    with pytest.raises(ImageError, match=r"image 2: .* truncated or corrupt"):
        strict.preprocess(ask(image(28, 28), {"type": "image", "image": header}))
    with pytest.raises(ImageError, match="video 1: frame 3: images and frames of 9408 pixels so far"):
        strict.preprocess(ask({"type": "video", "video": [picture(56, 56), picture(56, 56, 1), header]}))


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json, so it is not a checkpoint folder"):
        Processor.load(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        Processor.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: a file, not a checkpoint folder"):
        Processor.load(tmp_path / "file")


def test_a_text_models_folder_is_refused_with_the_way_out(copy):
    change(copy / "config.json", image_token_id=...)
    with pytest.raises(
        CheckpointError,
        match=r"no image_token_id \(model_type 'qwen2_5_vl'\): .* vision-language model. Make one with saccade init",
    ):
        Processor.load(copy)


@pytest.mark.parametrize("content", ["{", "[]", "5", "\xff"])
@pytest.mark.parametrize(
    "name",
    ["config.json", "preprocessor_config.json", "tokenizer.json", "generation_config.json", "tokenizer_config.json"],
)
def test_a_damaged_file_is_named(copy, name, content):
    (copy / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        Processor.load(copy)


def test_a_template_that_is_not_utf8_is_named(copy):
    (copy / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Processor.load(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"do_resize": False}, {"do_normalize": False}, {"do_normalize": None}, {"do_rescale": False},
        {"resample": 2}, {"rescale_factor": 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_pixel_settings_we_do_not_follow_are_refused_by_name(copy, changes):
    change(copy / "preprocessor_config.json", **changes)
    [(name, value)] = changes.items()
    with pytest.raises(CheckpointError, match=rf"preprocessor_config\.json: {name} is {value}"):
        Processor.load(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"patch_size": "14"}, {"patch_size": 0}, {"image_mean": 0.5}, {"image_mean": [0.5]},
        {"image_std": [1, 0, 1]}, {"rescale_factor": "1"},
    ],
    ids=str,
)  # fmt: skip
def test_pixel_settings_that_make_no_sense_are_refused(copy, changes):
    change(copy / "preprocessor_config.json", **changes)
    with pytest.raises(UserError):
        Processor.load(copy)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"model_type": []}, r"model_type '\[\]' is not supported"),
        ("config.json", {"vision_config": 3}, "vision_config is 3, not an object"),
        (
            "config.json", {"vision_config": {"tokens_per_second": "x"}},
            "tokens_per_second is 'x', not a number above 0",
        ),
        ("config.json", {"image_token_id": 7}, "the image token of .* 7, is no control token of tokenizer.json"),
        ("preprocessor_config.json", {"image_mean": None}, "image_mean is None, not three numbers"),
        (
            "preprocessor_config.json", {"patch_size": 16},
            "patch_size is 16 in preprocessor_config.json, 14 in config.json",
        ),
        ("processor_config.json", {"video_processor": [1]}, r"video_processor is \[1\], not an object"),
    ],
)  # fmt: skip
def test_fields_that_cannot_be_right_are_named(copy, file, changes, message):
    if file == "preprocessor_config.json":
        change(copy / "config.json", vision_config={"tokens_per_second": 2})  # the patches are the default of the class
    if file == "processor_config.json":
        (copy / file).write_text("{}")
    change(copy / file, **changes)
    with pytest.raises(CheckpointError, match=message):
        Processor.load(copy)


def test_the_pixel_budget_is_read_in_both_spellings(copy):
    change(copy / "preprocessor_config.json", min_pixels=784, max_pixels=3200)
    assert Processor.load(copy).preprocess(ask(image(300, 300))).image_grids.tolist() == [[1, 4, 4]]
    change(copy / "preprocessor_config.json", min_pixels=..., max_pixels=...)
    change(copy / "preprocessor_config.json", size={"shortest_edge": 784, "longest_edge": 3200})
    assert Processor.load(copy).preprocess(ask(image(300, 300))).image_grids.tolist() == [[1, 4, 4]]
    change(copy / "preprocessor_config.json", min_pixels=9999, max_pixels=784)
    with pytest.raises(CheckpointError, match="min_pixels 9999"):
        Processor.load(copy)


def test_settings_in_processor_config_are_read(copy):
    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").unlink()
    wrapped = {"image_processor": settings | {"max_pixels": 3136}}
    (copy / "processor_config.json").write_text(json.dumps(wrapped))
    assert Processor.load(copy).images.max_pixels == 3136


def test_videos_may_have_a_budget_of_their_own(copy):
    (copy / "video_preprocessor_config.json").write_text(json.dumps({"max_pixels": 3136}))
    row = Processor.load(copy).preprocess(ask(image(112, 112), video(2, 112, 112)))
    assert row.image_grids.tolist() == [[1, 8, 8], [1, 4, 4]]


@pytest.mark.parametrize(("stored", "expected"), [(258, {258}), ([258, 256], {258, 256}), (None, {258})])
def test_end_tokens_are_read_as_one_or_several(copy, stored, expected):
    change(copy / "generation_config.json", eos_token_id=stored)
    assert Processor.load(copy).eos_ids == expected

"""A checkpoint folder of Hugging Face works unchanged and gives its tokens, pixels, positions, logits and words."""

import pytest
import torch
from closeness import assert_close
from model.hugging_face import CONVERSATIONS, FAMILIES, SHAPES, VIDEO, Oracle, make_checkpoint, picture
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from saccade.errors import RequestError
from saccade.model import generate, load_model
from saccade.processor import Processor

FP32_BOUND = 1e-4
BF16_BOUND = 2e-2


@pytest.fixture(scope="module", params=[*SHAPES, *FAMILIES], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint", request.param)


@pytest.fixture(scope="module")
def oracle(folder):
    return Oracle(folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device="cpu")


@pytest.fixture(scope="module")
def processor(folder):
    return Processor.load(folder)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_tokens_pixels_positions_and_logits_equal(messages, oracle, model, processor):
    theirs, ours = oracle.inputs(messages), processor([messages])
    assert ours.token_ids.tolist() == theirs["input_ids"][0].tolist()
    if "pixel_values" in theirs:
        if "image_grid_thw" in theirs:
            assert ours.image_grids.tolist() == theirs["image_grid_thw"].tolist()
        pixel_step = 1 / 255 / min(ours.pixel_std)  # one grey level of the normalised range
        assert (ours.normalized_patches() - oracle.pixels(theirs)).abs().max() <= pixel_step
    assert torch.equal(ours.positions, oracle.positions(theirs))
    with torch.no_grad():
        assert_close("logits", model(ours), oracle.logits(theirs), FP32_BOUND)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) for name in ("text-only", "644x364")] + ["multi-image", "multi-turn"],
)
def test_greedy_continuations_of_32_tokens_are_identical(name, oracle, model, processor):
    messages = CONVERSATIONS[name]
    theirs, ours = (
        make([messages] if make is processor else messages, add_generation_prompt=True)
        for make in (oracle.inputs, processor)
    )
    [tokens] = generate(model, ours, max_new_tokens=32)
    assert tokens == oracle.following(theirs, tokens)


VIDEO_FRAMES = [picture(140, 84, seed) for seed in range(5)]
VIDEO_PARTS = [{"type": "video", "video": VIDEO_FRAMES, "fps": 1.5}, {"type": "text", "text": "What happens?"}]
VIDEO_MESSAGES = [{"role": "user", "content": VIDEO_PARTS}]


def test_a_video_gives_the_same_logits_and_words_at_the_published_positions(oracle, model, processor):
    """Text starts at the largest position of any axis plus one; `transformers` is given the positions."""
    if processor.rules.video_id is None:
        pytest.skip("this family takes no videos: test_videos_are_refused_by_families_that_take_none")
    if processor.rules.num_texts("video", (1, 2, 2)):
        pytest.skip(
            "this family puts the times of frames into the text: "
            "test_frames_with_times_give_the_same_tokens_positions_logits_and_words"
        )
    ours = processor([VIDEO_MESSAGES], add_generation_prompt=True)
    ids = ours.token_ids[None]
    if oracle.own is not None:
        theirs = oracle.inputs(VIDEO_MESSAGES, add_generation_prompt=True)
        assert ids.tolist() == theirs["input_ids"].tolist()
        assert torch.allclose(ours.normalized_patches(), oracle.pixels(theirs), atol=1e-6)
        assert torch.equal(ours.positions, oracle.positions(theirs))
        with torch.no_grad():
            assert_close("logits", model(ours), oracle.logits(theirs), FP32_BOUND)
        [tokens] = generate(model, ours, max_new_tokens=32)
        assert tokens == oracle.following(theirs, tokens)
        return
    theirs = {
        "input_ids": ids,
        "mm_token_type_ids": oracle.token_types(ids),
        "pixel_values_videos": ours.normalized_patches(),
        "video_grid_thw": ours.image_grids,
        "second_per_grid_ts": torch.tensor([2 / 1.5]),
    }
    assert ours.image_grids[0, 0] == 3, "five frames are three frame pairs"
    assert (ids == oracle.tokenizer.convert_tokens_to_ids(VIDEO)).sum() == ours.image_token_index.shape[0]
    first, last = int(ours.image_token_index[0]), int(ours.image_token_index[-1])
    times = [first + int(processor.rules.time_step("video", 1.5) * pair) for pair in range(3)]
    _, rows, columns = (ours.image_grids[0] // processor.videos.merge_size).tolist()
    video = [(time, first + row, first + column) for time in times for row in range(rows) for column in range(columns)]
    assert ours.positions[:, first : last + 1].T.tolist() == [list(token) for token in video]
    largest = int(ours.positions[:, last].max())
    assert largest == max(times[-1], first + max(rows, columns) - 1)
    [tokens] = generate(model, ours, max_new_tokens=32)
    positions = torch.cat([ours.positions[:, : last + 1], torch.zeros(3, ids.shape[1] - last - 1 + 32).long()], dim=1)
    positions[:, last + 1 :] = torch.arange(positions.shape[1] - last - 1) + largest + 1
    assert torch.equal(ours.positions, positions[:, : ids.shape[1]])
    theirs["input_ids"] = torch.cat([ids, torch.tensor([tokens])], dim=1)
    theirs |= {"mm_token_type_ids": oracle.token_types(theirs["input_ids"]), "position_ids": positions[:, None]}
    expected = oracle.logits(theirs)
    with torch.no_grad():
        assert_close("logits", model(ours), expected[: ids.shape[1]], FP32_BOUND)
    assert tokens == expected[ids.shape[1] - 1 : -1].argmax(-1).tolist()


def test_frames_with_times_give_the_same_tokens_positions_logits_and_words(oracle, model, processor):
    if not processor.rules.num_texts("video", (1, 2, 2)):
        pytest.skip(
            "this family has no times in the text: "
            "test_a_video_gives_the_same_logits_and_words_at_the_published_positions"
        )
    ours = processor([VIDEO_MESSAGES], add_generation_prompt=True)
    ids, pairs = ours.token_ids[None], ours.image_grids
    grid = torch.tensor([[len(pairs), *pairs[0, 1:]]])
    assert pairs.tolist() == [[1, *grid[0, 1:].tolist()]] * 3
    height, width = smart_resize(
        5, 84, 140, 2, processor.videos.cell, processor.videos.min_pixels, processor.videos.max_pixels
    )
    assert grid.tolist() == [[3, height // 16, width // 16]]
    assert (
        ids[0].tolist()
        == oracle.inputs(VIDEO_MESSAGES, add_generation_prompt=True, video=(grid, 1.5))["input_ids"][0].tolist()
    )
    theirs = {
        "input_ids": ids,
        "mm_token_type_ids": oracle.token_types(ids),
        "pixel_values_videos": ours.normalized_patches(),
        "video_grid_thw": grid,
    }
    assert torch.equal(ours.positions, oracle.positions(theirs))
    with torch.no_grad():
        assert_close("logits", model(ours), oracle.logits(theirs), FP32_BOUND)
    [tokens] = generate(model, ours, max_new_tokens=32)
    assert tokens == oracle.following(theirs, tokens)


def test_videos_are_refused_by_families_that_take_none(processor):
    if processor.rules.video_id is not None:
        pytest.skip("this family takes videos: the two tests above")
    with pytest.raises(RequestError, match="takes images but no videos"):
        processor([VIDEO_MESSAGES])


@pytest.mark.parametrize(
    "name",
    ["644x364", pytest.param("text-only", marks=pytest.mark.slow), pytest.param("multi-turn", marks=pytest.mark.slow)],
)
def test_logits_in_bf16_equal_within_the_bf16_bound(name, folder, processor):
    messages = CONVERSATIONS[name]
    oracle, model = Oracle(folder, torch.bfloat16), load_model(folder, device="cpu", dtype="bf16")
    with torch.no_grad():
        assert_close("logits", model(processor([messages])), oracle.logits(oracle.inputs(messages)), BF16_BOUND)


def test_perturbed_weights_are_noticed(folder, oracle, processor):
    """The bounds above are tight enough to see one changed bias."""
    model = load_model(folder, device="cpu")
    messages = CONVERSATIONS["644x364"]
    with torch.no_grad():
        next(
            bias
            for name, bias in model.vision.blocks[0].named_parameters()
            if name.endswith(("qkv.bias", "v_proj.bias"))
        ).add_(0.05)
        with pytest.raises(AssertionError, match="relative RMS"):
            assert_close("logits", model(processor([messages])), oracle.logits(oracle.inputs(messages)), FP32_BOUND)

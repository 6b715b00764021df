"""M-RoPE positions: by hand, against Hugging Face for images, and against the published rule for videos."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from saccade.processor.positions import TextSpan, VisionSpan, mrope_positions


def test_text_advances_all_three_axes_together():
    assert mrope_positions([TextSpan(3)]).tolist() == [[0, 1, 2]] * 3
    assert mrope_positions([TextSpan(1), TextSpan(0), TextSpan(2)]).tolist() == [[0, 1, 2]] * 3
    assert mrope_positions([]).shape == (3, 0)
    assert mrope_positions([]).dtype == np.int64


def test_an_image_shares_one_time_and_text_continues_after_its_longer_side():
    positions = mrope_positions([TextSpan(2), VisionSpan(1, 2, 3), TextSpan(2)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_a_high_image_moves_the_text_by_its_rows():
    positions = mrope_positions([VisionSpan(1, 3, 1), TextSpan(1)])
    assert positions.tolist() == [[0, 0, 0, 3], [0, 1, 2, 3], [0, 0, 0, 3]]


def test_several_images_each_start_where_the_last_ended():
    positions = mrope_positions(
        [VisionSpan(1, 1, 2), VisionSpan(1, 2, 2), TextSpan(1), VisionSpan(1, 1, 1), TextSpan(1)]
    )
    assert positions.tolist() == [
        [0, 0, 2, 2, 2, 2, 4, 5, 6],
        [0, 0, 2, 2, 3, 3, 4, 5, 6],
        [0, 1, 2, 3, 2, 3, 4, 5, 6],
    ]


def test_a_videos_frame_pairs_lie_a_time_step_apart():
    positions = mrope_positions([TextSpan(1), VisionSpan(3, 1, 2, time_step=2.0), TextSpan(1)])
    assert positions[0, 1:7].tolist() == [1, 1, 3, 3, 5, 5]
    assert positions[1, 1:7].tolist() == [1] * 6
    assert positions[2, 1:7].tolist() == [1, 2] * 3


def test_text_after_a_video_starts_at_the_largest_position_of_any_axis_plus_one():
    """The published example: 3 frame pairs, 25 tokens a second, 1 frame a second."""
    positions = mrope_positions([VisionSpan(3, 2, 2, time_step=50.0), TextSpan(2)])
    assert positions[0].tolist() == [0] * 4 + [50] * 4 + [100] * 4 + [101, 102]
    assert positions[:, -2:].tolist() == [[101, 102]] * 3
    assert mrope_positions([TextSpan(5), VisionSpan(2, 1, 9, time_step=2.0), TextSpan(1)])[:, -1].tolist() == [14] * 3
    assert mrope_positions([VisionSpan(2, 1, 1, time_step=0.5), TextSpan(1)])[:, -1].tolist() == [1] * 3


@pytest.mark.parametrize(("time_step", "times"), [(0.5, [0, 0, 1, 1]), (1.5, [0, 1, 3, 4]), (1 / 3, [0, 0, 0, 1])])
def test_a_fraction_of_a_step_is_dropped_at_the_end_not_at_each_step(time_step, times):
    assert mrope_positions([VisionSpan(4, 1, 1, time_step)])[0].tolist() == times


# ------------------------------------------------------------------ against others

MERGE, IMAGE = 2, 1

text_spans = st.builds(TextSpan, st.integers(1, 9))
image_spans = st.builds(lambda rows, columns: VisionSpan(1, rows, columns), st.integers(1, 6), st.integers(1, 6))
video_spans = st.builds(
    VisionSpan,
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 4 / 3, 1 / 3, 2.8, 50.0]),
)


def published_rule(spans):
    """Count token by token, as the model's authors do: a span starts at the largest position so far plus one."""
    tokens, start = [], 0
    for span in spans:
        if isinstance(span, TextSpan):
            tokens += [(start + i,) * 3 for i in range(span.length)]
        else:
            tokens += [
                (start + int(np.float32(frame) * np.float32(span.time_step)), start + row, start + column)
                for frame in range(span.frames)
                for row in range(span.rows)
                for column in range(span.columns)
            ]
        start = 1 + max(position for token in tokens for position in token)
    return [list(axis) for axis in zip(*tokens, strict=True)]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(first=text_spans, rest=st.lists(st.tuples(image_spans | video_spans, text_spans), max_size=4))
def test_positions_follow_the_published_rule_for_any_mixture_of_text_images_and_videos(first, rest):
    spans = [first, *(span for pair in rest for span in pair)]
    assert mrope_positions(spans).tolist() == published_rule(spans)


@pytest.fixture(scope="module")
def reference():
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "vocab_size": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 16,
            "spatial_merge_size": MERGE,
        },
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2_5_VLModel(config)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(first=text_spans, rest=st.lists(st.tuples(image_spans, text_spans), min_size=1, max_size=4))
def test_positions_are_hugging_faces_for_text_and_images(reference, first, rest):
    spans = [first, *(span for pair in rest for span in pair)]
    kinds = [kind for span in spans for kind in [IMAGE * isinstance(span, VisionSpan)] * span.length]
    grids = [[1, image.rows * MERGE, image.columns * MERGE] for image, _ in rest]
    expected, _ = reference.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long), torch.tensor([kinds]), image_grid_thw=torch.tensor(grids)
    )
    assert mrope_positions(spans).tolist() == expected[:, 0].tolist()

"""M-RoPE positions: by hand, and against Hugging Face on random rows."""

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


def test_an_image_shares_one_time_and_text_goes_on_behind_its_longer_side():
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


@pytest.mark.parametrize(("time_step", "times"), [(0.5, [0, 0, 1, 1]), (1.5, [0, 1, 3, 4]), (1 / 3, [0, 0, 0, 1])])
def test_a_fraction_of_a_step_is_dropped_at_the_end_not_at_each_step(time_step, times):
    assert mrope_positions([VisionSpan(4, 1, 1, time_step)])[0].tolist() == times


# ------------------------------------------------------------------ against Hugging Face

MERGE, IMAGE, VIDEO, TOKENS_PER_SECOND = 2, 1, 2, 4

text_spans = st.builds(lambda length: (TextSpan(length), None), st.integers(1, 9))
image_spans = st.builds(
    lambda rows, columns: (VisionSpan(1, rows, columns), None), st.integers(1, 6), st.integers(1, 6)
)
video_spans = st.builds(
    lambda frames, rows, columns, seconds: (VisionSpan(frames, rows, columns, TOKENS_PER_SECOND * seconds), seconds),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0.25, 0.5, 1.0, 2.0, 1 / 3, 2 / 24, 0.7]),
)
visual_then_text = st.tuples(image_spans | video_spans, text_spans)  # two placeholders never touch: vision_end is text


@pytest.fixture(scope="module")
def reference():
    config = Qwen2_5_VLConfig(
        text_config={"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 16, "spatial_merge_size": MERGE, "tokens_per_second": TOKENS_PER_SECOND},
    )  # fmt: skip
    with torch.device("meta"):
        return Qwen2_5_VLModel(config)


def grids(spans, is_video):
    chosen = [
        [span.frames, span.rows * MERGE, span.columns * MERGE]
        for span, seconds in spans
        if isinstance(span, VisionSpan) and (seconds is not None) == is_video
    ]
    return torch.tensor(chosen) if chosen else None


@settings(deadline=None, derandomize=True, max_examples=150)
@given(first=text_spans, rest=st.lists(visual_then_text, min_size=1, max_size=4))
def test_positions_are_hugging_faces_for_any_mixture_of_text_images_and_videos(reference, first, rest):
    spans = [first, *(span for pair in rest for span in pair)]
    kinds = [
        kind
        for span, seconds in spans
        for kind in [0 if isinstance(span, TextSpan) else IMAGE if seconds is None else VIDEO] * span.length
    ]
    times = [seconds for _, seconds in spans if seconds is not None]
    expected, _ = reference.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        image_grid_thw=grids(spans, is_video=False),
        video_grid_thw=grids(spans, is_video=True),
        second_per_grid_ts=torch.tensor(times) if times else None,
    )
    assert mrope_positions([span for span, _ in spans]).tolist() == expected[:, 0].tolist()

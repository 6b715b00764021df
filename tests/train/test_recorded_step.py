"""Steps recorded on one process: the operations of the whole program, and the collectives of a real world."""

import json
from dataclasses import replace

import pytest
import torch
from train.recorded_ranks import CONFIG, LAYOUTS, SHAPE, collectives, settings
from train.running import run_together
from train.test_collectives import formula

from saccade.kernels import rope
from saccade.model.families import named_size
from saccade.parallel_dims import ParallelDims
from saccade.plan.ragged import draw_sequences, typical
from saccade.train.recorded_step import combined_operations, record_step

FAMILIES = ["tiny", "qwen3_vl/tiny", "llava_next/tiny"]
"""Windows; image features of several blocks and layers; tiles, and a block that never runs."""


def deep(size):
    """A tiny model with layers that repeat, and the settings of its step."""
    config = named_size(size)
    vision, deep = config.vision, {"num_layers": 12}
    if vision.full_attention_layers:
        deep["full_attention_layers"] = (3, 7, 11)
    if vision.feature_layers:
        deep["feature_layers"] = (3, 5)
    if vision.selected_layers:
        deep["selected_layers"] = (11,)
    return replace(config, vision=replace(vision, **deep), language=replace(config.language, num_layers=9))


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
@pytest.mark.parametrize("size", FAMILIES)
def test_a_layer_that_is_repeated_has_the_operations_of_all_layers(recompute, size):
    config, dims = deep(size), ParallelDims(shard=2, tensor=2)
    shape = typical(draw_sequences(config, seq_len=2048)).shape
    chosen = settings(config, recompute_language=recompute, recompute_vision=recompute)
    whole, repeated = (
        without_update(record_step(chosen, dims, shape, is_whole=is_whole)) for is_whole in (True, False)
    )
    assert repeated == whole
    assert len({one.phase for one in whole if "language.layers" in one.phase}) == 2 * 9


def test_a_step_is_composed_of_the_tower_of_one_and_the_decoder_of_another():
    def step(vision, language):
        return without_update(
            record_step(
                settings(recompute_vision=vision, recompute_language=language), ParallelDims(shard=2, context=2), SHAPE
            )
        )

    assert combined_operations(step("full", "full"), step("none", "none")) == step("full", "none")


def without_update(operations):
    return [one for one in operations if one.phase != "the update"]


def test_nothing_that_is_recorded_stays_in_a_cache():
    """A fake tensor in a cache would make every later result fake."""
    language = CONFIG.language
    rope._cached_frequencies.cache_clear()
    record_step(settings(), ParallelDims(shard=2), SHAPE)
    kept, _ = rope.frequencies(
        language.rope_sections, language.rope_theta, torch.device("cpu"), language.rope_interleaved
    )
    assert type(kept) is torch.Tensor
    assert len(kept[kept > 0]) == len(kept)


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param(ParallelDims(shard=128, tensor=8), marks=pytest.mark.slow),
        ParallelDims(replicate=16, shard=8, tensor=8),
    ],
)
def test_1024_ranks_have_the_collectives_of_the_formula(dims):
    config = replace(
        CONFIG, language=replace(CONFIG.language, num_layers=36), vision=replace(CONFIG.vision, num_layers=2)
    )
    found = collectives(record_step(settings(config), dims, replace(SHAPE, grids=())))
    # The formula is of the parts of a step that tests/train/test_collectives.py runs; here it ends with the same norm.
    kinds = [sum(one[1] == kind for one in found) for kind in ("all-gather", "reduce-scatter", "all-reduce")]
    assert tuple(kinds) == formula(dims, replicates=dims.replicate > 1)


@pytest.mark.slow
def test_collectives_and_bytes_are_those_of_gloo(tmp_path):
    to = tmp_path / "found.json"
    run_together([{"call": "train.recorded_ranks:compare", "to": str(to)}], tmp_path, num_ranks=4)
    real = json.loads(to.read_text())
    for name, dims in LAYOUTS.items():
        recorded = json.loads(json.dumps(collectives(record_step(settings(), dims, SHAPE, is_whole=True))))
        assert sorted(map(comparable, recorded), key=str) == sorted(map(comparable, real[name]), key=str), name


def comparable(collective):
    """Without the bytes of the loss's gradient, which its kernel makes in bf16, and the reference on a CPU in fp32."""
    phase, kind, axes, num_bytes, overlaps = collective
    return phase, kind, axes, num_bytes if (phase, kind) != ("the loss", "all-reduce") else None, overlaps

"""Steps recorded on one process: the operations of the whole program, and the collectives of a real world."""

import json
from dataclasses import replace

import pytest
from train.recorded_ranks import CONFIG, LAYOUTS, SHAPE, collectives, settings
from train.running import run_together
from train.test_collectives import formula

from saccade.parallel_dims import ParallelDims
from saccade.train.recorded_step import Attention, record_step


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_a_layer_that_is_repeated_has_the_operations_of_all_layers(recompute):
    dims, chosen = ParallelDims(shard=2, tensor=2), settings(recompute_language=recompute)
    whole, repeated = (record_step(chosen, dims, SHAPE, is_whole=is_whole) for is_whole in (True, False))

    def of_layers(operations):
        return [one for one in operations if ".layers." in one.phase or one.phase == "the loss"]

    assert of_layers(repeated) == of_layers(whole)
    assert len({one.phase for one in of_layers(whole)}) == 2 * 9 + 1
    assert sum(isinstance(one, Attention) for one in of_layers(whole)) == 9 * (2 if recompute == "none" else 3)


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

"""Compressed reduce-scatter of gradients: close to fp32, less traffic, error feedback, and refusals."""

import pytest
from train.running import losses, make_checkpoint, records, run_together, write_recipe, write_shards
from train.shapes import LARGE, UNIFORM

from saccade.errors import ConfigError
from saccade.train.memory import MemoryPlanner
from saccade.train.memory_check import check_residual
from saccade.train.memory_plan import GIB, RESIDUAL
from saccade.train.parallel_config import ParallelConfig


@pytest.mark.slow
def test_compressed_gradients_are_fed_back_and_train_like_fp32(tmp_path):
    checkpoint, shards = make_checkpoint(tmp_path / "checkpoint"), write_shards(tmp_path / "shards", text_every=3)
    jobs = [{"call": "train.compression_ranks:reduce", "rounding": rounding} for rounding in ("bf16", "int8")]
    for kind in ("none", "bf16", "int8"):
        recipe = write_recipe(tmp_path / f"{kind}.toml", run=tmp_path / kind, checkpoint=checkpoint, shards=shards)
        settings = ["stages.0.steps=12", "stages.0.data.global_batch_size=4", f"parallel.compress_gradients={kind}"]
        jobs.append({"recipe": str(recipe), "set": settings})
    run_together(jobs, tmp_path, num_ranks=2)
    exact = losses(tmp_path / "none")
    assert losses(tmp_path / "bf16") == pytest.approx(exact, abs=0.01)
    assert losses(tmp_path / "int8") == pytest.approx(exact, abs=0.05)
    assert losses(tmp_path / "int8") != losses(tmp_path / "bf16") != exact, "gradients are rounded"
    norms = [records(tmp_path / kind)[1]["grad_norm"] for kind in ("none", "bf16", "int8")]
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"compress_gradients": "powersgd"}, "requires strategy = 'ddp'; with fsdp, use 'int8'"),
        ({"compress_gradients": "int8", "strategy": "ddp"}, "requires fsdp"),
        ({"compress_gradients": "int8", "reduce_dtype": "bf16"}, "rounds fp32 gradients"),
        ({"compress_gradients": "bf16", "strategy": "hsdp", "shard": 4}, "Remove it, or set replicate = 1"),
    ],
)
def test_forms_that_a_strategy_does_not_have_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        strategy_on_8_ranks(**settings)


def strategy_on_8_ranks(**settings):
    config = ParallelConfig(**settings)
    return config.strategy_of(config.dims(8))


def test_the_error_feedback_is_planned_and_refused_with_its_size_where_it_does_not_fit():
    plain, compressed = (
        MemoryPlanner(config=LARGE, world_size=8, parallel=ParallelConfig(compress_gradients=kind))
        for kind in ("none", "int8")
    )
    residual = compressed.plan(UNIFORM).parts[RESIDUAL]
    parameters = plain.plan(UNIFORM).parts["parameters"] * 8 // 4
    assert residual == pytest.approx(2 * parameters, rel=1e-3)
    needed = compressed.plan(UNIFORM).total_gib
    check_residual(compressed, UNIFORM, needed + 1)
    check_residual(plain, UNIFORM, 1.0)  # what does not fit for other reasons is advised on, not refused
    with pytest.raises(ConfigError, match=f"is {residual / GIB:.1f} GiB on every rank"):
        check_residual(compressed, UNIFORM, needed - 1)

"""`saccade plan` of training: whether a model fits a GPU, and what to change if it does not."""

import pytest
from train.shapes import THIN, UNIFORM

from saccade.errors import ConfigError
from saccade.plan.gpus import gpu_named
from saccade.plan.training import plan_model, plan_training
from saccade.train.dry_run import MicroBatchSize
from saccade.train.memory import MemoryPlanner
from saccade.train.parallel_config import ParallelConfig


def test_a_report_says_whether_it_fits_and_what_to_change():
    fitting = plan_training(MemoryPlanner(config=THIN), UNIFORM, gpu_named("H200"))
    assert "fits in H200 (139.8 GiB)" in "\n".join(fitting.lines())
    full = plan_training(MemoryPlanner(config=THIN), UNIFORM, gpu_named("l40s"))
    text = "\n".join(full.lines())
    assert "does not fit in L40S" in text
    assert "2 with parallel.strategy = 'fsdp'" in text
    assert full.record()["plan"]["total_gib"] == pytest.approx(full.plan.total_gib, abs=1e-3)


@pytest.mark.slow
def test_a_3b_model_that_is_too_large_for_24_gb_is_offered_as_lora_and_qlora():
    made = plan_model("3b", gpu_named("RTX4090"), ParallelConfig(), tokens=2048)
    assert not made.fits
    lora, qlora = (line for line in made.advice if "LoRA" in line)
    assert lora.startswith("to make it fit, LoRA: lora = {} in the stage, 9.0 GiB")
    assert qlora.startswith("to make it fit, QLoRA: lora.quantize_base = 'int4' in the stage, 5.2 GiB")


def test_unknown_gpus_and_invalid_sizes_are_refused():
    assert gpu_named("24").gib == 24.0
    with pytest.raises(ConfigError, match=r"unknown GPU 'K80'.*H200"):
        gpu_named("K80")
    with pytest.raises(ConfigError, match="not a valid size"):
        MicroBatchSize(tokens=0, patches=1)

"""Alternatives are ordered by cost, just fit, and are offered as settings of a recipe."""

from dataclasses import replace

import pytest
from train.shapes import THIN, UNIFORM

from saccade.train.dry_run import MicroBatchSize
from saccade.train.memory import MemoryPlanner
from saccade.train.memory_advice import advice, compare_checkpointing
from saccade.train.stage_config import LoraConfig


def test_suggestions_are_ordered_by_cost_and_their_largest_sequences_just_fit():
    planner, gib = MemoryPlanner(config=THIN), 60.0
    compared = compare_checkpointing(planner, UNIFORM, gib)
    assert [one.extra_compute for one in compared] == sorted(one.extra_compute for one in compared)
    assert compared[0][:2] == ("none", "none")
    assert compared[0].extra_compute == 0.0
    for one in (compared[0], compared[4], compared[-1]):
        share = one.max_tokens / UNIFORM.tokens
        most = MicroBatchSize(tokens=one.max_tokens, patches=int(UNIFORM.patches * share))
        more = MicroBatchSize(
            tokens=one.max_tokens + 256, patches=int(UNIFORM.patches * (share + 256 / UNIFORM.tokens))
        )
        assert planner.plan(most, one[:2]).total_gib <= gib < planner.plan(more, one[:2]).total_gib
        assert one.fits == (one.max_tokens >= UNIFORM.tokens)


@pytest.mark.slow
def test_what_does_not_fit_whole_is_offered_as_lora_and_lora_as_qlora():
    size = MicroBatchSize(tokens=256, patches=64)
    planner = MemoryPlanner(config=THIN)
    whole, lora, qlora = (
        replace(planner, lora=lora).plan(size, ("full", "full")).total_gib
        for lora in (None, LoraConfig(), LoraConfig(quantize_base="int4"))
    )
    assert whole > lora > qlora
    lines = advice(planner, size, qlora / 2)
    assert not [line for line in lines if "LoRA" in line], "half of it is too little for any"
    between = advice(planner, size, lora + 0.1)
    assert (
        f"to make it fit, LoRA: lora = {{}} in the stage, {lora:.1f} GiB with full activation checkpointing" in between
    )
    assert any(line.startswith("to make it fit, QLoRA: lora.quantize_base = 'int4'") for line in between)
    [only] = [line for line in advice(replace(planner, lora=LoraConfig()), size, qlora + 0.1) if "LoRA" in line]
    assert "QLoRA" in only

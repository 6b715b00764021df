"""Exposed communication and bubbles, from the intervals of a trace."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.train.communication import length, measure, report_communication, union, without

TIMES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=12)


def intervals(starts_and_lengths):
    return np.array([(start, start + size) for start, size in starts_and_lengths], float).reshape(-1, 2)


def seconds(starts_and_lengths):
    """The unit intervals that are covered."""
    return {second for start, size in starts_and_lengths for second in range(start, start + size)}


@given(TIMES, TIMES)
@settings(max_examples=200, deadline=None)
def test_lengths_are_those_of_sets_of_seconds(some, others):
    assert length(union(intervals(some))) == len(seconds(some))
    assert length(without(intervals(some), intervals(others))) == len(seconds(some) - seconds(others))


def test_a_collective_is_exposed_while_nothing_computes():
    compute = intervals([(0, 10), (5, 10), (40, 10)])
    report = measure(compute, {"AllGather": intervals([(12, 6), (41, 2)]), "ReduceScatter": intervals([(17, 3)])})
    assert report.elapsed == 50
    assert report.compute == 25
    assert report.exposed == 5, "from 15 to 20"
    assert (report.longest_bubble, report.bubble_start) == (20, 20)
    gathers, scatters = report.kinds["AllGather"], report.kinds["ReduceScatter"]
    assert (gathers.count, gathers.total, gathers.exposed) == (2, 8, 3)
    assert (scatters.count, scatters.total, scatters.exposed) == (1, 3, 3)
    assert "exposed communication 10.0%" in report.lines()[0]


def test_nothing_was_recorded():
    report = report_communication([{"ph": "M", "name": "process_name"}])
    assert (report.elapsed, report.kinds) == (0.0, {})
    assert len(report.lines()) == 1


def test_kernels_of_a_gpu_trace_are_sorted_by_name():
    def kernel(name, start, duration):
        return {"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "pid": 0, "tid": 7}

    report = report_communication(
        [
            kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 0, 10),
            kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 20, 5),
            kernel("void cutlass::Kernel2<cutlass_80_tensorop_bf16>", 5, 10),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 100, "pid": 1, "tid": 1},
        ]
    )
    assert {kind: one.exposed for kind, one in report.kinds.items()} == {"AllGather": 5, "ReduceScatter": 5}
    assert (report.compute, report.longest_bubble) == (10, 5)


def test_the_report_of_a_run_is_written_next_to_its_traces(tmp_path):
    from train.running import make_checkpoint, read_recipe, write_recipe, write_shards

    from saccade.train.stages import train

    checkpoint, shards = make_checkpoint(tmp_path / "checkpoint"), write_shards(tmp_path / "shards", 12)
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
    train(read_recipe(recipe, "stages.0.steps=5", "log.profile=true"), device="cpu")
    assert (tmp_path / "run/trace/steps-3-5-rank0.json").exists()
    report = json.loads((tmp_path / "run/trace/communication-rank0.json").read_text())
    assert report["compute"] > 0
    assert report["kinds"] == {}, "one rank communicates with no other"


@pytest.mark.slow
def test_two_ranks_report_the_collectives_of_their_layout(tmp_path):
    """Each rank reports its own: gathers of parameters and reductions of gradients by gloo, and what they exposed."""
    from train.running import make_checkpoint, run_together, write_recipe, write_shards

    checkpoint, shards = make_checkpoint(tmp_path / "checkpoint"), write_shards(tmp_path / "shards", 24)
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=shards)
    settings = ["stages.0.steps=5", "log.profile=true", "parallel.shard=2"]
    run_together([{"recipe": str(recipe), "set": settings}], tmp_path, num_ranks=2)
    for rank in range(2):
        report = json.loads((tmp_path / f"run/trace/communication-rank{rank}.json").read_text())
        kinds = report["kinds"]
        assert len(kinds) >= 2, "parameters are gathered, gradients reduced"
        assert all(one["count"] >= 3 for one in kinds.values()), "three steps are profiled"
        assert all(0 <= one["exposed"] <= one["total"] for one in kinds.values())
        assert 0 < report["exposed"] < report["elapsed"]
        assert max(one["exposed"] for one in kinds.values()) <= report["exposed"] + 1e-6
        assert report["compute"] + report["exposed"] <= report["elapsed"] + 1e-6

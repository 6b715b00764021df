"""Plans of layouts on a cluster: what is possible, what it costs, and what the report says."""

import json
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from saccade.cli.commands import app
from saccade.errors import ConfigError
from saccade.model.families import named_size
from saccade.parallel_dims import ParallelDims
from saccade.plan.cluster import Cluster, Job, candidates
from saccade.plan.gpus import gpu_named
from saccade.plan.layout_report import LayoutReport
from saccade.plan.layouts import COMPUTE, UPDATE, LayoutPlanner
from saccade.plan.prices import LINK_SHARE, START_S, LinkPrices, Network, Segments, network_named
from saccade.plan.ragged import draw_sequences, slowest_rank
from saccade.plan.stages import stage_operations
from saccade.plan.timeline import simulate
from saccade.train.parallel_config import ParallelConfig
from saccade.train.pipeline_stages import PipelineStages
from saccade.train.recorded_step import Collective, Kernel, StepSettings, Wait, record_step

TINY = named_size("tiny")
H200 = gpu_named("H200")
SLOW = Network(name="slow", adapter=1e9, latency_s=0.0, gpus_per_node=8)


def gather(phase, *, axes=("shard", "context"), num_bytes=0, overlaps=True, kind="all-gather"):
    return Collective(phase, kind, axes, num_bytes, overlaps)


def ran(operations, seconds=None):
    """The timeline if kernels take the seconds that their bytes say, and collectives likewise."""
    return simulate(operations, lambda one: float(one.num_bytes), lambda one: float(one.num_bytes))


# ------------------------------------------------------------------ timeline


def test_a_gather_is_exposed_as_far_as_computation_waits_for_it():
    """The second gather (5) runs while the first block computes (3): two are left when its result is copied."""
    found = ran(
        [
            gather("start", num_bytes=1), Wait("start"), gather("start", num_bytes=5),
            Kernel("block 0", "mm", 3), Wait("block 0"), Kernel("block 1", "mm", 4),
        ]
    )  # fmt: skip
    assert (found.end, found.compute) == (1 + 5 + 4, 7)
    assert found.exposed == {"shards all-gather": 3}
    assert [one.name for one in found.intervals if one.lane == "compute"] == ["block 0", "block 1"]


def test_computation_waits_for_the_last_reduce_scatter_but_one():
    scatter = gather("backward", num_bytes=4, kind="reduce-scatter")
    found = ran([scatter, Kernel("a", "mm", 1), scatter, Kernel("b", "mm", 10)])
    assert found.exposed == {"shards reduce-scatter": 3}
    assert found.end == 4 + 10


def test_collectives_of_tensor_ranks_stop_computation():
    found = ran([Kernel("a", "mm", 2), gather("a", axes=("tensor",), num_bytes=3, overlaps=False)])
    assert (found.end, found.exposed) == (5, {"tensor all-gather": 3})


def test_copies_are_averaged_after_their_reduce_scatter():
    average = gather("b", axes=("replicate",), num_bytes=2, kind="all-reduce")
    found = ran([gather("b", num_bytes=5, kind="reduce-scatter"), average, Kernel("b", "mm", 1)])
    assert [(one.lane, one.start, one.end) for one in found.intervals if one.lane != "compute"] == [
        ("shards", 0, 5), ("copies", 5, 7)
    ]  # fmt: skip


# ------------------------------------------------------------------ links and data


def test_bytes_between_nodes_go_through_the_adapters_of_a_node():
    one = gather("a", num_bytes=8_000_000_000)
    inside = LinkPrices(H200, SLOW, ParallelDims(shard=8)).seconds(one)
    assert inside == pytest.approx(8e9 * 7 / 8 / (H200.link * LINK_SHARE) + START_S, rel=0.01)
    between = LinkPrices(H200, SLOW, ParallelDims(shard=16)).seconds(one)
    assert between == pytest.approx(8e9 / 2 / (8 * 1e9 * LINK_SHARE), rel=0.01), "half of it, by eight adapters"
    alone = LinkPrices(H200, SLOW, ParallelDims(shard=2, tensor=8)).seconds(one)
    assert alone == pytest.approx(8e9 / 2 / (1e9 * LINK_SHARE), rel=0.01), "by the adapter of the one rank of a node"


def test_networks_have_names_or_gigabits():
    assert network_named("ib-ndr").adapter == 50e9
    assert network_named("200", 4) == Network(name="200 Gbit/s per GPU", adapter=25e9, latency_s=1e-5, gpus_per_node=4)
    with pytest.raises(ConfigError, match=r"unknown network 'token-ring'.*ib-ndr"):
        network_named("token-ring")


def test_sequences_have_the_patches_that_were_asked_for():
    for patches in (0, 8000, 30000):
        found = draw_sequences(TINY, seq_len=16384, patches=patches)
        assert all(one.shape.num_tokens <= 16384 for one in found)
        assert np.mean([one.num_patches for one in found]) == pytest.approx(patches, rel=0.2)
    with pytest.raises(ConfigError, match="Give fewer than"):
        draw_sequences(TINY, seq_len=4096, patches=20000)


def test_more_ranks_wait_longer_for_the_slowest():
    sequences = draw_sequences(TINY, seq_len=4096)
    times = [
        slowest_rank(sequences, lambda one: one.pairs, num_ranks=ranks, num_micro_batches=4) for ranks in (1, 8, 64)
    ]
    assert times == sorted(times)
    assert times[2] > times[0]


def test_attention_of_longer_segments_is_faster():
    short, long = (Segments([length] * 16, True) for length in (1024, 8192))
    assert long.pairs == 64 * short.pairs
    assert long.rates.forward > short.rates.forward
    assert Segments([], False).pairs == 0


def test_operations_are_cut_into_the_stages_of_a_run():
    phases = ["forward of vision.blocks.0", *(f"forward of language.layers.{n}" for n in range(8)), "the loss"]
    costs = [3, *[1] * 8, 1]
    operations = [Kernel(phase, "mm", cost) for phase, cost in zip(phases, costs, strict=True)]
    stages = stage_operations(operations, PipelineStages((0, 0, 3, 6, 8), 4, is_head_tied=False))
    assert [sum(one.num_bytes for one in stage) for stage in stages] == [3, 3, 3, 3]
    assert [one for stage in stages for one in stage] == operations


# ------------------------------------------------------------------ plans


@pytest.fixture(scope="module")
def report():
    job = Job(config=replace(TINY, language=replace(TINY.language, num_layers=8)), seq_len=8192, global_batch_size=32)
    cluster = Cluster(gpu=H200, num_gpus=16, network=network_named("ib-ndr"))
    return LayoutReport(LayoutPlanner(job, cluster))


@pytest.mark.slow
def test_the_fastest_layout_comes_first_and_others_say_why_they_lose(report):
    possible = [plan for plan in report.plans if plan.is_possible]
    assert report.best is possible[0]
    assert [plan.step_s for plan in possible] == sorted(plan.step_s for plan in possible)
    assert all(plan.reason.endswith(" ms") for plan in possible[1:])
    assert all(plan.dims.size == 16 for plan in report.plans)
    for plan in possible:
        assert plan.parts[COMPUTE] > 0
        assert plan.parts[UPDATE] > 0
        assert plan.step_s >= plan.exposed_s
        assert 0 < plan.mfu < 1
    text = "\n".join(report.lines())
    assert "GB/s per GPU between nodes" in text
    assert "shards all-gather" in text


@pytest.mark.slow
@pytest.mark.parametrize("dims", [ParallelDims(replicate=2, shard=8), ParallelDims(shard=8, tensor=2)], ids=str)
def test_collectives_of_a_layout_are_those_of_a_step_on_exactly_its_ranks(dims, report):
    """They are taken from a step on two copies of two shards. Shards pad some parameters: bytes differ by a percent."""
    plan = next(one for one in report.plans if one.dims == dims)
    settings = StepSettings(config=report.planner.job.config, parallel=ParallelConfig())
    shape = report.planner.typical.shape
    exact = [
        one
        for one in record_step(settings, dims, shape, is_whole=True)
        if isinstance(one, Collective) and one.phase != "the update"
    ]
    assert [(one.phase, one.kind) for one in plan.collectives] == [(one.phase, one.kind) for one in exact]
    ours, theirs = (sum(one.num_bytes for one in found) for found in (plan.collectives, exact))
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.slow
def test_a_page_has_the_timeline(report, tmp_path):
    report.write(tmp_path / "layouts.html")
    page = (tmp_path / "layouts.html").read_text()
    assert page.count("<svg") == 1
    assert "backward of language.layers.3: " in page
    assert "all-gather in forward of" in page


def test_every_candidate_has_all_gpus_and_no_more_tensor_ranks_than_a_node():
    cluster = Cluster(gpu=H200, num_gpus=1024, network=network_named("ib-ndr"))
    found = list(candidates(Job(config=named_size("72b"), seq_len=131072, global_batch_size=256), cluster))
    assert len(found) == len(set(found))
    assert all(dims.size == 1024 and dims.tensor <= 8 for dims in found)
    assert {dims.context for dims in found} == {1, 2, 4, 8, 16}


def test_a_model_that_fits_nowhere_has_no_best_layout():
    job = Job(config=named_size("3b"), seq_len=8192, global_batch_size=1)
    planner = LayoutPlanner(job, Cluster(gpu=gpu_named("L4"), num_gpus=1, network=network_named("ib-ndr")))
    report = LayoutReport(planner)
    assert report.best is None
    assert "does not fit" in "\n".join(report.lines())


def test_the_command_prints_json_and_writes_a_page(tmp_path):
    page = tmp_path / "page.html"
    arguments = [
        "plan",
        "tiny",
        "--gpus",
        "2",
        "--seq-len",
        "2048",
        "--network",
        "25",
        "--explain",
        str(page),
        "--json",
    ]
    ended = CliRunner().invoke(app, arguments)
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert found["layouts"][0]["layout"]
    assert "3.125 GB/s per GPU between nodes" in found["assumptions"]
    assert page.exists()

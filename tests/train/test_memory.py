"""The dry run counts what autograd really keeps, for every family, and plans meet what was measured on a GPU."""

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import get_args
from unittest import mock

import pytest
import torch
from PIL import Image
from torch.multiprocessing.spawn import spawn
from train import pipeline_memory_ranks
from train.running import RECIPE, read_recipe, write_recipe
from train.shapes import LARGE, THIN, UNIFORM

from saccade.kernels import launch
from saccade.model.families import VISION_LANGUAGE, load_model_config
from saccade.model.initialize import initialize_random, named_size
from saccade.model.live_bytes import moments
from saccade.model.vlm import VLM
from saccade.processor import Processor
from saccade.processor.inputs import ModelInputs
from saccade.train.context_batches import ContextGroup, SequenceShare
from saccade.train.dry_run import DryBatch, MicroBatchSize, combined, dry_batch, dry_run, image_grids, saved
from saccade.train.lora import add_lora, lora_parameters
from saccade.train.loss import count_labels, next_token_labels
from saccade.train.memory import MemoryPlanner
from saccade.train.memory_check import available_host_bytes, device_gib, stage_planner
from saccade.train.objectives.build import build_objective
from saccade.train.objectives.config import DistillationConfig, ObjectiveConfig, PreferenceConfig
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.optimizer import freeze
from saccade.train.parallel_config import ParallelConfig, Recompute
from saccade.train.parallelize import recompute
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.pipeline_stages import pipeline_stages
from saccade.train.stage_config import LoraConfig

TINY = named_size("tiny")
SMALL = replace(
    TINY,
    vision=replace(TINY.vision, num_layers=3, intermediate_size=172, full_attention_layers=(1,)),
    language=replace(TINY.language, num_layers=3),
)
"""Windows and whole images, and an intermediate size that is rounded up in memory."""
TINY_OF_EACH_FAMILY = [family.sizes["tiny"] for family in VISION_LANGUAGE.values()]
RAGGED = MicroBatchSize(tokens=14372, patches=49088)


def plan(config, size, **settings):
    return MemoryPlanner(config=config, **settings).plan(size)


@pytest.fixture
def kernels_that_compute_nothing(monkeypatch):
    """Triton's interpreter launches kernels and returns: memory does not depend on the results, which take minutes."""
    monkeypatch.setattr("triton.runtime.interpreter.GridExecutor.__call__", lambda *_, **__: None)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    return row_of(SMALL, tmp_path_factory.mktemp("plan"))


def row_of(config, folder):
    """Two conversations with pictures larger than a window."""
    initialize_random(folder / "checkpoint", config, dtype=torch.float32)
    processor = Processor.load(folder / "checkpoint")

    def conversation(size, answer):
        parts = [{"type": "image", "image": Image.new("RGB", size, "red")}, {"type": "text", "text": "What?"}]
        return [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]

    return processor([conversation((168, 112), "a red one"), conversation((112, 140), "red")])


def prepared(config, dtype, device, extents, optimizer, lora):
    """A model ready for training, as `parallelize` makes it."""
    with torch.device(device):
        model = VLM(config).to(dtype)
    if lora is None:
        freeze(model.named_parameters(), optimizer)
    else:
        add_lora(model, lora, dtype)
        model.requires_grad_(False)
        freeze(lora_parameters(model).items(), optimizer)
    recompute(model.vision.blocks, extents[0])
    recompute(model.language.layers, extents[1])
    return model


def kept_bytes(row, model):
    """Bytes of all tensors that autograd saves in the forward pass, without parameters and inputs."""
    given = [*model.parameters(), *(value for value in vars(row).values() if isinstance(value, torch.Tensor))]
    ignored = {tensor.untyped_storage().data_ptr() for tensor in given}
    found = {}

    def note(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in ignored:
            found[storage.data_ptr()] = (storage.nbytes(), x)  # held, so that no other tensor takes its place
        return x

    with launch.forced("triton"), torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        hidden = model.hidden_states(row, encode_dummy_image=True)
    assert hidden.requires_grad
    return sum(num_bytes for num_bytes, _ in found.values())


def held_bytes(row, model):
    """Bytes that a dry run of the same step holds when the forward pass ends."""
    labels = next_token_labels(row)
    batch = DryBatch(row.to("meta"), labels.to("meta"), torch.empty((), device="meta"), count_labels(labels))
    return sum(saved(dry_run(model, batch)).values())


def assert_holds_what_is_kept(row, config, dtype, extents, optimizer, lora=None):
    kept = kept_bytes(row, prepared(config, dtype, "cpu", extents, optimizer, lora))
    held = held_bytes(row, prepared(config, dtype, "meta", extents, optimizer, lora))
    # The running functions also hold embeddings, image features, output and RoPE tables.
    local = 7 * row.num_tokens * config.language.hidden_size * dtype.itemsize
    assert kept <= held <= kept + local


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("vision", "language", "lrs", "lora"),
    [
        ("none", "none", {}, None),
        ("selective", "selective", {}, None),
        ("full", "full", {}, None),
        ("none", "full", {}, None),
        ("none", "none", {"language": 0, "embedding": 0}, None),
        ("none", "none", {"vision": 0}, None),
        ("none", "selective", {"vision": 0, "projector": 0}, None),
        ("none", "none", {r"vision\.": 0, r"layers\.0\.": 0, "embedding": 0, "projector": 0}, None),
        ("none", "none", {}, LoraConfig(rank=4)),
        (
            "none", "none", {},
            LoraConfig(rank=4, targets=("q_proj", "qkv", "mlp.0"), parts=("language", "vision", "projector")),
        ),
    ],
    ids=[
        "none", "selective", "full", "mixed", "frozen decoder", "frozen tower", "decoder only", "half a decoder",
        "lora", "lora everywhere",
    ],
)  # fmt: skip
@pytest.mark.usefixtures("kernels_that_compute_nothing")
def test_a_dry_run_holds_the_bytes_autograd_saves(row, dtype, vision, language, lrs, lora):
    compute = torch.float16 if dtype == "bf16" else torch.float32  # as large; Triton's interpreter has no bf16
    assert_holds_what_is_kept(row, SMALL, compute, (vision, language), OptimizerConfig(lrs=lrs), lora)


@pytest.mark.parametrize("config", TINY_OF_EACH_FAMILY, ids=lambda config: config.family)
@pytest.mark.usefixtures("kernels_that_compute_nothing")
def test_a_dry_run_of_every_family_holds_the_bytes_autograd_saves(config, tmp_path):
    row = row_of(config, tmp_path)
    for vision, language, lrs in (("none", "none", {}), ("selective", "full", {}), ("none", "none", {"vision": 0})):
        assert_holds_what_is_kept(row, config, torch.float32, (vision, language), OptimizerConfig(lrs=lrs))


@pytest.mark.parametrize("config", TINY_OF_EACH_FAMILY, ids=lambda config: config.family)
def test_every_family_is_planned_with_and_without_images(config):
    planner = MemoryPlanner(config=config, dtype="fp32")
    empty, pictures = (planner.plan(MicroBatchSize(tokens=512, patches=patches)) for patches in (0, 1024))
    assert "activations of the decoder" in empty.parts
    assert pictures.parts["activations of the vision tower"] > empty.parts.get("activations of the vision tower", 0)
    [smaller] = [planner.plan(MicroBatchSize(tokens=512, patches=1024), ("full", "full"))]
    assert smaller.total_gib < pictures.total_gib


def test_towers_and_decoders_of_two_dry_runs_combine_to_the_run_of_both_settings():
    optimizer, size = OptimizerConfig(), MicroBatchSize(tokens=2048, patches=4096)

    def step(*extents):
        model = prepared(THIN, torch.bfloat16, "meta", extents, optimizer, None)
        return dry_run(model, dry_batch(model, size))

    def peaks(phases):
        return [sum(held.values()) for _, held in moments(phases)]

    mixed = combined(step("selective", "selective"), step("full", "full"))
    assert peaks(mixed) == pytest.approx(peaks(step("selective", "full")), rel=0.005, abs=2**20)


def test_images_of_a_dry_run_have_as_many_patches_as_planned():
    model = prepared(TINY, torch.float32, "meta", ("none", "none"), OptimizerConfig(), None)
    for num_patches in (0, 8, 64, 1000, 1024, 36864, 49088):
        grids = image_grids(model, num_patches)
        assert model.vision.num_patches(grids) == num_patches - num_patches % 8, num_patches


MEASURED_GIB = {
    UNIFORM: {("none", "none"): 133.0, ("selective", "none"): 118.0, ("selective", "selective"): 94.2},
    RAGGED: {("selective", "selective"): 101.7, ("selective", "none"): 122.6, ("none", "selective"): 121.8},
}
"""Peak memory of training steps of the 3B shape on an H200 (`bench/train_step.py`, docs/results/training.md)."""


@pytest.mark.parametrize(("size", "measured"), MEASURED_GIB.items(), ids=["uniform", "ragged"])
def test_plans_of_the_3b_shape_are_within_1_percent_of_peaks_measured_on_an_h200(size, measured):
    planner = MemoryPlanner(config=named_size("3b"))
    for extents, gib in measured.items():
        assert planner.plan(size, extents).allocated_gib == pytest.approx(gib, rel=0.01), extents
    if size == RAGGED:
        assert planner.plan(size).total_gib > 139.8, "it ran out of memory"


def test_nothing_is_allocated_for_a_plan():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert MemoryPlanner(config=named_size("7b")).plan(UNIFORM).total_gib > 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20  # KiB: a GiB


def test_a_plan_needs_neither_triton_nor_a_gpu():
    """On a laptop the launchers of kernels that are not there still say what they would allocate."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from saccade.train.memory import MemoryPlanner, MicroBatchSize\n"
        "from saccade.model.families import named_size\n"
        "planner = MemoryPlanner(config=named_size('tiny'))\n"
        "print(planner.plan(MicroBatchSize(tokens=512, patches=1024)).total_gib)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    planned = plan(TINY, MicroBatchSize(tokens=512, patches=1024)).total_gib
    assert float(ended.stdout) == pytest.approx(planned, rel=1e-6)


def test_optimizer_state_is_sharded_and_gradients_follow_the_micro_batches():
    config, row = THIN, UNIFORM
    one, eight = plan(config, row), plan(config, row, world_size=8)
    state = sum(one.parts[name] for name in ("parameters", "masters", "moments"))
    cut = sum(eight.parts[name] for name in ("parameters", "moments"))
    # fp32 parameters are their own masters: 12 bytes a parameter for 14, an eighth on each rank.
    assert cut * 8 == pytest.approx(state * 12 / 14, rel=1e-3)
    assert "masters" not in eight.parts
    assert plan(config, row, world_size=8, parallel=ParallelConfig(strategy="ddp")).parts["gradients"] == pytest.approx(
        one.parts["parameters"], rel=0.07
    )


def test_gradient_accumulation_is_planned_with_fp32_gradients():
    config, row = THIN, UNIFORM
    one, several = plan(config, row), plan(config, row, micro_batches_per_rank=2)
    assert one.parts["gradients"] < 0.1 * several.parts["gradients"]
    assert several.parts["gradients"] == one.parts["masters"]
    ddp = ParallelConfig(strategy="ddp")
    buckets = plan(config, row, world_size=8, parallel=ddp).parts["gradients"]
    assert plan(config, row, world_size=8, micro_batches_per_rank=2, parallel=ddp).parts["gradients"] == 3 * buckets
    assert buckets * 2 == one.parts["masters"]


def test_settings_that_save_memory_save_it_in_the_plan():
    def total(**settings):
        parallel = settings.pop("parallel", {})
        return plan(THIN, UNIFORM, parallel=ParallelConfig(**parallel), **settings).total_gib

    one = total()
    assert total(parallel={"recompute_vision": "full"}) < total(parallel={"recompute_vision": "selective"}) < one
    assert total(optimizer=OptimizerConfig(offload=True)) < total(optimizer=OptimizerConfig(kind="adamw8bit")) < one
    assert total(optimizer=OptimizerConfig(lrs={"vision": 0, "projector": 0})) < one
    quantized, plain, with_dropout = (
        total(lora=lora) for lora in (LoraConfig(quantize_base="int4"), LoraConfig(), LoraConfig(dropout=0.1))
    )
    assert quantized < plain < with_dropout < one
    two = {"world_size": 2}
    offloaded = total(**two, parallel={"strategy": "fsdp", "offload": True})
    whole = total(**two, parallel={"reshard_after_forward": False})
    reduced_at_once = {"reshard_after_forward": False, "reduce_each_micro_batch": False}
    assert offloaded < total(**two) < whole < total(**two, micro_batches_per_rank=2, parallel=reduced_at_once)


@pytest.mark.parametrize("kind", ["distillation", "dpo", "dpo of adapters"])
def test_frozen_models_of_an_objective_and_their_passes_are_planned(kind, tmp_path):
    folder = tmp_path / "checkpoint"
    initialize_random(folder, TINY, dtype=torch.bfloat16)
    lora = LoraConfig(rank=4) if kind == "dpo of adapters" else None
    section = {"dpo": PreferenceConfig()}
    if kind == "distillation":
        section = {"distillation": DistillationConfig(teacher=folder)}
    config = ObjectiveConfig(**section)
    objective = partial(build_objective, config, folder=folder, has_lora=lora is not None, device="meta")
    size = MicroBatchSize(tokens=2048, patches=1024)
    plain, planned = (plan(TINY, size, lora=lora, make_objective=make) for make in (CrossEntropy, objective))
    if lora is None:
        assert planned.parts["frozen models"] == plain.parts["parameters"]
    else:
        assert "frozen models" not in planned.parts, "the reference is the model without its adapters"
    assert planned.parts["loss"] > plain.parts["loss"]


def test_the_model_that_a_preference_stage_starts_from_is_planned(tmp_path):
    """Adapters that an earlier stage has trained belong to the reference: it cannot be the model without them."""
    folder = tmp_path / "checkpoint"
    initialize_random(folder, TINY, dtype=torch.float32)
    path = write_recipe(tmp_path / "recipe.toml", run=tmp_path, checkpoint=folder, shards=tmp_path, text=RECIPE)
    path.write_text(
        path.read_text() + path.read_text()[path.read_text().index("[[stages]]") :].replace("learn", "prefer")
    )
    found = {}
    for lora in ("none", "int4"):
        settings = [f"stages.{stage}.lora={{rank=4, quantize_base='{lora}'}}" for stage in ("learn", "prefer")]
        config = read_recipe(path, *settings, "stages.prefer.objective.dpo={}", "model.dtype=bf16")
        planner, size = stage_planner(config, config.stages[1], TINY, world_size=1)
        parts = planner.plan(size).parts
        found[lora] = parts["frozen models"]
        assert parts["frozen models"] == pytest.approx(parts["parameters"], rel=0.02)
    assert found["int4"] < found["none"]


def test_activation_checkpointing_costs_the_matrix_products_that_run_again():
    planner = MemoryPlanner(config=THIN)
    flops = {
        extents: sum(phase.flops for phase in planner.step(UNIFORM, ("none", extents)))
        for extents in get_args(Recompute)
    }
    blocks = (
        3 * 2 * 36864 * (4 * 1280**2 + 3 * 1280 * 3424),
        3 * 8 * 16384 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944),
    )
    step = sum(blocks) + 3 * 16384 * 3584 * 152064
    mlp = 8 * 16384 * 2 * 3584 * 18944  # gate and up
    assert flops["none"] == pytest.approx(2 * step, rel=0.02)
    assert flops["selective"] - flops["none"] == pytest.approx(2 * mlp)
    # Never the down projection: backward needs its input only.
    assert flops["full"] - flops["none"] == pytest.approx(2 * (blocks[1] / 3 - mlp / 2), rel=0.01)


def test_a_stage_of_a_recipe_is_planned_with_its_own_settings(tmp_path):
    folder = tmp_path / "checkpoint"
    initialize_random(folder, TINY, dtype=torch.float32)
    path = write_recipe(tmp_path / "recipe.toml", run=tmp_path, checkpoint=folder, shards=tmp_path, text=RECIPE)
    config = read_recipe(path, "parallel.recompute_vision=full")
    planner, row = stage_planner(config, config.stages[0], load_model_config(folder), world_size=1)
    assert (row.tokens, row.patches, planner.micro_batches_per_rank, planner.dtype) == (240, 512, 2, "fp32")
    assert "recompute_vision full" in planner.plan(row).lines()[0]


def test_memory_of_the_host_is_what_is_available_within_the_limit_of_the_container(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write(
        "proc/meminfo", "MemTotal:  24000000 kB\nMemFree: 1000000 kB\nMemAvailable:  19000000 kB\nHugePages_Total: 0\n"
    )
    assert available_host_bytes(tmp_path) == 19000000 * 1024
    write("sys/fs/cgroup/memory.current", "3000\n")
    write("sys/fs/cgroup/memory.stat", "anon 500\ninactive_file 2000\n")
    write("sys/fs/cgroup/memory.max", "max\n")
    assert available_host_bytes(tmp_path) == 19000000 * 1024
    write("sys/fs/cgroup/memory.max", "8000\n")
    assert available_host_bytes(tmp_path) == 8000 - (3000 - 2000), "cached files are freed when memory is needed"


def test_a_cpu_has_less_memory_than_the_machine():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    assert 0 < device_gib(torch.device("cpu")) < total


# ------------------------------------------------------------------ context parallel


@pytest.fixture
def fake_ranks():
    """Open a process group of so many ranks, of which this process is the first and the others do not exist."""
    store_module = pytest.importorskip("torch.testing._internal.distributed.fake_pg")

    def open_group(num_ranks):
        torch.distributed.init_process_group("fake", store=store_module.FakeStore(), rank=0, world_size=num_ranks)
        return torch.distributed.group.WORLD

    yield open_group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("kernels_that_compute_nothing")
def test_activations_of_a_context_rank_are_its_share_and_the_gathered_keys(fake_ranks):
    """A rank saves 1 / n of the other bytes of one rank, and keys and values of all 4,096 tokens; blocks have 128."""
    lengths = [1, 1500, 700, 3, 1892]
    inputs = ModelInputs.empty(patch_dim=12, pixel_mean=(0.5,), pixel_std=(0.5,), num_tokens=sum(lengths))
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    inputs = replace(inputs, cu_seqlens=starts, max_seqlen=max(lengths))
    model, language = prepared(SMALL, torch.float16, "cpu", ("none", "none"), OptimizerConfig(), None), SMALL.language
    gathered = 2 * language.num_kv_heads * language.head_dim * 2 * inputs.num_tokens * language.num_layers
    with mock.patch.object(VLM, "_dummy_image_features", lambda _, x: x.new_zeros(2, language.hidden_size)):
        whole = kept_bytes(inputs, model)
        for num_ranks in (2, 4, 8):
            context = ContextGroup(0, num_ranks, fake_ranks(num_ranks), block_size=128)
            share = SequenceShare(inputs, context, image_ranks=[], image_tokens=[]).inputs()
            kept = kept_bytes(share, model) - gathered
            torch.distributed.destroy_process_group()
            assert kept == pytest.approx((whole - gathered) / num_ranks, rel=0.02)


def test_a_plan_counts_the_share_of_a_context_rank_and_the_gathered_keys():
    one, eight = (plan(LARGE, UNIFORM, world_size=8, parallel=ParallelConfig(context=context)) for context in (1, 8))
    language = LARGE.language
    gathered = 4 * language.num_kv_heads * language.head_dim * UNIFORM.tokens * (language.num_layers + 2)
    assert eight.modules["activations of the decoder: gathered keys and values"] == gathered
    decoder = "activations of the decoder"
    assert eight.parts[decoder] - gathered == pytest.approx(one.parts[decoder] / 8, rel=0.02)
    assert eight.parts["parameters"] == one.parts["parameters"]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_tensor_ranks_hold_a_part_of_the_decoder_and_of_its_activations(recompute):
    """The tower is whole on every rank."""
    one, two, four = (
        plan(THIN, UNIFORM, world_size=size, parallel=ParallelConfig(tensor=size, recompute_language=recompute))
        for size in (1, 2, 4)
    )
    decoder, vision = "activations of the decoder", "activations of the vision tower"
    for size, planned in ((2, two), (4, four)):
        assert planned.parts[vision] == pytest.approx(one.parts[vision], rel=1e-6)
        assert planned.parts[decoder] < 1.1 / size * one.parts[decoder]
        assert planned.parts["moments"] < 1.1 / size * one.parts["moments"]


# ------------------------------------------------------------------ pipeline parallel


@pytest.mark.slow
def test_pipeline_ranks_hold_the_activations_that_are_planned(tmp_path):
    """Real ranks and messages; what autograd holds at once is counted, in 1F1B and interleaved."""
    torch.save(row_of(pipeline_memory_ranks.deep("tiny"), tmp_path), tmp_path / "inputs.pt")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, num_ranks = store.port, pipeline_memory_ranks.NUM_RANKS
    del store
    spawn(pipeline_memory_ranks.run, (port, str(tmp_path)), nprocs=num_ranks)
    for rank in range(num_ranks):
        for layout, found in json.loads((tmp_path / f"found-{rank}.json").read_text()).items():
            # The running functions also hold embeddings, image features, output and RoPE tables.
            assert found["held"] <= found["planned"] <= 1.08 * found["held"], (rank, layout)


def test_a_plan_of_a_pipeline_is_that_of_the_rank_that_needs_most():
    """Weights are those of its stages, activations those of the micro-batches in flight."""
    config = replace(THIN, language=replace(THIN.language, num_layers=16))

    def planner(micro_batches, **parallel):
        parallel = ParallelConfig(pipeline=4, pipeline_layers=(4, 4, 4, 4), **parallel)
        return MemoryPlanner(config=config, world_size=4, parallel=parallel, micro_batches_per_rank=micro_batches)

    size = MicroBatchSize(tokens=8192, patches=0)
    with torch.device("meta"):
        stages = pipeline_stages(VLM(config), size, planner(8).parallel, 4)
    decoder = "activations of the decoder"
    ranks = [replace(planner(8), stages=stages, pipeline_rank=rank).plan(size) for rank in range(4)]
    assert planner(8).plan(size).total_gib == max(plan.total_gib for plan in ranks)
    in_flight = [plan.parts[decoder] / ranks[3].parts[decoder] for plan in ranks]
    assert in_flight[1:3] == pytest.approx([3, 2], rel=0.1)
    one = plan(config, size)
    embedding = config.language.vocab_size * config.language.hidden_size * 2
    layers = sum(plan.parts["parameters"] for plan in ranks) - one.parts["parameters"]
    assert layers == (embedding if config.tied_head else 0), "every parameter is on one rank, and a tied one on two"
    few = replace(planner(2), stages=stages, pipeline_rank=0).plan(size).parts[decoder]
    assert few == pytest.approx(2 / 4 * ranks[0].parts[decoder], rel=0.1), "no more micro-batches than there are"


@pytest.mark.parametrize("config", TINY_OF_EACH_FAMILY, ids=lambda config: config.family)
def test_one_layer_of_each_kind_stands_for_the_others_in_a_plan(config):
    vision, language = config.vision, replace(config.language, num_layers=9)
    if vision.tile_size is None:
        vision = replace(vision, num_layers=8, full_attention_layers=(3, 7) if vision.has_windows else ())
    config, size = replace(config, vision=vision, language=language), MicroBatchSize(tokens=1024, patches=2048)
    for extents in (("none", "none"), ("full", "selective")):
        found = [
            MemoryPlanner(config=config, repeats_layers=is_thin, world_size=2).plan(size, extents).parts
            for is_thin in (False, True)
        ]
        assert found[0] == found[1]

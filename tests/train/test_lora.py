"""LoRA and QLoRA: the same on any strategy, resumed = uninterrupted, merged = unmerged, only adapters are trained."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from train.running import losses, read_recipe, run_together, write_recipe, write_shards

from saccade.config import load_config
from saccade.errors import CheckpointError, ConfigError
from saccade.model import load_model
from saccade.model.families import DEFAULT_FAMILY
from saccade.model.initialize import initialize_random, named_size
from saccade.model.linear import Linear
from saccade.model.lora_linear import GROUP_SIZE, LoraLinear, compute_weight, stored_weight
from saccade.processor import Processor
from saccade.train.config import TrainConfig
from saccade.train.flops import Flops, training_flops
from saccade.train.lora import lora_layers, lora_parameters, target_layers
from saccade.train.loss import count_labels, next_token_labels
from saccade.train.optimizer import build_optimizer
from saccade.train.parallelize import parallelize, trainable_table
from saccade.train.saved_state import newest_state, stored_names
from saccade.train.stage_config import LoraConfig
from saccade.train.stages import train
from saccade.train.train_state import TrainState
from saccade.train.weights import export_checkpoint
from saccade.world import World

WORLD = World(0, 1, 0, torch.device("cpu"))
TARGETS = '["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj", "qkv", "attn.proj", "mlp.0"]'
SETTINGS = [
    "stages.0.steps=4",
    "stages.0.optimizer.lr=2e-3",
    "stages.0.schedule.warmup_steps=0",
    "stages.0.data.packing_buffer_size=64",
    f'stages.0.lora={{rank=4, alpha=8, parts=["language", "vision", "projector"], targets={TARGETS}}}',
]
RECOMPUTE = ["parallel.recompute_language=full", "parallel.recompute_vision=selective"]
ALONE = {
    "lora": [],
    "int8": ["stages.0.lora.quantize_base=int8"],
    "int4": ["stages.0.lora.quantize_base=int4"],
}
TOGETHER = {
    "lora-fsdp": RECOMPUTE,
    "int4-ddp": ALONE["int4"],
    "int4-fsdp": [*ALONE["int4"], "model.dtype=bf16"],
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tower whose feed-forward is wider in memory than on disk."""
    tiny = named_size("tiny")
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    odd = replace(tiny, vision=replace(tiny.vision, intermediate_size=100))
    initialize_random(folder, odd, dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def run_root(tmp_path_factory, checkpoint):
    """Runs on one rank in this process, then those on two."""
    folder = tmp_path_factory.mktemp("lora")
    shards = write_shards(folder / "shards")

    def recipe(name):
        return write_recipe(folder / f"{name}.toml", run=folder / name, checkpoint=checkpoint, shards=shards)

    for name, settings in ALONE.items():
        train(read_recipe(recipe(name), *SETTINGS, *settings), device="cpu")
    jobs = [{"recipe": str(recipe(name)), "set": [*SETTINGS, *settings]} for name, settings in TOGETHER.items()]
    jobs += [
        {"recipe": str(recipe("int4-resumed")), "set": [*SETTINGS, *ALONE["int4"], *RECOMPUTE, "stages.0.steps=2"]}
    ]
    run_together(jobs, folder, num_ranks=2)
    train(read_recipe(folder / "int4-resumed.toml", *SETTINGS, *ALONE["int4"]), device="cpu")
    return folder


def exported(run_root, name):
    return run_root / name / "checkpoints" / "step-00000004"


def built(checkpoint, tmp_path, *overrides, settings=SETTINGS):
    recipe = write_recipe(tmp_path / "recipe.toml", run=tmp_path / "run", checkpoint=checkpoint, shards=tmp_path)
    config = read_recipe(recipe, *settings, *overrides)
    stage = config.stages[0]
    parallel = parallelize(checkpoint, stage, config.parallel, WORLD, dtype=config.model.dtype, seed=config.seed)
    return parallel, TrainState(parallel, build_optimizer(parallel.model.named_parameters(), stage.optimizer), WORLD)


def trained_model(run_root, name, checkpoint, tmp_path):
    """The model of a finished run with its matrices next to the weights."""
    parallel, train_state = built(checkpoint, tmp_path, *ALONE[name])
    train_state.load_weights(newest_state(run_root / name / "state", WORLD))
    return parallel.model.eval()


def conversations():
    from model.hugging_face import answer, ask, picture

    return [
        [ask(picture(56, 84), "What is it?"), answer("A wave.")],
        [ask("Hello?"), answer("Yes, hello, how are you?")],
    ]


@torch.no_grad()
def logits(model, checkpoint):
    return model(Processor.load(checkpoint)(conversations())).float()


def loss_and_gradients(parallel, inputs):
    """Return loss and gradients with random adapters.

    The matrices matter from the first step on, and every call draws the same random numbers.
    """
    torch.manual_seed(0)
    for layer in lora_layers(parallel.model).values():
        nn.init.normal_(layer.lora_B, std=0.1)
    labels = next_token_labels(inputs)
    loss, _ = parallel.wrapped(inputs, labels, torch.tensor(float(count_labels(labels))), count_labels(labels))
    loss.backward()
    named = parallel.model.named_parameters()
    return float(loss.detach()), {name: parameter.grad for name, parameter in named if parameter.grad is not None}


# ------------------------------------------------------------------ training


@pytest.mark.parametrize("name", TOGETHER)
def test_two_ranks_compute_the_losses_of_one(run_root, name):
    alone = losses(run_root / name.removesuffix("-fsdp").removesuffix("-ddp"))
    assert len(alone) == 4
    assert alone[0] > alone[-1] + 0.2, "it learns"
    assert losses(run_root / name) == pytest.approx(alone, abs=0.01 if name == "int4-fsdp" else 1e-5)


def test_a_run_of_two_ranks_resumes_on_one(run_root):
    assert losses(run_root / "int4-resumed") == pytest.approx(losses(run_root / "int4"), abs=1e-5)


def test_a_state_holds_only_the_adapters(run_root):
    names = stored_names(newest_state(run_root / "int4" / "state", WORLD))
    assert names
    assert all(".lora_A" in name or ".lora_B" in name for name in names)


def test_qlora_trains_nearly_like_lora(run_root):
    for name, bound in (("int8", 0.002), ("int4", 0.03)):
        assert losses(run_root / name) == pytest.approx(losses(run_root / "lora"), abs=bound), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["lora", "int8", "int4"])
@pytest.mark.parametrize("more", [[], ["parallel.compile=true", *RECOMPUTE]], ids=["plain", "compiled"])
def test_a_gpu_computes_the_losses_of_the_cpu(run_root, tmp_path, name, more):
    recipe = (run_root / f"{name}.toml").read_text().replace(str(run_root / name), str(tmp_path / "run"))
    (tmp_path / "recipe.toml").write_text(recipe)
    train(read_recipe(tmp_path / "recipe.toml", *SETTINGS, *ALONE[name], "model.dtype=bf16", *more), device="cuda")
    assert losses(tmp_path / "run") == pytest.approx(losses(run_root / name), abs=0.03)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, about itself
def test_a_compiled_layer_has_the_gradients_of_an_eager_one():
    torch.manual_seed(0)
    layer = LoraLinear(Linear(16, 24), rank=4, alpha=8, dtype=torch.float32)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x_TD = torch.randn(5, 16, requires_grad=True)
    inputs = x_TD, layer.lora_A, layer.lora_B
    eager, compiled = (
        torch.autograd.grad(run(x_TD).square().sum(), inputs) for run in (layer, torch.compile(layer, backend="eager"))
    )
    torch.testing.assert_close(compiled, eager)


def test_activation_checkpointing_repeats_the_dropout_mask(checkpoint, tmp_path):
    inputs = Processor.load(checkpoint)(conversations())
    plain, dropped, recomputed = (
        loss_and_gradients(built(checkpoint, tmp_path, *overrides)[0], inputs)
        for overrides in ([], ["stages.0.lora.dropout=0.2"], ["stages.0.lora.dropout=0.2", *RECOMPUTE])
    )
    assert dropped[0] == recomputed[0]
    assert all(torch.equal(dropped[1][name], recomputed[1][name]) for name in dropped[1])
    assert any(not torch.equal(plain[1][name], dropped[1][name]) for name in dropped[1])


def test_training_starts_from_the_unchanged_model(checkpoint, tmp_path):
    parallel, _ = built(checkpoint, tmp_path)
    assert torch.equal(logits(parallel.model, checkpoint), logits(load_model(checkpoint), checkpoint))


def test_a_resumed_run_with_another_rank_is_refused(run_root, checkpoint, tmp_path):
    _, train_state = built(checkpoint, tmp_path, "stages.0.lora.rank=2")
    with pytest.raises(CheckpointError, match="step-00000004"):
        train_state.load_weights(newest_state(run_root / "lora" / "state", WORLD))


def test_lora_may_follow_a_stage_of_full_training(run_root, checkpoint, tmp_path):
    """The second stage stands on the weights of the first, and what is exported holds both."""
    recipe = (run_root / "lora.toml").read_text().replace(str(run_root / "lora"), str(tmp_path / "run"))
    first, second = recipe.index("[[stages]]"), recipe[recipe.index("[[stages]]") :]
    (tmp_path / "two.toml").write_text(
        recipe[:first] + second.replace("learn", "align") + second + "[stages.lora]\nrank = 4\n"
    )
    short = [
        f"stages.{stage}.{key}"
        for stage in (0, 1)
        for key in ("steps=2", "schedule.warmup_steps=2", "data.packing_buffer_size=64")
    ]
    train(read_recipe(tmp_path / "two.toml", *short, "stages.0.optimizer.lrs={language=0, vision=0}"), device="cpu")
    start, aligned, both = (
        load_model(folder)
        for folder in (
            checkpoint,
            *(tmp_path / "run/checkpoints" / step for step in ("step-00000002", "step-00000004")),
        )
    )
    assert not torch.equal(start.projector.mlp[0].weight, aligned.projector.mlp[0].weight)
    assert torch.equal(aligned.projector.mlp[0].weight, both.projector.mlp[0].weight)
    assert not torch.equal(aligned.language.layers[0].mlp.up_proj.weight, both.language.layers[0].mlp.up_proj.weight)


# ------------------------------------------------------------------ merged and exported


def test_the_merged_export_computes_what_the_adapted_model_computes(run_root, checkpoint, tmp_path):
    merged, start = load_model(exported(run_root, "lora")), load_model(checkpoint)
    unmerged = logits(trained_model(run_root, "lora", checkpoint, tmp_path), checkpoint)
    assert torch.allclose(logits(merged, checkpoint), unmerged, atol=1e-5)
    assert not torch.allclose(logits(start, checkpoint), unmerged, atol=0.1), "the matrices count"


def test_two_ranks_export_what_one_exports(run_root):
    for name in ("lora-fsdp", "int4-ddp"):
        alone = load_file(exported(run_root, name.rpartition("-")[0]) / "model.safetensors")
        together = load_file(exported(run_root, name) / "model.safetensors")
        assert alone.keys() == together.keys()
        assert all(torch.allclose(alone[key], together[key], atol=1e-5) for key in alone)


def test_qlora_adapters_are_merged_into_the_original_weights(run_root, checkpoint, tmp_path):
    """The product of the matrices is added exactly; the trained model differs by at most half a scale of the base."""
    model = trained_model(run_root, "int4", checkpoint, tmp_path)
    start, merged = (load_file(folder / "model.safetensors") for folder in (checkpoint, exported(run_root, "int4")))
    for name, layer in lora_layers(model).items():
        stored = DEFAULT_FAMILY.name_on_disk(f"{name}.weight")
        N, D = start[stored].shape
        learned = layer.scale * (layer.lora_B @ layer.lora_A)[:N, :D]
        assert learned.abs().max() > 1e-3
        assert torch.allclose(merged[stored] - start[stored], learned, atol=1e-6)
        base = compute_weight([layer.weight_bits, layer.weight_scale], "int4", layer.in_features)[:N, :D]
        half_scale = 0.5 * layer.weight_scale.repeat_interleave(GROUP_SIZE, 1)[:N, :D]
        assert ((merged[stored] - (base + learned)).abs() <= half_scale + 1e-6).all()
    difference = logits(load_model(exported(run_root, "int4")), checkpoint) - logits(model, checkpoint)
    assert difference.abs().max() < 0.25
    assert difference.abs().max() > 1e-3


def test_the_adapter_alone_has_the_names_and_shapes_of_peft(run_root, checkpoint):
    stored = load_file(exported(run_root, "lora") / "adapter" / "adapter_model.safetensors")
    described = json.loads((exported(run_root, "lora") / "adapter" / "adapter_config.json").read_text())
    assert {name: described[name] for name in ("peft_type", "r", "lora_alpha")} == {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
    }
    assert stored.keys() == {
        f"base_model.model.{name}.lora_{matrix}.weight" for name in described["target_modules"] for matrix in "AB"
    }
    name = "base_model.model.model.visual.blocks.0.mlp.down_proj.lora"
    assert stored[f"{name}_A.weight"].shape == (4, 100)
    assert stored[f"{name}_B.weight"].shape == (64, 4)


def test_the_adapter_can_be_all_that_is_exported(checkpoint, tmp_path):
    parallel, train_state = built(checkpoint, tmp_path)
    for _ in range(2):  # the second replaces the first
        out, options = (
            tmp_path / "out",
            {"like": checkpoint, "dtype": torch.bfloat16, "world": WORLD, "only_adapter": True},
        )
        export_checkpoint(out, parallel.model, train_state.weights(), **options)
    assert sorted(file.name for file in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]


@pytest.mark.filterwarnings("ignore")
def test_peft_reads_the_adapter_beside_the_original_model(run_root, checkpoint, tmp_path):
    """`transformers` with the adapter computes what our model with its matrices computes."""
    peft = pytest.importorskip("peft")
    from model.hugging_face import Oracle

    oracle = Oracle(checkpoint)
    inputs = oracle.inputs(conversations()[0])
    ours = logits(trained_model(run_root, "lora", checkpoint, tmp_path), checkpoint)[: inputs["input_ids"].shape[1]]
    begun = oracle.logits(inputs)
    oracle.model = peft.PeftModel.from_pretrained(oracle.model, exported(run_root, "lora") / "adapter")
    assert torch.allclose(oracle.logits(inputs), ours, atol=1e-4)
    assert not torch.allclose(begun, ours, atol=1e-2)


# ------------------------------------------------------------------ the layer


def layer_of(linear, dtype=torch.float32, **settings):
    layer = LoraLinear(linear, rank=4, alpha=8.0, dtype=dtype, **settings).eval()
    torch.nn.init.normal_(layer.lora_A, std=0.1)
    torch.nn.init.normal_(layer.lora_B, std=0.1)
    return layer


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_inputs", [128, 104])
def test_the_layer_and_its_gradients_follow_the_formula(quantization, dtype, num_inputs):
    torch.manual_seed(0)
    layer = layer_of(Linear(num_inputs, 72).to(dtype), dtype, quantization=quantization)
    held = [layer.weight] if quantization == "none" else [layer.weight_bits, layer.weight_scale]
    weight = compute_weight(held, quantization, num_inputs).float()
    x = torch.randn(2, 5, num_inputs, dtype=dtype, requires_grad=True)
    exact = [tensor.detach().float().requires_grad_() for tensor in (x, layer.lora_A, layer.lora_B)]
    expected = F.linear(exact[0], weight, layer.bias.float()) + 2.0 * exact[0] @ exact[1].T @ exact[2].T
    actual, d_y = layer(x), torch.randn(2, 5, 72)
    actual.backward(d_y.to(dtype))
    expected.backward(d_y)
    bound = 1e-5 if dtype == torch.float32 else 0.03
    for ours, reference in zip(
        (actual, x.grad, layer.lora_A.grad, layer.lora_B.grad), (expected, *(e.grad for e in exact)), strict=True
    ):
        assert ours.dtype == dtype
        assert (ours.float() - reference).norm() < bound * reference.norm()


def test_dropout_applies_to_the_adapters_only():
    torch.manual_seed(0)
    layer, x = layer_of(Linear(128, 72), dropout=0.5), torch.randn(64, 128, requires_grad=True)
    nn.init.zeros_(layer.lora_B)
    assert torch.equal(layer.train()(x), layer.eval()(x))
    nn.init.normal_(layer.lora_B)
    torch.manual_seed(1)
    actual = layer.train()(x)
    torch.manual_seed(1)
    expected = F.linear(x, layer.weight, layer.bias) + 2.0 * F.dropout(x, 0.5) @ layer.lora_A.T @ layer.lora_B.T
    (d_actual,), (d_expected,) = (torch.autograd.grad(y.square().sum(), x) for y in (actual, expected))
    assert torch.allclose(actual, expected, atol=1e-4)
    assert torch.allclose(d_actual, d_expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("quantization", "share", "error"), [("int4", 0.27, 0.12), ("int8", 0.51, 0.01)])
def test_a_frozen_weight_takes_a_quarter_or_half_of_its_memory(quantization, share, error):
    weight = torch.randn(256, 512)
    held = list(stored_weight(weight.bfloat16(), quantization, torch.bfloat16).values())
    assert sum(tensor.nbytes for tensor in held) <= share * 2 * weight.numel()
    assert all(tensor.dtype == torch.bfloat16 for tensor in held), "FSDP casts other floats and refuses integers"
    assert (compute_weight(held, quantization, 512).float() - weight).norm() < error * weight.norm()


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_backward_saves_only_the_input(quantization):
    layer, kept = layer_of(Linear(512, 768), quantization=quantization), []
    x = torch.randn(32, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(x)
    parameters = {parameter.data_ptr() for parameter in layer.parameters()}
    added = [tensor for tensor in kept if tensor.data_ptr() not in parameters]
    assert sorted(tuple(tensor.shape) for tensor in added) == [(32, 4), (32, 512)]
    assert x.data_ptr() in {tensor.data_ptr() for tensor in added}, "the input itself, not a copy"


# ------------------------------------------------------------------ what learns


def test_only_the_adapters_are_trained(checkpoint, tmp_path):
    overrides = ["stages.0.lora.quantize_base=int4", "stages.0.optimizer.lrs={lora=1e-4}", "stages.0.optimizer.lr=0"]
    parallel, train_state = built(checkpoint, tmp_path, *overrides)
    assert train_state.trained == {f"{name}.lora_{matrix}" for name in lora_layers(parallel.model) for matrix in "AB"}
    assert [(group.name, group.lr) for group in train_state.optimizer.groups] == [("lora", 1e-4)]
    whole, _ = built(checkpoint, tmp_path, settings=())
    counted, expected = (
        {line.split()[0]: line.split()[1:] for line in trainable_table(model).splitlines()[1:]}
        for model in (parallel.model, whole.model)
    )
    for part, (total, trained) in counted.items():
        matrices = int(trained.replace(",", ""))
        assert int(total.replace(",", "")) == int(expected[part][0].replace(",", "")) + matrices, part
    assert counted["embedding"][1] == "0"


def test_parts_may_have_their_own_learning_rates(checkpoint, tmp_path):
    _, train_state = built(checkpoint, tmp_path, "stages.0.optimizer.lrs={vision=1e-4, projector=0}")
    rates = {name: group.lr for group in train_state.optimizer.groups for name in group.parameter_names}
    assert rates["vision.blocks.0.attn.qkv.lora_A"] == 1e-4
    assert rates["language.layers.0.self_attn.q_proj.lora_B"] == 2e-3
    assert not any(name.startswith("projector.") for name in rates)


def test_a_frozen_tower_builds_no_graph(checkpoint, tmp_path):
    parallel, _ = built(checkpoint, tmp_path, "stages.0.lora={rank=4}", "parallel.recompute_language=full")
    inputs = Processor.load(checkpoint)(conversations())
    assert not parallel.model.embed(inputs)[0].requires_grad
    _, gradients = loss_and_gradients(parallel, inputs)
    assert gradients.keys() == lora_parameters(parallel.model).keys()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_layers_stay_outside_compiled_code(checkpoint, tmp_path):
    for quantization, is_outside in (("int4", True), ("none", False)):
        overrides = [f"stages.0.lora.quantize_base={quantization}", "parallel.compile=true"]
        parallel, _ = built(checkpoint, tmp_path, *overrides)
        for layer in lora_layers(parallel.model).values():
            assert hasattr(layer.forward, "_torchdynamo_disable") == is_outside


def test_flops_of_adapted_parts_exclude_weight_gradients():
    forward = Flops(vision=1.0, projector=1.0, language=1.0, head=1.0)
    assert training_flops(forward, {"language.lora"}, tied_head=True) == (1, 1, 2, 2)
    assert training_flops(forward, {"vision.lora", "language.lora"}, tied_head=True) == (2, 2, 2, 2)


# ------------------------------------------------------------------ settings

NAMES = [
    "language.layers.0.self_attn.q_proj", "language.layers.0.mlp.gate_proj", "language.layers.1.self_attn.q_proj",
    "language.layers.1.mlp.gate_proj", "vision.blocks.0.attn.proj", "vision.blocks.0.mlp.gate_proj", "projector.mlp.0",
    "projector.mlp.2", "head",
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "numbers"),
    [
        ({"targets": ("gate_proj",)}, [1, 3]),
        ({"targets": ("gate_proj",), "parts": ("language", "vision")}, [1, 3, 5]),
        ({"targets": ("proj",), "parts": ("vision",)}, [4]),
        ({"targets": (r"layers\.1\.", "gate_proj")}, [1, 2, 3]),
        ({"targets": (".*",), "parts": ("language", "vision", "projector")}, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({"targets": ("mlp.2",), "parts": ("projector",)}, [7]),
    ],
)
def test_targets_are_name_suffixes_or_regular_expressions_within_the_parts(settings, numbers):
    assert target_layers(NAMES, LoraConfig(**settings)) == [NAMES[number] for number in numbers]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"targets": ("q_porj",)}, "Similar names: q_proj"),
        ({"targets": ("q_proj", "qkv")}, "target 'qkv' matches no linear layer of language"),
        ({"targets": (r"layers\.7\.",)}, "Similar names: language.layers"),
        ({"targets": ("q_proj",), "parts": ("language", "vision")}, "no target matches a layer of vision"),
        ({"targets": ("(",)}, "neither a name nor a regular expression"),
        ({"targets": ()}, "cannot be empty"),
        ({"rank": 0}, "rank is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        target_layers(NAMES, LoraConfig(**settings))


def test_learning_rates_of_frozen_parameters_are_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match=r"'embedding' matches no parameter.*only the adapters are trained"):
        built(checkpoint, tmp_path, "stages.0.optimizer.lrs={embedding=1e-4}")


def test_stages_that_would_need_a_merge_between_them_are_refused(run_root):
    recipe = (run_root / "lora.toml").read_text()
    stage = recipe[recipe.index("[[stages]]") :]
    plain, lora, int4 = "", "[stages.lora]\nrank = 4\n", "[stages.lora]\nquantize_base = 'int4'\n"
    for first, second, is_good in (
        (plain, lora, True), (lora, lora, True), (int4, int4, True),
        (lora, plain, False), (plain, int4, False), (lora, int4, False),
    ):  # fmt: skip
        file = run_root / "stages.toml"
        file.write_text(recipe + first + stage.replace("learn", "more") + second)
        if is_good:
            load_config(TrainConfig, file)
        else:
            with pytest.raises(ConfigError, match="start another run from the folder it exports"):
                load_config(TrainConfig, file)


RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_training_recipes_load(path):
    assert load_config(TrainConfig, path).stages


def test_there_is_a_recipe_for_lora():
    config = load_config(TrainConfig, next(path for path in RECIPES if path.stem == "qwen2.5-vl-3b-lora"))
    assert config.stages[0].lora is not None

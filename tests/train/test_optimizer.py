import copy
import math

import pytest
import torch
import torch.distributed as dist
from closeness import assert_close, relative_rms
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from train.running import fork_server

from saccade.config import decode
from saccade.errors import ConfigError
from saccade.model.initialize import named_size
from saccade.model.vlm import VLM
from saccade.train.muon import orthogonalized
from saccade.train.optimizer import build_optimizer, freeze, total_norm
from saccade.train.parameter_groups import OptimizerConfig, parameter_groups, part_of

KINDS = pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "muon"])
NAMES = {
    "vision.patch_embed.proj.weight": 5,
    "vision.blocks.0.norm1.weight": 1,
    "vision.blocks.0.attn.qkv.weight": 2,
    "vision.blocks.0.attn.qkv.bias": 1,
    "projector.mlp.0.weight": 2,
    "language.embed_tokens.weight": 2,
    "language.layers.0.self_attn.q_proj.weight": 2,
    "language.layers.1.self_attn.q_proj.weight": 2,
    "head.weight": 2,
}
"""Parameters of a small model, by their number of dims."""
SHAPES = {
    "language.embed_tokens.weight": (65, 70),
    "language.layers.0.mlp.up_proj.weight": (33, 300),
    "language.layers.0.mlp.down_proj.weight": (300, 33),
    "language.norm.weight": (31,),
}


def groups_of(**settings):
    return {group.name: group for group in parameter_groups(NAMES, OptimizerConfig(**settings))}


def make_parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype))
        for name, shape in SHAPES.items()
    }


def gradients_of(step):
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in SHAPES.items()}


def train(parameters, optimizer, steps, lr_factor=1.0, grad_scale=1.0):
    for step in steps:
        for name, gradient in gradients_of(step).items():
            parameters[name].grad = gradient.to(parameters[name])
        optimizer.step(lr_factor, grad_scale)
    optimizer.zero_grad()


def config_of(kind="adamw", **changes):
    return OptimizerConfig(**{"kind": kind, "lr": 1e-2, "weight_decay": 0.1} | changes)


# ------------------------------------------------------------------ groups


def test_parts_and_patterns_give_learning_rates_and_the_first_match_wins():
    lrs = {"projector": 1e-3, r"layers\.0\.": 2e-5, "language": 3e-5, "vision": 0.0}
    groups = groups_of(lr=1e-5, lrs=lrs)
    assert groups["projector"].lr == 1e-3
    assert groups[r"layers\.0\."].parameter_names == ("language.layers.0.self_attn.q_proj.weight",)
    assert groups["language"].parameter_names == ("language.layers.1.self_attn.q_proj.weight",)
    assert set(groups["default"].parameter_names) == {"language.embed_tokens.weight", "head.weight"}
    assert "vision" not in groups


def test_norms_biases_and_by_default_embeddings_are_not_decayed():
    [group] = groups_of().values()
    undecayed = {"vision.blocks.0.norm1.weight", "vision.blocks.0.attn.qkv.bias", "language.embed_tokens.weight"}
    assert set(group.undecayed) == undecayed
    [group] = groups_of(decay_embedding=True).values()
    assert "language.embed_tokens.weight" in group.decayed


def test_every_parameter_of_a_model_belongs_to_a_part():
    with torch.device("meta"):
        model = VLM(named_size("tiny"))
    assert {part_of(name) for name, _ in model.named_parameters()} >= {"vision", "projector", "embedding", "language"}
    assert part_of("head.weight") == "head"
    assert part_of("something.else") is None


def test_a_pattern_that_matches_nothing_is_refused_with_near_names():
    with pytest.raises(ConfigError, match=r"'language\\.layer\\.0'.*language\.layers\.0"):
        groups_of(lrs={r"language\.layer\.0": 1e-4})
    with pytest.raises(ConfigError, match=r"'visoin' matches no parameter.*Near names: vision"):
        groups_of(lrs={"visoin": 1e-4})
    with pytest.raises(ConfigError, match="tied to the embedding"):
        parameter_groups({"language.embed_tokens.weight": 2}, OptimizerConfig(lrs={"head": 1e-4}))


@pytest.mark.parametrize(
    "settings",
    [
        {"lr": -1.0},
        {"lrs": {"vision": math.nan}},
        {"beta2": 1.0},
        {"eps": 0.0},
        {"weight_decay": -0.1},
        {"lrs": {"(": 1.0}},
        {"kind": "sgd"},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ConfigError):
        decode(OptimizerConfig, settings)


def test_a_learning_rate_of_zero_freezes():
    parameters = make_parameters()
    freeze(parameters.items(), OptimizerConfig(lrs={"embedding": 0.0}))
    assert [name for name, p in parameters.items() if not p.requires_grad] == ["language.embed_tokens.weight"]
    optimizer = build_optimizer(parameters.items(), OptimizerConfig(lrs={"embedding": 0.0}))
    assert optimizer.masters.keys() == parameters.keys() - {"language.embed_tokens.weight"}
    freeze(parameters.items(), OptimizerConfig())
    assert all(p.requires_grad for p in parameters.values())
    with pytest.raises(ConfigError, match="nothing would be trained"):
        freeze(parameters.items(), OptimizerConfig(lr=0.0))


def test_parameters_frozen_by_others_are_left_alone():
    parameters = make_parameters()
    parameters["language.norm.weight"].requires_grad_(False)
    before = parameters["language.norm.weight"].clone()
    optimizer = build_optimizer(parameters.items(), config_of())
    train(parameters, optimizer, range(2))
    assert torch.equal(parameters["language.norm.weight"], before)
    assert not any("language.norm.weight" in group.parameter_names for group in optimizer.groups)


# ------------------------------------------------------------------ steps


def test_adamw_equals_the_optimizer_of_torch_with_its_groups():
    parameters = make_parameters()
    theirs = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    lrs = {"embedding": 5e-2}
    optimizer = build_optimizer(parameters.items(), config_of(lrs=lrs))
    reference = torch.optim.AdamW(
        [
            {
                "params": [p],
                "lr": lrs["embedding"] if "embed" in name else 1e-2,
                "weight_decay": 0.1 if "layers" in name else 0.0,
            }
            for name, p in theirs.items()
        ],
        betas=(0.9, 0.95),
    )  # fmt: skip
    for step in range(5):
        for name, gradient in gradients_of(step).items():
            theirs[name].grad = gradient * 0.5
        for group in reference.param_groups:
            group.setdefault("peak", group["lr"])
            group["lr"] = group["peak"] * (step + 1) / 5
        reference.step()
        train(parameters, optimizer, [step], lr_factor=(step + 1) / 5, grad_scale=0.5)
    for name, parameter in parameters.items():
        assert torch.allclose(parameter, theirs[name], rtol=1e-6, atol=1e-6), name


@KINDS
def test_parameters_in_bf16_are_roundings_of_masters_that_see_small_steps(kind):
    parameters = make_parameters(torch.bfloat16)
    optimizer = build_optimizer(parameters.items(), config_of(kind, lr=1e-5, weight_decay=0.0))
    before = {name: x.clone() for name, x in optimizer.masters.items()}
    train(parameters, optimizer, range(3))
    for name, master in optimizer.masters.items():
        assert master.dtype == torch.float32
        assert not torch.equal(master, before[name]), "a step too small for bf16 is kept in the master"
        assert torch.equal(parameters[name], master.to(torch.bfloat16))


def test_masters_of_fp32_parameters_are_the_parameters():
    parameters = make_parameters()
    for name, master in build_optimizer(parameters.items(), config_of()).masters.items():
        assert master is parameters[name]


def test_8_bit_moments_give_nearly_the_steps_of_fp32_moments():
    moved = {}
    for kind in ("adamw", "adamw8bit"):
        parameters = make_parameters()
        before = {name: p.detach().clone() for name, p in parameters.items()}
        train(parameters, build_optimizer(parameters.items(), config_of(kind)), range(20))
        moved[kind] = {name: p.detach() - before[name] for name, p in parameters.items()}
    for name, expected in moved["adamw"].items():
        assert_close(name, moved["adamw8bit"][name], expected, 0.0 if "norm" in name else 0.05)


def test_8_bit_state_takes_two_bytes_per_parameter():
    state = build_optimizer(make_parameters().items(), config_of("adamw8bit")).state()
    large = state["language.layers.0.mlp.up_proj.weight"]
    assert large["first"].dtype == torch.int8
    assert large["second"].dtype == torch.uint8
    assert large["first_scale"].shape == (33, 2), "300 columns are two blocks of 256"
    assert state["language.norm.weight"]["first"].dtype == torch.float32


def test_muon_steps_are_orthogonal_and_as_long_as_those_of_adamw():
    values = torch.linalg.svdvals(orthogonalized(torch.randn(40, 300)))
    assert values.min() > 0.6
    assert values.max() < 1.3
    parameters = make_parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    train(parameters, build_optimizer(parameters.items(), config_of("muon", weight_decay=0.0)), range(1))
    for name, parameter in parameters.items():
        step = (parameter.detach() - before[name]).square().mean().sqrt().item()
        assert step == pytest.approx(1e-2 * (0.2 if ".layers." in name else 1.0), rel=0.2), name


def test_muon_keeps_a_momentum_for_matrices_of_blocks_and_moments_for_the_rest():
    state = build_optimizer(make_parameters().items(), config_of("muon")).state()
    for name, tensors in state.items():
        assert set(tensors) == ({"momentum", "step"} if ".layers." in name else {"first", "second", "step"})


@KINDS
def test_a_missing_gradient_counts_as_zero(kind):
    runs = []
    for is_missing in (False, True):
        parameters = make_parameters()
        optimizer = build_optimizer(parameters.items(), config_of(kind))
        train(parameters, optimizer, range(2))
        for name, parameter in parameters.items():
            is_there = "embed" in name or not is_missing
            parameter.grad = torch.zeros_like(parameter) if is_there else None
        optimizer.step(1.0)
        runs.append(parameters)
    for name in SHAPES:
        assert torch.equal(runs[0][name], runs[1][name])


# ------------------------------------------------------------------ state


def load(optimizer, saved):
    """Copy a saved state in run_root, as loading a checkpoint does."""
    for name, tensors in optimizer.state().items():
        for key, tensor in tensors.items():
            tensor.copy_(saved[name][key])


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resumed_steps_equal_uninterrupted_ones_bit_for_bit(kind, dtype):
    parameters = make_parameters(dtype)
    optimizer = build_optimizer(parameters.items(), config_of(kind))
    train(parameters, optimizer, range(3))
    saved = copy.deepcopy((optimizer.state(), {k: v.detach() for k, v in optimizer.masters.items()}))
    train(parameters, optimizer, range(3, 6))

    resumed = make_parameters(dtype)
    optimizer = build_optimizer(resumed.items(), config_of(kind))
    load(optimizer, saved[0])
    with torch.no_grad():
        for name, master in optimizer.masters.items():
            master.copy_(saved[1][name])
    optimizer.write_parameters()
    train(resumed, optimizer, range(3, 6))
    for name in SHAPES:
        assert torch.equal(resumed[name], parameters[name])


def test_state_can_be_loaded_in_place():
    parameters = make_parameters()
    optimizer = build_optimizer(parameters.items(), config_of())
    train(parameters, optimizer, range(2))
    optimizer.state()["language.norm.weight"]["first"].fill_(3.0)
    optimizer.state()["language.norm.weight"]["step"].fill_(7)
    state = optimizer.state()["language.norm.weight"]
    assert (state["first"] == 3.0).all()
    assert state["step"] == 7


@KINDS
def test_offloaded_state_gives_the_same_steps(kind, monkeypatch):
    monkeypatch.setattr("saccade.train.optimizer._STREAMED_BYTES", 50_000)
    expect_offloaded_equal(kind, "cpu")


@pytest.mark.gpu
@KINDS
def test_offloaded_state_gives_the_same_steps_on_a_gpu(kind, monkeypatch):
    monkeypatch.setattr("saccade.train.optimizer._STREAMED_BYTES", 50_000)
    optimizer = expect_offloaded_equal(kind, "cuda")
    assert all(master.is_cpu and master.is_pinned() for master in optimizer.masters.values())


def expect_offloaded_equal(kind, device):
    runs = []
    for offload in (False, True):
        parameters = make_parameters(torch.bfloat16, device)
        optimizer = build_optimizer(parameters.items(), config_of(kind, offload=offload))
        train(parameters, optimizer, range(4))
        runs.append(parameters)
    for name in SHAPES:
        assert torch.equal(runs[0][name], runs[1][name])
    return optimizer


# ------------------------------------------------------------------ norms and shards


def test_the_norm_is_that_of_all_gradients_in_any_precision():
    gradients = [torch.randn(1000), torch.randn(7, 9).bfloat16(), torch.zeros(0)]
    parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    expected = torch.cat([x.float().flatten() for x in gradients]).norm()
    norm = total_norm([*parameters, torch.nn.Parameter(torch.ones(3))])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert total_norm([]).item() == 0.0


def _sharded(parameters, mesh):
    return {name: torch.nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for name, p in parameters.items()}


def _run_rank(rank, folder):
    """Steps on two ranks equal those on one; state moves between them through a DCP folder."""
    import torch.distributed.checkpoint as dcp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for kind in ("adamw", "adamw8bit", "muon"):
        whole, sharded = make_parameters(torch.bfloat16), _sharded(make_parameters(torch.bfloat16), mesh)
        alone, together = (build_optimizer(p.items(), config_of(kind)) for p in (whole, sharded))
        for step in range(3):
            for name, gradient in gradients_of(step).items():
                whole[name].grad = gradient.bfloat16()
                sharded[name].grad = distribute_tensor(gradient.bfloat16(), mesh, [Shard(0)])
            assert torch.allclose(total_norm(whole.values()), total_norm(sharded.values()), rtol=1e-6)
            alone.step(1.0, 0.5)
            together.step(1.0, 0.5)
        for name, master in together.masters.items():
            bound = 1e-3 if kind == "adamw8bit" else 1e-6  # in 8 bits the noise is the shard's own
            assert relative_rms(master.full_tensor(), alone.masters[name]) <= bound, (kind, name)
            assert torch.equal(sharded[name].full_tensor(), master.full_tensor().bfloat16())
        dcp.save({"optimizer": together.state()}, checkpoint_id=f"{folder}/{kind}")
        torch.save(_gathered(together), f"{folder}/{kind}-{rank}.pt")
    dist.destroy_process_group()


def _gathered(optimizer):
    return {
        name: {key: x if key == "step" else x.full_tensor() for key, x in tensors.items()}
        for name, tensors in optimizer.state().items()
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_sharded_steps_equal_single_device_steps_and_their_state_loads_in_one_process(tmp_path):
    import torch.distributed.checkpoint as dcp

    fork_server()
    torch.multiprocessing.start_processes(_run_rank, args=(str(tmp_path),), nprocs=2, start_method="forkserver")
    for kind in ("adamw", "adamw8bit", "muon"):
        optimizer = build_optimizer(make_parameters(torch.bfloat16).items(), config_of(kind))
        dcp.load({"optimizer": optimizer.state()}, checkpoint_id=tmp_path / kind, no_dist=True)
        expected = torch.load(tmp_path / f"{kind}-0.pt")
        for name, tensors in optimizer.state().items():
            for key, x in tensors.items():
                assert torch.equal(x, expected[name][key]), f"{kind} {name} {key}"

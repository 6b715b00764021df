"""A model whose matrices are divided over tensor ranks computes the logits of the whole one, in every storage form."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from closeness import assert_close, relative_rms
from engine.making_adapters import write_adapters
from model.hugging_face import FAMILIES, SHAPES, make_checkpoint
from model.tensor_ranks import BOUND, assert_ranks_equal_one, inputs_of, run_ranks
from train.running import run_together

from saccade.errors import ConfigError, UserError
from saccade.model import load_model
from saccade.model.adapters import AdapterBank, load_adapter
from saccade.model.attention import PackedAttention
from saccade.model.checkpoint_reader import _Runs, read_tensors, tensor_files
from saccade.model.fake_quantized_linear import FakeQuantizedLinear
from saccade.model.families import family_of, named_size, named_sizes
from saccade.model.linear import Linear
from saccade.model.shard import Shard, TensorRank
from saccade.model.tensor_parallel import (
    check_divisible,
    connect,
    kv_heads_of,
    possible_ranks,
    shard_model,
    tensor_slices,
)
from saccade.model.vlm import VLM
from saccade.model.weights import meta_model

# ------------------------------------------------------------------ logits


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[1], *FAMILIES])
def test_every_family_computes_the_same_logits_on_any_number_of_ranks(shape, tmp_path):
    """With fewer key/value heads than ranks too, and with sizes that do not divide evenly."""
    folder = make_checkpoint(tmp_path / "model", shape)
    sizes = [size for size in possible_ranks(meta_model(folder)[0].config.language) if 1 < size <= 8]
    for size in sizes:
        assert_ranks_equal_one(folder, size)


def test_a_rank_holds_its_part_of_every_matrix_and_reads_nothing_else(tmp_path):
    folder = make_checkpoint(tmp_path / "model", SHAPES[1])
    whole = load_model(folder, device="cpu")
    parts = [load_model(folder, device="cpu", tensor_rank=TensorRank(rank, 4)) for rank in range(4)]
    for index, layer in enumerate(whole.language.layers):
        own = [part.language.layers[index] for part in parts]
        for name in ("self_attn.q_proj", "mlp.gate_proj"):
            rows = [part.get_submodule(name).weight for part in own]
            assert torch.equal(torch.cat(rows), layer.get_submodule(name).weight)
        columns = [part.self_attn.o_proj.weight for part in own]
        assert torch.equal(torch.cat(columns, dim=1), layer.self_attn.o_proj.weight)
        keys = [part.self_attn.k_proj.weight for part in own]  # two heads on four ranks
        assert torch.equal(keys[0], keys[1])
        assert torch.equal(torch.cat(keys[::2]), layer.self_attn.k_proj.weight)
    assert torch.equal(
        torch.cat([part.language.embed_tokens.weight for part in parts]), whole.language.embed_tokens.weight
    )


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_are_divided_with_their_projections(size, tmp_path):
    """Tokens of one sequence have different adapters and the base model."""
    base = make_checkpoint(tmp_path / "base", SHAPES[1])
    adapters = write_adapters(base, tmp_path / "adapters")
    inputs = inputs_of(base)

    @torch.no_grad()
    def hidden(model):
        bank = AdapterBank(model, num_slots=4, max_rank=16, dtype=torch.float32, device=torch.device("cpu"))
        for slot, folder in enumerate(adapters.values()):
            bank.set(slot, load_adapter(folder, bank.shapes, family_of(base)))
        attend = PackedAttention(model.cos_sin(inputs.positions), inputs.cu_seqlens, inputs.max_seqlen)
        x_TD, features = model.embed(inputs)
        slot_T = (torch.arange(len(x_TD)) % (len(adapters) + 1)).int()
        return model.head(model.language.run_layers(x_TD, attend, None, slot_T, features).normed)

    def run(rank, exchange):
        model = load_model(base, device="cpu", tensor_rank=TensorRank(rank, size))
        connect(model, exchange)
        return hidden(model)

    whole = hidden(load_model(base, device="cpu"))
    for logits in run_ranks(size, run):
        assert relative_rms(logits, whole) < BOUND


@pytest.mark.parametrize("damage", ["heads", "sum", "vocabulary"])
def test_a_mistake_in_the_division_is_noticed(damage, tmp_path):
    """The comparison has power: queries of another rank, a missing sum, embeddings that are not shared."""
    folder = make_checkpoint(tmp_path / "model", SHAPES[1])
    inputs = inputs_of(folder)

    def run(rank, exchange):
        model = load_model(folder, device="cpu", tensor_rank=TensorRank(rank, 2))
        attention, sums = model.language.layers[0].self_attn, type(exchange).leave
        if damage == "sum":
            exchange.leave, exchange.total = lambda x_TD: x_TD, lambda x_TD: sums(exchange, x_TD)
        if damage == "vocabulary":
            exchange.total = lambda x_TD: x_TD
        if damage == "heads":
            attention.q_proj.weight.data.copy_(attention.q_proj.weight.data.roll(64, 0))
        connect(model, exchange)
        with torch.no_grad():
            return model(inputs)

    with torch.no_grad():
        whole = load_model(folder, device="cpu")(inputs)
    assert relative_rms(run_ranks(2, run)[0], whole) > 1000 * BOUND


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compute_the_same_logits(size, tmp_path):
    folder = make_checkpoint(tmp_path / "model", SHAPES[1])
    with torch.no_grad():
        whole = load_model(folder, device="cpu")(inputs_of(folder))
    run_together([{"call": "model.tensor_ranks:save_logits", "folder": str(folder)}], tmp_path, num_ranks=size)
    for rank in range(size):
        assert relative_rms(torch.load(folder / f"logits-{rank}", weights_only=True), whole) < BOUND


def test_int8_training_rounds_divided_inputs_by_the_scales_of_all_ranks():
    """A row-parallel projection: weights by the largest input of an output, tokens by their largest channel."""
    generator = torch.Generator().manual_seed(5)
    weight_ND, x_TD = torch.randn(16, 64, generator=generator), torch.randn(9, 64, generator=generator)
    d_y_TN = torch.randn(9, 16, generator=generator)

    def step(own, maximum=None):
        linear = Linear(own.stop - own.start, 16, bias=False)
        linear.load_tensor("weight", weight_ND[:, own].clone(), None)
        layer = FakeQuantizedLinear(linear, form="int8", dtype=torch.float32)
        layer.maximum = maximum
        x = x_TD[:, own].clone().requires_grad_()
        y_TN = layer(x)
        y_TN.backward(d_y_TN)
        return y_TN.detach(), x.grad, layer.weight.grad

    whole = step(slice(0, 64))
    parts = run_ranks(2, lambda rank, exchange: step(slice(32 * rank, 32 * rank + 32), exchange.maximum))
    y_TN, d_x_TD, d_weight_ND = (torch.stack(both) for both in zip(*parts, strict=True))
    assert_close("outputs", y_TN.sum(0), whole[0], 1e-6)
    assert_close("gradients of inputs", torch.cat([*d_x_TD], dim=1), whole[1], 1e-6)
    assert_close("gradients of weights", torch.cat([*d_weight_ND], dim=1), whole[2], 1e-6)
    alone = step(slice(0, 32))[0] + step(slice(32, 64))[0]
    assert relative_rms(alone, whole[0]) > 1e-4, "the comparison has power"


# ------------------------------------------------------------------ sizes


def test_published_sizes_can_be_divided_as_the_table_says():
    """The table of `docs/model.md`."""
    page = Path("docs/model.md").read_text(encoding="utf-8")
    for name, config in named_sizes().items():
        if not name.endswith("tiny"):
            ranks = [str(size) for size in possible_ranks(config.language) if size <= 16]
            assert f"| `{name}` | {', '.join(ranks)} |" in page


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"^28 attention heads cannot be divided over 8 .* Use one of 1, 2, 4, 28$"):
        check_divisible(named_size("7b").language, 8)
    with pytest.raises(ConfigError, match="key/value heads cannot be divided or copied"):
        check_divisible(replace(named_size("qwen2_vl/2b").language, num_kv_heads=4), 3)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_parts_are_whole_and_every_element_is_on_one_rank_or_on_neighbours(size):
    """This holds for every divided tensor of the 3B shape, whose two key/value heads are copied."""
    config = named_size("3b")
    few = replace(config, language=replace(config.language, num_layers=1))
    found = {}
    for rank in range(size):
        with torch.device("meta"):
            model = VLM(few)
        shard_model(model, TensorRank(rank, size))
        for name, slices in tensor_slices(model).items():
            [divided] = [one for one in slices if one != slice(None)]
            found.setdefault(name, []).append((divided.start, divided.stop))
        heads = kv_heads_of(config.language, TensorRank(rank, size))
        assert len(heads) == max(1, 2 // size)
    for name, spans in found.items():
        distinct = sorted(set(spans))
        assert spans == sorted(spans)
        assert distinct[0][0] == 0
        assert all(one[1] == other[0] for one, other in itertools.pairwise(distinct))
        assert len(distinct) == (min(2, size) if "k_proj" in name or "v_proj" in name else size)


def test_a_split_inside_a_packed_word_is_refused():
    shard = Shard(0, (0, 4, 8), 1, shapes={"zeros": (1, 8)})
    with pytest.raises(UserError, match="fewer tensor-parallel ranks"):
        shard.slices("zeros", (0, 8))


# ------------------------------------------------------------------ parts of files


@pytest.mark.parametrize("shape", [SHAPES[1], *FAMILIES], ids=lambda shape: shape.name)
def test_all_ranks_together_read_the_folder_once_and_whole_tensors_once_more_each(shape, tmp_path):
    """Bytes of the files that ranks ask for: a key/value head that several hold counts as whole tensors do."""
    folder = make_checkpoint(tmp_path / "model", shape)
    config, files = meta_model(folder)[0].config.language, tensor_files(folder)
    stored = {name: tensor.nbytes for name, tensor in read_tensors(files, files, torch.device("cpu"))}
    for size in possible_ranks(config)[1:3]:
        num_read = Counter()

        def counted(*arguments, num_read=num_read):
            for name, tensor in read_tensors(*arguments):
                num_read[name] += tensor.nbytes
                yield name, tensor

        with patch("saccade.model.weights.read_tensors", counted):
            for rank in range(size):
                model = load_model(folder, device="cpu", tensor_rank=TensorRank(rank, size))
        shards, family = tensor_slices(model), family_of(folder)
        for name, num_bytes in stored.items():
            copies = size
            if family.name_in_model(name) in shards:
                copies = max(1, size // config.num_kv_heads) if re.search("[kv]_proj", name) else 1
            assert num_read[name] == num_bytes * copies, name
        replicated = sum(num_bytes for name, num_bytes in stored.items() if num_read[name] > num_bytes)
        assert sum(num_read.values()) <= sum(stored.values()) + replicated * (size - 1)


@pytest.mark.parametrize("part", [(), (slice(None), slice(None)), (slice(1, 3),), (slice(None), slice(2, 5))])
@pytest.mark.parametrize("shape", [(4, 6), (4, 6, 3)])
def test_the_runs_of_a_part_are_its_bytes(part, shape):
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int16).view(shape)
    data = whole.numpy().tobytes()
    runs = _Runs.of(shape, 2, part).after(0)
    found = b"".join(data[start : start + count] for reads in runs.reads() for start, count in reads)
    assert found == whole[part].contiguous().numpy().tobytes()
    assert (runs.shape, runs.num_bytes) == (tuple(whole[part].shape), len(found))

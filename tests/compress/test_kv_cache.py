"""An 8-bit KV cache stated by a folder: scales as `compressed-tensors` expects them, and the engine that reads them."""

import dataclasses
import json

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from model.hugging_face import CONVERSATIONS, Oracle
from safetensors.torch import load_file

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.scheme import Rule, Scheme, load_scheme
from saccade.engine import Engine
from saccade.engine.config import EngineConfig
from saccade.engine.device.loading import load_runner
from saccade.engine.device.runner import PixelScale
from saccade.engine.sampling_params import SamplingParams
from saccade.errors import CheckpointError, ConfigError
from saccade.model import attention, load_model
from saccade.model.quantization import parse_quantization
from saccade.processor import Processor

RULES = (Rule(part="language", layers="0", form="int4"),)
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
CONFIG = EngineConfig(page_size=8, num_pages=70, max_length=550, max_step_tokens=64)
GREY = PixelScale(mean=(0.5,) * 3, std=(0.5,) * 3)


@pytest.fixture(scope="module")
def samples(shards):
    return CalibrationConfig(shards=(str(shards / "large"),), num_samples=8)


@pytest.fixture(scope="module", params=["fp8", "int8"])
def form(request):
    return request.param


@pytest.fixture(scope="module")
def folder(form, checkpoint, samples, tmp_path_factory):
    """Only the first layer is rounded; every layer has scales."""
    out = tmp_path_factory.mktemp(form) / "out"
    report = compress(checkpoint, out, scheme=Scheme(rules=RULES, kv_cache=form), calibration=samples, device="cpu")
    assert report.kv_cache == form
    return out


def scales_of(folder):
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.endswith((".k_scale", ".v_scale"))}


def kv_scheme(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]


def test_every_attention_layer_has_scales_and_the_config_says_of_what(folder, form):
    args = QuantizationArgs.model_validate(kv_scheme(folder))
    kind = "float" if form == "fp8" else "int"
    assert (args.num_bits, args.type, args.strategy, args.dynamic) == (8, kind, "tensor", False)
    found = scales_of(folder)
    layers = load_model(folder, device="cpu").config.language.num_layers
    assert len(found) == 2 * layers
    assert all(name.rpartition(".")[0].endswith(".self_attn") for name in found)
    assert all(tensor.shape == (1,) and tensor.dtype == torch.float32 and tensor > 0 for tensor in found.values())


class RoundedAttention(attention.PackedAttention):
    """Attention to keys and values that the package rounds with the scales of a folder; keeps the largest of each."""

    folder, largest = None, None

    def __call__(self, layer, q_THK, k_TGK, v_TGK):
        q_THK, k_TGK = self.rotate(q_THK, k_TGK)
        self.largest.append((float(k_TGK.abs().max()), float(v_TGK.abs().max())))
        args, scales = QuantizationArgs.model_validate(kv_scheme(self.folder)), scales_of(self.folder)
        rows = []
        for name, x in (("k", k_TGK), ("v", v_TGK)):
            [scale] = [tensor for key, tensor in scales.items() if key.endswith(f".{layer}.self_attn.{name}_scale")]
            rows.append(fake_quantize(x.contiguous(), scale, torch.zeros(1), args))
        return attention.attention(
            q_THK,
            *rows,
            self._cu_seqlens,
            self._cu_seqlens,
            max_seqlen_q=self._max_seqlen,
            max_seqlen_k=self._max_seqlen,
            causal=True,
        )


@pytest.fixture
def rounded(folder, monkeypatch):
    """The decoder attends as `RoundedAttention`."""
    monkeypatch.setattr(RoundedAttention, "folder", folder)
    monkeypatch.setattr(RoundedAttention, "largest", [])
    monkeypatch.setattr("saccade.model.vlm.PackedAttention", RoundedAttention)
    return RoundedAttention


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_the_scales_and_computes_our_logits_on_rounded_keys_and_values(folder, checkpoint, rounded):
    oracle = Oracle(folder)
    loaded = {name: value for name, value in oracle.model.named_parameters() if name.endswith(("k_scale", "v_scale"))}
    assert len(loaded) == len(scales_of(folder))
    theirs = oracle.logits(oracle.inputs(CONVERSATIONS["multi-image"]))
    with torch.no_grad():
        ours = load_model(folder, device="cpu")(Processor.load(checkpoint)([CONVERSATIONS["multi-image"]]))
    assert rounded.largest
    assert (ours - theirs).norm() / theirs.norm() < 1e-3


def test_scales_are_those_of_the_largest_key_after_rope_and_value(folder, form, checkpoint, samples, rounded):
    """The first layer alone is compared: what the others read depends on what is rounded before them."""
    model = load_model(checkpoint, device="cpu")
    with torch.no_grad():
        for batch in load_batches(samples, Processor.load(checkpoint), model.config.language.vocab_size):
            model.hidden_states(batch)
    of_first = rounded.largest[:: model.config.language.num_layers]
    half = 448.0 if form == "fp8" else 127.5
    for name, index in (("k", 0), ("v", 1)):
        [scale] = [tensor for key, tensor in scales_of(folder).items() if key.endswith(f".0.self_attn.{name}_scale")]
        assert float(scale) == pytest.approx(max(one[index] for one in of_first) / half, rel=1e-5)


def test_the_engine_stores_keys_and_values_as_the_folder_says(folder, form, checkpoint):
    runner = load_runner(folder, CONFIG, pixels=GREY, device="cpu")
    assert runner.cache.entries.dtype == DTYPES[form]
    asked = load_runner(folder, dataclasses.replace(CONFIG, kv_format="model"), pixels=GREY, device="cpu")
    assert asked.cache.entries.dtype == torch.float32, "what is asked for has precedence"
    assert load_runner(checkpoint, CONFIG, pixels=GREY, device="cpu").cache.entries.dtype == torch.float32


def test_tokens_of_the_engine_are_those_with_keys_and_values_of_this_form(folder, form):
    found = []
    for kv_format in ("auto", form, "model"):
        config = dataclasses.replace(CONFIG, kv_format=kv_format, num_workers=0)
        with Engine.load(folder, device="cpu", config=config) as engine:
            sampling = SamplingParams(max_tokens=8, logprobs=1, ignore_eos=True)
            [output] = engine.generate([{"role": "user", "content": "hello"}], sampling)
            found.append(output)
    assert found[0].token_ids == found[1].token_ids
    assert [one.logprob for one in found[0].logprobs] == [one.logprob for one in found[1].logprobs]
    assert [one.logprob for one in found[0].logprobs] != [one.logprob for one in found[2].logprobs]


def test_a_scheme_file_states_it(tmp_path):
    (tmp_path / "scheme.toml").write_text('kv_cache = "fp8"\n[[rules]]\npart = "language"\nform = "int4"')
    scheme = load_scheme(tmp_path / "scheme.toml")
    assert scheme.kv_cache == "fp8"
    assert scheme.needs_calibration
    (tmp_path / "scheme.toml").write_text('kv_cache = "int4"\n[[rules]]\npart = "language"\nform = "int4"')
    with pytest.raises(ConfigError, match="kv_cache"):
        load_scheme(tmp_path / "scheme.toml")


def test_without_calibration_it_is_refused(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="needs calibration samples"):
        compress(checkpoint, tmp_path / "out", scheme=Scheme(rules=RULES, kv_cache="fp8"), device="cpu")


@pytest.mark.parametrize("change", [{"num_bits": 4}, {"symmetric": False}, {"type": "uint"}])
def test_another_form_of_a_folder_is_refused(change, folder):
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] |= change
    with pytest.raises(CheckpointError, match="kv_cache_scheme"):
        parse_quantization(raw)

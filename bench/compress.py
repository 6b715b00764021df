"""Measure compression on a trained model.

Methods are compared with rounding to nearest, calibration data of several kinds with each other, forms of activations
and of the KV cache with each other, and mixed schemes with uniform ones.

    saccade quickstart --no-serve --dir quickstart
    python -m bench.compress quickstart/run/checkpoints/step-00001000 \\
        --calibration quickstart/shards/train --held-out quickstart/shards/held-out

Everything is compared with the original on held-out samples with images: KL divergence of the next token, perplexity,
the share of equal tokens. It ends with a list of statements, each of which must hold; exit status 1 if one does not.
"""

import argparse
import functools
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from saccade.compress import compress
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.layer_report import CompressReport
from saccade.compress.mixed_scheme import Picker
from saccade.compress.scheme import BUILT_IN, Scheme
from saccade.compress.verify import Fidelity, Reference
from saccade.device import resolve_device
from saccade.evaluate.statistics import Difference, Metric, paired_difference, ratio_metric
from saccade.kernels.attention import attention
from saccade.kernels.paged_attention import quantize_rows_reference
from saccade.model import load_model
from saccade.model.attention import PackedAttention
from saccade.model.checkpoint_reader import read_tensors, tensor_files
from saccade.processor import Processor


@dataclass
class Result:
    """A compressed folder compared with the original on held-out samples."""

    report: CompressReport
    fidelity: Fidelity
    kl: Metric
    """KL divergence by conversation."""

    def difference(self, other: "Result") -> Difference:
        """KL divergence minus the other's, with its interval by paired bootstrap over conversations."""
        return paired_difference(self.kl, other.kl, [str(number) for number in range(len(self.kl.counts))])


@dataclass
class Bench:
    """A checkpoint, its calibration, and what the original says about held-out samples."""

    checkpoint: Path
    calibration: CalibrationConfig
    reference: Reference
    model: torch.nn.Module
    device: torch.device
    group_size: int | None

    def run(self, scheme: Scheme, calibration: CalibrationConfig | None = None) -> Result:
        """Compress by a scheme into a folder that is removed, and compare."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out"
            chosen = calibration or self.calibration
            report = compress(self.checkpoint, out, scheme=scheme, calibration=chosen, device=self.device)
            model = load_model(out, device=self.device)
            kl = ratio_metric(*self.reference.kl_by_conversation(model).T.numpy(), higher_is_better=False)
            return Result(report, self.reference.compare(model), kl)

    def built_in(self, name: str) -> Scheme:
        """A built-in scheme, with the groups of this run."""
        scheme = BUILT_IN[name]
        return scheme if self.group_size is None else scheme.with_group_size(self.group_size)


def open_bench(
    checkpoint: Path,
    calibration: CalibrationConfig,
    held_out: str,
    num_held_out: int,
    device: str,
    group_size: int | None,
) -> Bench:
    """Load the original and its answers."""
    place = resolve_device(device)
    model = load_model(checkpoint, device=place)
    samples = CalibrationConfig(shards=(held_out,), num_samples=num_held_out, seed=calibration.seed + 1)
    batches = load_batches(samples, Processor.load(checkpoint), model.config.language.vocab_size)
    reference = Reference(model, [batch.to(place) for batch in batches])
    return Bench(checkpoint, calibration, reference, model, place, group_size)


def compare_methods(bench: Bench) -> dict[str, Result]:
    """Every built-in scheme."""
    found = {}
    print(f"{'scheme':<14}{'size':>8}{'KL':>12}{'perplexity':>12}{'same token':>12}{'worst layer / rtn':>20}")
    for name in BUILT_IN:
        found[name] = one = bench.run(bench.built_in(name))
        print(
            f"{name:<14}{one.report.ratio:>8.3f}{one.fidelity.kl:>12.2e}{one.fidelity.perplexity:>12.4f}{one.fidelity.agreement:>12.3%}"
            f"{max(decoder_ratios(one).values()):>20.3f}"
        )
    return found


def decoder_ratios(result: Result) -> dict[str, float]:
    """Error of every decoder projection as a share of that of rounding to nearest."""
    decoder = [one for one in result.report.layers if one.name.startswith("language.")]
    return {one.name: one.error / one.rtn_error for one in decoder}


def compare_activations(bench: Bench) -> dict[str, float]:
    """int8 with a scale per token, with one per layer, and with a zero point as well."""
    forms: dict[str, dict[str, bool]] = {
        "per token": {},
        "per layer": {"static": True},
        "per layer, asymmetric": {"static": True, "symmetric": False},
    }
    found = {}
    print(f"\n{'int8 activations':<24}{'KL':>12}")
    for name, settings in forms.items():
        rules = [replace(rule, **settings) for rule in BUILT_IN["int8"].rules]
        found[name] = bench.run(Scheme(name=name, rules=tuple(rules))).fidelity.kl
        print(f"{name:<24}{found[name]:>12.2e}", flush=True)
    return found


def compare_kv_caches(bench: Bench) -> dict[str, float]:
    """The original with keys and values in 8 bits.

    Scales are one per token and head, as in the engine, and one per layer, as in other engines."""
    found = {}
    print(f"\n{'KV cache':<24}{'KL':>12}")
    with tempfile.TemporaryDirectory() as folder:
        for form, dtype in (("fp8", torch.float8_e4m3fn), ("int8", torch.int8)):
            out = Path(folder) / form
            scheme = replace(BUILT_IN["int8-rtn"], kv_cache=form)
            compress(bench.checkpoint, out, scheme=scheme, calibration=bench.calibration, device=bench.device)
            scales = {
                name: float(tensor)
                for name, tensor in read_tensors(tensor_files(out), tensor_files(out), torch.device("cpu"))
                if name.endswith(("k_scale", "v_scale"))
            }
            for kind, own in (("token and head", None), ("layer", scales)):
                attention = functools.partial(RoundedAttention, dtype, own)
                with mock.patch("saccade.model.vlm.PackedAttention", attention):
                    found[f"{form} per {kind}"] = bench.reference.compare(bench.model).kl
                print(f"{form + ' per ' + kind:<24}{found[f'{form} per {kind}']:>12.2e}", flush=True)
    return found


class RoundedAttention(PackedAttention):
    """Attention to keys and values as an 8-bit KV cache gives them back."""

    def __init__(self, dtype: torch.dtype, scales: dict[str, float] | None, *args: Any) -> None:
        """`scales`: scales of every layer, by the names of their tensors; None: one for every token and head."""
        super().__init__(*args)
        self._dtype, self._scales = dtype, scales

    def __call__(self, layer: int, q_THK: Tensor, k_TGK: Tensor, v_TGK: Tensor) -> Tensor:
        """See `PackedAttention`."""
        q_THK, k_TGK = self.rotate(q_THK, k_TGK)
        rows = [self._rounded(layer, name, x) for name, x in (("k", k_TGK), ("v", v_TGK))]
        return attention(
            q_THK,
            *rows,
            self._cu_seqlens,
            self._cu_seqlens,
            max_seqlen_q=self._max_seqlen,
            max_seqlen_k=self._max_seqlen,
            causal=True,
            window=self._window,
        )

    def _rounded(self, layer: int, name: str, x_TGK: Tensor) -> Tensor:
        if self._scales is None:
            values, scale_TG = quantize_rows_reference(x_TGK, self._dtype)
            return (values.float() * scale_TG.unsqueeze(-1)).to(x_TGK.dtype)
        [scale] = [one for key, one in self._scales.items() if key.endswith(f".{layer}.self_attn.{name}_scale")]
        lowest, highest = (-448, 448) if self._dtype == torch.float8_e4m3fn else (-128, 127)
        scaled = (x_TGK.float() / scale).clamp(lowest, highest)
        values = scaled.round() if self._dtype == torch.int8 else scaled
        return (values.to(self._dtype).float() * scale).to(x_TGK.dtype)


def compare_calibration(bench: Bench, num_draws: int) -> dict[str, dict[str, Any]]:
    """GPTQ and AWQ calibrated on samples as they are, without images, on random tokens; and with image tokens weighted.

    Means over several draws of samples: they differ from each other by a third.
    """
    variants = {
        "images": bench.calibration,
        "images, balanced": replace(bench.calibration, image_weight="balanced"),
        "text": replace(bench.calibration, kind="text"),
        "random": replace(bench.calibration, kind="random"),
    }
    found: dict[str, dict[str, Any]] = {}
    print(f"\n{'calibration':<20}{'GPTQ KL':>12}{'AWQ KL':>12}")
    for name, calibration in variants.items():
        draws = [replace(calibration, seed=calibration.seed + number) for number in range(num_draws)]
        found[name] = kl = {
            method: sum(bench.run(bench.built_in(f"w4a16-{method}"), draw).fidelity.kl for draw in draws) / num_draws
            for method in ("gptq", "awq")
        }
        print(f"{name:<20}{kl['gptq']:>12.2e}{kl['awq']:>12.2e}", flush=True)
    return found


def compare_mixed(bench: Bench, uniform: dict[str, Result]) -> dict[str, dict[str, Any]]:
    """What `saccade compress --target-size` picks within the size of every uniform scheme, to the byte."""
    found = {}
    print(
        f"\n{'uniform':<14}{'size':>8}{'KL':>12}  {'picked':<16}{'size':>8}{'KL':>12}{'difference':>12}  95 % interval"
    )
    with tempfile.TemporaryDirectory() as folder:
        picker = Picker(bench.checkpoint, bench.calibration, Path(folder), device=bench.device)
        for name, one in uniform.items():
            picked = picker.within_size(one.report.ratio)
            mixed = bench.run(picked)
            change = mixed.difference(one)
            found[name] = {
                "picked": picked.name,
                "ratio": mixed.report.ratio,
                "kl": mixed.fidelity.kl,
                "uniform_ratio": one.report.ratio,
                "uniform_kl": one.fidelity.kl,
                "difference": asdict(change),
                "rules": [asdict(rule) for rule in picked.rules],
            }
            print(
                f"{name:<14}{one.report.ratio:>8.4f}{one.fidelity.kl:>12.2e}  "
                f"{picked.name:<16}{mixed.report.ratio:>8.4f}{mixed.fidelity.kl:>12.2e}"
                f"{change.value:>12.1e}  [{change.low:.1e}, {change.high:.1e}]",
                flush=True,
            )
    return found


def statements(
    methods: dict[str, Result], calibration: dict[str, Any] | None, mixed: dict[str, Any]
) -> dict[str, bool]:
    """Statements that must hold, and whether each does."""
    kl = {name: one.fidelity.kl for name, one in methods.items()}
    highest = max(decoder_ratios(methods["w4a16-gptq"]).values())
    found = {
        "GPTQ loses less than rounding to nearest on every decoder projection": highest < 1,
        "GPTQ has a lower KL divergence than rounding to nearest": kl["w4a16-gptq"] < kl["w4a16-rtn"],
        "AWQ has a lower KL divergence than rounding to nearest": kl["w4a16-awq"] < kl["w4a16-rtn"],
        **{
            f"what is picked within the size of {name} is no larger, and not worse (the interval reaches 0)": (
                one["ratio"] <= one["uniform_ratio"] and one["difference"]["low"] <= 0
            )
            for name, one in mixed.items()
        },
    }
    if calibration is not None:
        for kind in ("text", "random"):
            is_better = calibration["images"]["gptq"] < calibration[kind]["gptq"]
            found[f"GPTQ calibrated on images is better than on {kind}"] = is_better
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--held-out", required=True)
    parser.add_argument("--num-samples", type=int, default=128)
    parser.add_argument("--num-held-out", type=int, default=256)
    parser.add_argument(
        "--num-draws", type=int, default=3, help="draws of samples that calibration data is compared on; 0: it is not"
    )
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    calibration = CalibrationConfig(shards=(options.calibration,), num_samples=options.num_samples, seed=options.seed)
    bench = open_bench(
        options.checkpoint, calibration, options.held_out, options.num_held_out, options.device, options.group_size
    )
    methods = compare_methods(bench)
    mixed = compare_mixed(bench, methods)
    kinds = compare_calibration(bench, options.num_draws) if options.num_draws else None
    activations, kv_caches = compare_activations(bench), compare_kv_caches(bench)
    found = statements(methods, kinds, mixed)
    print()
    for statement, holds in found.items():
        print(f"{'yes' if holds else 'NO ':<4}{statement}")
    if options.json is not None:
        figures = {
            name: {"ratio": one.report.ratio, "decoder": decoder_ratios(one), **one.fidelity.to_json()}
            for name, one in methods.items()
        }
        content = {
            "methods": figures,
            "mixed": mixed,
            "calibration": kinds,
            "activations": activations,
            "kv_caches": kv_caches,
            "statements": found,
        }
        options.json.write_text(json.dumps(content))
    sys.exit(not all(found.values()))


if __name__ == "__main__":
    main()

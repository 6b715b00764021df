"""Compress a checkpoint folder: the flow, one block of the model at a time.

    check -> load what is outside of blocks -> for every block: load, observe, fold scales, round, save, run again
    -> write the folder

Only one block is in memory, with the activations of the calibration batches at its input. A block is observed with its
original weights, and the next one gets the output of the compressed one: what is rounded later makes up for what was
lost before.

A finished block is saved in `OUT.partial`. A run that was killed continues after the last finished block: the batches
run through the finished blocks as they were saved, without calibration, so that the result is the same to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from saccade.compress.block_runner import HEAD, BlockRunner, is_in, row_weights
from saccade.compress.calibration import CalibrationConfig, fingerprint, image_weight, load_batches
from saccade.compress.export import quantization_config, write_folder
from saccade.compress.finished_blocks import FinishedBlocks
from saccade.compress.input_statistics import InputStatistics
from saccade.compress.kv_scales import ATTENTION, KV_SCALES, KVObserver
from saccade.compress.layer_report import CompressReport, LayerReport
from saccade.compress.observed_linear import ObservedLinear, Observer, replace_projection
from saccade.compress.original import Original
from saccade.compress.quantizers import stored_scheme
from saccade.compress.rounding import RoundedProjection, round_projections
from saccade.compress.scheme import Rule, Scheme, load_scheme, part_of
from saccade.device import resolve_device
from saccade.errors import ConfigError
from saccade.model.checkpoint_reader import tensor_files
from saccade.model.checkpoint_writer import check_new_folder
from saccade.model.linear import Linear, Projection, projections
from saccade.model.quantization import StoredScheme
from saccade.model.quantized_linear import quantized_form
from saccade.model.weights import load_tensor
from saccade.processor import Processor

logger = logging.getLogger(__name__)

OnBlock = Callable[[str, int, int], None]
"""Called after every block with its name, the number of finished blocks and of all."""


def compress(
    checkpoint: str | Path,
    out: str | Path,
    *,
    scheme: str | Path | Scheme,
    calibration: CalibrationConfig | Sequence[str] | None = None,
    device: str | torch.device = "auto",
    on_block: OnBlock | None = None,
) -> CompressReport:
    """Write a compressed copy of a checkpoint folder.

    `scheme`: a built-in name, a TOML file, or a `Scheme`.
    `calibration`: shard folders, or a `CalibrationConfig`; GPTQ and AWQ need it.
    """
    checkpoint, out, device = Path(checkpoint), Path(out), resolve_device(device)
    scheme = scheme if isinstance(scheme, Scheme) else load_scheme(scheme)
    if calibration is not None and not isinstance(calibration, CalibrationConfig):
        calibration = CalibrationConfig(shards=tuple(map(str, calibration)))
    if scheme.needs_calibration and calibration is None:
        raise ConfigError(
            f"scheme {scheme.name} needs calibration samples: --calibration SHARDS, "
            "or use one without: int8-rtn, fp8, w4a16-rtn"
        )
    run = _Run(checkpoint, out, scheme, calibration, device)
    run.compress_blocks(on_block)
    return run.write()


class _Run:
    """One compression: the model on the meta device, its blocks filled one at a time."""

    def __init__(
        self, checkpoint: Path, out: Path, scheme: Scheme, calibration: CalibrationConfig | None, device: torch.device
    ) -> None:
        check_new_folder(out)
        self.original, self.out, self.scheme, self.device = Original(checkpoint), out, scheme, device
        self.model, self.blocks = self.original.model, self.original.blocks
        self.rules = self.original.rules(scheme)
        if not self.rules:
            raise ConfigError(
                f"scheme {scheme.name} keeps every projection, so there is nothing to compress. Allow more loss"
            )
        self.calibration = calibration
        self.finished = FinishedBlocks(out, self._settings())
        self.reports: dict[str, list[LayerReport]] = {}
        self.num_samples = self.num_resumed = 0
        self.reached: set[str] = set()
        """Parts of the model that calibration samples have reached."""

    def _settings(self) -> dict[str, Any]:
        """The settings that determine the result: a run continues only with equal ones."""
        files = sorted(set(self.original.files.values()))
        stat = {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
        return {
            "checkpoint": str(self.original.folder.resolve()),
            "weights": stat,
            "scheme": asdict(self.scheme),
            "calibration": None if self.calibration is None else fingerprint(self.calibration),
            "device": self.device.type,
        }

    # -------------------------------------------------------------- blocks

    def compress_blocks(self, on_block: OnBlock | None) -> None:
        """Compress all blocks, or what an earlier run left of them."""
        todo = [name for name in self.blocks if self._is_changed(name)]
        runner = self._runner() if self.calibration is not None and todo else None
        try:
            for number, name in enumerate(self.blocks):
                self._compress_block(name, runner, is_last=bool(todo) and name == todo[-1])
                if on_block is not None:
                    on_block(name, number + 1, len(self.blocks))
                if runner is not None and todo and name == todo[-1]:
                    runner.close()
                    runner = None
        finally:
            if runner is not None:
                runner.close()

    def _is_changed(self, name: str) -> bool:
        """Whether a block has tensors that its original has not."""
        return self._has_kv_scales(name) or any(is_in(layer, name) for layer in self.rules)

    def _has_kv_scales(self, name: str) -> bool:
        return self.scheme.kv_cache is not None and name.startswith("language.")

    def _runner(self) -> BlockRunner:
        assert self.calibration is not None, "there is a runner where there is calibration"
        processor = Processor.load(self.original.folder)
        batches = load_batches(self.calibration, processor, self.model.config.language.vocab_size)
        self.image_weight = image_weight(self.calibration, batches)
        self.num_samples = sum(batch.num_conversations for batch in batches)
        outside = [
            ours for ours in self.original.names.values() if not any(is_in(ours, block) for block in self.blocks)
        ]
        for name, tensor in self.original.read(outside, self.device).items():
            load_tensor(self.model, name, tensor, self._compute_dtype(tensor))
        self.model.requires_grad_(False).eval()
        return BlockRunner(self.model, self.blocks, [batch.to(self.device) for batch in batches])

    def _compute_dtype(self, tensor: Tensor) -> torch.dtype:
        return torch.float32 if self.device.type == "cpu" else tensor.dtype

    def _compress_block(self, name: str, runner: BlockRunner | None, *, is_last: bool) -> None:
        """Load, observe, fold, round, save, run again."""
        rules = {layer: rule for layer, rule in self.rules.items() if is_in(layer, name)}
        if runner is not None and runner.calls(name):
            self.reached.add(part_of(name))
        is_changed = self._is_changed(name)
        if not is_changed and runner is None:
            return
        stored = self.finished.load(name) if is_changed else None
        if stored is not None:
            tensors, self.reports[name] = stored
            self.num_resumed += 1
        else:
            tensors = self.original.read(
                [ours for ours in self.original.names.values() if is_in(ours, name)], self.device
            )
            if is_changed:
                tensors = self._round_block(name, tensors, rules, runner)
                self.finished.save(name, tensors, self.reports[name])
        if runner is not None and not is_last:
            self._load_block(name, tensors, rules)
            with torch.no_grad():
                for call in runner.calls(name):
                    runner.resume(call, runner.compute(call))
        self.blocks[name].to_empty(device="meta")

    def _round_block(
        self, name: str, tensors: dict[str, Tensor], rules: Mapping[str, Rule], runner: BlockRunner | None
    ) -> dict[str, Tensor]:
        """The tensors of a block with its projections rounded."""
        statistics, kv = ({}, None) if runner is None else self._observe(name, tensors, rules, runner)
        is_reached = part_of(name) in self.reached
        rounded = round_projections(self.blocks[name], name, tensors, rules, statistics, is_reached=is_reached)
        self.reports[name] = [
            self._layer_report(layer, one, statistics.get(layer), runner) for layer, one in rounded.items()
        ]
        if self.scheme.kv_cache is not None and kv is not None:
            scales = kv.scales(self.scheme.kv_cache)
            tensors |= {f"{name}.{ATTENTION}.{suffix}": tensor for suffix, tensor in scales.items()}
        return tensors

    def _layer_report(
        self, layer: str, rounded: RoundedProjection, statistics: InputStatistics | None, runner: BlockRunner | None
    ) -> LayerReport:
        rule, scheme = self.rules[layer], rounded.scheme
        return LayerReport(
            name=layer,
            form=rule.form,
            method=rounded.method,
            group_size=scheme.group_size,
            note=_note(rule, self.scheme.rule(layer), scheme, rounded.num_inputs, statistics, runner),
            error=rounded.error,
            rtn_error=rounded.rtn_error,
        )

    def _observe(
        self, name: str, tensors: Mapping[str, Tensor], rules: Mapping[str, Rule], runner: BlockRunner
    ) -> tuple[dict[str, InputStatistics], KVObserver | None]:
        """Statistics of the projections' inputs and of keys and values over all batches, with the original weights."""
        self._load_block(name, tensors, {})
        observer, plain = Observer(), {layer: self.model.get_submodule(layer) for layer in rules}
        kv = KVObserver() if self._has_kv_scales(name) else None
        for layer, module in plain.items():
            assert isinstance(module, Linear), "rules are about plain projections"
            replace_projection(self.model, layer, ObservedLinear(layer, module, observer))
        # With gradients enabled no kernel fuses or splits what a projection reads; no parameter requires any.
        with torch.enable_grad():
            for call in runner.calls(name):
                observer.weight_T = row_weights(name, call.inputs, self.image_weight)
                if name == HEAD:
                    observer.add(HEAD, call.args[0], self.model.head.stored_shape[1])
                else:
                    runner.compute(call if kv is None else kv.observed(call))
                observer.forget_tensors()
        for layer, module in plain.items():
            assert isinstance(module, Projection), "it was one"
            replace_projection(self.model, layer, module)
        self.blocks[name].to_empty(device="meta")
        return observer.statistics, kv

    def _load_block(self, name: str, tensors: Mapping[str, Tensor], rules: Mapping[str, Rule]) -> None:
        """Give a block its weights; projections with a rule become the form they are stored in."""
        for layer, rule in rules.items():
            plain = self.model.get_submodule(layer)
            assert isinstance(plain, Linear), "a block is compressed once"
            replace_projection(self.model, layer, quantized_form(plain, stored_scheme(rule, plain.stored_shape[1])))
        for ours, tensor in tensors.items():
            if not ours.endswith((".weight_shape", *KV_SCALES)):
                load_tensor(self.model, ours, tensor.to(self.device), self._compute_dtype(tensor))
        self.blocks[name].requires_grad_(False)

    # -------------------------------------------------------------- the folder

    def write(self) -> CompressReport:
        """Write the compressed folder from the finished blocks and the kept tensors, and remove the saved blocks."""
        schemes: dict[str, StoredScheme | None] = {}
        for name, layer in projections(self.model):
            rule = self.rules.get(name)
            schemes[name] = None if rule is None else stored_scheme(rule, layer.stored_shape[1])
        before = self.original.num_bytes
        on_disk = {ours: name for name, ours in self.original.names.items()}
        reports = [report for name in self.blocks for report in self.reports.get(name, [])]
        ordered = {name for name, rule in self.rules.items() if rule.method == "gptq"}
        quantization = quantization_config(schemes, self.original.family, on_disk, ordered, self.scheme.kv_cache)
        write_folder(self.original.folder, self.out, quantization, self._tensors(), before)
        self.finished.remove()
        return CompressReport(
            scheme=self.scheme.name,
            bytes_before=before,
            bytes_after=sum(file.stat().st_size for file in set(tensor_files(self.out).values())),
            layers=reports,
            kept=[name for name, scheme in schemes.items() if scheme is None],
            num_samples=self.num_samples,
            num_resumed=self.num_resumed,
            kv_cache=self.scheme.kv_cache,
        )

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors by their names on disk. Tensors of a layer are called as its weight was."""
        on_disk = {ours: name for name, ours in self.original.names.items()}
        done = set()
        for name in self.blocks:
            if name in self.reports:
                loaded = self.finished.load(name)
                assert loaded is not None, "a finished block was saved"
                for ours, tensor in loaded[0].items():
                    yield _name_on_disk(ours, on_disk), tensor
                done.add(name)
        kept = [name for name, ours in self.original.names.items() if not any(is_in(ours, block) for block in done)]
        yield from self.original.read_on_disk(kept, torch.device("cpu"))


def _name_on_disk(ours: str, on_disk: Mapping[str, str]) -> str:
    """The name of a tensor on disk; one that the original lacks is named after a weight next to it."""
    if ours in on_disk:
        return on_disk[ours]
    layer, _, last = ours.rpartition(".")
    neighbour = f"{layer}.q_proj.weight" if ours.endswith(KV_SCALES) else f"{layer}.weight"
    return on_disk[neighbour].removesuffix("q_proj.weight" if ours.endswith(KV_SCALES) else "weight") + last


def _note(
    rule: Rule,
    stated: Rule | None,
    scheme: StoredScheme,
    num_inputs: int,
    statistics: InputStatistics | None,
    runner: BlockRunner | None,
) -> str:
    """Describe how a layer differs from the scheme, whose rule is `stated`."""
    notes = []
    wanted = rule.group_size or 128
    if stated is not None and stated.form != rule.form:
        notes.append(f"{rule.form}, one scale per output: transformers cannot load this tower with packed weights")
    if rule.form == "int4" and scheme.group_size != wanted:
        instead = "one scale per output" if scheme.group_size is None else f"groups of {scheme.group_size}"
        notes.append(f"{instead}: {num_inputs} inputs are no multiple of {wanted}")
    if rule.method != "rtn" and statistics is None:
        why = "no calibration" if runner is None else "no sample of the calibration reaches it"
        notes.append(f"rounded to nearest: {why}")
    return "; ".join(notes)

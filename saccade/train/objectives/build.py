"""The objective that a recipe chooses, with the frozen models it needs, and its check before a run."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from saccade.data.config import Source
from saccade.data.index import open_index
from saccade.device import DTYPES
from saccade.errors import ConfigError, DataError
from saccade.model import load_model
from saccade.model.families import load_model_config
from saccade.model.vlm import VLM
from saccade.model.weights import meta_model
from saccade.processor import Processor
from saccade.train.lora import without_adapters
from saccade.train.objectives.chunks import log_probabilities
from saccade.train.objectives.config import DistillationConfig, ObjectiveConfig
from saccade.train.objectives.cross_entropy import CrossEntropy
from saccade.train.objectives.distillation import Distillation
from saccade.train.objectives.objective import Labelled, Objective
from saccade.train.objectives.preference import PreferenceOptimization, Reference, frozen_reference
from saccade.train.objectives.stored_distillation import StoredDistillation
from saccade.train.objectives.stored_logits import LogitsOf, missing_shards


def build_objective(
    config: ObjectiveConfig,
    *,
    folder: Path,
    has_lora: bool = False,
    dtype: str = "bf16",
    device: torch.device | str = "cpu",
    make_start: Callable[[], VLM] | None = None,
) -> Objective:
    """Make the objective of a stage.

    `folder`: what the run starts from; `dtype`: compute dtype of training; `device`: of frozen models, which are not
    loaded on the meta device; `make_start`: makes the frozen model that the stage starts from, if that is neither in
    `folder` nor the trained model without its adapters.
    """
    if (distillation := config.distillation) is not None and distillation.top_k is not None:
        stored = stored_logits_of(distillation, folder, dtype)
        vocab_size = shared_vocabulary(distillation.teacher, folder)
        return StoredDistillation(stored, vocab_size=vocab_size, label_smoothing=config.label_smoothing)
    if distillation is not None:
        teacher = _frozen(distillation.teacher, distillation.teacher_dtype or dtype, device)
        return Distillation(distillation, teacher, label_smoothing=config.label_smoothing)
    if config.dpo is not None:
        if config.compares_with_start and make_start is not None:
            return PreferenceOptimization(config.dpo, frozen_reference(make_start()))
        return PreferenceOptimization(config.dpo, _reference(config, folder, has_lora, dtype, device))
    return CrossEntropy(label_smoothing=config.label_smoothing)


def stored_logits_of(config: DistillationConfig, folder: Path, dtype: str) -> LogitsOf:
    """The stored logits that a stage reads. `dtype`: compute dtype of training."""
    return LogitsOf(config=config, folder=folder, dtype=config.teacher_dtype or dtype)


def shared_vocabulary(teacher: Path, folder: Path) -> int:
    """Entries that both heads have: one may be padded further than the other."""
    return min(meta_model(one)[0].head.out_features for one in (teacher, folder))


def _reference(
    config: ObjectiveConfig, folder: Path, has_lora: bool, dtype: str, device: torch.device | str
) -> Reference:
    """The reference of DPO: the model without its adapters, or a frozen model."""
    assert config.dpo is not None, "only DPO has a reference"
    if has_lora and config.dpo.reference is None:
        return _unadapted_reference
    return frozen_reference(_frozen(config.dpo.reference or folder, dtype, device))


def _unadapted_reference(model: VLM, batch: Labelled, rows_S: Tensor) -> Tensor:
    """Compute log-probabilities with adapters switched off; every rank runs the same blocks, as in training."""
    with without_adapters(model):
        hidden_TD = model.hidden_states(batch.inputs, encode_dummy_image=batch.encode_dummy_image)
        return log_probabilities(model.head, hidden_TD[rows_S], batch.labels[rows_S])


def _frozen(folder: Path, dtype: str, device: torch.device | str) -> VLM:
    if torch.device(device).type == "meta":
        model, _ = meta_model(folder)
        return model.to(DTYPES[dtype]).eval().requires_grad_(False)
    return load_model(folder, device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)


# ------------------------------------------------------------------ check


def check_objective(config: ObjectiveConfig, folder: Path) -> None:
    """Refuse a teacher or reference that does not read the inputs of the model in `folder`. Loads no weights."""
    if config.distillation is not None:
        _check_frozen(config.distillation.teacher, folder, "teacher")
        if config.distillation.hidden_weight:
            _check_width(config.distillation.teacher, folder)
    if config.dpo is not None and config.dpo.reference is not None:
        _check_frozen(config.dpo.reference, folder, "reference")


def check_stored_logits(
    config: ObjectiveConfig, folder: Path, dtype: str, sources: Sequence[Source], resize: str, max_seq_len: int
) -> None:
    """Refuse a source whose shards have no stored logits, if the objective reads them."""
    if config.distillation is None or config.distillation.top_k is None:
        return
    wanted = stored_logits_of(config.distillation, folder, dtype)
    for source in sources:
        index = open_index(source.path)
        if missing := missing_shards(wanted, index, source.rules, resize, max_seq_len):
            raise DataError(
                f"{source.path}: {len(missing)} of {len(index.shards)} shards have no logits of the teacher "
                f"{config.distillation.teacher} with top_k {config.distillation.top_k} and max_seq_len {max_seq_len}. "
                "Compute them first: saccade train RECIPE --teacher-logits"
            )


def _check_frozen(other: Path, folder: Path, name: str) -> None:
    """Both models must give every conversation the same tokens, patches and positions."""
    ours, theirs = load_model_config(folder), load_model_config(other)
    if ours.family != theirs.family:
        raise ConfigError(
            f"the {name} {other} is a {theirs.family} model, the trained one is {ours.family}. "
            f"Use a {name} of its family"
        )
    mine, its = Processor.load(folder), Processor.load(other)
    if _vocabulary(folder) != _vocabulary(other):
        raise ConfigError(
            f"the {name} {other} has another vocabulary than {folder}. Use a {name} with the same tokenizer.json"
        )
    if repr(mine.images) != repr(its.images):
        raise ConfigError(
            f"the {name} {other} has other image settings than {folder}. "
            f"Use a {name} with the same preprocessor_config.json"
        )


def _check_width(teacher: Path, folder: Path) -> None:
    widths = [load_model_config(one).language.hidden_size for one in (folder, teacher)]
    if widths[0] != widths[1]:
        raise ConfigError(
            f"hidden_weight compares hidden states of {widths[0]} and {widths[1]} channels. "
            "Set it to 0, or use a teacher of the same width"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    """Token ids by text, control tokens included."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
    return dict(content["model"]["vocab"]) | added

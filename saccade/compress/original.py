"""The checkpoint that is compressed: its model on the meta device, and its tensors on disk until they are asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from saccade.compress.block_runner import HEAD, model_blocks
from saccade.compress.scheme import BUILT_IN, Rule, Scheme, check_scheme
from saccade.errors import CheckpointError, ConfigError
from saccade.model.checkpoint_reader import read_tensors, tensor_files
from saccade.model.families import family_of
from saccade.model.linear import Linear, projections
from saccade.model.weights import check_finite, match_tensors, meta_model, tensor_shapes


class Original:
    """A checkpoint folder in 16 or 32 bits."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.family = folder, family_of(folder)
        self.model, quantization = meta_model(folder)
        if quantization is not None:
            raise CheckpointError(f"{folder}: is quantized already. Compress the original checkpoint")
        self.files = tensor_files(folder)
        shapes = tensor_shapes(self.files, any_dtype=True)
        self.names = match_tensors(shapes, self.model, self.family, folder)
        """Name in the model by name on disk."""
        self.blocks = model_blocks(self.model)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight files."""
        return sum(file.stat().st_size for file in set(self.files.values()))

    @functools.cached_property
    def num_bytes_per_weight(self) -> int:
        """Bytes of one number in the decoder's weights."""
        [tensor] = self.read(["language.norm.weight"], torch.device("cpu")).values()
        return tensor.element_size()

    def read(self, wanted: Iterable[str], device: torch.device) -> dict[str, Tensor]:
        """Tensors by their names in the model."""
        chosen = set(wanted)
        on_disk = [name for name, ours in self.names.items() if ours in chosen]
        return {self.names[name]: tensor for name, tensor in self.read_on_disk(on_disk, device)}

    def read_on_disk(self, names: Iterable[str], device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Tensors by their names on disk. NaN and infinity are refused."""
        for name, tensor in read_tensors(self.files, names, device):
            check_finite({name: tensor}, self.folder)
            yield name, tensor

    def plain_projections(self) -> dict[str, Linear]:
        """Projections that can be compressed: not the patch embedding, nor a head that is the embedding."""
        tied = id(self.model.language.embed_tokens.weight)
        return {
            name: layer
            for name, layer in projections(self.model)
            if type(layer) is Linear and not any(id(parameter) == tied for parameter in layer.parameters())
        }

    def rules(self, scheme: Scheme) -> dict[str, Rule]:
        """The rule of every projection that a scheme compresses. Rules that would have no effect are refused."""
        check_scheme(scheme, [name for name, layer in projections(self.model) if type(layer) is Linear])
        if self.model.config.tied_head and (rule := scheme.rule(HEAD)) is not None:
            raise ConfigError(
                f"scheme {scheme.name}: a rule stores the head in {rule.form}, but the head of {self.folder} is the "
                "embedding (tie_word_embeddings), which is kept. Remove the rule of part head"
            )
        found = {name: scheme.rule(name) for name in self.plain_projections()}
        rules = {name: rule for name, rule in found.items() if rule is not None}
        if scheme.name in BUILT_IN:
            rules = {name: rule if self.can_store(rule) else _unpacked(rule) for name, rule in rules.items()}
        return rules

    def can_store(self, rule: Rule) -> bool:
        """Whether other libraries load projections of this form.

        `transformers` initializes the packed weights of some towers, and fails."""
        return self.family.packs_tower or rule.form != "int4" or rule.part != "vision"


def _unpacked(rule: Rule) -> Rule:
    """The rule of a tower in 8 bits instead of 4."""
    return Rule(part=rule.part, form="int8", method="smoothquant" if rule.method == "awq" else rule.method)

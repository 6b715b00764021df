"""Interface of an objective: the seam between the training loop and what is optimized.

Legend: T tokens, D decoder width.

The loop runs the model to its hidden states and calls `Objective.loss` once per micro-batch, inside the module that
FSDP or DDP wraps. A term is a sum over the units of a micro-batch (loss tokens, or pairs of conversations) divided by
`normalizer`, the number of units in the whole step: micro-batches and ranks are then simply summed, however unevenly
the units are distributed.

An objective never forms the logits of a whole packed sequence: it asks the head for a loss (`Projection.cross_entropy`)
or works in chunks of rows (`chunks.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from saccade.data.loader import Stream
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs


@dataclass(frozen=True)
class Labelled:
    """A packed sequence and its labels, on the device."""

    inputs: ModelInputs
    labels: Tensor
    """[T]: the next token, or `IGNORED`."""
    num_labels: int
    """Loss tokens, known on the host."""
    encode_dummy_image: bool = False
    """Whether a forward pass without images encodes a dummy image, so that all ranks run the same blocks."""
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    """Further tensors, read by the objective's `target_reader`."""


ReadTargets = Callable[[Sequence[str], ModelInputs, Tensor], Mapping[str, Tensor]]
"""(sample ids, inputs, labels) of a packed sequence on the host to further tensors that its loss needs."""


@dataclass(frozen=True)
class LossTerms:
    """The loss of a micro-batch."""

    terms: Mapping[str, Tensor]
    """Scalars with gradients, weighted and divided by the normaliser; their sum is optimized."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Sums over the units of the micro-batch, without gradients; logged as means over the step."""

    @property
    def total(self) -> Tensor:
        """The loss."""
        first, *others = self.terms.values()
        for term in others:
            first = first + term
        return first


class Objective:
    """A loss that a stage optimizes."""

    metric_names: tuple[str, ...] = ()
    """Names of the metrics of every `LossTerms`, the same in all micro-batches of a stage."""

    def num_units(self, inputs: ModelInputs, num_labels: int) -> float:
        """Count on the host what a packed sequence adds to the normaliser: loss tokens by default."""
        del inputs
        return num_labels

    def target_reader(self, stream: Stream) -> ReadTargets | None:
        """Return the reader of further targets of a stream's packed sequences, on the host; None if there are none."""
        del stream
        return None

    def validated(self, inputs: ModelInputs, labels_T: Tensor) -> Tensor:
        """Return the labels whose cross entropy validation reports: all, unless some are to become improbable."""
        del inputs
        return labels_T

    def loss(self, model: VLM, hidden_TD: Tensor, batch: Labelled, normalizer: Tensor) -> LossTerms:
        """Return the terms of a micro-batch. `normalizer` is the units of the whole step, a scalar on the device."""
        raise NotImplementedError

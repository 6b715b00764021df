"""The model of one rank of a pipeline, and its loss if it has the last stage.

Legend: T tokens of this rank, M image tokens, D decoder width, L later layers that image features are added to.

A stage is given rows [T + L * M, D] by the stage before it: the residual stream, then the image features of later
layers (`LayerFeatures`), which most models do not have. All ranks of a pipeline read the same packed sequences, so
every rank knows the number of rows: nothing is padded, and no size is sent. Tensor ranks send their part of the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.model.language import LayerFeatures
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs
from saccade.train.batches import MicroBatch
from saccade.train.loss import ModelWithLoss
from saccade.train.objectives.objective import Objective
from saccade.train.pipeline_link import PipelineLinks
from saccade.train.pipeline_stages import PipelineStages
from saccade.train.tensor_exchange import TrainingExchange


class PipelineModule(ModelWithLoss):
    """The stages of one rank."""

    def __init__(
        self,
        model: VLM,
        objective: Objective,
        stages: PipelineStages,
        links: PipelineLinks,
        exchange: TrainingExchange | None = None,
    ) -> None:
        """`exchange`: what the rank exchanges with other tensor ranks."""
        super().__init__(model, objective)
        self.stages, self.links, self._exchange = stages, links, exchange
        self.has_last_stage = links.rank == stages.num_ranks - 1

    def stage_of_chunk(self, chunk: int) -> int:
        """The stage of a chunk of this rank."""
        return chunk * self.stages.num_ranks + self.links.rank

    def forward(  # type: ignore[override]
        self, batch: MicroBatch, count: Tensor, chunk: int, received: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run one chunk: (rows for the next stage, nothing), or what `ModelWithLoss` returns if it is the last one."""
        rows = self._run(batch.inputs, chunk, received)
        if self.stage_of_chunk(chunk) < self.stages.last:
            return rows, rows.new_zeros(0)
        return self.loss_of(
            rows, batch.inputs, batch.labels, count, batch.num_loss_tokens, batch.by_source, batch.targets
        )

    def shape(self, inputs: ModelInputs, stage: int) -> tuple[int, int]:
        """Shape of the rows that a stage is given."""
        later = self.stages.num_later_features(stage) * len(inputs.image_token_index)
        return self._num_own_tokens(inputs) + later, self.model.config.language.hidden_size

    def start_backward(self, num_tokens: int) -> None:
        """Prepare for the backward pass of a micro-batch: activation checkpointing may run its layers again."""
        if self._exchange is not None:
            self._exchange.num_tokens = num_tokens

    # -------------------------------------------------------------- forward of a stage

    def _num_own_tokens(self, inputs: ModelInputs) -> int:
        return inputs.num_tokens if self._exchange is None else self._exchange.own_length(inputs.num_tokens)

    def _run(self, inputs: ModelInputs, chunk: int, received: Tensor | None) -> Tensor:
        """Rows for the next stage; of the last stage [T, D] hidden states, of all tokens on every tensor rank."""
        stage, language = self.stage_of_chunk(chunk), self.model.language
        x_TD, features = self._start(inputs, stage, received)
        attend, update_TD = self.model.attention(inputs), None
        first = self.stages.bounds[stage]
        for number in self.stages.layers(stage):
            layer = language.layers.get_submodule(str(number))
            x_TD, update_TD = layer(x_TD, update_TD, attend, None, None)
            if features is not None:
                x_TD = features.add(number - first, x_TD, None)
        if stage == self.stages.last:
            hidden_TD = language.norm.add_norm(x_TD, update_TD).normed
            return hidden_TD if self._exchange is None else self._exchange.collect(hidden_TD)
        # The rows are never the output of a layer itself: FSDP's hooks of layer and root would run in another order on
        # ranks whose features are added after it.
        x_TD = x_TD.clone() if update_TD is None else x_TD + update_TD
        if features is None or not self.stages.num_later_features(stage + 1):
            return x_TD
        later_LMD = features.features[len(self.stages.layers(stage)) :].to(x_TD.dtype)
        return torch.cat([x_TD, later_LMD.flatten(0, 1)])

    def _start(self, inputs: ModelInputs, stage: int, received: Tensor | None) -> tuple[Tensor, LayerFeatures | None]:
        """The residual stream before a stage, and image features of its layers and later ones."""
        if received is None:
            x_TD, features = self.model.decoder_inputs(inputs, encode_dummy_image=self.encode_dummy_image)
            return (x_TD, features) if self._exchange is None else self._exchange.divide(x_TD, features)
        num_tokens, index = self._num_own_tokens(inputs), inputs.image_token_index
        if self._exchange is not None:
            self._exchange.num_tokens = inputs.num_tokens
            index, _ = self._exchange.own_index(index, num_tokens)
        if not (num_features := self.stages.num_later_features(stage)) or not len(index):
            return received, None
        later_LMD = received[num_tokens:].view(num_features, -1, received.shape[1])
        return received[:num_tokens], LayerFeatures(later_LMD, index)

    # -------------------------------------------------------------- without gradients

    @torch.no_grad()
    def score(self, inputs: ModelInputs, labels: Tensor) -> Tensor:
        """See `ModelWithLoss`; zeros from ranks without the last stage."""
        hidden_TD = self._pass_on(inputs)
        return (
            self.score_of(hidden_TD, labels)
            if self.has_last_stage
            else torch.zeros(3, dtype=torch.float64, device=labels.device)
        )

    @torch.no_grad()
    def score_objective(self, inputs: ModelInputs, labels: Tensor, num_loss_tokens: int, targets: Any = None) -> Tensor:
        """See `ModelWithLoss`; zeros from ranks without the last stage."""
        hidden_TD = self._pass_on(inputs)
        if self.has_last_stage:
            return self.score_objective_of(hidden_TD, inputs, labels, num_loss_tokens, targets)
        return torch.zeros(2 + len(self.objective.metric_names), dtype=torch.float64, device=labels.device)

    def _pass_on(self, inputs: ModelInputs) -> Tensor:
        """Run all chunks of this rank; the rows of the last one."""
        rows = torch.empty(0)
        for chunk in range(self.stages.num_chunks):
            stage, received = self.stage_of_chunk(chunk), None
            if stage > 0:
                received = self.links.receive(stage, self.shape(inputs, stage), is_forward=True).wait()
            rows = self._run(inputs, chunk, received)
            if stage < self.stages.last:
                self.links.send(stage, rows, is_forward=True)
        return rows

"""One training step of every family: loss and gradients are those of `transformers`."""

import pytest
import torch
from closeness import assert_close
from model.hugging_face import CONVERSATIONS, FAMILIES, SHAPES, Oracle, make_checkpoint

from saccade.model.families import family_of
from saccade.model.weights import load_model
from saccade.processor import Processor
from saccade.train.loss import ModelWithLoss, count_labels, next_token_labels

BOUND = 1e-4


@pytest.fixture(scope="module", params=[SHAPES[0], *FAMILIES], ids=lambda shape: shape.name)
def folder(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("families") / "checkpoint", request.param)


def test_loss_and_gradients_of_a_step_are_those_of_transformers(folder):
    oracle, messages = Oracle(folder), CONVERSATIONS["multi-turn"]
    inputs, theirs = Processor.load(folder)([messages]), oracle.inputs(messages)
    labels = next_token_labels(inputs)
    module = ModelWithLoss(load_model(folder, device="cpu").train())
    loss, _ = module(inputs, labels, torch.tensor(float(count_labels(labels))), count_labels(labels))
    loss.backward()
    targets = torch.where(inputs.loss_mask, inputs.token_ids, -100)[None]
    expected = oracle.model.train()(**theirs, labels=targets).loss
    expected.backward()
    assert_close("loss", loss.detach(), expected.detach(), BOUND)
    family, gradients = family_of(folder), dict(oracle.model.named_parameters())
    for name, parameter in module.model.named_parameters():
        theirs = gradients[family.name_in_transformers(name)]
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad  # features for layers there are not
        assert_close(name, parameter.grad[tuple(slice(size) for size in theirs.shape)], expected, BOUND)

"""The loss of a packed row: what is learned, what is not, and that neither packing nor padding changes it."""

import pytest
import torch
import torch.nn.functional as F
from model.hugging_face import answer, ask, picture
from train.running import make_checkpoint

from saccade.model import load_model
from saccade.model.deferred_gradients import deferrable, deferred
from saccade.model.linear import Linear
from saccade.processor import ModelInputs, Processor
from saccade.train.batches import MicroBatch
from saccade.train.loss import (
    IGNORED,
    ModelWithLoss,
    count_labels,
    empty_micro_batch,
    labels_by_source,
    next_token_labels,
)
from saccade.train.optimizer import build_optimizer
from saccade.train.parallelize import ParallelModel, recompute
from saccade.train.parameter_groups import OptimizerConfig
from saccade.train.train_state import TrainState
from saccade.world import World

CONVERSATIONS = [
    [ask(picture(56, 84), "What is it?"), answer("A wave.")],
    [ask("Hello?"), answer("Yes, hello."), ask("And?"), answer("Nothing more.")],
    [ask(picture(140, 28, 1), "And this?"), answer("Another.")],
    [ask("Be brief."), answer("No.")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("loss") / "checkpoint")


@pytest.fixture(scope="module")
def processor(folder):
    return Processor.load(folder)


def train_state_of(folder):
    trained = ModelWithLoss(load_model(folder, device="cpu"))
    optimizer = build_optimizer(trained.model.named_parameters(), OptimizerConfig(lr=1e-3))
    return TrainState(ParallelModel(trained, trained, "none"), optimizer, World(0, 1, 0, torch.device("cpu")))


def row_of(inputs: ModelInputs) -> MicroBatch:
    labels = next_token_labels(inputs)
    return MicroBatch(inputs, labels, count_labels(labels), [])


def accumulated(folder, rows):
    """The loss and the gradients of one step made of these rows."""
    train_state = train_state_of(folder)
    count = torch.tensor(float(sum(row.num_loss_tokens for row in rows)))
    losses = [train_state.backward(row, count, is_last_micro_batch=row is rows[-1])[0] for row in rows]
    gradients = {name: p.grad for name, p in train_state.parallel.model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return float(torch.stack(losses).sum()), gradients


@pytest.mark.parametrize("extent", ["none", "full"])
def test_gradients_of_weights_may_be_computed_later(folder, processor, extent):
    """Two micro-batches: the first gradient is set, the second added."""
    rows = [row_of(processor(part)) for part in (CONVERSATIONS[:2], CONVERSATIONS[2:])]
    _, expected = accumulated(folder, rows)
    trained = ModelWithLoss(load_model(folder, device="cpu"))
    recompute(trained.model.language.layers, extent)
    projections = {f"{name}.weight" for name, one in trained.model.named_modules() if isinstance(one, Linear)}
    count = float(sum(row.num_loss_tokens for row in rows))
    with deferrable():
        for row in rows:
            loss, _ = trained(row.inputs, row.labels, count, row.num_loss_tokens, row.by_source, row.targets)
            before = {name: p.grad for name, p in trained.model.named_parameters() if name in projections}
            with deferred() as later:
                loss.backward()
            after = dict(trained.model.named_parameters())
            assert sum(after[name].grad is gradient for name, gradient in before.items()) > 10
            later.compute()
    for name, parameter in trained.model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-7)


def test_a_label_is_the_next_token_of_the_same_conversation(processor):
    inputs = processor(CONVERSATIONS)
    labels, learned = next_token_labels(inputs), 0
    for start, end in zip(inputs.cu_seqlens[:-1].tolist(), inputs.cu_seqlens[1:].tolist(), strict=True):
        for t in range(start, end):
            is_learned = t + 1 < end and bool(inputs.loss_mask[t + 1])
            assert labels[t] == (inputs.token_ids[t + 1] if is_learned else IGNORED)
            learned += is_learned
    assert count_labels(labels) == learned > 0


def test_loss_tokens_are_the_assistants_text_and_its_end_of_turn_tokens(processor):
    inputs = processor(CONVERSATIONS[1:2])
    labels = next_token_labels(inputs)
    assert processor.decode(labels[labels != IGNORED].tolist()) == "Yes, hello.\nNothing more.\n".replace("\n", "")


def test_four_micro_batches_of_one_conversation_have_the_gradients_of_one_with_four(folder, processor):
    packed, packed_gradients = accumulated(folder, [row_of(processor(CONVERSATIONS))])
    single, single_gradients = accumulated(folder, [row_of(processor([one])) for one in CONVERSATIONS])
    assert single == pytest.approx(packed, abs=1e-6)
    for name, gradient in packed_gradients.items():
        assert torch.allclose(gradient, single_gradients[name], atol=2e-6), name


def test_the_loss_is_the_mean_over_loss_tokens_one_conversation_at_a_time(folder, processor):
    """The plain way: full logits, no packing, cross entropy of torch."""
    model = load_model(folder, device="cpu")
    total, count = 0.0, 0
    with torch.no_grad():
        for one in CONVERSATIONS:
            inputs = processor([one])
            logits, loss_mask = model(inputs)[:-1], inputs.loss_mask[1:]
            total += float(F.cross_entropy(logits[loss_mask], inputs.token_ids[1:][loss_mask], reduction="sum"))
            count += int(loss_mask.sum())
    loss, _ = accumulated(folder, [row_of(processor(CONVERSATIONS))])
    assert loss == pytest.approx(total / count, abs=1e-6)


def test_a_dummy_image_and_an_empty_micro_batch_change_nothing(folder, processor):
    text = row_of(processor(CONVERSATIONS[3:]))
    loss, gradients = accumulated(folder, [text])
    nothing = row_of(empty_micro_batch(load_model(folder, device="cpu").config.vision))
    padded_loss, padded_gradients = accumulated(folder, [text, nothing, nothing])
    assert (nothing.num_loss_tokens, padded_loss) == (0, loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, padded_gradients[name]), name
        if name.startswith(("vision", "projector")):
            assert not gradient.any(), f"{name} saw only a blank image"
    model = load_model(folder, device="cpu")
    with torch.no_grad():
        plain = F.cross_entropy(model(text.inputs)[text.labels != IGNORED], text.labels[text.labels != IGNORED])
    assert loss == pytest.approx(float(plain), abs=1e-6)


def test_sums_by_source_add_up_to_the_loss(folder, processor):
    inputs = processor(CONVERSATIONS)
    labels = next_token_labels(inputs)
    parts = labels_by_source(inputs, labels, [0, 1, 0, 2], 4)
    by_source = [(part, count_labels(part)) for part in parts]
    learned = [count for _, count in by_source]
    assert learned[3] == 0
    assert sum(learned) == count_labels(labels)
    trained = ModelWithLoss(load_model(folder, device="cpu"))
    loss, sums = trained(inputs, labels, torch.tensor(float(sum(learned))), sum(learned), by_source)
    assert not sums.requires_grad
    assert sums.sum() / sum(learned) == pytest.approx(float(loss.detach()), abs=1e-5)
    alone, _ = accumulated(folder, [row_of(processor(CONVERSATIONS[1:2]))])
    assert float(sums[1]) / learned[1] == pytest.approx(alone, abs=1e-5)

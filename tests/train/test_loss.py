"""The loss of a packed row: what is learned, what is not, and that neither packing nor padding changes it."""

import pytest
import torch
import torch.nn.functional as F
from model.hugging_face import answer, ask, picture
from train.running import make_checkpoint

from saccade.model import load_model
from saccade.processor import ModelInputs, Processor
from saccade.train.feed import Row
from saccade.train.groups import OptimizerConfig
from saccade.train.learner import Learner
from saccade.train.loss import IGNORED, TrainedModel, empty_row, num_labels, row_labels, source_labels
from saccade.train.optimizer import build_optimizer
from saccade.train.parallelize import Parallelized
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


def learner_of(folder):
    trained = TrainedModel(load_model(folder, device="cpu"))
    optimizer = build_optimizer(trained.model.named_parameters(), OptimizerConfig(lr=1e-3))
    return Learner(Parallelized(trained, trained, "none"), optimizer, World(0, 1, 0, torch.device("cpu")))


def row_of(inputs: ModelInputs) -> Row:
    labels = row_labels(inputs)
    return Row(inputs, labels, num_labels(labels), [])


def accumulated(folder, rows):
    """The loss and the gradients of one step made of these rows."""
    learner = learner_of(folder)
    count = torch.tensor(float(sum(row.num_learned for row in rows)))
    losses = [learner.backward(row, count, is_last_row=row is rows[-1])[0] for row in rows]
    gradients = {name: p.grad for name, p in learner.parallel.model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return float(torch.stack(losses).sum()), gradients


def test_a_token_learns_the_next_one_of_its_own_conversation(processor):
    inputs = processor(CONVERSATIONS)
    labels, learned = row_labels(inputs), 0
    for start, end in zip(inputs.cu_seqlens[:-1].tolist(), inputs.cu_seqlens[1:].tolist(), strict=True):
        for t in range(start, end):
            is_learned = t + 1 < end and bool(inputs.loss_mask[t + 1])
            assert labels[t] == (inputs.token_ids[t + 1] if is_learned else IGNORED)
            learned += is_learned
    assert num_labels(labels) == learned > 0


def test_what_is_learned_are_the_assistants_words_and_the_ends_of_its_turns(processor):
    inputs = processor(CONVERSATIONS[1:2])
    labels = row_labels(inputs)
    assert processor.decode(labels[labels != IGNORED].tolist()) == "Yes, hello.\nNothing more.\n".replace("\n", "")


def test_four_rows_of_one_conversation_give_the_gradients_of_one_row_of_four(folder, processor):
    packed, packed_gradients = accumulated(folder, [row_of(processor(CONVERSATIONS))])
    single, single_gradients = accumulated(folder, [row_of(processor([one])) for one in CONVERSATIONS])
    assert single == pytest.approx(packed, abs=1e-6)
    for name, gradient in packed_gradients.items():
        assert torch.allclose(gradient, single_gradients[name], atol=2e-6), name


def test_the_loss_is_the_mean_over_learned_tokens_one_conversation_at_a_time(folder, processor):
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


def test_a_blank_image_and_an_empty_row_change_nothing(folder, processor):
    text = row_of(processor(CONVERSATIONS[3:]))
    loss, gradients = accumulated(folder, [text])
    nothing = row_of(empty_row(load_model(folder, device="cpu").config.vision))
    padded_loss, padded_gradients = accumulated(folder, [text, nothing, nothing])
    assert (nothing.num_learned, padded_loss) == (0, loss)
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
    labels = row_labels(inputs)
    parts = source_labels(inputs, labels, [0, 1, 0, 2], 4)
    by_source = [(part, num_labels(part)) for part in parts]
    learned = [count for _, count in by_source]
    assert learned[3] == 0
    assert sum(learned) == num_labels(labels)
    trained = TrainedModel(load_model(folder, device="cpu"))
    loss, sums = trained(inputs, labels, torch.tensor(float(sum(learned))), sum(learned), by_source)
    assert not sums.requires_grad
    assert sums.sum() / sum(learned) == pytest.approx(float(loss.detach()), abs=1e-5)
    alone, _ = accumulated(folder, [row_of(processor(CONVERSATIONS[1:2]))])
    assert float(sums[1]) / learned[1] == pytest.approx(alone, abs=1e-5)

"""Gradient accumulation is in fp32, also if parameters and their gradients are bf16."""

import math

import pytest
import torch
import torch.distributed as dist
from model.hugging_face import answer, ask, picture
from train.running import make_checkpoint, read_recipe, write_recipe

from saccade.processor import Processor
from saccade.train.batches import MicroBatch
from saccade.train.loss import count_labels, next_token_labels
from saccade.train.optimizer import build_optimizer
from saccade.train.parallelize import parallelize
from saccade.train.train_state import TrainState
from saccade.world import World

WORLD = World(0, 1, 0, torch.device("cpu"))
NUM_MICRO_BATCHES = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("accumulation") / "checkpoint")


@pytest.fixture(scope="module")
def rows(checkpoint):
    processor = Processor.load(checkpoint)
    answers = ["A wave.", "Nothing.", "Two of them."]
    questions = [ask(picture(28, 28, number), f"Number {number}?") for number in range(NUM_MICRO_BATCHES)]
    packed = [processor([[question, answer(answers[i % 3])]]) for i, question in enumerate(questions)]
    return [
        MicroBatch(inputs, next_token_labels(inputs), count_labels(next_token_labels(inputs)), []) for inputs in packed
    ]


@pytest.fixture(scope="module")
def train_state_of(checkpoint):
    def build(*overrides):
        run_root = checkpoint.parent
        recipe = write_recipe(run_root / "recipe.toml", run=run_root / "run", checkpoint=checkpoint, shards=run_root)
        config = read_recipe(recipe, *overrides)
        parallel = parallelize(checkpoint, config.stages[0], config.parallel, WORLD, dtype=config.model.dtype)
        optimizer = build_optimizer(parallel.model.named_parameters(), config.stages[0].optimizer)
        return TrainState(parallel, optimizer, WORLD, reduce_each_micro_batch=config.parallel.reduce_each_micro_batch)

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


def accumulate(train_state, rows):
    count = torch.tensor(float(sum(row.num_loss_tokens for row in rows)))
    for row in rows:
        train_state.backward(row, count, is_last_micro_batch=row is rows[-1])


def gradients_of(train_state):
    gradients = {name: parameter.grad for name, parameter in train_state.parallel.model.named_parameters()}
    return {name: getattr(g, "full_tensor", lambda g=g: g)().clone() for name, g in gradients.items()}


def accumulated_by_autograd(train_state, rows):
    """Accumulate by autograd alone, in the parameters' dtype."""
    count = torch.tensor(float(sum(row.num_loss_tokens for row in rows)))
    for row in rows:
        train_state.parallel.wrapped(row.inputs, row.labels, count, row.num_loss_tokens)[0].backward()
    return gradients_of(train_state)


def distance(gradients, reference):
    squares = [float((gradients[name].double() - g.double()).square().sum()) for name, g in reference.items()]
    return math.sqrt(sum(squares) / sum(float(g.double().square().sum()) for g in reference.values()))


@pytest.fixture(scope="module")
def exact(train_state_of, rows):
    train_state = train_state_of()
    accumulate(train_state, rows)
    return gradients_of(train_state)


@pytest.fixture(scope="module")
def error_of_bf16(train_state_of, rows, exact):
    """Bound for bf16 accumulation: it adds the rounding of 47 additions to the rounding of the computation."""
    return distance(accumulated_by_autograd(train_state_of("model.dtype=bf16"), rows), exact)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        pytest.param(["parallel.strategy=ddp"], marks=pytest.mark.slow),
        pytest.param(["parallel.strategy=fsdp"], marks=pytest.mark.slow),
        ["parallel.strategy=fsdp", "parallel.reduce_each_micro_batch=false"],
    ],
    ids=["none", "ddp", "fsdp", "zero1"],
)
def test_bf16_gradients_accumulate_in_fp32(train_state_of, rows, exact, error_of_bf16, settings):
    train_state = train_state_of("model.dtype=bf16", *settings)
    accumulate(train_state, rows)
    assert distance(gradients_of(train_state), exact) < 0.6 * error_of_bf16
    assert train_state.grad_norm() == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in exact.values())), rel=1e-2
    )


def test_nothing_is_lost_between_micro_batches(train_state_of, rows):
    one_by_one, together = train_state_of("model.dtype=bf16"), train_state_of("model.dtype=bf16")
    total = {}
    count = torch.tensor(float(sum(row.num_loss_tokens for row in rows)))
    for row in rows:
        one_by_one.backward(row, count, is_last_micro_batch=True)
        for name, gradient in gradients_of(one_by_one).items():
            total[name] = total.get(name, 0.0) + gradient.double()
        one_by_one.drop_gradients()
    accumulate(together, rows)
    # The head is tied: the two gradients of the embedding are added in bf16 there, and in fp32 here.
    rest = {name: gradient for name, gradient in total.items() if name != "language.embed_tokens.weight"}
    assert distance(gradients_of(together), rest) < 1e-6


def test_a_single_micro_batch_keeps_its_gradient_dtype(train_state_of, rows):
    train_state = train_state_of("model.dtype=bf16")
    count = torch.tensor(float(rows[0].num_loss_tokens))
    for num_micro_batches in (1, 3, 1, 2):
        accumulate(train_state, rows[:num_micro_batches])
        expected = torch.bfloat16 if num_micro_batches == 1 else torch.float32
        assert {gradient.dtype for gradient in gradients_of(train_state).values()} == {expected}
        train_state.step(1.0, 1.0)
    train_state.backward(rows[0], count, is_last_micro_batch=False)
    train_state.drop_gradients()
    train_state.backward(rows[0], count, is_last_micro_batch=True)
    assert {gradient.dtype for gradient in gradients_of(train_state).values()} == {torch.bfloat16}

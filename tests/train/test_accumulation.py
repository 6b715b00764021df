"""Many rows of a step are added up in fp32, also where parameters and their gradients are bf16."""

import math

import pytest
import torch
import torch.distributed as dist
from model.hugging_face import answer, ask, picture
from train.running import make_checkpoint, read_recipe, write_recipe

from saccade.processor import Processor
from saccade.train.feed import Row
from saccade.train.learner import Learner
from saccade.train.loss import num_labels, row_labels
from saccade.train.optimizer import build_optimizer
from saccade.train.parallelize import parallelize
from saccade.world import World

WORLD = World(0, 1, 0, torch.device("cpu"))
NUM_ROWS = 48


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("accumulation") / "checkpoint")


@pytest.fixture(scope="module")
def rows(checkpoint):
    processor = Processor.load(checkpoint)
    answers = ["A wave.", "Nothing.", "Two of them."]
    questions = [ask(picture(28, 28, number), f"Number {number}?") for number in range(NUM_ROWS)]
    packed = [processor([[question, answer(answers[i % 3])]]) for i, question in enumerate(questions)]
    return [Row(inputs, row_labels(inputs), num_labels(row_labels(inputs)), []) for inputs in packed]


@pytest.fixture(scope="module")
def learner_of(checkpoint):
    def build(*overrides):
        place = checkpoint.parent
        recipe = write_recipe(place / "recipe.toml", run=place / "run", checkpoint=checkpoint, shards=place)
        config = read_recipe(recipe, *overrides)
        parallel = parallelize(checkpoint, config.stages[0], config.parallel, WORLD, dtype=config.model.dtype)
        optimizer = build_optimizer(parallel.model.named_parameters(), config.stages[0].optimizer)
        return Learner(parallel, optimizer, WORLD, reduce_each_row=config.parallel.reduce_each_row)

    yield build
    if dist.is_initialized():
        dist.destroy_process_group()


def add_up(learner, rows):
    count = torch.tensor(float(sum(row.num_learned for row in rows)))
    for row in rows:
        learner.backward(row, count, is_last_row=row is rows[-1])


def gradients_of(learner):
    gradients = {name: parameter.grad for name, parameter in learner.parallel.model.named_parameters()}
    return {name: getattr(g, "full_tensor", lambda g=g: g)().clone() for name, g in gradients.items()}


def plainly_added_up(learner, rows):
    """By autograd alone, in the parameters' own format."""
    count = torch.tensor(float(sum(row.num_learned for row in rows)))
    for row in rows:
        learner.parallel.wrapped(row.inputs, row.labels, count, row.num_learned)[0].backward()
    return gradients_of(learner)


def distance(gradients, reference):
    squares = [float((gradients[name].double() - g.double()).square().sum()) for name, g in reference.items()]
    return math.sqrt(sum(squares) / sum(float(g.double().square().sum()) for g in reference.values()))


@pytest.fixture(scope="module")
def exact(learner_of, rows):
    learner = learner_of()
    add_up(learner, rows)
    return gradients_of(learner)


@pytest.fixture(scope="module")
def error_of_bf16(learner_of, rows, exact):
    """Of sums in bf16: the rounding of 47 additions, beside that of the computation itself."""
    return distance(plainly_added_up(learner_of("model.dtype=bf16"), rows), exact)


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["parallel.strategy=ddp"],
        ["parallel.strategy=fsdp"],
        ["parallel.strategy=fsdp", "parallel.reduce_each_row=false"],
    ],
    ids=["none", "ddp", "fsdp", "zero1"],
)
def test_rows_in_bf16_are_added_up_in_fp32(learner_of, rows, exact, error_of_bf16, settings):
    learner = learner_of("model.dtype=bf16", *settings)
    add_up(learner, rows)
    assert distance(gradients_of(learner), exact) < 0.6 * error_of_bf16
    assert learner.grad_norm() == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in exact.values())), rel=1e-2
    )


def test_nothing_is_lost_between_the_rows(learner_of, rows):
    one_by_one, together = learner_of("model.dtype=bf16"), learner_of("model.dtype=bf16")
    total = {}
    count = torch.tensor(float(sum(row.num_learned for row in rows)))
    for row in rows:
        one_by_one.backward(row, count, is_last_row=True)
        for name, gradient in gradients_of(one_by_one).items():
            total[name] = total.get(name, 0.0) + gradient.double()
        one_by_one.drop_gradients()
    add_up(together, rows)
    # The embedding is the head too: its two gradients of a row are one in bf16 there, and stay two in fp32 here.
    rest = {name: gradient for name, gradient in total.items() if name != "language.embed_tokens.weight"}
    assert distance(gradients_of(together), rest) < 1e-6


def test_the_only_row_of_a_step_keeps_its_gradient_as_it_is(learner_of, rows):
    learner = learner_of("model.dtype=bf16")
    count = torch.tensor(float(rows[0].num_learned))
    for num_rows in (1, 3, 1, 2):
        add_up(learner, rows[:num_rows])
        expected = torch.bfloat16 if num_rows == 1 else torch.float32
        assert {gradient.dtype for gradient in gradients_of(learner).values()} == {expected}
        learner.step(1.0, 1.0)
    learner.backward(rows[0], count, is_last_row=False)
    learner.drop_gradients()
    learner.backward(rows[0], count, is_last_row=True)
    assert {gradient.dtype for gradient in gradients_of(learner).values()} == {torch.bfloat16}

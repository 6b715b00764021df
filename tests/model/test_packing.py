"""Packed = one by one: conversations in one row do not see, move or change each other."""

import pytest
import torch
from closeness import assert_close, relative_rms
from model.hugging_face import CONVERSATIONS, SHAPES, answer, ask, make_checkpoint, picture

from saccade.kernels import launch
from saccade.model import generate, load_model
from saccade.processor import ModelInputs, Processor

VIDEO = [
    {
        "role": "user",
        "content": [{"type": "video", "video": [picture(84, 56, s) for s in range(3)]}, {"type": "text", "text": "?"}],
    }
]
TWELVE = [
    *CONVERSATIONS.values(),
    VIDEO,
    [ask("no picture at all, just a longer stretch of words " * 5)],
    [ask(picture(112, 112, 20), picture(112, 112, 21), "Same?"), answer("No.")],
    [ask("a")],
    [ask(picture(300, 200, 22)), answer("A wave.")],
    [ask("b", picture(28, 28, 23), "c"), answer("d"), ask("e")],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("hf") / "checkpoint", SHAPES[2])


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, device="cpu").requires_grad_(False)


@pytest.fixture(scope="module")
def processor(folder):
    return Processor.load(folder)


def rows_of(inputs: ModelInputs, logits: torch.Tensor) -> list[torch.Tensor]:
    return list(logits.split(inputs.cu_seqlens.diff().tolist()))


def test_a_row_of_twelve_mixed_conversations_equals_one_by_one(model, processor):
    packed = processor(TWELVE)
    assert packed.num_conversations == 12
    for number, (row, messages) in enumerate(zip(rows_of(packed, model(packed)), TWELVE, strict=True)):
        assert_close(f"conversation {number}", row, model(processor([messages])), 1e-5)


def test_changing_one_conversation_changes_no_other_beyond_rounding(model, processor):
    packed = processor(TWELVE)
    before = rows_of(packed, model(packed))
    changed = [[ask(picture(330, 150, 99), "Something else entirely.")] if i == 4 else m for i, m in enumerate(TWELVE)]
    other = processor(changed)
    after = rows_of(other, model(other))
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        if number != 4:
            assert relative_rms(new, old) < 1e-6, f"conversation {number} moved"


def test_a_change_that_keeps_all_lengths_leaves_the_others_bit_identical(model, processor):
    """With equal shapes even the rounding is the same, so one leaked bit would show."""
    changed = [[ask("z")] if m == [ask("a")] else m for m in TWELVE]
    packed, other = processor(TWELVE), processor(changed)
    for number, (old, new) in enumerate(zip(rows_of(packed, model(packed)), rows_of(other, model(other)), strict=True)):
        assert torch.equal(old, new) == (TWELVE[number] == changed[number])


def test_gradients_of_a_packed_row_are_the_sums_of_one_by_one(folder, processor):
    """The loss of each conversation reaches the weights as if it were alone; text-only ones reach no vision weight."""
    model = load_model(folder, device="cpu")
    chosen = [TWELVE[0], TWELVE[1], TWELVE[4], VIDEO]

    def gradients(rows):
        model.zero_grad(set_to_none=True)
        for row in rows:
            model(row).square().sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    packed, single = gradients([processor(chosen)]), gradients([processor([m]) for m in chosen])
    assert packed.keys() == single.keys()
    for name in packed:
        assert_close(name, packed[name], single[name], 1e-4)


def test_the_chosen_kernels_give_the_logits_of_the_references(model, processor):
    packed = processor(TWELVE)
    with launch.forced("reference"):
        reference = model(packed)
    assert_close("chosen", model(packed), reference, 1e-5)


def test_triton_kernels_give_the_logits_and_gradients_of_the_references(folder, processor):
    """The whole model under Triton's interpreter: windows and full attention, grouped heads, rotary, norms, gates."""
    model = load_model(folder, device="cpu")
    packed = processor([[ask(picture(84, 56, 1), "What?")], [ask("a")]])

    def logits_and_gradients(path):
        model.zero_grad(set_to_none=True)
        with launch.forced(path):
            logits = model(packed)
            logits.square().sum().backward()
        return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()}

    reference, actual = logits_and_gradients("reference"), logits_and_gradients("triton")
    for name, expected in reference.items():
        assert_close(name, actual[name], expected, 1e-4)


def test_generation_in_a_row_equals_generation_alone(model, processor):
    together = generate(model, processor(TWELVE, add_generation_prompt=True), max_new_tokens=8)
    for messages, tokens in zip(TWELVE, together, strict=True):
        assert generate(model, processor([messages], add_generation_prompt=True), max_new_tokens=8) == [tokens]

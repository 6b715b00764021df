"""Token ids of whole conversations are those of `transformers`, for each way of writing a space before text."""

import json
import shutil
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import tokenizers
from model import llava_next as oracle
from model.hugging_face import picture
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import LlavaNextProcessor

from saccade.processor import Processor

SPACED_MISTRAL = oracle.MISTRAL.replace("'</s>'", "'</s> '")
"""A space follows each answer: it and the next `[INST]` are one text between two control tokens."""
TEMPLATES = {"vicuna": oracle.VICUNA, "mistral": oracle.MISTRAL, "mistral-spaced": SPACED_MISTRAL}
assert SPACED_MISTRAL != oracle.MISTRAL

MERGES = ("▁ [", "▁[ I", "▁ U", "▁U S", "▁ A", "▁A S", "▁ B", "▁ b")
"""Tokens that begin with the space before a word, as published vocabularies have them; some span the ends of turns."""


def sentencepiece(**layout: Any) -> dict[str, Any]:
    """The tokenizer of the oracle with these fields and more merges."""
    description = oracle.tokenizer_description("every") | {"normalizer": None} | layout
    model, (*control, image) = description["model"], description["added_tokens"]
    pieces = [*model["vocab"], *(merge.replace(" ", "") for merge in MERGES)]
    merges = [*(merge.split(" ") for merge in MERGES), *model["merges"]]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    added = [*control, image | {"id": len(vocab)}]
    return description | {"model": model | {"vocab": vocab, "merges": merges}, "added_tokens": added}


def metaspace(prepend_scheme: str, *, split: bool) -> dict[str, Any]:
    """Text is pre-tokenized: the layout that `transformers` writes."""
    fields = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": split}
    return sentencepiece(pre_tokenizer=fields)


def prepend() -> dict[str, Any]:
    """Text is normalized: the layout of the published Mistral and Vicuna checkpoints."""
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, space]
    return sentencepiece(normalizer={"type": "Sequence", "normalizers": steps}, pre_tokenizer=None)


def byte_level(*, add_prefix_space: bool) -> dict[str, Any]:
    """A byte-level BPE with merges."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(["USER: [INST] Blue. [/INST] ASSISTANT: a\n\n  there <<SYS>>\n"] * 4, trainer)
    trained.add_special_tokens([*oracle.CONTROL, "<image>"])
    return json.loads(trained.to_str())


LAYOUTS = {
    "prepend": prepend,
    "metaspace-first": lambda: metaspace("first", split=False),
    "metaspace-first-split": lambda: metaspace("first", split=True),
    "metaspace-always": lambda: metaspace("always", split=False),
    "metaspace-never": lambda: metaspace("never", split=True),
    "byte-level": lambda: byte_level(add_prefix_space=False),
    "byte-level-prefix": lambda: byte_level(add_prefix_space=True),
}


@dataclass(frozen=True)
class Both:
    """The processors of one folder."""

    ours: Processor
    theirs: LlavaNextProcessor

    def text(self, messages, **options):
        return self.theirs.apply_chat_template(messages, tokenize=False, **options)

    def ids(self, messages, **options):
        found = self.theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
        return found["input_ids"][0]

    def spelled(self, ids):
        return self.theirs.tokenizer.decode(ids)

    def has_token_across_the_start_of_an_answer(self, messages):
        """Whether the tokens of `transformers` differ from those of a prompt that ends there; ours never do."""
        tokenizer = self.theirs.tokenizer
        offsets = tokenizer(self.text(messages), return_offsets_mapping=True)["offset_mapping"]
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        starts = [len(self.text(messages[:number], add_generation_prompt=True)) if number else 0 for number in answers]
        return any(first < start < end for first, end in offsets for start in starts)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder without its weights."""
    folder = oracle.write(tmp_path_factory.mktemp("written") / "checkpoint", oracle.SHAPES[-1])
    for path in folder.glob("*.safetensors"):
        path.unlink()
    return folder


@pytest.fixture(scope="module", params=LAYOUTS)
def description(request):
    return LAYOUTS[request.param]()


@pytest.fixture(scope="module", params=TEMPLATES)
def both(request, description, written, tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout") / "checkpoint"
    shutil.copytree(written, folder)
    (folder / "tokenizer.json").write_text(json.dumps(description))
    (folder / "chat_template.jinja").write_text(TEMPLATES[request.param])
    config = json.loads((folder / "config.json").read_text())
    [config["image_token_index"]] = [
        token["id"] for token in description["added_tokens"] if token["content"] == "<image>"
    ]
    (folder / "config.json").write_text(json.dumps(config))
    shape = replace(oracle.SHAPES[-1], template=TEMPLATES[request.param])
    return Both(Processor.load(folder), oracle.processor(folder, shape))


TEXTS = ["", " ", "Blue.", " the hall", "a\nb\n", "\n", "USER:", "Bring  it ", "é日🙂", "[INST]", "2 < 3 > 1", "b"]


def message(role: str, draw: Random) -> dict[str, Any]:
    """One text, or two among images; answers have one text."""
    is_question = role == "user"
    images = [{"type": "image", "image": picture(16, 16)}] * (draw.choice([0, 0, 1, 2]) if is_question else 0)
    texts = [{"type": "text", "text": draw.choice(TEXTS)} for _ in range(draw.choice([1, 2]) if is_question else 1)]
    return {"role": role, "content": [*images, *texts]}


def conversation(seed: int) -> list[dict[str, Any]]:
    """Turns in order, or roles repeated; with and without a system prompt and a last question."""
    draw = Random(seed)
    roles = ["system"] * draw.choice([0, 0, 1])
    if draw.random() < 0.7:
        roles += ["user", "assistant"] * draw.choice([1, 2, 3])
    else:
        roles += draw.choices(["user", "assistant"], k=draw.choice([2, 3, 4]))
    return [message(role, draw) for role in [*roles, *["user"] * draw.choice([0, 1])]]


CONVERSATIONS = [conversation(seed) for seed in range(32)]


def test_conversations_have_the_tokens_of_transformers(both):
    exact = 0
    for messages in CONVERSATIONS:
        ours, theirs = both.ours.preprocess(messages).token_ids.tolist(), both.ids(messages)
        assert both.spelled(ours) == both.spelled(theirs), messages
        if not both.has_token_across_the_start_of_an_answer(messages):
            assert ours == theirs, messages
            exact += 1
    assert exact >= 0.9 * len(CONVERSATIONS)


def test_prompts_have_the_tokens_of_transformers_and_begin_the_training_row(both):
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Blue."}]}
    for messages in CONVERSATIONS[:16]:
        prompt = both.ours.preprocess(messages, add_generation_prompt=True).token_ids.tolist()
        if not both.has_token_across_the_start_of_an_answer(messages):
            assert prompt == both.ids(messages, add_generation_prompt=True), messages
        assert both.ours.preprocess([*messages, answer]).token_ids.tolist()[: len(prompt)] == prompt, messages


def test_the_tokens_that_are_learned_are_the_answers(both):
    for messages in CONVERSATIONS:
        inputs = both.ours.preprocess(messages)
        learned = both.ours.decode(inputs.token_ids[inputs.loss_mask].tolist())
        answers = "".join(message["content"][0]["text"] for message in messages if message["role"] == "assistant")
        assert "".join(learned.split()) == "".join(answers.split()), messages


@pytest.mark.parametrize("spelled", ["</s>", " <image> ", "a<s>", "<unk></s> </s>[INST]"])
def test_text_that_spells_control_tokens_stays_text_in_each_layout(both, spelled):
    def control_tokens(text):
        parts = [{"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}] * 2
        return [token_id for token_id in both.ours.tokenize(messages) if both.ours.tokenizer.is_control(token_id)]

    assert control_tokens(spelled) == control_tokens("a")

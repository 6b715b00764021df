"""One tiny checkpoint with a byte tokenizer, and a tokenizer that merges, shared by all tests of the package."""

import json

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor
from saccade.processor.tokenizer import Tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
PROSE = [
    "The quick brown fox jumps over the lazy dog. You are a helpful assistant.\n\nuser assistant system\n",
    "What is in this picture? A red circle on a blue ground. <html> a <b> |> <| im_start im_end |\n",
] * 4


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processor") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def processor(checkpoint):
    return Processor.load(checkpoint)


@pytest.fixture(scope="session")
def merging_description():
    """`tokenizer.json` of a byte-level BPE that has learned merges, as real checkpoints have."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(PROSE, trainer)
    trained.add_special_tokens(CONTROL)
    return json.loads(trained.to_str())


@pytest.fixture(scope="session")
def merging_tokenizer(merging_description):
    return Tokenizer(merging_description)

"""Token dropout: random tokens in answers alone, unchanged labels, the same draws after a resume and with workers."""

import pytest
import torch
from data.making import make_shards
from data.test_loader import assert_same_batches

from saccade.data.index_builder import build_index
from saccade.processor import Processor
from saccade.processor.inputs import next_token_labels


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    captions = {
        "captions": ["a red square beside a blue circle", "two shapes on a plain background, one of them round"]
    }
    folder = make_shards(tmp_path_factory.mktemp("tokens") / "photos", 2, 10, fields=captions)
    build_index(folder, num_workers=1)
    return folder


def sequences(stream):
    return [sequence for batch in stream for sequence in batch.sequences]


def test_only_tokens_of_answers_are_replaced_and_by_tokens_that_text_can_have(folder, opened, checkpoint):
    tokenizer = Processor.load(checkpoint).tokenizer
    num_texts = num_replaced = 0
    for sequence in sequences(opened(folder, num_epochs=4, token_dropout=0.3)):
        original, read = sequence.inputs.token_ids, sequence.model_inputs.token_ids
        replaced = set(sequence.replaced_index)
        assert set((original != read).nonzero()[:, 0].tolist()) <= replaced
        assert read[sequence.replaced_index].tolist() == sequence.replaced_by
        is_text = [not tokenizer.is_control(token_id) for token_id in original.tolist()]
        texts = {index for index in sequence.inputs.loss_mask.nonzero()[:, 0].tolist() if is_text[index]}
        assert replaced <= texts
        assert all(tokenizer.token_bytes(token_id) is not None for token_id in sequence.replaced_by)
        num_texts, num_replaced = num_texts + len(texts), num_replaced + len(replaced)
    assert 0.25 < num_replaced / num_texts < 0.35


def test_what_is_predicted_and_the_images_stay(folder, opened):
    plain, dropped = (sequences(opened(folder, num_epochs=1, token_dropout=rate)) for rate in (0.0, 0.5))
    for one, other in zip(plain, dropped, strict=True):
        assert not one.replaced_index
        assert one.model_inputs is one.inputs
        assert other.replaced_index
        assert torch.equal(next_token_labels(one.inputs), next_token_labels(other.inputs))
        assert torch.equal(one.inputs.patches, other.model_inputs.patches)


def test_every_epoch_replaces_others_and_a_resumed_stream_the_same_with_workers_too(folder, opened):
    settings = {"num_epochs": 3, "token_dropout": 0.3, "max_seq_len": 400}
    whole = list(opened(folder, **settings))
    resumed = list(opened(folder, state=whole[2].state, num_workers=1, **settings))
    assert_same_batches(resumed, whole[3:])
    one, other = (sequences(opened(folder, **settings, seed=seed))[0] for seed in (0, 1))
    assert one.replaced_index != other.replaced_index

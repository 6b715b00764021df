"""The engine is asked as any other model is: same answers as `generate`, likelihoods of the model's own logits."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from engine.making_adapters import write_adapters
from model.hugging_face import SHAPES, make_checkpoint

from saccade.cli.joins.engine_model import EngineModel
from saccade.cli.joins.speed import measure_speed
from saccade.data.toy import toy_sample
from saccade.engine import Engine
from saccade.errors import CheckpointError, RequestError
from saccade.evaluate.model import Decoding
from saccade.model import generate, load_model
from saccade.processor import Processor


def conversation(number):
    sample = toy_sample(number, side=56)
    question = json.loads(sample.members["json"])["questions"][0]["question"]
    image = {"type": "image", "image": sample.members["png"]}
    return [{"role": "user", "content": [image, {"type": "text", "text": question}]}]


@pytest.fixture(scope="module")
def model(checkpoint):
    with EngineModel(checkpoint, device="cpu") as model:
        yield model


def test_answers_are_those_of_plain_generation(model, checkpoint):
    plain, processor = load_model(checkpoint, device="cpu"), Processor.load(checkpoint)
    for number in range(3):
        inputs = processor([conversation(number)], add_generation_prompt=True)
        [tokens] = generate(plain, inputs, max_new_tokens=6, eos_ids=processor.eos_ids)
        answer = model.generate(conversation(number), Decoding(max_tokens=6))
        assert answer.text == processor.decode(tokens)
        assert (answer.num_tokens, answer.num_prompt_tokens) == (len(tokens), inputs.num_tokens)


def test_several_beams_are_searched_by_the_engine(model, checkpoint):
    answer = model.generate(conversation(2), Decoding(max_tokens=6, num_beams=4))
    with Engine.load(checkpoint, device="cpu") as engine:
        [completion] = engine.beam_search(conversation(2), num_beams=4, max_tokens=6)
    assert (answer.text, answer.num_tokens) == (completion.text, len(completion.token_ids))
    assert answer.finish_reason == completion.finish_reason


def test_likelihoods_are_sums_over_the_tokens_of_the_continuation(model, checkpoint):
    plain, processor = load_model(checkpoint, device="cpu"), Processor.load(checkpoint)
    choices = ["red", "a purple ring", "square"]
    found = model.log_likelihoods(conversation(1), choices)
    num_prompt = processor([conversation(1)], add_generation_prompt=True).num_tokens
    for text, likelihood in zip(choices, found, strict=True):
        inputs = processor([[*conversation(1), {"role": "assistant", "content": text}]], continue_final_message=True)
        with torch.no_grad():
            logprobs = plain(inputs).log_softmax(dim=-1)
        own = logprobs[:-1].gather(1, inputs.token_ids[1:, None])[num_prompt - 1 :, 0]
        assert likelihood.num_tokens == len(own) == len(text.encode())  # this tokenizer has a token per byte
        assert likelihood.logprob == pytest.approx(float(own.sum()), abs=1e-4)


def test_threads_that_score_more_than_the_engine_may_hold_wait_for_each_other(model, monkeypatch):
    alone = [model.log_likelihoods(conversation(number), ["red", "blue", "a ring"]) for number in range(4)]
    monkeypatch.setattr(model, "_scoring", threading.Semaphore(2))
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda n: model.log_likelihoods(conversation(n), ["red", "blue", "a ring"]), range(4)))
    lengths, sums = (
        [[getattr(one, name) for many in scored for one in many] for scored in (together, alone)]
        for name in ("num_tokens", "logprob")
    )
    assert lengths[0] == lengths[1]
    assert sums[0] == pytest.approx(sums[1], abs=1e-4)


def test_a_refused_image_is_an_error_of_the_request(model):
    broken = [{"role": "user", "content": [{"type": "image", "image": b"not an image"}, {"type": "text", "text": "?"}]}]
    with pytest.raises(RequestError):
        model.generate(broken, Decoding())
    with pytest.raises(RequestError):
        model.log_likelihoods(broken, ["x"])
    with pytest.raises(RequestError, match="no embeddings"):
        model.embed(broken)


def test_the_speed_of_a_checkpoint_is_measured_alone_and_at_once(checkpoint):
    found = measure_speed(checkpoint, "cpu", 0, num_alone=2, num_at_once=3)
    assert all(value > 0 for value in found.values())
    assert found["output_tokens_per_s"] < 3e3 / found["tpot_ms"], "three at once"


def test_a_checkpoint_is_recognized_by_its_weights_and_loaded_when_it_is_asked(checkpoint, tmp_path):
    first = EngineModel(checkpoint).describe()
    assert first == EngineModel(checkpoint).describe()
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in checkpoint.iterdir():
        data = bytearray(file.read_bytes())
        if file.suffix == ".safetensors":
            data[-1] ^= 1
        (copy / file.name).write_bytes(data)
    assert EngineModel(copy).describe()["weights"] != first["weights"]
    EngineModel(checkpoint).close()  # never loaded
    with pytest.raises(CheckpointError, match="no checkpoint folder"):
        EngineModel(tmp_path / "nothing")


def test_a_checkpoint_is_evaluated_with_an_adapter(tmp_path):
    base = make_checkpoint(tmp_path / "base", SHAPES[1])
    [(name, folder)] = write_adapters(
        base, tmp_path, mlp={"r": 4, "target_modules": r".*language_model.*(q_proj|up_proj)"}
    ).items()
    with EngineModel(folder.with_name(f"{name}-merged"), device="cpu") as merged:
        expected = merged.log_likelihoods(conversation(1), ["red", "square"])
        answer = merged.generate(conversation(1), Decoding(max_tokens=6))
    with EngineModel(base, device="cpu", adapter=folder) as model:
        assert model.generate(conversation(1), Decoding(max_tokens=6)).text == answer.text
        found = model.log_likelihoods(conversation(1), ["red", "square"])
        assert [one.logprob for one in found] == pytest.approx([one.logprob for one in expected], abs=1e-4)
        assert model.describe()["adapter"] == str(folder)
    with (
        EngineModel(base, device="cpu", adapter=tmp_path) as model,
        pytest.raises(CheckpointError, match="adapter_config"),
    ):
        model.generate(conversation(1), Decoding())

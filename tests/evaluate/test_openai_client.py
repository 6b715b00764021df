"""A server is asked over real HTTP: answers, likelihoods, embeddings, streams, and what goes wrong."""

import socket

import pytest
from evaluate.making import ColourModel, caption, picture, served

from saccade.errors import ConfigError, RequestError
from saccade.evaluate import openai_client
from saccade.evaluate.efficiency import Load, measure_efficiency
from saccade.evaluate.model import Decoding
from saccade.evaluate.openai_client import OpenAIModel

RED = [
    {"role": "user", "content": [{"type": "image", "image": picture("red")}, {"type": "text", "text": "What colour?"}]}
]


@pytest.fixture
def no_waiting(monkeypatch):
    monkeypatch.setattr(openai_client.time, "sleep", lambda _: None)


def test_answers_likelihoods_and_embeddings_are_those_of_the_model():
    model = ColourModel()
    with served(model) as (url, requests), OpenAIModel(url) as client:
        assert client.describe() == {"url": url, "model": "walls"}
        assert client.generate(RED, Decoding(max_tokens=5, seed=3)) == model.generate(RED, Decoding())
        assert {key: requests[0][key] for key in ("model", "max_tokens", "temperature", "seed")} == {
            "model": "walls",
            "max_tokens": 5,
            "temperature": 0.0,
            "seed": 3,
        }
        assert client.can_score
        captions = [caption("red"), caption("blue")]
        for ours, theirs in zip(
            client.log_likelihoods(RED, captions), model.log_likelihoods(RED, captions), strict=True
        ):
            assert ours.num_tokens == theirs.num_tokens
            assert ours.logprob == pytest.approx(theirs.logprob)
        assert client.can_embed
        assert client.embed(RED) == model.embed(RED)
        assert sum(client.stream(RED, Decoding(max_tokens=7))) == 7


def test_a_server_without_prompt_logprobs_is_recognized():
    with served(ColourModel(), scores=False) as (url, _), OpenAIModel(f"{url}/v1") as client:
        assert not client.can_score


def test_a_busy_server_is_asked_again(no_waiting):
    responses = [(503, []), (429, [("Retry-After", "1")])]
    with served(ColourModel(), responses=responses) as (url, requests), OpenAIModel(url) as client:
        assert client.generate(RED, Decoding()).text == "red"
        assert len(requests) == 3


def test_a_refused_request_fails_alone_and_a_wrong_key_ends_everything():
    refusing, refused = ColourModel(refuses=("red",)), pytest.raises(RequestError, match="400 red hurts")
    with served(refusing) as (url, _), OpenAIModel(url) as client, refused:
        client.generate(RED, Decoding())
    with served(ColourModel(), key="secret") as (url, _):
        with OpenAIModel(url) as client, pytest.raises(ConfigError, match=r"401 no such key. Give a key"):
            client.generate(RED, Decoding())
        with OpenAIModel(url, api_key="secret") as client:
            assert client.generate(RED, Decoding()).text == "red"


def test_a_server_that_stays_away_ends_the_evaluation(no_waiting):
    with served(ColourModel()) as (url, _), OpenAIModel(url) as client:
        client.generate(RED, Decoding())
    with pytest.raises(ConfigError, match=r"does not answer: .*the same command then resumes"):
        client.generate(RED, Decoding())
    with pytest.raises(ConfigError, match=r"does not answer: .*Check the URL"):
        OpenAIModel(url)
    with pytest.raises(ConfigError, match="not the URL of a server"):
        OpenAIModel("ftp://somewhere")


def test_a_connection_that_the_server_closed_is_opened_again():
    with served(ColourModel()) as (url, requests), OpenAIModel(url) as client:
        client.generate(RED, Decoding())
        client._connections._free[0].sock.shutdown(socket.SHUT_RDWR)
        assert client.generate(RED, Decoding()).text == "red"
        assert len(requests) == 2


def test_a_server_without_ignore_eos_is_measured_without(no_waiting):
    load = Load(num_requests=1, concurrency=1, image_side=0, num_words=1, num_output_tokens=3, num_warmup=1)
    with served(ColourModel(), unknown=("ignore_eos",)) as (url, requests), OpenAIModel(url) as client:
        assert measure_efficiency(client, load)["num_output_tokens"] == 3
    assert ["ignore_eos" in request for request in requests] == [True, False, False]


@pytest.mark.parametrize("rate", [None, 200.0])
def test_efficiency_counts_every_token_of_a_stated_load(rate):
    load = Load(num_requests=6, concurrency=3, rate=rate, image_side=32, num_words=4, num_output_tokens=5, num_warmup=1)
    with served(ColourModel()) as (url, requests), OpenAIModel(url) as client:
        found = measure_efficiency(client, load)
    assert len(requests) == 7
    assert all(request["ignore_eos"] for request in requests)
    assert (found["num_requests"], found["num_output_tokens"]) == (6, 30)
    assert found["output_tokens_per_s"] == pytest.approx(30 / found["seconds"])
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= found["e2e_ms"]["max"]
    assert found["load"]["text"] == load.describe()
    assert found["peak_memory_bytes"] is None


def test_answers_that_arrive_whole_have_no_time_per_token():
    load = Load(num_requests=2, concurrency=1, image_side=0, num_words=1, num_output_tokens=4, num_warmup=1)

    class Streams(ColourModel):
        def stream(self, conversation, decoding):
            yield from deltas.pop(0)

    deltas = [[4], [4], [4]]
    found = measure_efficiency(Streams(), load)
    assert (found["tpot_ms"], found["inter_token_ms"], found["num_output_tokens"]) == (None, None, 8)
    assert found["ttft_ms"]["p50"] == found["e2e_ms"]["p50"]
    deltas = [[4], [4], [1, 3]]
    found = measure_efficiency(Streams(), load)
    assert found["tpot_ms"]["p50"] == pytest.approx(found["inter_token_ms"]["p50"] / 3)

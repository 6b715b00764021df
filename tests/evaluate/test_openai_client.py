"""A server is asked over real HTTP: answers, likelihoods, embeddings, and what goes wrong."""

import socket

import pytest
from evaluate.making import ColourModel, caption, picture, served

from saccade.errors import ConfigError, RequestError
from saccade.evaluate import openai_client
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

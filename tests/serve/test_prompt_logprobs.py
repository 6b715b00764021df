"""Log-probabilities of the prompt: `prompt_logprobs` as vLLM has it, `echo` with `logprobs` as OpenAI does."""

import pytest

from saccade.engine import Engine, EngineConfig, SamplingParams


def test_echo_and_prompt_logprobs_are_those_of_the_engine(server, checkpoint):
    fields = {"model": "tiny", "prompt": "red é car", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    [echoed] = server.http.post("/v1/completions", json=fields | {"echo": True, "logprobs": 2}).json()["choices"]
    [scored] = server.http.post("/v1/completions", json=fields | {"prompt_logprobs": 1}).json()["choices"]
    config = EngineConfig(num_workers=0, max_length=800, num_pages=200)
    with Engine.load(checkpoint, device="cpu", config=config) as engine:
        token_ids = server.http.post("/tokenize", json={"model": "tiny", "prompt": "red é car"}).json()["tokens"]
        [expected] = engine.generate_tokens(
            [(token_ids, [])], SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=2, ignore_eos=True)
        )
    assert echoed["text"] == "red é car" + scored["text"]
    logprobs = echoed["logprobs"]
    wanted = [one.logprob for one in (*expected.prompt_logprobs, *expected.logprobs) if one is not None]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(wanted, abs=1e-3)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(token_ids) + 2
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    first, *rest = scored["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in rest] == [str(token_id) for token_id in token_ids[1:]]
    assert [next(iter(entry.values()))["logprob"] for entry in rest] == pytest.approx(wanted[:-2], abs=1e-3)


def test_they_need_one_completion_that_is_not_streamed(server):
    fields = {"model": "tiny", "prompt": "red", "max_tokens": 2}
    for wrong in (
        {"echo": True, "stream": True},
        {"prompt_logprobs": 0, "n": 2},
        {"prompt_logprobs": 0, "stream": True},
    ):
        response = server.http.post("/v1/completions", json=fields | wrong)
        assert response.status_code == 400
        assert "stream" in response.json()["error"]["message"]
    assert server.chat(prompt_logprobs=0, n=2).status_code == 400

"""Evaluating through the server gives the answers of the engine in process."""

import json

import pytest

from saccade.cli.joins.engine_model import EngineModel
from saccade.data.toy import write_toy_shards
from saccade.evaluate import EvaluationConfig, OpenAIModel, TaskConfig, evaluate
from saccade.evaluate.readers import DataSpec, read_examples


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Questions in shards, and the same images to be described."""
    folder = tmp_path_factory.mktemp("evaluation")
    write_toy_shards(folder / "shards", first=0, count=12, side=56)
    lines = []
    for number, example in enumerate(read_examples(DataSpec(path=str(folder / "shards")))):
        (folder / f"{number}.png").write_bytes(example.images[0].read())
        lines.append(json.dumps({"image": f"{number}.png", "caption": "a shape on a wall"}) + "\n")
    (folder / "captions.jsonl").write_text("".join(lines))
    return (
        TaskConfig(task="vqa", data=DataSpec(path=str(folder / "shards")), max_tokens=8),
        TaskConfig(task="captioning", data=DataSpec(path=str(folder / "captions.jsonl")), max_tokens=24),
    )


def test_answers_and_scores_over_http_are_those_in_process(server, checkpoint, tasks, tmp_path):
    with OpenAIModel(server.url) as served, EngineModel(checkpoint, device="cpu") as engine:
        over_http = evaluate(served, EvaluationConfig(out=tmp_path / "http", tasks=tasks))
        in_process = evaluate(engine, EvaluationConfig(out=tmp_path / "engine", tasks=tasks))
    for task in ("vqa", "captioning"):
        assert over_http.records(task) == in_process.records(task)
        assert any(record["answer"] for record in in_process.records(task))
    assert over_http.scores == in_process.scores


def test_log_likelihoods_over_http_are_those_in_process(server, checkpoint, tasks, tmp_path):
    data = tasks[1].data
    scored = (TaskConfig(task="perplexity", data=data, limit=2), TaskConfig(task="retrieval", data=data, limit=2))
    with OpenAIModel(server.url) as served, EngineModel(checkpoint, device="cpu") as engine:
        assert served.can_score
        assert not served.can_embed
        image = {"type": "image", "image": next(iter(read_examples(data))).images[0].read()}
        conversation = [{"role": "user", "content": [image, {"type": "text", "text": "what is it?"}]}]
        answers = ["a shape", " on a wall ", "é"]
        ours, theirs = (model.log_likelihoods(conversation, answers) for model in (engine, served))
        assert [one.num_tokens for one in theirs] == [one.num_tokens for one in ours]
        assert [one.logprob for one in theirs] == pytest.approx([one.logprob for one in ours], abs=1e-3)
        assert len({one.logprob for one in ours}) == 3
        over_http = evaluate(served, EvaluationConfig(out=tmp_path / "http", tasks=scored))
        in_process = evaluate(engine, EvaluationConfig(out=tmp_path / "engine", tasks=scored))
    for task, name in (("perplexity", "logprob"), ("retrieval", "logprobs")):
        records = zip(over_http.records(task), in_process.records(task), strict=True)
        assert all(theirs[name] == pytest.approx(ours[name], abs=1e-3) for theirs, ours in records)

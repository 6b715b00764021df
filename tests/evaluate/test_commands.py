"""`saccade evaluate`: from a checkpoint, from a URL, compared, killed and resumed."""

import json
import signal
import subprocess
import sys
import time

import pytest
from data.making import encode, make_picture
from evaluate.making import ColourModel, picture, served, write_shards

from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.evaluate.results import VERSION

GAINS = [0.95 + 0.006 * number for number in range(8)]


@pytest.fixture
def walls(tmp_path):
    return write_shards(tmp_path / "walls", 12)


def test_a_checkpoint_is_compared_with_itself_on_other_images(command, checkpoint, shards, tmp_path):
    words = [
        "evaluate",
        checkpoint,
        "--tasks",
        "vqa,perplexity",
        "--data",
        shards,
        "-o",
        tmp_path / "out",
        "--max-tokens",
        4,
    ]
    words += ["--shuffle-images", "--json"]
    ended = command(*words)
    assert ended.status == 0, ended.err
    content = json.loads(ended.out)
    assert set(content["results"]) == {"tiny", "image-shuffled"}
    scores = content["results"]["tiny"]["tasks"]
    assert scores["vqa"]["num_examples"] == 12
    assert scores["perplexity"]["metrics"]["perplexity"]["value"] > 1
    assert {metric["metric"] for metric in content["comparisons"]["image-shuffled"]["metrics"]} >= {
        "vqa_accuracy",
        "perplexity",
    }
    for name in ("report.html", "report.md", "report.tex", "comparison.json", "scores.json", "settings.json"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    again = command(*words)
    assert json.loads(again.out) == content  # nothing was asked or measured again


def test_a_url_is_evaluated_and_two_results_are_compared(command, walls, tmp_path):
    for name, model in (("good", ColourModel()), ("bad", ColourModel(knows=("red",)))):
        with served(model) as (url, _):
            ended = command("evaluate", url, "--tasks", "vqa", "--data", walls, "-o", tmp_path / name, "--name", name)
        assert ended.status == 0, ended.err
        assert "vqa_accuracy" in ended.out
    ended = command("evaluate", tmp_path / "good", "--compare", tmp_path / "bad")
    assert ended.status == 0
    assert "0.471 [" in ended.out
    assert "+0.529*" in ended.out
    assert "against bad: 9 examples better, 0 worse" in ended.out
    assert f"report: {tmp_path / 'good' / 'report.html'}" in ended.out


def test_a_limit_may_be_of_one_task_and_progress_is_logged_without_a_terminal(command, tmp_path, monkeypatch):
    monkeypatch.setattr("saccade.cli.progress._LOG_EVERY_S", 0.0)
    walls = write_shards(tmp_path / "walls", 12, questions=False)
    words = ["--tasks", "captioning,retrieval,perplexity", "--data", walls, "-o", tmp_path / "out", "--name", "walls"]
    with served(ColourModel()) as (url, _):
        ended = command("evaluate", url, *words, "--limit", 5, "--limit", "retrieval=3", "--json")
    tasks = json.loads(ended.out)["results"]["walls"]["tasks"]
    counts = {name: one["num_examples"] for name, one in tasks.items()}
    assert counts == {"captioning": 5, "retrieval": 3, "perplexity": 5}
    assert tasks["retrieval"]["notes"] == ["retrieval among 3 pairs, 9 captions scored: recall@1 by chance is 0.3333"]
    assert "walls: captioning: 5 of 5 examples" in ended.err


def test_an_evaluation_that_is_killed_resumes_where_it_was(command, walls, tmp_path):
    out = tmp_path / "out"
    words = ["--tasks", "vqa", "--data", str(walls), "-o", str(out), "--name", "walls", "--concurrency", "2"]
    with served(ColourModel(), delay_s=0.1) as (url, requests):
        process = subprocess.Popen([sys.executable, "-m", "saccade", "evaluate", url, *words])
        written, deadline = out / "vqa" / "examples.jsonl", time.monotonic() + 300
        while not written.exists() or written.read_text().count("\n") < 4:
            assert time.monotonic() < deadline, "nothing is written"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        num_written = len(written.read_text().splitlines())
        assert 4 <= num_written < 17
        before = len(requests)
        ended = command("evaluate", url, *words, "--json")
        assert ended.status == 0, ended.err
        assert len(requests) - before == 17 - num_written
    scores = json.loads(ended.out)["results"]["walls"]["tasks"]["vqa"]
    assert scores["num_examples"] == 17
    assert scores["metrics"]["exact_match"]["value"] == 1.0


def test_images_of_the_training_data_are_noticed(command, tmp_path):
    """Three of twelve evaluation images are in the training shards as they are."""
    walls = write_shards(tmp_path / "walls", 12)
    with ShardWriter(tmp_path / "training", max_samples=10) as writer:
        for number in (1, 5, 9):  # green
            members = {"png": picture("green", number), "txt": b"a green wall"}
            writer.write(Sample(key=f"t{number}", source="training", members=members))
    with served(ColourModel()) as (url, _):
        ended = command(
            "evaluate", url, "--tasks", "vqa", "--data", walls, "-o", tmp_path / "out", "--name", "walls",
            "--training-data", tmp_path / "training", "--json",
        )  # fmt: skip
    assert ended.status == 0, ended.err
    note = json.loads(ended.out)["results"]["walls"]["tasks"]["vqa"]["contamination"]
    assert {"00000/0001/0", "00000/0005/0", "00001/0009/0"} <= set(note["example_ids"])
    assert note["num_exact"] == 5
    assert "5 of them the same file" in note["text"]
    assert note["clean_metrics"]["vqa_accuracy"]["value"] == 1.0


def test_all_evaluation_images_that_a_training_sample_shows_are_noticed(command, tmp_path):
    """Twelve pages named page.png: ten look alike, two of those are the same file, and one training sample shows
    them."""
    paper = make_picture(160, 120, 1)
    edits = [paper] * 2 + [paper.point(lambda value, gain=gain: round(value * gain)) for gain in GAINS]
    pages = [encode(image, "PNG") for image in [*edits, make_picture(160, 120, 2), make_picture(160, 120, 3)]]
    assert pages[0] == pages[1]
    assert len(set(pages)) == 11
    records = []
    for number, page in enumerate(pages):
        folder = tmp_path / "pages" / f"doc{number}"
        folder.mkdir(parents=True)
        (folder / "page.png").write_bytes(page)
        records.append({"id": str(number), "image": f"doc{number}/page.png", "question": "What?", "answer": "x"})
    (tmp_path / "pages" / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    with ShardWriter(tmp_path / "training") as writer:
        writer.write(Sample(key="t", source="training", members={"png": pages[0], "txt": b"a page"}))
    with served(ColourModel()) as (url, _):
        ended = command(
            "evaluate", url, "--tasks", "docvqa", "--data", tmp_path / "pages", "-o", tmp_path / "out", "--name",
            "pages",
            "--training-data", tmp_path / "training", "--json",
        )  # fmt: skip
    assert ended.status == 0, ended.err
    note = json.loads(ended.out)["results"]["pages"]["tasks"]["docvqa"]["contamination"]
    assert note["example_ids"] == [str(number) for number in range(10)]
    assert note["num_exact"] == 2


def test_results_of_an_earlier_version_are_not_compared_and_one_line_says_why(command, walls, tmp_path):
    for name in ("old", "new"):
        with served(ColourModel()) as (url, _):
            command("evaluate", url, "--tasks", "vqa", "--data", walls, "-o", tmp_path / name, "--name", name)
    settings = json.loads((tmp_path / "old" / "settings.json").read_text())
    (tmp_path / "old" / "settings.json").write_text(json.dumps(settings | {"version": 1}))
    for words in ([tmp_path / "new", "--compare", tmp_path / "old"], [tmp_path / "old", "--compare", tmp_path / "new"]):
        ended = command("evaluate", *words)
        assert ended.status == 2
        [line] = ended.err.strip().splitlines()
        assert "old: results of version 1" in line
        assert "Evaluate again" in line


def test_models_of_the_same_name_go_by_their_folder(command, walls, tmp_path):
    for name in ("one", "two"):
        with served(ColourModel()) as (url, _):
            command("evaluate", url, "--tasks", "vqa", "--data", walls, "-o", tmp_path / name, "--name", "walls")
    content = json.loads(command("evaluate", tmp_path / "one", "--compare", tmp_path / "two", "--json").out)
    assert set(content["results"]) == {str(tmp_path / "one"), str(tmp_path / "two")}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tasks", "vqa"], "takes --tasks NAME,NAME --data PATH -o RESULTS"),
        (["--tasks", "vq", "--data", "x", "-o", "y"], "no task is called 'vq'. Tasks: captioning"),
        (["--tasks", "vqa,pope", "--data", "vqa=x", "-o", "y"], "--data is missing for pope"),
        (["--tasks", "vqa", "--data", "x", "--prompt", "look", "-o", "y"], "--prompt look: write TASK=..."),
        (["--tasks", "vqa", "--data", "nowhere", "-o", "y"], "no such file or folder. Check --data"),
        (["--tasks", "vqa", "--data", "x", "-o", "y", "--training-data", "nowhere"], "nowhere"),
        (["--tasks", "vqa", "--data", "x", "-o", "y", "--model", "served"], "no URL was given"),
        (["--tasks", "vqa", "--data", "x", "-o", "y", "--adapter", "nowhere"], "--adapter nowhere: no such folder"),
        (["--tasks", "vqa", "--data", "x", "-o", "y", "--limit", "pope=3"], "--limit pope=3: write N, or TASK=N"),
        (["--tasks", "vqa", "--data", "x", "-o", "y", "--limit", "0"], "--limit 0: write N"),
        (
            ["--num-beams", "3", "--compare", "http://localhost:1/v1"],
            "http://localhost:1/v1 is a server, whose API has no beam search",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(command, checkpoint, words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command("evaluate", checkpoint, *words)
    assert ended.status == 2
    assert message in ended.err
    assert "Traceback" not in ended.err


def test_a_model_to_compare_with_is_checked_before_anything_is_asked(command, walls, tmp_path):
    (tmp_path / "unfinished").mkdir()
    unfinished = {"version": VERSION, "name": "x", "tasks": {}}
    (tmp_path / "unfinished" / "settings.json").write_text(json.dumps(unfinished))
    with served(ColourModel()) as (url, requests):
        words = ["evaluate", url, "--tasks", "vqa", "--data", walls, "-o", tmp_path / "out", "--compare"]
        assert "no checkpoint folder" in command(*words, tmp_path / "nothing").err
        assert "its evaluation is not finished" in command(*words, tmp_path / "unfinished").err
    assert requests == []


def test_something_that_is_no_model_is_refused(command, walls, tmp_path):
    ended = command("evaluate", tmp_path / "nothing", "--tasks", "vqa", "--data", walls, "-o", tmp_path / "out")
    assert ended.status == 2
    assert "no checkpoint folder (config.json), no results folder and no URL" in ended.err

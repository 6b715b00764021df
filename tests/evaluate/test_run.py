"""An evaluation end to end: every task, resumed, refused, compared."""

import json
import logging
import threading
import time
from dataclasses import replace

import pytest
from evaluate.making import COLOURS, ColourModel, caption, picture, write_shards

from saccade.errors import ConfigError, DataError
from saccade.evaluate import EvaluationConfig, Results, TaskConfig, compare, evaluate
from saccade.evaluate.readers import DataSpec
from saccade.evaluate.report import terminal_report, write_reports
from saccade.evaluate.results import RecordWriter
from saccade.evaluate.run import in_threads


@pytest.fixture(scope="module")
def walls(tmp_path_factory):
    """Shards of questions and of captions, and choices in jsonl."""
    folder = tmp_path_factory.mktemp("walls")
    write_shards(folder / "questions", 24)
    write_shards(folder / "captions", 12, questions=False)
    records = []
    for number, colour in enumerate(list(COLOURS) * 3):
        (folder / f"{number}.png").write_bytes(picture(colour, number))
        records.append(
            {"image": f"{number}.png", "question": "Which colour?", "choices": list(COLOURS), "answer": colour}
        )
    (folder / "choices.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def config_of(walls, out, *tasks, **fields):
    paths = {
        "captioning": "captions",
        "retrieval": "captions",
        "embedding_retrieval": "captions",
        "multiple_choice": "choices.jsonl",
    }
    configs = [TaskConfig(task=task, data=DataSpec(path=str(walls / paths.get(task, "questions")))) for task in tasks]
    return EvaluationConfig(out=out, tasks=tuple(configs), **fields)


def scores_of(results, task):
    return {name: score["value"] for name, score in results.scores["tasks"][task]["metrics"].items()}


ALL = (
    "vqa", "docvqa", "chartqa", "pope", "nlvr", "captioning", "retrieval", "embedding_retrieval", "multiple_choice",
    "perplexity",
)  # fmt: skip


def test_a_model_that_sees_scores_full_marks_and_one_that_is_shown_other_images_does_not(walls, tmp_path):
    seen = evaluate(ColourModel(), config_of(walls, tmp_path / "seen", *ALL, seed=1))
    blind = evaluate(
        ColourModel(), config_of(walls, tmp_path / "blind", *ALL, seed=1, shuffle_images=True, name="blind")
    )
    for task, metric, full in [
        ("vqa", "exact_match", 1.0),
        ("docvqa", "anls", 1.0),
        ("chartqa", "relaxed_accuracy", 1.0),
        ("pope", "accuracy", 1.0),
        ("captioning", "rouge_l", 1.0),
        ("retrieval", "text_to_image_recall@5", 1.0),
        ("retrieval", "image_to_text_recall@5", 1.0),
        ("embedding_retrieval", "image_to_text_recall@5", 1.0),
        ("multiple_choice", "letter_accuracy", 1.0),
        ("multiple_choice", "likelihood_accuracy", 1.0),
        ("perplexity", "bits_per_byte", None),
    ]:
        ours, theirs = scores_of(seen, task)[metric], scores_of(blind, task)[metric]
        if full is None:
            assert ours < theirs
        else:
            assert ours == full, (task, metric)
            assert theirs < ours, (task, metric)
    comparison = compare(seen, blind)
    found = comparison.of("captioning", "cider")
    assert found.is_significant
    assert found.is_better
    assert found.difference == pytest.approx(found.ours - found.theirs)
    assert found.low > 0


def test_records_keep_what_was_asked_and_answered(walls, tmp_path):
    config = config_of(walls, tmp_path / "out", "captioning", seed=5)
    results = evaluate(ColourModel(), config)
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())
    assert settings["seed"] == 5
    assert settings["tasks"]["captioning"]["prompt"] == "Describe the image."
    assert settings["tasks"]["captioning"]["decoding"] == {
        "max_tokens": 64,
        "temperature": 0.0,
        "seed": 5,
        "num_beams": 1,
        "ignore_eos": False,
    }
    [record, *_] = results.records("captioning")
    assert record["id"] == "00000/0000"
    assert record["images"] == ["00000/0000/0"]
    assert record["prompt"] == "Describe the image."
    assert record["answer"] == caption("red")
    assert record["references"][0] == caption("red")
    assert record["scores"]["rouge_l"] == 1.0
    assert [one["id"] for one in results.records("captioning")] == sorted(
        one["id"] for one in results.records("captioning")
    )


def test_a_task_that_takes_a_part_of_its_data_by_default_says_so(tmp_path, caplog):
    data = DataSpec(path=str(write_shards(tmp_path / "walls", 66, questions=False)))
    config = EvaluationConfig(out=tmp_path / "out", tasks=(TaskConfig(task="embedding_retrieval", data=data),))
    with caplog.at_level(logging.INFO, "saccade.evaluate"):
        results = evaluate(ColourModel(), config)
    assert results.scores["tasks"]["embedding_retrieval"]["num_examples"] == 64
    assert "embedding_retrieval: 64 of 66 examples, the default of the task" in caplog.text


def test_groups_are_scored_apart(walls, tmp_path):
    results = evaluate(ColourModel(knows=("red",)), config_of(walls, tmp_path / "out", "vqa"))
    groups = results.scores["tasks"]["vqa"]["groups"]
    assert {name: (group["num_examples"], group["value"]) for name, group in groups.items()} == {
        "colour": (24, 0.25),
        "yes_no": (9, 1.0),
    }


class StoppedError(Exception):
    pass


class StoppingModel(ColourModel):
    """Fails for good after some answers, as a process that is killed does."""

    def __init__(self, num_answers):
        super().__init__()
        self._left, self._guard = num_answers, threading.Lock()

    def generate(self, conversation, decoding):
        with self._guard:
            self._left -= 1
            if self._left < 0:
                raise StoppedError
        return super().generate(conversation, decoding)


def test_an_interrupted_evaluation_asks_only_what_is_missing(walls, tmp_path):
    config = config_of(walls, tmp_path / "out", "vqa", concurrency=4)
    with pytest.raises(StoppedError):
        evaluate(StoppingModel(13), config)
    path = tmp_path / "out" / "vqa" / "examples.jsonl"
    assert len(path.read_text().splitlines()) == 13
    with path.open("a") as file:
        file.write('{"id": "00000/0000/0", "answ')  # cut off in the middle of a line
    model = ColourModel()
    resumed = evaluate(model, config)
    assert model.asked.total() == 33 - 13
    whole = evaluate(ColourModel(), config_of(walls, tmp_path / "whole", "vqa"))
    assert resumed.records("vqa") == whole.records("vqa")
    assert resumed.scores == whole.scores
    again = ColourModel()
    evaluate(again, config)
    assert again.asked.total() == 0


def test_answers_with_odd_characters_survive_the_results_folder(walls, tmp_path):
    odd = "two\u2028lines\x85and\x0ca\ud800half"

    class Odd(ColourModel):
        def generate(self, conversation, decoding):
            return replace(super().generate(conversation, decoding), text=odd)

    config = config_of(walls, tmp_path / "out", "vqa")
    results = evaluate(Odd(), config)
    assert {record["answer"] for record in results.records("vqa")} == {odd.replace("\ud800", "?")}
    again = ColourModel()
    assert evaluate(again, config).records("vqa") == results.records("vqa")
    assert again.asked.total() == 0


def test_ctrl_c_waits_for_no_answer_in_progress(tmp_path):
    """The abandoned thread writes nothing any more."""
    has_asked, is_over = threading.Event(), threading.Event()
    writer, ended = RecordWriter(tmp_path / "examples.jsonl"), []

    def ask(number):
        if number == 0:
            has_asked.wait(60)
            raise KeyboardInterrupt
        has_asked.set()
        assert is_over.wait(60), "the interruption waits for this answer"
        writer.add({"id": number})
        ended.append(number)

    with pytest.raises(KeyboardInterrupt):
        in_threads(ask, range(2), 2)
    writer.close()
    is_over.set()
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [1]
    assert (tmp_path / "examples.jsonl").read_text() == ""


def test_refused_examples_are_recorded_count_as_wrong_and_are_asked_again(walls, tmp_path):
    config = config_of(walls, tmp_path / "out", "pope")
    results = evaluate(ColourModel(refuses=("red",)), config)
    assert results.scores["tasks"]["pope"]["num_failures"] == 6
    assert results.scores["tasks"]["pope"]["metrics"]["accuracy"]["value"] == pytest.approx(3 / 9)
    assert results.records("pope")[0]["failure"] == "red hurts"
    assert scores_of(evaluate(ColourModel(), config), "pope")["accuracy"] == 1.0


def test_beam_search_is_recorded_for_tasks_that_generate_and_told_in_the_report(walls, tmp_path):
    model = ColourModel()
    config = config_of(walls, tmp_path / "out", "captioning", "perplexity", num_beams=3)
    results = evaluate(model, config)
    assert model.num_beams == {3}
    recorded = {task: one["decoding"]["num_beams"] for task, one in results.settings["tasks"].items()}
    assert recorded == {"captioning": 3, "perplexity": 1}
    write_reports([results], {})
    assert "12 examples about 12 images, 3 beams<" in (tmp_path / "out" / "report.html").read_text()
    assert "captioning: 12 examples, 12 images, 3 beams" in terminal_report([results], {}).renderables
    with pytest.raises(ConfigError, match=r"other settings: captioning decoding\.num_beams was 3, now 4\."):
        evaluate(model, replace(config, num_beams=4))
    model.has_beam_search = False
    with pytest.raises(ConfigError, match=r"API has no beam search\. Evaluate the checkpoint folder"):
        evaluate(model, replace(config, out=tmp_path / "other"))
    with pytest.raises(ConfigError, match="beam search draws no samples"):
        replace(config, temperature=0.5)


def test_results_of_an_earlier_version_are_neither_resumed_nor_compared(walls, tmp_path):
    """The earlier version scored answers and named images differently, so results of both are not mixed."""
    config = config_of(walls, tmp_path / "out", "vqa")
    evaluate(ColourModel(), config)
    path = tmp_path / "out" / "settings.json"
    settings = json.loads(path.read_text())
    assert settings["version"] == 2
    path.write_text(json.dumps(settings | {"version": 1}))
    model = ColourModel()
    expected = (
        r"^\S+out: results of version 1, which this release \(version 2\) neither resumes nor compares: .*file name.*"
        r"\. Evaluate again into another folder: -o NAME$"
    )
    with pytest.raises(DataError, match=expected):
        evaluate(model, config)
    with pytest.raises(DataError, match=expected):
        Results.load(tmp_path / "out")
    assert model.asked.total() == 0
    path.write_text(json.dumps(settings | {"version": 3}))
    with pytest.raises(DataError, match=r"version 3.* is newer than this release reads \(2\)\. Update saccade"):
        Results.load(tmp_path / "out")


def test_results_of_other_settings_are_not_mixed(walls, tmp_path):
    config = config_of(walls, tmp_path / "out", "vqa")
    evaluate(ColourModel(), config)
    with pytest.raises(ConfigError, match=r"other settings: .*seed was 0, now 1"):
        evaluate(ColourModel(), replace(config, seed=1))
    with pytest.raises(ConfigError, match=r"model\.rules was 'colours', now 'another'"):
        evaluate(ColourModel("another"), config)
    prompted = replace(config, tasks=(replace(config.tasks[0], prompt="{question} Say it."),))
    with pytest.raises(ConfigError, match=r"vqa prompt was '{question}', now '{question} Say it.'"):
        evaluate(ColourModel(), prompted)
    both = evaluate(ColourModel(), replace(config, tasks=config_of(walls, tmp_path, "captioning").tasks))
    assert set(both.scores["tasks"]) == {"vqa", "captioning"}


def test_a_folder_that_is_not_empty_is_not_written_to(walls, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="is not empty and has no results"):
        evaluate(ColourModel(), config_of(walls, tmp_path, "vqa"))


def test_a_task_refuses_data_and_models_it_cannot_use(walls, tmp_path):
    captioning = TaskConfig(task="captioning", data=DataSpec(path=str(walls / "questions")))
    config = EvaluationConfig(out=tmp_path / "a", tasks=(captioning,))
    with pytest.raises(DataError, match="captioning takes images with captions, and none of its 33 examples is one"):
        evaluate(ColourModel(), config)
    model = ColourModel()
    model.can_score = model.can_embed = False
    with pytest.raises(ConfigError, match="retrieval needs log-likelihoods"):
        evaluate(model, config_of(walls, tmp_path / "b", "retrieval"))
    with pytest.raises(ConfigError, match="needs embeddings"):
        evaluate(model, config_of(walls, tmp_path / "c", "embedding_retrieval"))
    results = evaluate(model, config_of(walls, tmp_path / "d", "multiple_choice"))
    assert set(scores_of(results, "multiple_choice")) == {"letter_accuracy"}


def test_long_answers_to_short_questions_are_noted(walls, tmp_path):
    class Talker(ColourModel):
        def generate(self, conversation, decoding):
            return replace(super().generate(conversation, decoding), text="As far as I can see it might well be red")

    results = evaluate(Talker(), config_of(walls, tmp_path / "out", "vqa"))
    [note] = results.scores["tasks"]["vqa"]["notes"]
    assert "11 words where the expected ones have 1" in note


def test_changed_examples_are_listed_from_best_to_worst(walls, tmp_path):
    one = evaluate(ColourModel(knows=("red", "blue")), config_of(walls, tmp_path / "one", "vqa", name="one"))
    other = evaluate(
        ColourModel("b", knows=("red", "green", "black")), config_of(walls, tmp_path / "two", "vqa", name="two")
    )
    comparison = compare(one, other)
    changes = comparison.changes["vqa"]
    assert [change.difference for change in changes] == [1.0] * 6 + [-1.0] * 12
    assert (changes[0].ours["answer"], changes[0].theirs["answer"]) == ("blue", "grey")
    found = comparison.of("vqa", "exact_match")
    assert found.difference == pytest.approx(-6 / 33)
    assert not found.is_better


def test_intervals_resample_pages_of_one_file_name_as_the_images_they_are(tmp_path):
    """Forty documents with a page.png each: as one image there would be nothing to resample."""
    records = []
    for number in range(40):
        colour = list(COLOURS)[number % 4]
        page = tmp_path / "pages" / f"doc{number}" / "page.png"
        page.parent.mkdir(parents=True)
        page.write_bytes(picture(colour, number))
        records.append({"image": f"doc{number}/page.png", "question": "What colour is it?", "answer": colour})
    (tmp_path / "pages" / "own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataSpec(path=str(tmp_path / "pages"))

    def run(name, **fields):
        model = ColourModel(name, knows=("red", "blue"))
        config = EvaluationConfig(
            out=tmp_path / name, name=name, tasks=(TaskConfig(task="docvqa", data=data),), **fields
        )
        return evaluate(model, config)

    results, shuffled = run("half"), run("shuffled", shuffle_images=True)
    scores = results.scores["tasks"]["docvqa"]
    assert scores["num_images"] == 40
    found = scores["metrics"]["exact_match"]
    assert found["low"] < 0.5 < found["high"]
    assert found["high"] - found["low"] > 0.2
    assert results.records("docvqa")[7]["images"] == ["doc7/page.png"]
    assert all(
        before["images"] != after["images"]
        for before, after in zip(results.records("docvqa"), shuffled.records("docvqa"), strict=True)
    )
    compared = compare(results, shuffled).of("docvqa", "exact_match")
    assert compared.low < compared.difference < compared.high


def test_results_on_other_examples_are_not_compared(walls, tmp_path):
    one = evaluate(ColourModel(), config_of(walls, tmp_path / "one", "vqa"))
    other = evaluate(ColourModel(), config_of(walls, tmp_path / "two", "captioning"))
    with pytest.raises(DataError, match="no task in common"):
        compare(one, other)
    assert Results.load(tmp_path / "one").name == one.name

import json
import re
from html.parser import HTMLParser

import pytest

from saccade.report.charts import MAX_POINTS
from saccade.train.report import write_report

HOSTILE = "<script>alert('x')</script>\"&"


def record_of(step, **more):
    return {
        "step": step,
        "stage": "align" if step <= 50 else "instruct",
        "loss": 5.0 / step,
        "grad_norm": 0.5,
        "lr": {"default": 1e-4, "vision": 2e-6},
        "ms": None if step == 10 else 400.0,
        "text_tokens_per_s": 2e5,
        "image_tokens_per_s": 1e5,
        "mfu": 0.41,
        "mfu_decoder": 0.3,
        "data_wait": 0.003,
        "memory_gib": 71.5,
        "tokens": step * 1000,
        "samples": step * 4,
        "source_loss": {"captions": 2.0, "charts": 1.0},
        **more,
    }


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", [record_of(step) for step in range(10, 110, 10)])
    return folder


class Page(HTMLParser):
    """Tags in order, all attributes, and text outside of styles; tags that are opened must be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text, self._open = [], [], "", []
        self.feed(text)
        assert set(self._open) <= {"html"}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "img", "line"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag != "line":
            assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.text += data + " "


def page_of(run):
    return Page(write_report(run).read_text())


def test_every_curve_of_a_run_is_drawn(run):
    page = page_of(run)
    for title in (
        "Loss",
        "Loss by source",
        "Gradient norm",
        "Learning rate",
        "Tokens per second",
        "Model FLOPs",
        "waiting for data",
        "Device memory",
        "Time of a step",
    ):
        assert title in page.text
    assert page.tags.count("polyline") == 1 + 2 + 1 + 2 + 2 + 2 + 1 + 1 + 1
    assert "captions" in page.text
    assert "100,000" in page.text, "tokens"
    assert page.tags.count("line") > page.tags.count("figure"), "a mark where the second stage begins"


def test_unknown_metrics_are_drawn_too(run):
    write_lines(run / "metrics.jsonl", [record_of(10), {"step": 10, "validation": {"chartqa": 0.3, "vqa": 0.5}}])
    page = page_of(run)
    assert "validation" in page.text
    assert "chartqa" in page.text


def test_the_page_loads_nothing_and_runs_no_script(run):
    text = write_report(run).read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?:|url\(|@import|javascript:", text)
    assert not [value for name, value in page.attributes if name in ("src", "href")]
    assert "default-src 'none'" in text


def test_the_page_follows_the_readers_colour_scheme(run):
    text = write_report(run).read_text()
    assert "color-scheme: light dark" in text
    assert "prefers-color-scheme: dark" in text


def test_all_text_is_escaped(tmp_path):
    run = tmp_path / "a<b>&"
    run.mkdir()
    write_lines(
        run / "metrics.jsonl",
        [
            record_of(s, stage=HOSTILE + str(s), source_loss={HOSTILE: 1.0}, **{HOSTILE: {HOSTILE: 2.0}})
            for s in (1, 2, 3)
        ],
    )
    write_lines(run / "samples.jsonl", [{"step": 1, "prompt": HOSTILE, "output": HOSTILE, "reference": HOSTILE}])
    write_lines(
        run / "skipped_steps.jsonl", [{"step": 1, "reason": HOSTILE, "micro_batches": [{"samples": [HOSTILE]}]}]
    )
    (run / "config.toml").write_text(f"[section]\n'<b>key' = {json.dumps(HOSTILE)}\n")
    text = write_report(run).read_text()
    assert "<script" not in text
    assert "<b>" not in text
    assert Page(text).text.count(HOSTILE) >= 8


def test_samples_show_their_text_and_only_data_url_images(run):
    picture = "data:image/png;base64,iVBORw0KGgo="
    samples = [
        {"step": 10, "prompt": "What is it?", "output": "A cat.", "reference": "A dog.", "image": picture},
        {"step": 20, "prompt": "And now?", "output": "Nothing.", "image": "https://example.org/x.png"},
    ]
    write_lines(run / "samples.jsonl", samples)
    page = page_of(run)
    assert [value for name, value in page.attributes if name == "src"] == [picture]
    for words in ("What is it?", "A cat.", "A dog.", "Nothing."):
        assert words in page.text


def test_skipped_steps_and_settings_are_listed(run):
    write_lines(
        run / "skipped_steps.jsonl",
        [{"step": 42, "reason": "loss is nan", "loss": "nan", "micro_batches": [{"samples": ["shard/7"]}]}],
    )
    (run / "config.toml").write_text('seed = 3\n[[stages]]\nname = "align"\n[stages.optimizer]\nlr = 1e-5\n')
    page = page_of(run)
    for words in ("Skipped steps", "loss is nan", "shard/7", "stages[0].optimizer.lr", "1e-05"):
        assert words in page.text


@pytest.mark.parametrize(
    "records", [[], [{"step": 1}], [record_of(7)], [record_of(10, loss=None)]], ids=["none", "empty", "one", "no loss"]
)
def test_a_run_with_almost_nothing_has_a_page(tmp_path, records):
    write_lines(tmp_path / "metrics.jsonl", records)
    assert "html" in page_of(tmp_path).tags


def test_long_runs_stay_small(run):
    write_lines(run / "metrics.jsonl", [record_of(step) for step in range(1, 20_001)])
    text = write_report(run).read_text()
    assert max(points.count(",") for points in re.findall(r'points="([^"]*)"', text)) <= MAX_POINTS
    assert len(text) < 200_000


def test_scores_of_two_versions_of_results_are_not_joined_into_one_curve(run):
    for step, version, value in ((100, 1, 0.2), (200, 1, 0.3), (300, 2, 0.6), (400, 2, 0.7)):
        folder = run / "evaluations" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        score = {"value": value, "low": value - 0.1, "high": value + 0.1, "higher_is_better": True}
        content = {"version": version, "tasks": {"vqa": {"num_examples": 9, "metrics": {"accuracy": score}}}}
        (folder / "scores.json").write_text(json.dumps(content))
    text = write_report(run).read_text()
    [figure] = re.findall(r"<figure><figcaption>Evaluation: vqa, accuracy</figcaption>.*?</figure>", text)
    curves = re.findall(r'points="([^"]*)"><title>([^<]*)', figure)
    assert [(points.count(","), name) for points, name in curves] == [
        (2, "accuracy (version 1 of results)"),
        (2, "accuracy"),
    ]
    assert text.count("<td>accuracy (version 1 of results)</td>") == 2

"""Reports: the page is complete in itself, the tables say what the scores say."""

import base64
import io
import re
from html.parser import HTMLParser

import pytest
from evaluate.making import COLOURS, ColourModel, caption, write_shards
from PIL import Image
from rich.console import Console

from saccade.evaluate import EvaluationConfig, TaskConfig, evaluate
from saccade.evaluate.readers import DataSpec
from saccade.evaluate.report import compare_all, terminal_report, to_json, write_reports


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """A good and a bad model with their reports."""
    folder = tmp_path_factory.mktemp("reported")
    data = str(write_shards(folder / "captions", 12, questions=False))
    config = {"tasks": (TaskConfig(task="captioning", data=DataSpec(path=data)),)}
    results = [
        evaluate(ColourModel(), EvaluationConfig(out=folder / "good", name="good <b>model</b>", **config)),
        evaluate(ColourModel(knows=("red",)), EvaluationConfig(out=folder / "bad", name="only_red", **config)),
    ]
    comparisons = compare_all(results)
    write_reports(results, comparisons)
    return results, comparisons


class Page(HTMLParser):
    """Tags and their attributes; void tags and those whose end HTML lets one leave out need no end."""

    MAY_STAY_OPEN = {"meta", "img", "line", "circle", "rect", "html", "td", "th", "tr", "dt", "dd"}

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.MAY_STAY_OPEN:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.MAY_STAY_OPEN:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_self_contained_and_well_formed(reported):
    text = (reported[0][0].folder / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert not re.search(r"(src|href)=\"?(?!data:)[a-z]", text)
    assert not any(tag in ("script", "link", "iframe") for tag, _ in page.tags)
    assert "default-src 'none'" in text


def test_the_page_shows_scores_answers_and_small_images(reported):
    page = Page((reported[0][0].folder / "report.html").read_text())
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(images) >= 12
    with Image.open(io.BytesIO(base64.b64decode(images[0].partition(",")[2]))) as image:
        assert image.format == "JPEG"
        assert max(image.size) <= 160
    for words in (caption("blue"), "the wall is painted blue", "Changed against only_red: 9 examples", "Settings"):
        assert words in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) >= 6


def test_names_and_answers_are_escaped(reported):
    text = (reported[0][0].folder / "report.html").read_text()
    assert "<b>model</b>" not in text
    assert "good &lt;b&gt;model&lt;/b&gt;" in text


def test_the_tables_have_the_scores_and_mark_what_is_significant(reported):
    results, comparisons = reported
    scores = [one.scores["tasks"]["captioning"]["metrics"]["rouge_l"] for one in results]
    cells = [f"{score['value']:.3f} [{score['low']:.3f}, {score['high']:.3f}]" for score in scores]
    difference = f"{scores[0]['value'] - scores[1]['value']:+.3f}"
    markdown = (results[0].folder / "report.md").read_text()
    assert f"| captioning | rouge_l | {cells[0]} | {cells[1]} ({difference}\\*) |" in markdown
    latex = (results[0].folder / "report.tex").read_text()
    assert rf"captioning & rouge\_l & \textbf{{{scores[0]['value']:.3f}}}" in latex
    assert r"only\_red" in latex
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(terminal_report(results, comparisons))
    shown = console.export_text()
    assert cells[0] in shown
    assert f"{difference}*" in shown
    assert "9 examples better, 0 worse" in shown


def test_everything_is_available_as_json(reported):
    results, comparisons = reported
    content = to_json(results, comparisons)
    assert set(content["results"]) == {"good <b>model</b>", "only_red"}
    [one] = [metric for metric in content["comparisons"]["only_red"]["metrics"] if metric["metric"] == "cider"]
    assert one["is_significant"]
    assert one["is_better"]
    assert len(content["comparisons"]["only_red"]["changes"]["captioning"]) == 12 - 12 // len(COLOURS)


def test_a_report_without_its_data_has_no_images(reported, tmp_path, caplog):
    """The page is made from the results folder; images come from the data while it exists."""
    results, _ = reported
    results[0].settings["tasks"]["captioning"]["data"] = str(tmp_path / "gone")
    write_reports(results[:1], {})
    page = Page((results[0].folder / "report.html").read_text())
    assert not any(tag == "img" for tag, _ in page.tags)
    assert caption("blue") in page.text
    assert "shows no images of captioning" in caplog.text

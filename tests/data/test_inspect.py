"""The contents of a folder and the decisions on it: as numbers, and as a page that no caption can break out of."""

import dataclasses
import html.parser
import json
import re

import numpy as np
import pytest
from data.making import encode, make_jpeg, make_picture, make_sample, make_shards, write_samples

from saccade.data.curate import CurationSettings, ScoreRange, curate, inspect, write_page
from saccade.data.curate.report import distribution
from saccade.data.index import open_index
from saccade.data.lengths import Lengths


def count_words(sample):
    return [len(sample.members["txt"].split())], 16


@pytest.fixture
def folder(tmp_path):
    """Two sources, one of them with scores; a copy, a small image, a broken one."""
    samples = [
        make_sample(f"a{n}", seed=n, source="museum", fields={"license": "CC0", "similarity": 0.1 * n})
        for n in range(6)
    ]
    samples += [make_sample(f"b{n}", seed=20 + n, width=200, height=100, source="web") for n in range(4)]
    samples += [
        make_sample("copy", members={**samples[0].members, "txt": b"a shorter text"}),
        make_sample("small", width=20, height=20, seed=40, source="web"),
        make_sample(
            "cut",
            members={"jpg": make_jpeg(256, 256, 3)[:4000], "txt": b"half of an image", "json": b'{"source": "web"}'},
        ),
    ]
    write_samples(tmp_path / "00000.tar", samples[:6])
    write_samples(tmp_path / "00001.tar", samples[6:])
    return tmp_path


def test_a_folder_can_be_inspected_before_it_is_curated(folder):
    report = inspect(folder)
    assert (report.num_samples, report.num_kept, report.is_curated) == (13, 13, False)
    assert report.steps == []
    assert [each.name for each in report.distributions] == [
        "image width",
        "image height",
        "aspect ratio (width / height)",
    ]
    assert "readable, not curated yet" in "\n".join(report.lines())


def test_the_report_counts_reasons_sources_and_sizes(folder):
    curate(folder, CurationSettings(scores={"similarity": ScoreRange(min=0.15)}), num_workers=1)
    report = inspect(folder)
    assert [(step.reason, step.num_dropped, step.num_left) for step in report.steps] == [
        ("image too small", 1, 12),
        ("corrupt image", 1, 11),
        ("score similarity", 3, 8),
    ]
    assert (report.num_kept, report.is_curated) == (8, True)
    assert report.sources == {"museum": (4, 7), "web": (4, 6)}
    assert report.licences == {"CC0": (4, 7), "unknown": (4, 6)}
    by_name = {each.name: each for each in report.distributions}
    assert by_name["image width"].quantiles[0] == 96
    assert by_name["image width"].quantiles[-1] == 200
    assert sum(by_name["score similarity"].num_all) == 7
    assert sum(by_name["score similarity"].num_kept) == 4
    assert sum(by_name["text length in words"].num_all) == 13
    text = "\n".join(report.lines())
    assert "8 of 13 samples kept (61.5%)" in text
    assert re.search(r"score similarity +-3 +8 left", text)
    json.dumps(dataclasses.asdict(report))  # what --json prints


def test_tokens_are_shown_where_they_are_known(folder):
    Lengths(open_index(folder), "abc").build(count_words, num_workers=1)
    by_name = {each.name: each for each in inspect(folder).distributions}
    assert by_name["tokens of the first text"].quantiles[-1] == 12
    assert by_name["image patches"].quantiles[0] == 16


def test_histograms_hold_every_value():
    rng = np.random.default_rng(0)
    for values in (rng.lognormal(5, 2, 1000), rng.normal(0, 1, 1000), np.full(10, 7.0), np.array([0.0])):
        kept = rng.random(len(values)) < 0.5
        each = distribution("x", values, kept)
        assert sum(each.num_all) == len(values)
        assert sum(each.num_kept) == kept.sum()
        assert len(each.edges) == len(each.num_all) + 1
        assert each.quantiles == () or each.quantiles[0] == values[kept].min()


class Elements(html.parser.HTMLParser):
    """All elements with their attributes, and all text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.text = [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</p></div></body><iframe src='https://evil.example'></iframe>",
    "{{ 7 * 7 }} {% raw %}",
    "<style>*{display:none}</style> and words",
    "\u202ereversed text &lt;b&gt; \x00 \ud7ff",
    "javascript:alert(1) is a caption of it",
]


def test_the_page_is_complete_and_hostile_text_stays_text(tmp_path):
    samples = [
        make_sample(f"k{n}", seed=n, text=text, source=text, fields={"license": text, text: 0.5})
        for n, text in enumerate(HOSTILE)
    ]
    samples += [
        make_sample("<b>key", seed=50),
        make_sample("cut", members={"jpg": make_jpeg(256, 256, 3)[:3000], "txt": b"a <b>cut</b> image"}),
    ]
    samples += [
        make_sample(
            "twin", members={"png": encode(make_picture(96, 64, 0), "PNG"), "txt": b"the <i>same</i> picture again"}
        )
    ]
    write_samples(tmp_path / "<i>shards" / "00000.tar", samples)
    curate(tmp_path / "<i>shards", CurationSettings(drop_boilerplate=False), num_workers=1)
    report = write_page(tmp_path / "<i>shards", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Elements(page)

    tags = {tag for tag, _ in found.elements}
    assert tags <= set(
        ("html head meta title style body h1 h2 h3 p span table tr td th svg rect div details summary img bdi").split()
    )
    assert not any(name.startswith("on") or name == "style" for _, attrs in found.elements for name in attrs)
    sources = [attrs["src"] for tag, attrs in found.elements if tag == "img"]
    assert sources
    assert all(source.startswith("data:image/jpeg;base64,") for source in sources)
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", page), "nothing is fetched"
    policy = next(
        attrs["content"] for tag, attrs in found.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    for text in HOSTILE[:4]:
        assert text in found.text, "shown as it is"
    assert "<b>key" in found.text
    assert "repeats 00000.tar/k0" in found.text or "repeats 00000.tar/twin" in found.text
    assert report.num_samples == len(samples)


def test_the_page_shows_examples_of_every_reason_and_is_the_same_every_time(tmp_path):
    make_shards(tmp_path, 3, 10)
    curate(tmp_path, CurationSettings(min_side=70), num_workers=1)
    write_page(tmp_path, tmp_path / "one.html", num_examples=4)
    write_page(tmp_path, tmp_path / "two.html", num_examples=4)
    page = (tmp_path / "one.html").read_text()
    assert page == (tmp_path / "two.html").read_text()
    assert "Dropped: image too small" in page
    assert page.count("<img") == 8
    shown = set(re.findall(r"(0000\d)\.tar/", page))
    assert shown == {"00000", "00001", "00002"}, "evenly over the shards"


def test_the_page_works_without_decisions_and_without_a_single_kept_sample(tmp_path):
    make_shards(tmp_path, 1, 3)
    write_page(tmp_path, tmp_path / "page.html")
    curate(tmp_path, CurationSettings(min_side=5000), num_workers=1)
    report = write_page(tmp_path, tmp_path / "page.html")
    assert report.num_kept == 0
    assert "image width: none kept" in "\n".join(report.lines())
    assert "none kept" in (tmp_path / "page.html").read_text()


def test_what_a_damaged_shard_lost_is_reported_everywhere(tmp_path):
    write_samples(tmp_path / "00000.tar", [make_sample(f"a{n}", seed=n) for n in range(4)])
    whole = (tmp_path / "00000.tar").read_bytes()
    (tmp_path / "00001.tar").write_bytes(whole[: len(whole) // 2])
    curated = curate(tmp_path, CurationSettings(), num_workers=1)
    report = write_page(tmp_path, tmp_path / "page.html")
    assert curated.damaged == report.damaged
    assert list(report.damaged) == ["00001.tar"]
    damage = report.damaged["00001.tar"]
    assert f"  damaged shard 00001.tar: {damage}" in report.lines()
    assert "Damaged shards" in (tmp_path / "page.html").read_text()
    assert damage in (tmp_path / "page.html").read_text()

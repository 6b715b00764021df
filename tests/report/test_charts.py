"""Charts: round ticks, escaped names, files that stand alone."""

from xml.etree import ElementTree

import pytest

from saccade.report.charts import LogBar, histogram, interval_chart, line_chart, log_bar_chart, svg_file, ticks

HOSTILE = "<b>\"name\" & 'more'</b>"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-3.2, 8.9), (1e-6, 3e-6), (1000.0, 123456.0), (5.0, 5.0)])
def test_ticks_are_round_and_within_the_range(low, high):
    marks = ticks(low, high)
    assert 1 <= len(marks) <= 7
    assert all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks)


def test_every_chart_is_well_formed_and_escapes_its_names():
    bars = [LogBar(HOSTILE, HOSTILE, 0.01, 0), LogBar("", "zero", 0.0, 1)]
    for chart in (
        line_chart(HOSTILE, {HOSTILE: [(1, 2.0), (2, 1.0)], "one": [(1, 1.0)]}, marks=[(1.5, HOSTILE)]),
        interval_chart(HOSTILE, [(HOSTILE, 0.5, 0.4, 0.6)]),
        histogram(HOSTILE, [1.0, 2.0, 2.0]),
        log_bar_chart(HOSTILE, bars, [HOSTILE, "other"]),
    ):
        tree = ElementTree.fromstring(chart)
        assert not any(element.tag == "b" for element in tree.iter())
        assert HOSTILE in "".join(tree.itertext())


def test_a_chart_as_a_file_has_its_name_space_and_colours():
    file = svg_file(log_bar_chart("Errors", [LogBar("layer", "0.1", 0.1, 0)], ["scheme"]))
    tree = ElementTree.fromstring(file)
    assert tree.tag == "{http://www.w3.org/2000/svg}svg"
    assert ".c0 { color:" in file

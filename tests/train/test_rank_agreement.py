"""Ranks that differ are refused at the start, and slow ones are named."""

import pytest

from saccade.train import rank_agreement
from saccade.train.rank_agreement import _refusal
from saccade.train.slow_ranks import late_data, slow_products

FACTS = {"recipe": "1", "code": "2", "torch": "2.13.0", "python": "3.11.7", "host": "first"}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch", "rank 3 on host other has another version of torch than rank 0 on host first: x instead of 2.13.0"),
        ("code", "rank 3 on host other has another code of saccade than rank 0 on host first: x instead of 2. Install"),
    ],
)
def test_the_refusal_names_the_rank_and_what_differs(name, words):
    line = _refusal(3, FACTS | {name: "x", "host": "other"}, FACTS, name, [])
    assert line.startswith(words)
    assert "\n" not in line


def test_the_refusal_of_another_recipe_names_the_settings():
    settings = [{"seed": 1, "stages": [{"lr": 0.1}]}, {"seed": 1, "stages": [{"lr": 0.2}]}]
    line = _refusal(1, FACTS | {"recipe": "x"}, FACTS, "recipe", settings)
    assert "(stages.0.lr 0.1 -> 0.2). Start all ranks with one recipe" in line


def test_the_digest_of_the_code_is_that_of_all_modules(tmp_path, monkeypatch):
    (tmp_path / "part").mkdir()
    (tmp_path / "__init__.py").write_text("")
    file = tmp_path / "part" / "module.py"
    monkeypatch.setattr(rank_agreement.saccade, "__file__", str(tmp_path / "__init__.py"))
    digests = []
    for text in ("a = 1", "a = 2", "a = 1"):
        file.write_text(text)
        digests.append(rank_agreement._code_digest.__wrapped__())
    assert digests[0] == digests[2] != digests[1]


def test_ranks_are_compared_with_the_median():
    assert slow_products([1.0, 1.1, 1.45, 1.0]) == {2: 1.45}
    assert slow_products([1.0, 2.0]) == {1: 2.0}
    assert late_data([0.01, 0.0, 0.4, 0.02]) == pytest.approx({2: 40.0})
    assert late_data([0.5, 0.5]) == {}

"""Metrics equal the published implementations and the examples of the published definitions."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from saccade.evaluate.metrics.bleu import bleu, bleu_counts
from saccade.evaluate.metrics.caption_tokenizer import tokenize_caption
from saccade.evaluate.metrics.choice import chosen
from saccade.evaluate.metrics.cider import cider_d
from saccade.evaluate.metrics.rouge import rouge_l
from saccade.evaluate.metrics.text_match import anls, edit_distance, exact_match, relaxed_accuracy
from saccade.evaluate.metrics.vqa_accuracy import normalize_answer, vqa_accuracy
from saccade.evaluate.metrics.yes_no import is_yes
from saccade.evaluate.tasks import TASKS

RECORDED = json.loads(Path(__file__).with_name("captions.json").read_text())
"""Our own captions; tokens and scores are what pycocoevalcap 1.2 gives for them, with its Java tokenizer."""


@pytest.mark.parametrize("image", RECORDED["images"], ids=lambda image: image["caption"][:20])
def test_captions_have_the_tokens_of_the_published_tokenizer(image):
    assert tokenize_caption(image["caption"]) == image["tokens"]
    assert [tokenize_caption(text) for text in image["references"]] == image["reference_tokens"]


def test_caption_scores_equal_the_published_implementation():
    records = [{"answer": image["caption"], "references": image["references"]} for image in RECORDED["images"]]
    metrics = TASKS["captioning"].score(records)
    assert {name: metric.value for name, metric in metrics.items()} == pytest.approx(RECORDED["scores"], abs=1e-6)
    for name in ("rouge_l", "cider"):
        assert metrics[name].values == pytest.approx([image[name] for image in RECORDED["images"]], abs=1e-6)


@pytest.fixture(scope="module")
def flickr8k():
    """A thousand photos with five captions each: the first is scored against the others."""
    path = Path(os.environ.get("SACCADE_DATA", "/nowhere")) / "flickr8k" / "test-00000.tar"
    if not path.exists():
        pytest.skip("needs Flickr8k: SACCADE_DATA=FOLDER")
    with tarfile.open(path) as tar:
        members = [member for member in tar if member.name.endswith(".json")]
        return [json.loads(tar.extractfile(member).read())["captions"] for member in members]


def test_caption_scores_equal_pycocoevalcap_on_real_captions(flickr8k):
    modules = [pytest.importorskip(f"pycocoevalcap.{name}.{name}") for name in ("bleu", "rouge", "cider")]
    captions = flickr8k[1:] + flickr8k[:1]  # every fourth is right, the others are of the next photo
    pairs = enumerate(zip(flickr8k, captions, strict=True))
    answers = [(own if number % 4 == 0 else other)[0] for number, (own, other) in pairs]
    tokens = [tokenize_caption(answer) for answer in answers]
    references = [[tokenize_caption(text) for text in captions[1:]] for captions in flickr8k]
    ours = {number: [" ".join(words)] for number, words in enumerate(tokens)}
    theirs = {number: [" ".join(words) for words in texts] for number, texts in enumerate(references)}
    expected_bleu, _ = modules[0].Bleu(4).compute_score(theirs, ours, verbose=0)
    counts = np.array([bleu_counts(*pair) for pair in zip(tokens, references, strict=True)])
    assert [float(bleu(counts.sum(axis=0), n)) for n in range(1, 5)] == pytest.approx(expected_bleu, abs=1e-6)
    _, expected_rouge = modules[1].Rouge().compute_score(theirs, ours)
    assert [rouge_l(*pair) for pair in zip(tokens, references, strict=True)] == pytest.approx(expected_rouge, abs=1e-6)
    _, expected_cider = modules[2].Cider().compute_score(theirs, ours)
    assert cider_d(tokens, references) == pytest.approx(expected_cider, abs=1e-6)


def test_real_captions_have_the_tokens_of_the_published_tokenizer(flickr8k):
    tokenizer = pytest.importorskip("pycocoevalcap.tokenizer.ptbtokenizer").PTBTokenizer()
    if shutil.which("java") is None:
        pytest.skip("the published tokenizer needs Java")
    texts = [text for captions in flickr8k for text in captions]
    expected = tokenizer.tokenize({number: [{"caption": text}] for number, text in enumerate(texts)})
    wrong = [text for number, text in enumerate(texts) if tokenize_caption(text) != expected[number][0].split()]
    assert wrong == []


def test_a_caption_equal_to_a_reference_has_a_bleu_of_one():
    counts = np.array(
        bleu_counts(["a", "dog", "runs", "fast", "today"], [["a", "dog", "runs", "fast", "today"], ["no"]])
    )
    assert [float(bleu(counts, n)) for n in range(1, 5)] == pytest.approx([1.0] * 4, abs=1e-8)


# ------------------------------------------------------------------ VQA


@pytest.mark.parametrize(("num_same", "expected"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_vqa_accuracy_averages_over_ten_people_leaving_one_out(num_same, expected):
    """The values on https://visualqa.org/evaluation.html."""
    assert vqa_accuracy("yes", ["yes"] * num_same + ["no"] * (10 - num_same)) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Two.", "2"),
        ("the red car", "red car"),
        ("an  apple\n", "apple"),
        ("1,000", "1000"),
        ("3.5", "3.5"),
        ("10:30", "10:30"),
        ("dont know", "don't know"),
        ("couldn'tve", "couldn't've"),
        ("red/white", "red white"),
        ("yes, please", "yes please"),
        ("man's", "man's"),
        ("t-shirt", "t shirt"),
        ("None", "0"),
    ],
)
def test_answers_are_normalized_as_vqa_publishes_it(answer, expected):
    assert normalize_answer(answer) == expected


def test_answers_are_normalized_also_where_all_ten_people_agree():
    """The challenge server does; the evaluator that was released first compares them as they are, and would give 0."""
    assert vqa_accuracy("Two.", ["2"] * 10) == 1.0
    assert vqa_accuracy("the cat", ["cat"] * 10) == 1.0


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("im here", "i'm here", False),  # published for "Im", which is compared after lower case and never found
        ("ive", "i've", False),
        ("couldntve", "couldn't've", False),  # one apostrophe may be missing, not two
        ("couldnt've", "couldn't've", True),
        ("yall'd've", "y'all'd've", True),
        ("ow's'at", "'ow's'at", True),
        ("somebodyd", "somebody'd", True),
        ("lets", "let's", False),
    ],
)
def test_contractions_are_those_that_vqa_publishes(one, other, is_same):
    assert (normalize_answer(one) == normalize_answer(other)) is is_same


def test_both_answer_and_references_are_normalized():
    assert vqa_accuracy("A cat", ["the cat."] * 10) == 1.0
    assert vqa_accuracy("2", ["two"]) == 1.0
    assert vqa_accuracy("3", ["two"]) == 0.0


# ------------------------------------------------------------------ documents and charts


@pytest.mark.parametrize(
    ("answer", "references", "expected"),
    [
        ("coca cola", ["Coca  Cola"], 1.0),
        ("coca cola company", ["coca cola"], 0.5294117647),
        ("coca cole", ["coca cola", "pepsi"], 0.8888888889),
        ("pepsi", ["coca cola"], 0.0),
        ("ab", ["abcd"], 0.5),  # half of it is wrong: the threshold itself counts
        ("ab", ["abcde"], 0.0),
        ("2010 ", ["2010"], 1.0),
        ("abcx ", ["abcd"], 0.8),  # the length that divides is that of the texts as they are, with their spaces
        ("abc", ["abcd"], 0.75),
        ("", ["a"], 0.0),
    ],
)
def test_anls_is_one_minus_the_normalized_distance_to_the_closest_answer(answer, references, expected):
    assert anls(answer, references) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("one", "other", "expected"), [("kitten", "sitting", 3), ("", "abc", 3), ("flaw", "lawn", 2)])
def test_edit_distance(one, other, expected):
    assert edit_distance(one, other) == edit_distance(other, one) == expected


@pytest.mark.parametrize(
    ("answer", "reference", "expected"),
    [
        ("104", "100", 1.0),
        ("105", "100", 1.0),
        ("106", "100", 0.0),
        ("-95", "-100", 1.0),
        ("52%", "0.5", 1.0),
        ("Blue", "blue", 1.0),
        ("blues", "blue", 0.0),
        ("0", "0", 1.0),
        ("0.01", "0", 0.0),
        ("yes", "1", 0.0),
        ("1.05", "1", 0.0),  # 0.05000000000000004
        ("0.42", "0.4", 1.0),
    ],
)
def test_relaxed_accuracy_allows_numbers_five_percent(answer, reference, expected):
    assert relaxed_accuracy(answer, [reference]) == expected


def test_exact_match_ignores_case_white_space_and_marks_at_the_ends():
    assert exact_match(' "Dark  Blue". ', ["dark blue"]) == 1.0
    assert exact_match("dark-blue", ["dark blue"]) == 0.0


# ------------------------------------------------------------------ multiple choice

PETS = ("A cat", "A dog", "Two cats", "cat")
COLOURS = ("red", "dark red", "vitamin C", "Washington D.C.", "blue", "pink", "grey", "black", "white")  # A to I


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        # what the prompt asks for, in the forms in which models give it
        ("B", "B"), ("B.", "B"), ("(B)", "B"), ("B)", "B"), ("b", "B"), ("(b)", "B"), ("[B]", "B"), ("**B**", "B"),
        ("`B`", "B"),
        ("\\boxed{B}", "B"), ("$\\boxed{\\text{B}}$", "B"), ("B: dark red", "B"), ("B. dark red", "B"),
        ("B) dark red", "B"),
        ("B\nbecause it is dark", "B"), ("Answer:B", "B"), ("Answer: B", "B"), ("The answer is B", "B"),
        ("answer: b.", "B"),
        ("The correct answer is (B).", "B"), ("**Answer:** B", "B"), ("Option B is right", "B"), ("I choose B", "B"),
        ("I think it is B.", "B"), ("I", "I"), ("I.", "I"), ("It must be I", "I"), ("A", "A"), ("A.", "A"),
        ("A is right", "A"),
        ("The answer is A because it is red", "A"),
        # after reasoning the last one counts, as in MMMU, but for what is called the answer
        ("(A) is wrong, (C) is right", "C"), ("not A, not B, so C", "C"),
        ("The answer is B, since A is too bright", "B"),
        ("A: red. B: dark red. The answer is B.", "B"), ("First \\boxed{A}, no: \\boxed{C}", "C"),
        # the text of a choice
        ("dark red", "B"), ("Dark red.", "B"), ("The wall is dark red", "B"), ("It is vitamin C", "C"),
        ("vitamin c", "C"),
        ("It was taken in Washington D.C. in spring", "D"), ("Not blue but grey.", "G"), ("A dark red wall", "B"),
        ("I see grey", "G"),
        # nothing
        ("", None), ("Z", None), ("a house", None), ("I cannot tell", None), ("Answer:", None), ("unreddened", None),
    ],
)  # fmt: skip
def test_the_choice_that_an_answer_names_is_found(answer, expected):
    found = chosen(answer, COLOURS)
    assert (None if found is None else "ABCDEFGHI"[found]) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("A dog", "B"), ("a dog.", "B"), ("A cat", "A"), ("cat", "D"), ("There are two cats", "C"), ("A dog runs", "B"),
        ("A", "A")],
)  # fmt: skip
def test_an_answer_that_is_a_choice_word_for_word_is_that_choice(answer, expected):
    assert "ABCD"[chosen(answer, PETS)] == expected


def test_a_letter_is_the_choice_of_that_letter_even_where_letters_are_choices():
    assert chosen("A", ["B", "A"]) == 0
    assert chosen("x", ["w", "x"]) == 1


@pytest.mark.parametrize(
    ("answer", "published"),
    [("B", "B"), ("B.", "B"), ("(B)", "B"), ("B dark red", "B"), ("(A) or (B)", "B"), ("It is B", "B"),
        ("I say A , no , B", "B"),
     ("The colour of it is surely dark blue", "E")],
)  # fmt: skip
def test_answers_that_mmmu_reads_are_read_as_in_mmmu(answer, published):
    """`published` is what MMMU's evaluator gives; where it finds nothing it draws a choice at random, and here there is
    none."""
    assert "ABCDEFGHI"[chosen(answer, COLOURS)] == published


def test_a_choice_is_right_by_its_letter_and_by_its_words():
    answers = ["A dog", "b", "Answer:B", "[B]", "A", ""]
    common = {"references": ["A dog"], "choices": list(PETS)}
    records = [{"id": str(number), "answer": said, **common} for number, said in enumerate(answers)]
    [metric] = TASKS["multiple_choice"].score(records).values()
    assert metric.values.tolist() == [1, 1, 1, 1, 0, 0]


# ------------------------------------------------------------------ yes and no


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Yes", True),
        ("yes, there is a dog.", True),
        ("No.", False),
        ("no there isn't", False),
        ("There is not a dog in the image. Yes", False),
        ("There isn't any.", False),
        ("True", True),
        ("false", False),
        ("I know it.", True),
        ("", True),  # none of POPE's words for no
    ],
)
def test_yes_and_no_are_read_from_the_first_sentence(answer, expected):
    assert is_yes(answer) is expected


def test_an_empty_answer_is_yes_and_a_refused_example_is_wrong():
    """POPE's evaluator looks for words for no, which an empty answer lacks. A refused example is not an answer."""
    records = [
        {"id": "0", "references": ["yes"], "answer": ""},
        {"id": "1", "references": ["no"], "answer": ""},
        {"id": "2", "references": ["yes"], "failure": "too large"},
        {"id": "3", "references": ["no"], "failure": "too large"},
    ]
    scores = {name: metric.value for name, metric in TASKS["pope"].score(records).items()}
    assert scores == pytest.approx({"accuracy": 0.25, "f1": 0.5, "precision": 0.5, "recall": 0.5, "yes_rate": 0.5})


def test_pope_scores_follow_from_the_confusion_matrix():
    """Three hits, one false alarm, two misses, four correct rejections."""
    cases = [("yes", "yes")] * 3 + [("no", "yes")] + [("yes", "no")] * 2 + [("no", "no")] * 4
    records = [{"id": str(n), "references": [truth], "answer": said} for n, (truth, said) in enumerate(cases)]
    scores = {name: metric.value for name, metric in TASKS["pope"].score(records).items()}
    assert scores == pytest.approx(
        {"accuracy": 0.7, "f1": 2 * 0.75 * 0.6 / 1.35, "precision": 0.75, "recall": 0.6, "yes_rate": 0.4}
    )

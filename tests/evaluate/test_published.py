"""Published benchmarks in their published layouts: read, asked and scored as their published code defines it."""

import base64
import csv
import json
import os
import re
import tarfile
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import run_forked
from evaluate.making import COLOURS, picture, write_shards
from loopback_hub import serve_hub

from saccade.data.curate import CurationSettings, curate
from saccade.errors import ConfigError, DataError
from saccade.evaluate import EvaluationConfig, TaskConfig, evaluate
from saccade.evaluate.example import Example, ImageFile
from saccade.evaluate.metrics.open_answer import names_answer
from saccade.evaluate.metrics.vqa_accuracy import textvqa_accuracy, vqa_accuracy
from saccade.evaluate.model import Answer
from saccade.evaluate.readers import DataSpec, read_examples
from saccade.evaluate.tasks import TASKS

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SHORT = "\nAnswer the question using a single word or phrase."
LETTER = "\nAnswer with the option's letter from the given choices directly."


def shown(number=0, colour="red"):
    """An image as the hub's Parquet files have it."""
    return {"bytes": picture(colour, number), "path": f"{number}.png"}


def write_parquet(path, rows, row_group_size=2):
    """A Parquet file of rows; columns named image... have images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0])
    columns = {
        name: pa.array([row[name] for row in rows], IMAGE if re.fullmatch(r"image(_\d)?", name) else None)
        for name in names
    }
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)


class Scripted:
    """Gives the answers of a list, by the text of the prompt; what it was shown is kept."""

    can_score = can_embed = has_beam_search = False

    def __init__(self, answers):
        self.answers, self.conversations, self._lock = answers, {}, threading.Lock()

    def describe(self):
        return {"rules": "scripted"}

    def generate(self, conversation, decoding):
        content = conversation[-1]["content"]
        text = "".join(part["text"] if part["type"] == "text" else "<>" for part in content).removeprefix("<>")
        with self._lock:
            self.conversations[text] = (content, decoding.max_tokens)
        return Answer(text=self.answers[text], num_prompt_tokens=9, num_tokens=1, finish_reason="stop")


def run(task, folder, answers, **fields):
    """Evaluate a benchmark with scripted answers; the results, and the scores by name."""
    model = Scripted(answers)
    config = EvaluationConfig(
        out=folder / "out", tasks=(TaskConfig(task=task, data=DataSpec(path=str(folder / "data"), **fields)),)
    )
    results = evaluate(model, config)
    scores = {name: one["value"] for name, one in results.scores["tasks"][task]["metrics"].items()}
    groups = {name: one["value"] for name, one in results.scores["tasks"][task]["groups"].items()}
    return model, results, scores, groups


# ------------------------------------------------------------------ short answers

ANSWERS = ["red", "Red.", "crimson"] + ["the red"] * 7
SETS = {
    "docvqa": (
        {
            "data/DocVQA/validation-00000-of-00002.parquet": [
                {
                    "questionId": "337",
                    "question": "What is the date?",
                    "question_types": ["form"],
                    "image": shown(),
                    "docId": 1,
                    "ucsf_document_id": "x",
                    "ucsf_document_page_no": "1",
                    "answers": ["1/8/93"],
                    "data_split": "val",
                },
            ],
            "data/DocVQA/validation-00001-of-00002.parquet": [
                {
                    "questionId": "338",
                    "question": "Who wrote?",
                    "question_types": ["form"],
                    "image": shown(),
                    "docId": 1,
                    "ucsf_document_id": "x",
                    "ucsf_document_page_no": "1",
                    "answers": ["Ms. Ann", "ab"],
                    "data_split": "val",
                },
            ],
            "data/DocVQA/test-00000-of-00001.parquet": [
                {"questionId": "1", "question": "no", "image": shown(), "answers": None}
            ],
            "data/InfographicVQA/validation-00000-of-00001.parquet": [
                {"questionId": "2", "question": "no", "image": shown(), "answers": ["x"]}
            ],
        },
        {f"What is the date?{SHORT}": "1/8/93", f"Who wrote?{SHORT}": "abcd"},
        {"anls": 0.75, "exact_match": 0.5},
        {},
        32,
        1,
    ),
    "infovqa": (
        {
            "data/InfographicVQA/validation-00000-of-00001.parquet": [
                {"questionId": "2", "question": "How many?", "image": shown(), "answers": ["5%"]}
            ]
        },
        {f"How many?{SHORT}": "5%"},
        {"anls": 1.0, "exact_match": 1.0},
        {},
        32,
        1,
    ),
    "textvqa": (
        {
            "data/data/validation-00000-of-00003.parquet": [
                {
                    "image_id": "a",
                    "question_id": 34602,
                    "question": "what is the brand of THIS camera?",
                    "image": shown(1),
                    "answers": ["nous les gosses"] * 8 + ["dakota"] * 2,
                    "ocr_tokens": ["x"],
                },
                {
                    "image_id": "b",
                    "question_id": 34603,
                    "question": "what colour?",
                    "image": shown(2),
                    "answers": ANSWERS,
                    "ocr_tokens": ["x"],
                },
            ]
        },
        {f"What is the brand of this camera?{SHORT}": "Dakota", f"What colour?{SHORT}": "A red"},
        {"textvqa_accuracy": (0.6 + 1.0) / 2, "exact_match": 0.5},
        {},
        32,
        2,
    ),
    "vqav2": (
        {
            "data/data/validation-00000-of-00068.parquet": [
                {
                    "question_type": "what",
                    "multiple_choice_answer": "red",
                    "image_id": 7,
                    "answer_type": "other",
                    "question_id": 70,
                    "answers": [
                        {"answer": one, "answer_confidence": "yes", "answer_id": n} for n, one in enumerate(ANSWERS)
                    ],
                    "question": "What colour?",
                    "image": shown(),
                },
                {
                    "question_type": "is",
                    "multiple_choice_answer": "no",
                    "image_id": 7,
                    "answer_type": "yes/no",
                    "question_id": 71,
                    "answers": [{"answer": "no", "answer_confidence": "yes", "answer_id": n} for n in range(10)],
                    "question": "Is it?",
                    "image": shown(),
                },
            ]
        },
        {f"What colour?{SHORT}": "red", f"Is it?{SHORT}": "No."},
        {"vqa_accuracy": 1.0, "exact_match": 1.0},
        {"other": 1.0, "yes/no": 1.0},
        16,
        1,
    ),
    "chartqa": (
        {
            "data/data/test-00000-of-00001.parquet": [
                {"type": "human_test", "question": "How many?", "answer": "14", "image": shown()},
                {"type": "augmented_test", "question": "Which?", "answer": "Inspired", "image": shown(1)},
            ]
        },
        {
            "How many?\nAnswer the question with a single word.": "14.7",
            "Which?\nAnswer the question with a single word.": "inspire",
        },
        {"relaxed_accuracy": 0.5, "exact_match": 0.0},
        {"human": 1.0, "augmented": 0.0},
        16,
        2,
    ),
    "ocrbench": (
        {
            "data/data/test-00000-of-00001.parquet": [
                {
                    "dataset": "IIIT5K",
                    "question": "what is written in the image?",
                    "question_type": "Regular Text Recognition",
                    "answer": ["CENTRE"],
                    "image": shown(),
                },
                {
                    "dataset": "HME100k",
                    "question": "Write the formula.",
                    "question_type": "Handwritten Mathematical Expression Recognition",
                    "answer": ["x ^ 2 + 1"],
                    "image": shown(1),
                },
                {
                    "dataset": "ocr",
                    "question": "which?",
                    "question_type": "Digit String Recognition",
                    "answer": ["42"],
                    "image": shown(2),
                },
                {
                    "dataset": "SROIE",
                    "question": "total?",
                    "question_type": "Key Information Extraction",
                    "answer": ["9.00", "9"],
                    "image": shown(3),
                },
            ]
        },
        {
            "what is written in the image?": "It says \uff23entre",
            "Write the formula.": "x^{2}+1",
            "which?": "the number 4 2",
            "total?": "RM 9",
        },
        {"accuracy": 0.5},
        {
            "Text Recognition": 0.5,
            "Key Information Extraction": 1.0,
            "Handwritten Mathematical Expression Recognition": 0.0,
        },
        128,
        4,
    ),
    "pope": (
        {
            "data/data/test-00000-of-00003.parquet": [
                {
                    "id": str(n),
                    "question_id": str(n % 2),
                    "question": f"Is there a {thing} in the image?",
                    "answer": answer,
                    "image_source": "COCO_1",
                    "image": shown(),
                    "category": category,
                }
                for n, (thing, answer, category) in enumerate(
                    [
                        ("dog", "yes", "random"),
                        ("cat", "no", "random"),
                        ("cup", "no", "popular"),
                        ("car", "yes", "popular"),
                    ]
                )
            ]
        },
        {
            f"Is there a {thing} in the image?{SHORT}": said
            for thing, said in [("dog", "Yes"), ("cat", "no"), ("cup", "Yes, there is a cup."), ("car", "No")]
        },
        {"accuracy": 0.5, "f1": 0.5, "precision": 0.5, "recall": 0.5, "yes_rate": 0.5},
        {"random": 1.0, "popular": 0.0},
        128,
        1,
    ),
    "ai2d": (
        {
            "data/data/test-00000-of-00001.parquet": [
                {"question": "Which is it?", "options": ["leaf", "root", "stem"], "answer": "1", "image": shown()},
                {"question": "What eats?", "options": ["fox", "hare"], "answer": "0", "image": shown(1)},
            ]
        },
        {f"Which is it?\nA. leaf\nB. root\nC. stem{LETTER}": "B. root", f"What eats?\nA. fox\nB. hare{LETTER}": "B"},
        {"accuracy": 0.5},
        {},
        16,
        2,
    ),
    "scienceqa": (
        {
            "data/ScienceQA-IMG/test-00000-of-00001.parquet": [
                {
                    "image": shown(),
                    "question": "Which state?",
                    "choices": ["Ohio", "Utah"],
                    "answer": 1,
                    "hint": "",
                    "subject": "social science",
                },
                {
                    "image": shown(1),
                    "question": "Which force?",
                    "choices": ["pull", "push"],
                    "answer": 0,
                    "hint": "Look.",
                    "subject": "natural science",
                },
            ],
            "data/ScienceQA-FULL/test-00000-of-00001.parquet": [{"image": shown(), "question": "no"}],
        },
        {
            f"Which state?\nA. Ohio\nB. Utah{LETTER}": "b",
            f"Context: Look.\nWhich force?\nA. pull\nB. push{LETTER}": "A",
        },
        {"accuracy": 1.0},
        {"social science": 1.0, "natural science": 1.0},
        16,
        2,
    ),
    "realworldqa": (
        {
            "data/data/test-00000-of-00002.parquet": [
                {
                    "image": shown(),
                    "image_path": "0.webp",
                    "question": "Which way?\n\nA. Left.\nB. Right.\nPlease answer directly.",
                    "answer": "A",
                },
                {"image": shown(1), "image_path": "1.webp", "question": "How many cars?", "answer": "3"},
            ]
        },
        {"Which way?\n\nA. Left.\nB. Right.\nPlease answer directly.": "A.", "How many cars?": "3."},
        {"accuracy": 1.0},
        {},
        16,
        2,
    ),
    "mmstar": (
        {
            "data/mmstar.parquet": [
                {
                    "index": n,
                    "question": f"{n}?\nOptions: A: x, B: y, C: z, D: w",
                    "image": shown(n),
                    "answer": "B",
                    "category": category,
                    "l2_category": fine,
                    "meta_info": {"source": "MMBench"},
                }
                for n, (category, fine) in enumerate(
                    [("math", "geometry")] * 3
                    + [("math", "statistical reasoning")]
                    + [("coarse perception", "image emotion")]
                )
            ]
        },
        {
            f"{n}?\nOptions: A: x, B: y, C: z, D: w{LETTER[:-1]}": said
            for n, said in enumerate(["B", "A", "C", "B: y", "none"])
        },
        {"average": (1 / 3 + 1 + 0) / 3, "accuracy": 0.4},
        {"math": (1 / 3 + 1) / 2, "coarse perception": 0.0},
        16,
        5,
    ),
    "mme": (
        {
            "data/data/test-00000-of-00004.parquet": [
                {
                    "question_id": f"{category}/{image}.png",
                    "image": shown(image),
                    "question": f"{category} {image} {answer}? Please answer yes or no.",
                    "answer": answer,
                    "category": category,
                }
                for category, image in (("existence", 1), ("existence", 2), ("OCR", 3), ("code_reasoning", 4))
                for answer in ("Yes", "No")
            ]
        },
        {
            f"{category} {image} {answer}?{SHORT}": said
            for (category, image, answer), said in {
                ("existence", 1, "Yes"): "Yes, it is.",
                ("existence", 1, "No"): "no",
                ("existence", 2, "Yes"): "Yes",
                ("existence", 2, "No"): "Yes",
                ("OCR", 3, "Yes"): "y",
                ("OCR", 3, "No"): "N",
                ("code_reasoning", 4, "Yes"): "It is",
                ("code_reasoning", 4, "No"): "No.",
            }.items()
        },
        {"perception": (75 + 50) + 200, "cognition": 50.0, "accuracy": 0.75},
        {},
        16,
        4,
    ),
}
"""By task: files, the answer to each published prompt, the published scores and those of groups, maximum tokens,
different images."""


@pytest.mark.parametrize("task", SETS)
def test_a_benchmark_is_read_asked_and_scored_as_published(tmp_path, task):
    files, answers, expected, expected_groups, max_tokens, num_images = SETS[task]
    for name, rows in files.items():
        write_parquet(tmp_path / name, rows)
    model, results, scores, groups = run(task, tmp_path, answers)
    assert set(model.conversations) == set(answers), "the prompts are those of the published code"
    assert {tokens for _, tokens in model.conversations.values()} == {max_tokens}
    assert scores == pytest.approx(expected)
    assert groups == pytest.approx(expected_groups)
    assert results.scores["tasks"][task]["num_images"] == num_images


def test_every_published_benchmark_has_an_example_here():
    assert {name for name, task in TASKS.items() if task.published} == {*SETS, "mmmu", "mmbench"}


# ------------------------------------------------------------------ MMMU


def mmmu_row(name, question, options, answer, kind="multiple-choice", **images):
    columns = {f"image_{n}": images.get(f"image_{n}") for n in range(1, 8)}
    return {
        "id": name,
        "question": question,
        "options": str(options),
        "explanation": "",
        "answer": answer,
        "question_type": kind,
    } | columns


MMMU = [
    mmmu_row(
        "validation_Art_1",
        "Who painted <image 1>?",
        ["Monet", "<image 2>", "Klee"],
        "B",
        image_1=shown(1),
        image_2=shown(2),
    ),
    mmmu_row("validation_Math_2", "<image 1> What is the area?", [], "['24', 'twenty-four']", "open", image_1=shown(3)),
    mmmu_row("validation_Art_Theory_3", "Name it: <image 1>", ["a", "b"], "A", image_1=shown(4)),
]
MMMU_ANSWERS = {
    f"Who painted<>?\nA. Monet\nB.<>C. Klee\n{LETTER}": "B",
    f"What is the area?\n{SHORT}": "So the area is 6 * 4 = 24.0",
    f"Name it:<>A. a\nB. b\n{LETTER}": "The answer is (B)",
}


@pytest.mark.parametrize("layout", ["data/validation-00000-of-00001.parquet", "{}/validation-00000-of-00001.parquet"])
def test_mmmu_shows_its_images_where_they_are_mentioned(tmp_path, layout):
    """The benchmark is one file, or has a folder for each subject."""
    for row in MMMU:
        subject = row["id"].partition("_")[2].rpartition("_")[0]
        path = tmp_path / "data" / layout.format(subject)
        write_parquet(path, [row] if "{}" in layout else MMMU)
    write_parquet(tmp_path / "data" / "Art" / "dev-00000-of-00001.parquet", [mmmu_row("dev_Art_1", "no", ["a"], "A")])
    model, _, scores, groups = run("mmmu", tmp_path, MMMU_ANSWERS)
    assert scores == pytest.approx({"accuracy": 2 / 3})
    assert groups == {"Art and Design": 0.5, "Science": 1.0}
    content, max_tokens = model.conversations[f"Who painted<>?\nA. Monet\nB.<>C. Klee\n{LETTER}"]
    assert [part["type"] for part in content] == ["text", "image", "text", "image", "text"]
    assert [part["image"] for part in content if part["type"] == "image"] == [picture("red", 1), picture("red", 2)]
    assert max_tokens == 128


def test_images_without_a_mark_come_first_and_a_second_mark_stays_text():
    images = tuple(ImageFile(Path(__file__), str(n)) for n in range(3))
    example = Example(id="x", images=images, is_interleaved=True)
    [turn] = example.conversation("See <image 3>, then <image 1>; again <image 3>. <image 9>")
    shape = [part.get("text", "image") for part in turn["content"]]
    assert shape == ["image", "See", "image", ", then", "image", "; again <image 3>. <image 9>"]


@pytest.mark.parametrize(
    ("answer", "expected", "is_right"),
    [
        ("24", ["24"], True),
        ("24.004", ["24"], True),  # two decimals
        ("1,234", ["1234"], True),
        ("The result is 3.5e2", ["350"], True),
        ("It is a Bronze sculpture.", ["bronze"], True),
        ("bronze\nso it is made of silver", ["bronze"], False),  # the part after `so` or `is` is the answer
        ("I guess gold", ["gold"], True),  # the whole answer if nothing says which part
        ("x = 5", ["5"], True),
        ("so bond", ["d"], False),  # a single character only next to a space
        ("x = bond\ny", ["bond y"], False),  # the whole has its line break
        ("the answer is d", ["d"], True),
        ("", ["gold"], False),
        ("-2", ["2"], False),
    ],
)
def test_open_answers_are_read_as_in_mmmu(answer, expected, is_right):
    assert names_answer(answer, expected) is is_right


# ------------------------------------------------------------------ MMBench


def mmbench_rows():
    """Two questions: three rotations of one, two of the other, which has three choices and no hint."""
    first = [["cat", "dog", "fox"], ["fox", "cat", "dog"], ["dog", "fox", "cat"]]
    rows = []
    for number, (choices, answer) in enumerate(zip(first, "BCA", strict=True)):
        rows.append(
            {
                "index": 241 + number * 1_000_000,
                "question": "Which?",
                "hint": "Look.",
                "answer": answer,
                "image": shown(1),
            }
            | dict(zip("ABC", choices, strict=True))
            | {"D": "bear", "L2-category": "logic_reasoning"}
        )
    for number, answer in enumerate("AB"):
        choices = dict(zip("ABC", ["up", "down", "left"] if number == 0 else ["left", "up", "down"], strict=True))
        rows.append(
            {
                "index": 252 + number * 1_000_000,
                "question": "Where?",
                "hint": "nan",
                "answer": answer,
                "image": shown(2),
            }
            | choices
            | {"D": "nan", "L2-category": "relation_reasoning"}
        )
    extra = {"category": "x", "source": "y", "comment": "nan", "split": "dev"}
    return [row | extra for row in rows]


def mmbench_prompt(row):
    options = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD" if row[letter] != "nan")
    hint = "" if row["hint"] == "nan" else f"{row['hint']} "
    return f"{hint}{row['question']} There are several options:\n{options}\n{LETTER}"


def write_tsv(path, rows):
    """As OpenCompass publishes it: base64 once, then the index of the row that has the image; empty cells for nan."""
    path.parent.mkdir(parents=True)
    seen = {}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(
            file,
            ["index", *[name for name in rows[0] if name not in ("index", "L2-category")], "l2-category"],
            delimiter="\t",
        )
        writer.writeheader()
        for row in rows:
            data = row["image"]["bytes"]
            cell = seen.get(data) or base64.b64encode(data).decode()
            seen.setdefault(data, str(row["index"]))
            cells = {name: "" if value == "nan" else value for name, value in row.items() if name != "L2-category"}
            writer.writerow(cells | {"image": cell, "l2-category": row["L2-category"]})


@pytest.mark.parametrize("layout", ["parquet", "tsv"])
def test_mmbench_counts_a_question_if_all_its_rotations_are_right(tmp_path, layout):
    rows = mmbench_rows()
    if layout == "parquet":
        write_parquet(tmp_path / "data" / "en" / "dev-00000-of-00001.parquet", rows)
        write_parquet(tmp_path / "data" / "cn" / "dev-00000-of-00001.parquet", [{"question": "no"}])
    else:
        write_tsv(tmp_path / "data" / "MMBench_DEV_EN.tsv", rows)
    answers = {mmbench_prompt(row): row["answer"] for row in rows}
    model, results, scores, groups = run("mmbench", tmp_path, answers | {mmbench_prompt(rows[2]): "D"})
    assert set(model.conversations) == set(answers)
    assert scores == {"accuracy": 0.5, "vanilla_accuracy": 1.0}
    assert groups == {"logic_reasoning": 0.0, "relation_reasoning": 1.0}
    assert results.scores["tasks"]["mmbench"]["num_images"] == 2
    [content, _] = model.conversations[mmbench_prompt(rows[4])]
    assert content[0]["image"] == picture("red", 2)


# ------------------------------------------------------------------ TextVQA


def test_textvqa_normalizes_commas_question_marks_and_genitives_before_vqa_does():
    assert textvqa_accuracy("red,white", ["redwhite"] * 10) == 1.0
    assert vqa_accuracy("red,white", ["red white"] * 10) == 1.0
    assert textvqa_accuracy("macy's", ["macy 's"] * 10) == 1.0
    assert textvqa_accuracy("what?", ["what"] * 4 + ["x"] * 6) == 1.0


# ------------------------------------------------------------------ files and images


def test_images_of_several_row_groups_are_read_when_they_are_needed(tmp_path):
    rows = [
        {"type": "human_test", "question": str(n), "answer": "x", "image": shown(n // 2, list(COLOURS)[n % 2])}
        for n in range(30)
    ]
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", rows, row_group_size=4)
    examples = read_examples(DataSpec(path=str(tmp_path)), TASKS["chartqa"].published)
    found = {}
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, examples[n].images[0].read())) for n in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[n] for n in range(30)] == [row["image"]["bytes"] for row in rows]
    assert len({example.image_key for example in examples}) == 30


def test_a_benchmark_may_be_one_file_or_a_folder_of_its_files(tmp_path):
    rows = [{"type": "human_test", "question": "q", "answer": "x", "image": shown()}]
    for name in ("test-00000-of-00001.parquet", "train-00000-of-00001.parquet"):
        write_parquet(tmp_path / name, rows)
    published = TASKS["chartqa"].published
    for path in (tmp_path, tmp_path / "train-00000-of-00001.parquet"):
        assert len(read_examples(DataSpec(path=str(path)), published)) == 1


def test_what_is_not_the_published_layout_is_refused_with_the_reason(tmp_path):
    def refused(error, task, message, **fields):
        config = EvaluationConfig(
            out=tmp_path / "out", tasks=(TaskConfig(task=task, data=DataSpec(path=str(tmp_path), **fields)),)
        )
        with pytest.raises(error, match=message):
            evaluate(Scripted({}), config)

    write_parquet(tmp_path / "train-0.parquet", [{"question": "q", "image": shown()}])
    refused(
        DataError,
        "mmmu",
        r"no file \*validation-\*\.parquet, as lmms-lab-encoder/MMMU has\. Download them: hf download",
    )
    write_parquet(tmp_path / "validation-0.parquet", [{"question": "q", "image": shown()}])
    refused(DataError, "docvqa", r"no column 'questionId', as the published table has\. It has question")
    refused(ConfigError, "vqa", "Parquet and TSV are read by the task of a published benchmark", kind="published")
    (tmp_path / "own.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}) + "\n")
    refused(DataError, "mmmu", "mmmu is read as it is published, Parquet or TSV", kind="jsonl")
    (tmp_path / "validation-0.parquet").write_bytes(b"no")
    refused(DataError, "docvqa", "cannot be read as Parquet")


def test_other_data_of_a_task_with_the_name_of_a_benchmark_is_asked_as_before(tmp_path):
    """The published prompt belongs to the published layout."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "own.jsonl").write_text(json.dumps({"question": "Which?", "answer": "red"}) + "\n")
    _, results, scores, _ = run("docvqa", tmp_path, {"Which?": "red"})
    assert scores["anls"] == 1.0
    assert results.settings["tasks"]["docvqa"]["prompt"] == "{question}"


def test_a_shard_folder_with_its_index_is_not_taken_for_a_benchmark(tmp_path):
    folder = write_shards(tmp_path / "walls", 4)
    curate(folder, CurationSettings(min_side=8), num_workers=1)
    assert list(folder.rglob("*.parquet"))
    examples = read_examples(DataSpec(path=str(folder)), TASKS["docvqa"].published)
    assert examples[0].question == "What colour is it?"


# ------------------------------------------------------------------ commands and the hub


def test_benchmarks_are_found_by_their_name_in_a_folder_of_several(command, checkpoint, tmp_path):
    for task in ("docvqa", "pope"):
        for name, rows in SETS[task][0].items():
            write_parquet(tmp_path / "sets" / task / Path(name).relative_to("data"), rows)
    ended = command(
        "evaluate", checkpoint, "--tasks", "docvqa,pope", "--data", tmp_path / "sets", "-o", tmp_path / "out",
        "--max-tokens", 2, "--json",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    [scores] = json.loads(ended.out)["results"].values()
    assert {name: one["num_examples"] for name, one in scores["tasks"].items()} == {"docvqa": 2, "pope": 4}
    settings = json.loads((tmp_path / "out" / "settings.json").read_text())["tasks"]
    assert settings["docvqa"]["prompt"] == "{question}" + SHORT
    assert settings["pope"]["data"] == str(tmp_path / "sets" / "pope")


def test_a_benchmark_without_data_comes_from_the_hub_and_only_its_files_do(tmp_path):
    """A hub on loopback with two configurations: one command downloads, a second one finds the files in the cache."""
    published = tmp_path / "hub"
    for name, rows in SETS["docvqa"][0].items():
        write_parquet(published / Path(name).relative_to("data"), rows)
    (published / "script.py").write_text("raise SystemExit('remote code')")
    script = (
        "from saccade.cli.joins.evaluation import evaluation_config; from saccade.evaluate.run import prepare_task\n"
        "config = evaluation_config({!r}, None, 'out', limits=[], images=None, prompts=None, max_tokens=None)\n"
        "print([example.id for example in prepare_task(config.tasks[0], config).examples])"
    )
    with serve_hub(published, "lmms-lab-encoder/DocVQA", kind="datasets") as (environment, served):
        environment |= {"HF_HOME": str(tmp_path / "cache"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        codes = [script.format(task) for task in ("docvqa", "docvqa", "mmmu")]
        first, again, missing = run_forked(codes, tmp_path, ("huggingface_hub", "saccade.evaluate.run"), **environment)
    assert first.out == again.out == "['337', '338']\n", first.err
    assert sorted(served) == ["DocVQA/validation-00000-of-00002.parquet", "DocVQA/validation-00001-of-00002.parquet"]
    assert "lmms-lab-encoder/MMMU: no such folder, and the Hugging Face Hub has not given it" in missing.err


# ------------------------------------------------------------------ a real set


def test_real_charts_in_the_published_layout_are_evaluated_as_in_shards(command, checkpoint, tmp_path):
    """ChartQA's validation charts of $SACCADE_DATA, written as the hub has them."""
    shards = Path(os.environ.get("SACCADE_DATA", "/nowhere")) / "chartqa"
    tars = sorted(shards.glob("val-*.tar"))
    if not tars:
        pytest.skip("needs ChartQA: SACCADE_DATA=FOLDER")
    rows = []
    for path in tars:
        with tarfile.open(path) as tar:
            members = {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}
        for name in sorted(name for name in members if name.endswith(".json")):
            key = name.removesuffix(".json")
            image = {"bytes": members[f"{key}.jpg"], "path": f"{key}.jpg"}
            for asked in json.loads(members[name])["questions"]:
                rows.append(
                    {
                        "type": f"{asked['kind']}_test",
                        "question": asked["question"],
                        "answer": asked["answer"],
                        "image": image,
                    }
                )
    write_parquet(tmp_path / "data" / "data" / "test-00000-of-00001.parquet", rows, row_group_size=100)
    found = {}
    for name, data in (("published", tmp_path / "data"), ("shards", f"{shards}/{tars[0].name}")):
        ended = command(
            "evaluate", checkpoint, "--tasks", "chartqa", "--data", data, "-o", tmp_path / name, "--limit", 12,
            "--max-tokens", 4, "--json", "--prompt", "chartqa={question}",
        )  # fmt: skip
        assert ended.status == 0, ended.err
        found[name] = [
            json.loads(line) for line in (tmp_path / name / "chartqa" / "examples.jsonl").read_text().splitlines()
        ]
    fields = ("question", "references", "answer", "scores", "num_prompt_tokens")
    ours, theirs = ([[one[field] for field in fields] for one in records] for records in found.values())
    assert len(ours) == 12
    assert sorted(map(str, ours)) == sorted(map(str, theirs))

"""Every published format is read from files as they are published."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from evaluate.making import COLOURS, picture, write_shards

from saccade.data.decisions import finish_decisions, write_decisions
from saccade.data.index import open_index
from saccade.data.readers import parse_input, read_input
from saccade.data.sample import Sample
from saccade.data.shards import ShardWriter
from saccade.errors import ConfigError, DataError
from saccade.evaluate.example import Example, ImageFile, select_examples, shuffle_images
from saccade.evaluate.readers import DataSpec, read_examples
from saccade.evaluate.readers.detect import detect, parse_spec


def write(folder, files):
    """Write files: json for other values than bytes, one object per line for lists in .jsonl."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif isinstance(content, str):
            path.write_text(content)
        else:
            path.write_text(json.dumps(content))
    return folder


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


COCO = {
    "annotations/captions_val2017.json": {
        "images": [{"id": 7, "file_name": "000000000007.png"}, {"id": 9, "file_name": "missing.png"}],
        "annotations": [
            {"image_id": 7, "caption": "a red wall "},
            {"image_id": 7, "caption": "the wall is red"},
        ],
    },
    "val2017/000000000007.png": picture("red"),
}
VQA = {
    "v2_OpenEnded_mscoco_val2014_questions.json": {
        "data_subtype": "val2014",
        "questions": [
            {"question_id": 70, "image_id": 7, "question": "What colour?"},
            {"question_id": 71, "image_id": 7, "question": "unanswered?"},
        ],
    },
    "v2_mscoco_val2014_annotations.json": {
        "annotations": [
            {
                "question_id": 70,
                "answer_type": "other",
                "multiple_choice_answer": "red",
                "answers": [{"answer": "red"}] * 9 + [{"answer": "crimson"}],
            }
        ]
    },
    "val2014/COCO_val2014_000000000007.png": picture("red"),
}
CHARTQA = {
    "test_human.json": [{"imgname": "a.png", "query": "How high is it?", "label": "12"}],
    "test_augmented.json": [{"imgname": "a.png", "query": "Which year?", "label": 1999}],
    "png/a.png": picture("blue"),
}
NLVR = {
    "dev.json": lines({"sentence": "There is a red wall.", "label": "true", "identifier": "12-0", "directory": "3"}),
    "images/3/dev-12-0-0.png": picture("red"),
}
NLVR2 = {
    "dev.json": lines(
        {"sentence": "Both are red.", "label": "False", "identifier": "dev-8-0-1", "left_url": "u", "right_url": "v"}
    ),
    "dev/dev-8-0-img0.png": picture("red"),
    "dev/dev-8-0-img1.png": picture("blue"),
}
POPE = {
    "coco_pope_random.json": lines(
        {"question_id": 1, "image": "a.png", "text": "Is there a dog in the image?", "label": "no"}
    ),
    "coco_pope_popular.json": lines(
        {"question_id": 1, "image": "a.png", "text": "Is there a wall in the image?", "label": "yes"}
    ),
    "val2014/a.png": picture("red"),
}
JSONL = {
    "own.jsonl": lines(
        {"id": "x", "image": "a.png", "question": "Which?", "choices": ["red", "blue"], "answer": "B", "group": "easy"},
        {"images": ["a.png", "b.png"], "question": "How many?", "answer": 2},
        {"image": "b.png", "captions": ["a wall", "blue wall"]},
    ),
    "a.png": picture("red"),
    "b.png": picture("blue"),
}


def fields(examples):
    return [(one.id, one.question, one.references, one.choices, one.group, len(one.images)) for one in examples]


@pytest.mark.parametrize(
    ("kind", "files", "expected"),
    [
        ("coco", COCO, [("7", None, ("a red wall", "the wall is red"), (), "", 1)]),
        ("vqa", VQA, [("70", "What colour?", ("red",) * 9 + ("crimson",), (), "other", 1)]),
        (
            "chartqa",
            CHARTQA,
            [
                ("test_augmented/0", "Which year?", ("1999",), (), "augmented", 1),
                ("test_human/0", "How high is it?", ("12",), (), "human", 1),
            ],
        ),
        (
            "nlvr",
            NLVR,
            [("dev/12-0", 'Is this statement true of the image? "There is a red wall."', ("yes",), (), "", 1)],
        ),
        (
            "nlvr",
            NLVR2,
            [("dev/dev-8-0-1", 'Is this statement true of the two images? "Both are red."', ("no",), (), "", 2)],
        ),
        (
            "pope",
            POPE,
            [
                ("coco_pope_popular/1", "Is there a wall in the image?", ("yes",), (), "popular", 1),
                ("coco_pope_random/1", "Is there a dog in the image?", ("no",), (), "random", 1),
            ],
        ),
        (
            "jsonl",
            JSONL,
            [
                ("x", "Which?", ("blue",), ("red", "blue"), "easy", 1),
                ("2", "How many?", ("2",), (), "", 2),
                ("3", None, ("a wall", "blue wall"), (), "", 1),
            ],
        ),
    ],
    ids=["coco", "vqa", "chartqa", "nlvr", "nlvr2", "pope", "jsonl"],
)
def test_a_published_folder_is_recognized_and_read(tmp_path, kind, files, expected):
    folder = write(tmp_path, files)
    assert detect(str(folder)) == kind
    examples = read_examples(DataSpec(path=str(folder)))
    assert fields(examples) == expected
    for example in examples:
        assert all(image.read().startswith(b"\x89PNG") for image in example.images)
    assert fields(read_examples(parse_spec(f"{kind}:{folder}"))) == expected


def test_a_shard_folder_gives_its_questions_or_its_captions(tmp_path):
    asked = read_examples(DataSpec(path=str(write_shards(tmp_path / "a", 5))))
    assert [(one.id, one.references, one.group) for one in asked[:2]] == [
        ("00000/0000/0", ("red",), "colour"),
        ("00000/0000/1", ("yes",), "yes_no"),
    ]
    assert len(asked) == 8
    assert asked[0].image_key == asked[1].image_key != asked[2].image_key
    described = read_examples(DataSpec(path=str(write_shards(tmp_path / "b", 2, questions=False))))
    assert [one.references for one in described] == [
        ("a red wall in the evening", "the wall is painted red"),
        ("a green wall in the evening", "the wall is painted green"),
    ]
    assert described[1].images[0].read() == picture("green", 1)


def test_samples_that_curation_dropped_are_not_read(tmp_path):
    folder = write_shards(tmp_path / "shards", 3)
    index = open_index(folder)
    write_decisions(index, 0, pa.table({"keep": [True, False, True], "reason": [None, "small", None]}))
    finish_decisions(index, settings={}, counts={"small": 1})
    assert {one.id.split("/")[1] for one in read_examples(DataSpec(path=str(folder)))} == {"0000", "0002"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"own.jsonl": lines({"image": "../a.png", "caption": "x"})}, "outside of the image folder"),
        ({"own.jsonl": lines({"image": "a.png", "caption": "x"})}, "a.png is missing. Give its folder: --images"),
        ({"own.jsonl": lines({"caption": "x", "imgae": "a.png"})}, "unknown field 'imgae'"),
        ({"own.jsonl": lines({"question": "x"})}, "no answer"),
        ({"own.jsonl": lines({"question": "x", "answer": "z", "choices": ["a", "b"]})}, "none of the choices"),
        ({"own.jsonl": lines({"id": 1, "caption": "x"}, {"id": 1, "caption": "y"})}, "ids are not unique, such as '1'"),
        ({"own.jsonl": '{"caption": "x"}\nnot json\n'}, "cannot be read as one JSON object per line"),
        ({"captions.json": {"images": [], "annotations": [{"image_id": 1}]}}, "no captions. Give captions_"),
        ({"notes.txt": "hello"}, "no file in a known format"),
        ({**POPE, **{"test_human.json": CHARTQA["test_human.json"]}}, "Name the format, KIND:PATH"),
    ],
)
def test_data_that_cannot_be_read_is_refused_with_the_reason(tmp_path, files, message):
    with pytest.raises(DataError, match=message):
        read_examples(DataSpec(path=str(write(tmp_path, files))))


def test_a_missing_path_and_an_unknown_format_are_refused(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read_examples(DataSpec(path=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match="no format of evaluation data is called 'lvis'"):
        read_examples(DataSpec(path=str(tmp_path), kind="lvis"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("captions.csv", "image,caption,width\na.png,a red wall,40\na.png,the wall is red,40\nb.png,a blue wall,40\n"),
        ("metadata.csv", 'file_name,text\na.png,"[""a red wall"", ""the wall is red""]"\nb.png,a blue wall\n'),
        (
            "metadata.jsonl",
            lines(
                {"file_name": "a.png", "captions": ["a red wall", "the wall is red"], "width": 40},
                {"file_name": "b.png", "text": "a blue wall"},
            ),
        ),
    ],
)
def test_a_folder_of_images_with_a_table_of_captions_is_read(tmp_path, name, content):
    """The tables that `data prepare` reads."""
    folder = write(tmp_path, {"a.png": picture("red"), "b.png": picture("blue"), name: content})
    examples = read_examples(DataSpec(path=str(folder)))
    assert [one.references for one in examples] == [("a red wall", "the wall is red"), ("a blue wall",)]
    assert [one.images[0].read() for one in examples] == [picture("red"), picture("blue")]
    assert all(one.question is None for one in examples)
    prepared = [item for item in read_input(parse_input(str(folder))) if isinstance(item, Sample)]
    assert [tuple(json.loads(one.members["json"])["captions"]) for one in prepared] == [
        one.references for one in examples
    ]


def test_questions_in_a_tsv_are_read(tmp_path):
    content = 'image\tquestion\tanswer\tchoices\na.png\tWhich?\tB\t["red", "blue"]\n'
    [one] = read_examples(DataSpec(path=str(write(tmp_path, {"a.png": picture("red"), "own.tsv": content}))))
    assert (one.question, one.references, one.choices) == ("Which?", ("blue",), ("red", "blue"))


# ------------------------------------------------------------------ choosing and shuffling


@pytest.fixture
def examples(tmp_path):
    return read_examples(DataSpec(path=str(write_shards(tmp_path / "shards", 12))))


def test_a_limit_chooses_by_the_seed_and_keeps_the_order(examples):
    chosen = select_examples(examples, 5, seed=1)
    assert chosen == select_examples(examples, 5, seed=1) != select_examples(examples, 5, seed=2)
    assert chosen == sorted(chosen, key=examples.index)
    assert select_examples(examples, None, seed=1) == select_examples(examples, 99, seed=1) == examples


def test_shuffled_images_are_never_an_examples_own_and_stay_together(examples):
    shuffled = shuffle_images(examples, seed=3)
    for before, after in zip(examples, shuffled, strict=True):
        assert (before.id, before.question, before.references) == (after.id, after.question, after.references)
        assert before.image_key != after.image_key
    assert shuffled[0].images == shuffled[1].images  # two questions about one image
    assert {one.image_key for one in examples} == {one.image_key for one in shuffled}


# ------------------------------------------------------------------ identity of images


def write_pages(folder, count=4):
    """Documents whose page has the same file name in every folder; two questions each."""
    records = []
    for number in range(count):
        page = folder / f"doc{number}" / "page.png"
        page.parent.mkdir(parents=True)
        page.write_bytes(picture(list(COLOURS)[number % 4], number))
        records += [{"image": f"doc{number}/page.png", "question": q, "answer": "x"} for q in ("Which?", "Why?")]
    (folder / "own.jsonl").write_text(lines(*records))
    return folder


def test_images_of_one_file_name_in_several_folders_are_several_images(tmp_path):
    examples = read_examples(DataSpec(path=str(write_pages(tmp_path))))
    assert [example.images[0].name for example in examples[::2]] == [f"doc{n}/page.png" for n in range(4)]
    assert len({example.image_key for example in examples}) == 4
    shuffled = shuffle_images(examples, seed=0)
    assert all(before.images != after.images for before, after in zip(examples, shuffled, strict=True))
    assert sorted(one.images[0].path for one in shuffled) == sorted(one.images[0].path for one in examples)


def test_a_name_that_splits_have_in_common_is_an_image_of_each_split(tmp_path):
    charts = {"png/a.png": picture("blue"), "test_human.json": CHARTQA["test_human.json"]}
    other = {"png/a.png": picture("red"), "val_human.json": CHARTQA["test_human.json"]}
    write(tmp_path / "test", charts)
    write(tmp_path / "val", other)
    examples = read_examples(DataSpec(path=str(tmp_path)))
    assert [example.images[0].name for example in examples] == ["test/png/a.png", "val/png/a.png"]


def test_the_identity_of_an_image_does_not_depend_on_where_the_data_is(tmp_path, monkeypatch):
    names = []
    for home in ("here", "elsewhere"):
        folder = write(tmp_path / home, COCO)
        names.append([one.images[0].name for one in read_examples(DataSpec(path=str(folder)))])
        monkeypatch.chdir(folder)
        names.append([one.images[0].name for one in read_examples(DataSpec(path=".", images=folder / "val2017"))])
    assert names == [["val2017/000000000007.png"], ["000000000007.png"]] * 2


def test_samples_of_a_shard_folder_that_repeat_an_image_are_about_the_same_image(tmp_path):
    with ShardWriter(tmp_path, max_samples=2) as writer:
        for number in range(4):  # one question per sample, two about each picture
            fields = {"questions": [{"question": f"{number}?", "answer": "x"}]}
            members = {"png": picture("red", number // 2), "json": json.dumps(fields).encode()}
            writer.write(Sample(key=f"{number:04d}", source="walls", members=members))
    examples = read_examples(DataSpec(path=str(tmp_path)))
    assert [one.images[0].name for one in examples] == ["00000/0000/0"] * 2 + ["00001/0002/0"] * 2
    assert all(one.images[0].read() == picture("red", n // 2) for n, one in enumerate(examples))


def test_an_example_whose_number_of_images_no_other_has_gets_other_images_too(tmp_path):
    folder = write(tmp_path, JSONL)
    examples = read_examples(DataSpec(path=str(folder)))
    assert [len(one.images) for one in examples] == [1, 2, 1]
    for before, after in zip(examples, shuffle_images(examples, seed=0), strict=True):
        assert after.images
        assert before.image_key != after.image_key


def test_the_key_of_images_is_unambiguous():
    def key(*names, id="x"):
        return Example(id=id, images=tuple(ImageFile(Path(name), name) for name in names)).image_key

    assert len({key("a|b"), key("a", "b"), key("a"), key(id="a"), key(id="b")}) == 5

"""Readers of input data, on real files of each kind."""

import base64
import json
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data.making import (
    encode,
    make_avif,
    make_jpeg,
    make_picture,
    make_png,
    make_shards,
    make_tiff,
    make_webp,
    write_tar,
)

from saccade.data.image_formats import image_extension
from saccade.data.readers import open_input, parse_input, read_input
from saccade.data.readers.inputs import KINDS, detect
from saccade.data.readers.reader import Link, Merged, Skipped
from saccade.data.sample import Sample, TextRules, conversations, description, images, texts
from saccade.errors import ConfigError, DataError
from saccade.processor.image import FORMATS

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def read(path, **fields):
    return list(read_input(parse_input(str(path), **fields)))


def reasons(items):
    return [item.reason if isinstance(item, Skipped) else None for item in items]


def write_json(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_images(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(make_jpeg(seed=seed))
    return folder


# ------------------------------------------------------------------ one input of each kind


def make_tars(folder):
    return make_shards(folder / "laion", 2, 3, text="a boat")


def make_files(folder):
    folder = folder / "photos"
    for key in ("b", "a.v2", "deep/er/c"):
        write_images(folder, [f"{key}.jpg"])
        (folder / f"{key}.txt").write_text(f"a picture of {key}")
    write_json(folder / "b.json", {"license": "CC0", "width": 96})
    return folder


def make_urls(folder):
    path = folder / "links.parquet"
    table = {"URL": ["http://x.example/1.jpg", "", "http://x.example/3.jpg"], "TEXT": ["one", "two", ""]}
    pq.write_table(pa.table(table), path)
    return path


def make_parquet(folder):
    path = folder / "data" / "train-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    rows = [{"bytes": make_jpeg(seed=n), "path": f"{n}.jpg"} for n in range(5)]
    table = {
        "image": pa.array(rows, IMAGE),
        "caption": [f"caption {n}" for n in range(5)],
        "score": [0.5, float("nan"), 1, 2, 3],
    }
    pq.write_table(pa.table(table), path, row_group_size=2)
    return path.parent


def make_coco(folder):
    write_images(folder / "val2017", ["000000000007.jpg", "000000000009.jpg", "000000000011.jpg"])
    content = {
        "info": {"year": 2017},
        "licenses": [{"id": 4, "name": "Attribution", "url": "http://creativecommons.org/licenses/by/2.0/"}],
        "images": [
            {
                "id": 7,
                "file_name": "000000000007.jpg",
                "license": 4,
                "coco_url": "http://images.example/7.jpg",
                "width": 96,
            },
            {"id": 9, "file_name": "000000000009.jpg"},
            {"id": 11, "file_name": "000000000011.jpg"},
            {"id": 13, "file_name": "000000000013.jpg"},
        ],
        "annotations": [
            {"id": 1, "image_id": 9, "caption": "nine"},
            {"id": 2, "image_id": 7, "caption": "A first. "},
            {"id": 3, "image_id": 7, "caption": "A second."},
            {"id": 4, "image_id": 13, "caption": "its file is gone"},
        ],
    }
    return write_json(folder / "annotations" / "captions_val2017.json", content)


def make_vqa(folder):
    write_images(folder / "train2014", ["COCO_train2014_000000000042.jpg", "COCO_train2014_000000000050.jpg"])
    questions = [
        {"image_id": 42, "question": "How many?", "question_id": 420},
        {"image_id": 50, "question": "Who?", "question_id": 500},
        {"image_id": 42, "question": "Which colour?", "question_id": 421},
        {"image_id": 51, "question": "Where?", "question_id": 510},
        {"image_id": 42, "question": "Unanswered?", "question_id": 422},
    ]
    answers = [{"answer": word, "answer_id": n} for n, word in enumerate(["red", "blue", "red"])]
    annotations = [
        {"question_id": 420, "image_id": 42, "multiple_choice_answer": "2", "answers": answers},
        {"question_id": 421, "image_id": 42, "answers": answers},
        {"question_id": 510, "image_id": 51, "multiple_choice_answer": "there"},
    ]
    write_json(folder / "v2_mscoco_train2014_annotations.json", {"annotations": annotations})
    content = {"data_type": "mscoco", "data_subtype": "train2014", "questions": questions}
    return write_json(folder / "v2_OpenEnded_mscoco_train2014_questions.json", content)


def make_chat(folder):
    write_images(folder / "images", ["coco/1.jpg", "2.jpg"])
    turns = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A boat."}]
    content = [
        {"id": "one", "image": "coco/1.jpg", "conversations": turns, "model": "llava"},
        {"id": "two", "image": ["coco/1.jpg", "2.jpg"], "conversations": turns},
        {"id": 3, "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hello."}]},
        {"id": "four", "image": "../secret.jpg", "conversations": turns},
        {"id": "five", "image": "gone.jpg", "conversations": turns},
        {"id": "six", "image": "2.jpg"},
        "seven",
    ]
    return write_json(folder / "llava.json", content)


def make_jsonl(folder):
    write_images(folder / "images", ["coco/1.jpg", "2.jpg"])
    rows = [
        {"image": "coco/1.jpg", "caption": "a boat "},
        {"image": "coco/1.jpg", "caption": "the boat"},
        {"image": "2.jpg", "caption": "a house", "id": "house", "author": "x"},
        {"image": "gone.jpg", "caption": "gone"},
        {"image": "2.jpg", "question": "What?", "answers": ["a house", "house"], "choices": ["a house", "a boat"]},
        {"image": "2.jpg", "question": "Why?"},
        {"caption": "without an image"},
        {"images": ["2.jpg", "coco/1.jpg"], "question": "How many?", "answer": 2},
    ]
    path = folder / "own.jsonl"
    path.write_text("not json\n".join("".join(json.dumps(row) + "\n" for row in part) for part in (rows[:7], rows[7:])))
    return path


MAKERS = {
    "tars": (make_tars, None),
    "files": (make_files, None),
    "urls": (make_urls, None),
    "parquet": (make_parquet, None),
    "coco": (make_coco, "val2017"),
    "vqa": (make_vqa, "train2014"),
    "jsonl": (make_jsonl, "images"),
    "chat": (make_chat, "images"),
}


def make_input(kind, folder):
    make, images = MAKERS[kind]
    return parse_input(str(make(folder)), images=folder / images if images else None)


def test_every_kind_has_a_maker():
    assert MAKERS.keys() == KINDS.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_is_detected_from_the_path(kind, tmp_path):
    spec = make_input(kind, tmp_path)
    assert spec.kind is None
    assert open_input(spec).kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_reading_may_begin_at_any_item(kind, tmp_path):
    source = open_input(make_input(kind, tmp_path))
    for part in range(len(source.parts)):
        whole = list(source.read(part))
        assert whole
        for begin in range(len(whole) + 2):
            assert list(source.read(part, begin)) == whole[begin:]


@pytest.mark.parametrize("kind", KINDS)
def test_samples_say_where_they_come_from(kind, tmp_path):
    spec = make_input(kind, tmp_path)
    source = open_input(spec.__class__(**{**vars(spec), "name": "mine", "licence": "CC BY"}))
    items = [item for part in range(len(source.parts)) for item in source.read(part)]
    items = [source.complete(item, make_jpeg()) if isinstance(item, Link) else item for item in items]
    samples = [item for item in items if isinstance(item, Sample)]
    assert samples
    for sample in samples:
        fields = description(sample)
        assert sample.source == "mine"
        assert fields["source"] == ("made" if kind == "tars" else "mine"), "what a sample states of itself stays"
        assert fields["licence"]
        assert fields["id"]
        assert conversations(sample, TextRules())


# ------------------------------------------------------------------ tars


def test_tars_keep_their_members_and_complete_their_json(tmp_path):
    items = read(make_tars(tmp_path))
    assert [item.key for item in items] == [
        "000000000",
        "000000001",
        "000000002",
        "000010000",
        "000010001",
        "000010002",
    ]
    assert items[4].members["jpg"] == make_jpeg(64, 96, seed=4)
    assert items[4].members["txt"] == b"a boat"
    assert description(items[4]) == {"source": "made", "id": "000010001"}


def test_one_tar_braces_and_remote_names_are_tars(tmp_path):
    folder = make_tars(tmp_path)
    assert len(read(folder / "00001.tar")) == 3
    assert len(read(folder / "{00000..00001}.tar")) == 6
    assert detect("s3://bucket/laion") == "tars"


def test_the_complete_samples_of_a_damaged_tar_are_read(tmp_path):
    folder = make_tars(tmp_path)
    with tarfile.open(folder / "00000.tar") as tar:
        cut = tar.getmembers()[-2].offset_data + 10
    os.truncate(folder / "00000.tar", cut)
    items = read(folder)
    assert reasons(items) == [None, None, "tar damaged", None, None, None]
    assert items[2].key == "00000.tar"


def test_members_that_are_no_sample_have_their_reasons(tmp_path):
    jpeg = make_jpeg()
    files = [
        ("a.jpg", jpeg),
        ("a.txt", b"fine"),
        ("b.jpg", jpeg),
        ("c.txt", b"text alone"),
        ("d.jpg", b"<html>"),
        ("d.txt", b"fine"),
        ("e.jpg", jpeg),
        ("e.json", b"{"),
        ("a.txt", b"again"),
        ("README", b"no sample"),
        ("f.jpg", jpeg),
        ("f.txt", b"\xff\xfe"),
        (
            "g.json",
            json.dumps(
                {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]}
            ).encode(),
        ),
    ]
    items = read(write_tar(tmp_path / "x.tar", files))
    assert reasons(items) == [
        None,
        "no usable text",
        "no image",
        "not an image",
        "json unreadable",
        "key twice in a tar",
        "no usable text",
        None,
    ]


# ------------------------------------------------------------------ loose files


def test_loose_files_are_paired_by_name_in_all_folders(tmp_path):
    items = read(make_files(tmp_path))
    assert [item.key for item in items] == ["a.v2", "b", "deep/er/c"]
    assert [texts(item) for item in items] == [["a picture of a.v2"], ["a picture of b"], ["a picture of deep/er/c"]]
    assert description(items[1]) == {"license": "CC0", "width": 96, "id": "b", "source": "photos", "licence": "CC0"}


def test_loose_files_are_named_by_what_they_are(tmp_path):
    for name, data in {
        "a.jpg": make_png(),
        "b.JPEG": make_jpeg(),
        "c.png": make_webp(),
        "d.jpg": b"nothing",
        "e.jpg": make_jpeg(),
    }.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).with_suffix(".txt").write_text("text")
    (tmp_path / "e.png").write_bytes(make_png())
    (tmp_path / "f.txt").write_text("alone")
    (tmp_path / "g.jpg").write_bytes(make_jpeg())
    items = read(tmp_path)
    assert reasons(items) == [
        None,
        None,
        None,
        "not an image",
        "several images of one name",
        "no image",
        "no usable text",
    ]
    assert [next(iter(item.members)) for item in items[:3]] == ["png", "jpg", "webp"]


def test_an_image_above_the_limit_of_training_is_skipped(tmp_path):
    (tmp_path / "a.jpg").write_bytes(make_jpeg() + bytes(32 * 2**20))
    (tmp_path / "a.txt").write_text("large")
    assert reasons(read(tmp_path)) == ["image too large"]


@pytest.mark.parametrize("kind", FORMATS)
def test_formats_are_detected_by_their_first_bytes(kind):
    data = encode(make_picture().convert("P") if kind == "GIF" else make_picture(), kind)
    assert image_extension(data) == {"JPEG": "jpg", "TIFF": "tif"}.get(kind, kind.lower())


@pytest.mark.parametrize(
    "data", [b"", b"BM", b"BMnothing of the kind, just text", b"RIFF1234WAVE", b"<svg/>", b"%PDF-1.4"]
)
def test_other_files_are_no_images(data):
    assert image_extension(data) is None


# ------------------------------------------------------------------ lists of links


def test_lists_of_links_keep_their_scores_as_metadata(tmp_path):
    columns = {
        "URL": ["http://x.example/1.jpg"],
        "TEXT": ["one"],
        "SIMILARITY": [0.33],
        "AESTHETIC_SCORE": [float("nan")],
        "pwatermark": [0.1],
        "NSFW": ["UNLIKELY"],
        "WIDTH": [640],
        "license": ["?"],
        "embedding": pa.array([[0.1]], pa.list_(pa.float32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "links.parquet")
    source = open_input(parse_input(str(tmp_path)))
    [link] = source.read(0)
    sample = source.complete(link, make_png())
    assert sample.members["png"] == make_png()
    assert sample.members["txt"] == b"one"
    assert description(sample) == {
        "url": "http://x.example/1.jpg",
        "similarity": 0.33,
        "aesthetic": None,
        "pwatermark": 0.1,
        "nsfw": "UNLIKELY",
        "width": 640,
        "license": "?",
        "licence": "?",
        "id": "links.parquet:0",
        "source": tmp_path.name,
    }


def test_links_without_url_or_text_are_skipped(tmp_path):
    source = open_input(parse_input(str(make_urls(tmp_path))))
    assert [getattr(item, "reason", None) for item in source.read(0)] == [None, "no url", "no text"]


def test_the_columns_of_a_list_can_be_named(tmp_path):
    pq.write_table(pa.table({"where": ["http://x.example/"], "words": ["one"], "url": ["?"]}), tmp_path / "a.parquet")
    source = open_input(parse_input(f"urls:{tmp_path}", columns={"url": "where", "text": "words"}))
    [link] = source.read(0)
    assert (link.url, link.text) == ("http://x.example/", "one")
    with pytest.raises(DataError, match=r"which column is the text.*where, words, url"):
        open_input(parse_input(f"urls:{tmp_path}"))
    with pytest.raises(ConfigError, match="no column 'wher' for url"):
        open_input(parse_input(f"urls:{tmp_path}", columns={"url": "wher"}))
    with pytest.raises(ConfigError, match="no column role is called 'link'"):
        open_input(parse_input(f"urls:{tmp_path}", columns={"link": "where"}))


# ------------------------------------------------------------------ Parquet with images


def test_embedded_images_keep_their_bytes_over_row_groups(tmp_path):
    items = read(make_parquet(tmp_path))
    assert [item.members["jpg"] for item in items] == [make_jpeg(seed=n) for n in range(5)]
    assert [texts(item) for item in items] == [[f"caption {n}"] for n in range(5)]
    assert [description(item).get("score") for item in items] == [0.5, None, 1, 2, 3]
    assert items[3].key == "train-00000-of-00001.parquet:3"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("captions", [["one", "two"]], {"captions": ["one", "two"]}),
        ("text", ["one"], {"captions": ["one"]}),
        (
            "conversations",
            [[{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "That."}]],
            {"conversations": [{"from": "human", "value": "<image> What?"}, {"from": "gpt", "value": "That."}]},
        ),
        (
            "messages",
            [[{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]},
              {"role": "assistant", "content": [{"type": "text", "text": "That."}]}]],
            {"conversations": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
                               {"role": "assistant", "content": [{"type": "text", "text": "That."}]}]},
        ),
        (
            "texts",
            [[{"user": "What?", "assistant": "That.", "source": "x"}, {"user": "And?", "assistant": "This."}]],
            {"conversations": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "That."},
                               {"role": "user", "content": "And?"}, {"role": "assistant", "content": "This."}]},
        ),
        (
            "conversation",
            [json.dumps([{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}])],
            {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "That."}]},
        ),
    ],
)  # fmt: skip
def test_text_in_each_of_its_forms(tmp_path, name, values, expected):
    table = pa.table({"image": pa.array([{"bytes": make_jpeg(), "path": None}], IMAGE), name: values})
    pq.write_table(table, tmp_path / "a.parquet")
    [sample] = read(tmp_path / "a.parquet")
    fields = description(sample)
    assert {key: fields[key] for key in expected} == expected


def test_questions_with_answers_of_one_or_many(tmp_path):
    image = pa.array([{"bytes": make_png(), "path": None}] * 2, IMAGE)
    table = {
        "picture": image,
        "query": ["How many?", "Who?"],
        "label": [["3"], ["a", "b", "b"]],
        "text": ["not", "this"],
    }
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    samples = read(tmp_path)
    assert [description(sample)["questions"] for sample in samples] == [
        [{"question": "How many?", "answer": "3"}],
        [{"question": "Who?", "answer": "b"}],
    ]


def test_one_caption_per_row_becomes_one_sample_with_all_captions(tmp_path):
    """COCO in Parquet: five rows for each image; begun at any row, the rest is the same."""
    rows = [{"image": make_jpeg(seed=n // 5), "caption": f"caption {n}", "n": n} for n in range(15)]
    rows += [{"image": make_jpeg(seed=0), "caption": "later", "n": 15}, {"image": None, "caption": "none", "n": 16}]
    rows += [{"image": None, "caption": "none", "n": 17}, {"image": make_jpeg(seed=9), "caption": None, "n": 18}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=4)
    items = read(tmp_path / "a.parquet")
    samples = [item for item in items if isinstance(item, Sample)]
    assert [description(sample)["captions"] for sample in samples] == [
        [f"caption {5 * n + k}" for k in range(5)] for n in range(3)
    ] + [["later"]]
    assert [description(sample)["n"] for sample in samples] == [0, 5, 10, 15]
    assert sum(isinstance(item, Merged) for item in items) == 12
    assert reasons(items)[16:] == ["no image", "no image", "no text"]
    opened = open_input(parse_input(str(tmp_path / "a.parquet")))
    for begin in range(len(items) + 1):
        assert list(opened.read(0, begin)) == items[begin:]


def test_questions_about_one_image_stay_rows_of_their_own(tmp_path):
    table = {"image": [make_jpeg()] * 2, "question": ["Red?", "Blue?"], "answer": ["yes", "no"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert [isinstance(item, Sample) for item in read(tmp_path / "a.parquet")] == [True, True]


def test_several_images_of_a_row_are_numbered(tmp_path):
    rows = [[{"bytes": make_jpeg(seed=1), "path": None}, {"bytes": make_png(seed=2), "path": None}], []]
    table = {"images": pa.array(rows, pa.list_(IMAGE)), "text": ["two pictures", "none"]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    items = read(tmp_path / "a.parquet")
    assert items[0].members.keys() == {"0.jpg", "1.png", "json"}
    assert images(items[0]) == [make_jpeg(seed=1), make_png(seed=2)]
    assert reasons(items) == [None, "no image"]


def test_images_that_are_paths_are_read_from_the_image_folder(tmp_path):
    write_images(tmp_path / "images", ["a.jpg"])
    rows = [{"bytes": None, "path": "a.jpg"}, {"bytes": None, "path": "../a.parquet"}, None]
    pq.write_table(pa.table({"image": pa.array(rows, IMAGE), "text": list("abc")}), tmp_path / "a.parquet")
    assert reasons(read(tmp_path / "a.parquet")) == ["no image"] * 3
    items = read(tmp_path / "a.parquet", images=tmp_path / "images")
    assert reasons(items) == [None, "image path leaves the image folder", "no image"]
    assert items[0].members["jpg"] == make_jpeg(seed=0)


def test_columns_are_found_by_type_and_can_be_given(tmp_path):
    table = pa.table({"pixels": [make_jpeg()], "raw": [b"x"], "alt": ["one"], "caption": ["two"]})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"which column is the image\? .*pixels \(binary\)"):
        read(tmp_path / "a.parquet")
    [sample] = read(tmp_path / "a.parquet", columns={"image": "pixels"})
    assert texts(sample) == ["two"]
    [sample] = read(tmp_path / "a.parquet", columns={"image": "pixels", "text": "alt"})
    assert texts(sample) == ["one"]
    with pytest.raises(DataError, match="'alt' cannot be the image: its type is string"):
        read(tmp_path / "a.parquet", columns={"image": "alt"})


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = make_parquet(tmp_path) / "train-00000-of-00001.parquet"
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(path)


def test_parquet_is_read_a_few_rows_at_a_time(tmp_path):
    """A row group of 32 MB of images; what is held at once stays below."""
    blob = make_jpeg() + os.urandom(2**20)
    table = pa.table({"image": pa.array([{"bytes": blob, "path": None}] * 32, IMAGE), "text": ["t"] * 32})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False, row_group_size=32, write_batch_size=4)
    del table
    before = pa.total_allocated_bytes()
    most = 0
    for _ in read_input(parse_input(str(tmp_path / "a.parquet"))):
        most = max(most, pa.total_allocated_bytes() - before)
    assert most < 26 * 2**20


# ------------------------------------------------------------------ COCO, VQA, conversations


def test_coco_gathers_the_captions_of_an_image(tmp_path):
    items = read(make_coco(tmp_path), images=tmp_path / "val2017")
    assert reasons(items) == [None, None, "no caption", "image file missing"]
    assert texts(items[0]) == ["A first.", "A second."]
    assert items[0].members["jpg"] == make_jpeg(seed=0)
    assert description(items[0]) == {
        "captions": ["A first.", "A second."],
        "file_name": "000000000007.jpg",
        "url": "http://images.example/7.jpg",
        "licence": "http://creativecommons.org/licenses/by/2.0/",
        "id": "7",
        "source": "captions_val2017",
    }


def test_captions_of_unknown_coco_images_are_counted(tmp_path):
    path = make_coco(tmp_path)
    content = json.loads(path.read_text())
    known = len(content["images"])
    content["annotations"] += [{"image_id": 900 + n % 2, "caption": f"lost {n}"} for n in range(5)]
    path.write_text(json.dumps(content))
    items = read(path, images=tmp_path / "val2017")
    assert reasons(items)[known:] == ["unknown image"] * 2
    assert [(item.key, item.detail) for item in items[known:]] == [
        ("900", "3 captions of an image not in `images`"),
        ("901", "2 captions of an image not in `images`"),
    ]
    opened = open_input(parse_input(str(path), images=tmp_path / "val2017"))
    for begin in range(len(items) + 1):
        assert list(opened.read(0, begin)) == items[begin:]


def test_coco_without_captions_is_refused(tmp_path):
    content = {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [{"image_id": 1, "bbox": [0, 0, 1, 1]}]}
    with pytest.raises(DataError, match="captions_"):
        read(write_json(tmp_path / "instances.json", content))


def test_vqa_gathers_the_questions_of_an_image(tmp_path):
    items = read(make_vqa(tmp_path), images=tmp_path / "train2014")
    assert reasons(items) == [None, "no answer", "image file missing"]
    assert [(entry["question"], entry["answer"]) for entry in description(items[0])["questions"]] == [
        ("How many?", "2"),
        ("Which colour?", "red"),
    ]
    assert items[0].members["jpg"] == make_jpeg(seed=0)


def test_image_numbers_do_not_lead_out_of_the_folder(tmp_path):
    path = make_vqa(tmp_path)
    write_images(tmp_path, ["secret.jpg"])
    path.write_text(path.read_text().replace('"image_id": 42', '"image_id": "../secret"'))
    items = read(path, images=tmp_path / "train2014")
    assert reasons(items)[0] == "image path leaves the image folder"


def test_vqa_needs_its_answers(tmp_path):
    path = make_vqa(tmp_path)
    answers = tmp_path / "v2_mscoco_train2014_annotations.json"
    answers.rename(tmp_path / "answers.json")
    with pytest.raises(DataError, match="--annotations"):
        read(path, images=tmp_path / "train2014")
    items = read(path, images=tmp_path / "train2014", annotations=tmp_path / "answers.json")
    assert isinstance(items[0], Sample)


def test_conversations_with_one_image_several_or_none(tmp_path):
    items = read(make_chat(tmp_path), images=tmp_path / "images")
    assert reasons(items) == [
        None,
        "no usable text",
        None,
        "image path leaves the image folder",
        "image file missing",
        "no conversation",
        "not a JSON object",
    ]
    assert items[0].key == "one"
    assert description(items[0])["model"] == "llava"
    [conversation] = conversations(items[0], TextRules())
    assert conversation[0]["content"][0]["image"] == make_jpeg(seed=0)
    assert items[2].members.keys() == {"json"}
    assert "1 <image> marks and 2 images" in items[1].detail


def test_jsonl_is_read_by_line_and_a_bad_line_costs_itself_alone(tmp_path):
    write_images(tmp_path, ["a.jpg"])
    url = "data:image/png;base64," + base64.b64encode(make_png()).decode()
    named = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": "a.jpg"},
        {"type": "text", "text": "What?"},
    ]
    web = [{"type": "image_url", "image_url": {"url": "https://x.example/a.jpg"}}]
    answer = {"role": "assistant", "content": "That."}
    lines = [
        json.dumps({"messages": [{"role": "user", "content": "<image>What?"}, answer], "images": ["a.jpg"]}),
        "",
        "{broken",
        json.dumps({"messages": [{"role": "user", "content": named}, answer]}),
        json.dumps({"messages": [{"role": "user", "content": web}, answer]}),
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    items = read(tmp_path / "chat.jsonl")
    assert reasons(items) == [None, "not a JSON object", None, "image is a URL"]
    assert items[1].detail.startswith("line 3: "), "blank lines are counted too, as editors do"
    assert images(items[2]) == [make_png(), make_jpeg(seed=0)]
    assert len(items[2].members["json"]) < 400, "the image is stored once"


def test_text_that_is_no_unicode_is_skipped(tmp_path):
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "\ud83d"}]
    assert reasons(read(write_json(tmp_path / "a.json", [{"conversations": turns}]))) == ["text is not valid Unicode"]


# ------------------------------------------------------------------ tables of captions and questions


def test_a_broken_line_of_a_table_is_reported_by_its_number(tmp_path):
    (tmp_path / "a.jpg").write_bytes(make_jpeg(seed=0))
    row = json.dumps({"image": "a.jpg", "caption": "a boat"})
    (tmp_path / "table.jsonl").write_text(f'{row}\n\n{{"image": "a.jpg", }}\n[1]\n')
    items = read(tmp_path / "table.jsonl")
    assert reasons(items) == [None, "not a JSON object", "not a JSON object"]
    assert items[1].detail.startswith("line 3: ")
    assert "column" in items[1].detail


def test_a_table_gives_captions_and_questions(tmp_path):
    items = read(make_jsonl(tmp_path), images=tmp_path / "images")
    kinds = ["Sample", "Merged", "Sample", "Skipped", "Sample", "Skipped", "Skipped", "Skipped", "Sample"]
    assert [type(item).__name__ for item in items] == kinds
    assert [one for one in reasons(items) if one] == ["image file missing", "no text", "no image", "not a JSON object"]
    assert texts(items[0]) == ["a boat", "the boat"]
    assert items[2].key == "house"
    assert description(items[2])["author"] == "x"
    [asked] = description(items[4])["questions"]
    assert asked == {
        "question": "What?",
        "answer": "a house",
        "answers": ["a house", "house"],
        "choices": ["a house", "a boat"],
    }
    assert len(images(items[8])) == 2
    assert description(items[8])["questions"][0]["answer"] == "2"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("captions.csv", 'file_name,text\n1.jpg,a boat\n1.jpg,the boat\n2.jpg,"a house, red"\n'),
        ("captions.csv", "Image| caption\n1.jpg| a boat\n1.jpg| the boat\n2.jpg| a house, red\n"),
        ("captions.tsv", 'image\tcaptions\n1.jpg\t["a boat", "the boat"]\n2.jpg\ta house, red\n'),
        (
            "metadata.jsonl",
            '{"file_name": "1.jpg", "captions": ["a boat", "the boat"]}\n'
            '{"file_name": "2.jpg", "text": "a house, red"}\n',
        ),
        (
            "captions.json",
            '[{"image": "1.jpg", "captions": ["a boat", "the boat"]},\n {"image": "2.jpg", "caption": "a house, red"}]',
        ),
    ],
)
def test_a_folder_of_images_with_a_table_of_captions_is_read(tmp_path, name, content):
    write_images(tmp_path, ["1.jpg", "2.jpg"])
    (tmp_path / name).write_text(content)
    path = tmp_path / name if name.endswith(".json") else tmp_path  # in a folder, each json file belongs to one image
    assert open_input(parse_input(str(path))).kind == "jsonl"
    samples = [item for item in read(path) if isinstance(item, Sample)]
    assert [texts(sample) for sample in samples] == [["a boat", "the boat"], ["a house, red"]]
    assert images(samples[1]) == [make_jpeg(seed=1)]


def test_a_row_with_more_cells_than_the_header_is_skipped(tmp_path):
    write_images(tmp_path, ["1.jpg"])
    (tmp_path / "captions.csv").write_text("image,caption\n1.jpg,a boat, red\n1.jpg,a boat\n")
    assert reasons(read(tmp_path)) == ["more cells than the header", None]


# ------------------------------------------------------------------ naming the kind


def test_the_kind_can_be_given_before_the_path_or_beside_it(tmp_path):
    path = make_chat(tmp_path)
    assert parse_input(f"chat:{path}").kind == "chat"
    assert parse_input(str(path), kind="chat").kind == "chat"
    assert parse_input("s3://bucket/x").kind is None
    with pytest.raises(ConfigError, match=r"no kind of input is called 'coca'.*\n(.*\n)*  coco "):
        parse_input(f"coca:{path}")
    with pytest.raises(ConfigError, match="no kind of input is called 'llava'"):
        open_input(parse_input(str(path), kind="llava"))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"x.json": b'{"a": 1}'}, "its kind cannot be detected"),
        ({"x.csv": b"a,b"}, "its kind cannot be detected"),
        ({"x/README.md": b"hello"}, "neither tars"),
        ({"x/a.jpg": b"", "x/a.parquet": b""}, "both Parquet files and images"),
    ],
)
def test_an_undetected_kind_is_an_error_with_the_list_of_kinds(tmp_path, files, complaint):
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    path = tmp_path / next(iter(files)).partition("/")[0]
    with pytest.raises(DataError, match=complaint) as error:
        read(path)
    assert all(f"  {kind} " in str(error.value) for kind in KINDS)


def test_a_wrongly_detected_kind_is_an_error_with_the_list_of_kinds(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="detected as urls") as error:
        read(tmp_path / "x.parquet")
    assert all(f"  {kind} " in str(error.value) for kind in KINDS)


@pytest.mark.parametrize("kind", [None, *KINDS])
def test_a_path_that_is_not_there_is_named(tmp_path, kind):
    with pytest.raises(DataError, match="no/such/file"):
        open_input(parse_input(str(tmp_path / "no/such/file"), kind=kind))


@pytest.mark.parametrize(
    ("path", "name"),
    [("laion", "laion"), ("laion/00000.tar", "laion"), ("laion/{00000..00001}.tar", "laion"), ("./laion/.", "laion")],
)
def test_an_input_is_named_by_its_folder(tmp_path, monkeypatch, path, name):
    make_tars(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert open_input(parse_input(path)).name == name
    monkeypatch.chdir(tmp_path / "laion")
    assert open_input(parse_input(".")).name == name


def test_only_tars_are_read_remotely():
    with pytest.raises(DataError, match="only tars"):
        open_input(parse_input("parquet:s3://bucket/data"))


@pytest.mark.parametrize("kind", ["coco", "vqa"])
def test_a_file_of_another_kind_is_an_error(tmp_path, kind):
    path = write_json(tmp_path / "questions.json", {"a": 1})
    write_json(tmp_path / "annotations.json", {"annotations": []})
    with pytest.raises(DataError, match=r"questions\.json"):
        list(read(path, kind=kind))


def test_an_image_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match="--images"):
        read(make_coco(tmp_path), images=Path("nowhere"))


# ------------------------------------------------------------------ what all readers treat alike


def in_every_kind(folder, image, extension, conversation=None):
    """One item of each kind that has its image at hand; with a conversation, of each kind that can have one."""
    folder.mkdir()
    fields = {"conversations": conversation} if conversation else {"caption": "a boat"}
    members = {f"a.{extension}": image} if image is not None else {}
    write_tar(folder / "tars" / "0.tar", {**members, "a.json": json.dumps(fields).encode()}.items())
    (folder / "files").mkdir()
    for name, data in {**members, "a.json": json.dumps(fields).encode()}.items():
        (folder / "files" / name).write_bytes(data)
    column, value = ("conversations", conversation) if conversation else ("caption", "a boat")
    rows = [{"image": image, column: json.dumps(value) if conversation else value}]
    schema = pa.schema([("image", pa.binary()), (column, pa.string())])
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "a.parquet")
    named = {"image": f"files/a.{extension}"} if image is not None else {}
    talk = conversation or [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "a boat"}]
    write_json(folder / "chat.json", [{**named, "conversations": talk}])
    found = {
        "tars": read(folder / "tars"),
        "files": read(f"files:{folder / 'files'}"),
        "parquet": read(f"parquet:{folder / 'a.parquet'}"),
    }
    if conversation or image is not None:
        found["chat"] = read(f"chat:{folder / 'chat.json'}")
    if not conversation and image is not None:
        content = {
            "images": [{"id": 1, "file_name": f"files/a.{extension}"}],
            "annotations": [{"image_id": 1, "caption": "a boat"}],
        }
        found["coco"] = read(f"coco:{write_json(folder / 'coco.json', content)}")
    return found


@pytest.mark.parametrize(
    ("image", "extension", "name"),
    [
        (b"\xff\x0a" + bytes(20), "jxl", "JPEG XL"),
        (b"\0\0\0\x1cftypheic\0\0\0\0", "heic", "HEIF"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "svg", "SVG"),
    ],
)
def test_images_in_unsupported_formats_have_one_reason_in_every_reader(tmp_path, image, extension, name):
    for kind, items in in_every_kind(tmp_path / "named", image, extension).items():
        assert reasons(items) == ["unsupported image format"], kind
        assert "Convert it to JPEG, PNG or WebP" in items[0].detail
    for kind, items in in_every_kind(tmp_path / "misnamed", image, "jpg").items():
        assert reasons(items) == ["unsupported image format"], kind
        assert items[0].detail.startswith(name)


@pytest.mark.parametrize(
    ("image", "extension"), [(make_tiff(), "tif"), *([(make_avif(), "avif")] if "AVIF" in FORMATS else [])]
)
def test_tiff_and_avif_images_are_read_in_every_reader(tmp_path, image, extension):
    for folder, name in (("named", extension), ("misnamed", "jpg")):
        for kind, items in in_every_kind(tmp_path / folder, image, name).items():
            assert [isinstance(item, Sample) for item in items] == [True], (kind, items)
            assert images(items[0]) == [image], kind


def test_a_conversation_without_an_image_is_a_text_only_sample_in_every_reader(tmp_path):
    talk = [{"from": "human", "value": "What is a boat?"}, {"from": "gpt", "value": "A vessel"}]
    for kind, items in in_every_kind(tmp_path / "talk", None, "jpg", talk).items():
        assert [isinstance(item, Sample) for item in items] == [True], kind
        assert texts(items[0]) == ["What is a boat?", "A vessel"]
    for kind, items in in_every_kind(tmp_path / "caption", None, "jpg").items():
        assert reasons(items) == ["no image"], kind


def test_parquet_with_conversations_alone_needs_no_image_column(tmp_path):
    talk = [{"role": "user", "content": "What is a boat?"}, {"role": "assistant", "content": "A vessel"}]
    pq.write_table(pa.table({"messages": [talk]}), tmp_path / "a.parquet")
    [sample] = read(f"parquet:{tmp_path / 'a.parquet'}")
    assert texts(sample) == ["What is a boat?", "A vessel"]

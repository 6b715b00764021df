"""Copies are found, similar pictures are not, the best of a group is kept; synthetic pictures, and photos."""

import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
from data.making import encode, make_caption, make_picture, make_sample, make_shards, write_samples
from PIL import Image

from saccade.data.curate import CurationSettings, curate, find_contamination
from saccade.data.index import open_index
from saccade.data.sample import images
from saccade.data.shards import ShardWriter
from saccade.processor.image import MediaLimits, load_image


def repeats(folder):
    """The key and reason of every dropped duplicate, and the key of the sample it repeats."""
    index = open_index(folder)
    keys = {name: index.read(shard, ["key"])["key"].to_pylist() for shard, name in enumerate(index.shards)}
    found = {}
    for shard, name in enumerate(index.shards):
        for row, decision in enumerate(index.decisions(shard).to_pylist()):
            if decision["repeats_shard"] is not None:
                original = keys[decision["repeats_shard"]][decision["repeats_row"]]
                found[keys[name][row]] = (decision["reason"], original)
    return found


def curated(folder, samples, **settings):
    write_samples(folder / "00000.tar", samples)
    curate(folder, CurationSettings(min_side=8, **settings), num_workers=1)
    return repeats(folder)


def shown(key, image, text=None, seed=0, **fields):
    """A sample with this image: bytes, or a picture to be encoded as PNG."""
    data = image if isinstance(image, bytes) else encode(image, "PNG")
    name = {b"\xff\xd8": "jpg", b"RI": "webp"}.get(data[:2], "png")
    sample = make_sample(key, seed=seed, text=text, fields=fields)
    return make_sample(key, members={name: data} | {n: sample.members[n] for n in ("json", "txt")})


def copy_of(image, rng):
    """Resized to 0.5-0.9 and encoded again as JPEG or WebP of quality 40-90, or as PNG."""
    scale, quality = rng.uniform(0.5, 0.9), int(rng.integers(40, 91))
    filters = [getattr(Image.Resampling, name) for name in ("BOX", "BILINEAR", "BICUBIC", "LANCZOS")]
    size = (round(image.width * scale), round(image.height * scale))
    smaller = image.resize(size, filters[rng.integers(len(filters))])
    kind = ("JPEG", "WEBP", "PNG")[rng.integers(3)]
    return encode(smaller, kind, **({} if kind == "PNG" else {"quality": quality}))


def test_planted_copies_are_found_and_nothing_else(tmp_path):
    rng = np.random.default_rng(0)
    pictures = {f"original-{n:03d}": make_picture(200, 150, n) for n in range(150)}
    originals = [
        shown(key, encode(picture, "JPEG", quality=90), seed=n) for n, (key, picture) in enumerate(pictures.items())
    ]
    exact = [
        shown(f"exact-{key}", encode(picture, "JPEG", quality=90), "another text")
        for key, picture in list(pictures.items())[:50]
    ]
    near = [shown(f"near-{key}", copy_of(picture, rng), "another text") for key, picture in list(pictures.items())[50:]]
    write_samples(tmp_path / "00001.tar", near)
    found = curated(tmp_path, exact + originals, keep_one_per="image")
    pairs = {
        frozenset((key.removeprefix("exact-").removeprefix("near-"), original.removeprefix("exact-")))
        for key, (_, original) in found.items()
    }
    assert all(len(pair) == 1 for pair in pairs), "nothing but copies"
    assert sum(reason == "exact duplicate" for reason, _ in found.values()) == 50
    assert sum(reason == "near-duplicate image" for reason, _ in found.values()) >= 97
    assert all(key.startswith("near-") for key, (reason, _) in found.items() if reason == "near-duplicate image")


def test_the_largest_then_the_longest_then_the_first_of_a_group_is_kept(tmp_path):
    picture = make_picture(160, 160, 1)
    samples = [
        shown("b-small", encode(picture.resize((100, 100)), "JPEG"), "a text that is much longer than the others here"),
        shown("c-large", picture, "short text"),
        shown("a-large", picture, "short text"),
        shown("d-large", picture, "a longer text about it"),
    ]
    assert curated(tmp_path, samples, keep_one_per="image") == {
        "b-small": ("near-duplicate image", "d-large"),
        "c-large": ("exact duplicate", "d-large"),
        "a-large": ("exact duplicate", "d-large"),
    }
    assert curated(tmp_path, samples[:3])["a-large"] == ("exact duplicate", "c-large")


def test_the_one_that_is_kept_has_passed_all_other_rules(tmp_path):
    picture = make_picture(160, 160, 1)
    samples = [shown("large", picture, "IMG_1.jpg"), shown("small", picture.resize((120, 120)), "a good caption of it")]
    write_samples(tmp_path / "00000.tar", samples)
    report = curate(tmp_path, CurationSettings(), num_workers=1)
    assert report.dropped == {"boilerplate text": 1}


def test_other_captions_and_questions_of_an_image_are_kept_unless_one_per_image_is_asked(tmp_path):
    def asked(key, question):
        return shown(key, make_picture(90, 90, 2), questions=[{"question": question, "answer": "yes"}])

    picture = make_picture(90, 90, 1)
    samples = [
        shown("one", picture, "A dog on the grass"),
        shown("two", picture, "a brown dog runs"),
        shown("three", encode(picture.resize((70, 70)), "JPEG"), "a dog  on the GRASS"),
        asked("first", "Is it red?"),
        asked("second", "Is it blue?"),
        asked("third", "is it red?"),
    ]
    near = {"three": ("near-duplicate image", "one"), "third": ("exact duplicate", "first")}
    assert curated(tmp_path, samples) == near
    by_image = curated(tmp_path, samples, keep_one_per="image")
    assert by_image == near | {"two": ("exact duplicate", "one")}
    assert curated(tmp_path, samples, keep_one_per="image and text") == {
        "three": ("near-duplicate image", "one"),
        "third": ("exact duplicate", "first"),
    }


def test_data_with_one_caption_per_row_keeps_all_captions_and_says_so(tmp_path):
    samples = [
        shown(f"{n}-{k}", encode(make_picture(90, 90, n), "JPEG", quality=90), f"caption {k} of picture {n}")
        for n in range(4)
        for k in range(5)
    ]
    samples += [shown("again", encode(make_picture(90, 90, 0), "JPEG", quality=90), "caption 0 of picture 0")]
    samples += [shown("smaller", encode(make_picture(90, 90, 1).resize((70, 70)), "JPEG"), "another text")]
    write_samples(tmp_path / "00000.tar", samples)
    report = curate(tmp_path, CurationSettings(min_side=8), num_workers=1)
    assert (report.num_kept, report.num_shared_images) == (20, 20)
    assert report.dropped == {"exact duplicate": 1, "near-duplicate image": 1}
    report = curate(tmp_path, CurationSettings(min_side=8, keep_one_per="image"), num_workers=1)
    assert (report.num_kept, report.num_shared_images) == (4, 0)


def test_samples_of_several_images_repeat_each_other_only_as_a_whole(tmp_path):
    one, two, three = (make_picture(120, 90, seed) for seed in range(3))
    png, jpeg = (lambda image: encode(image, "PNG")), (lambda image: encode(image.resize((96, 72)), "JPEG", quality=80))

    def album(key, *datas):
        return make_sample(
            key, members={**{f"{n}.png": data for n, data in enumerate(datas)}, "txt": f"{key} of a trip".encode()}
        )

    samples = [
        album("album", png(one), png(two)),
        album("again", jpeg(one), jpeg(two)),
        album("swapped", png(two), png(one)),
        album("longer", png(one), png(two), png(three)),
        shown("alone", one),
        make_sample("words", members={"txt": b"only a few words"}),
        make_sample("same-words", members={"txt": b"Only a FEW words"}),
        make_sample("other-words", members={"txt": b"only other words"}),
    ]
    assert curated(tmp_path, samples) == {
        "again": ("near-duplicate image", "album"),
        "same-words": ("exact duplicate", "words"),
    }


def page(seed):
    """A page of print: the same margins and lines, other words."""
    rng = np.random.default_rng(seed)
    ink = np.full((600, 480), 255, np.uint8)
    for line in range(40, 560, 14):
        letters = rng.random(200) < 0.45
        letters[rng.integers(0, 200, 35)] = False
        ink[line : line + 8, 40:440] = np.where(np.repeat(letters, 2), 30, 255)
    return Image.fromarray(ink).convert("RGB")


def test_similar_but_different_pictures_are_kept(tmp_path):
    def chart(*heights):
        image = Image.new("RGB", (240, 180), "white")
        for n, height in enumerate(heights):
            image.paste((40, 110, 200), (20 + 40 * n, 170 - height, 45 + 40 * n, 170))
        return image

    red, blue = Image.new("RGB", (128, 128), "white"), Image.new("RGB", (128, 128), "white")
    red.paste((190, 60, 60), (30, 30, 100, 100))
    blue.paste((60, 102, 190), (30, 30, 100, 100))  # as bright as the red one
    pictures = [chart(90, 120, 60, 140, 100), chart(90, 120, 95, 140, 100), red, blue, *map(page, range(20))]
    assert curated(tmp_path, [shown(f"{n}", picture, make_caption(n)) for n, picture in enumerate(pictures)]) == {}


def test_any_number_of_blank_pages_is_one_group(tmp_path):
    sizes = [(100 + n % 40, 100 + n // 40) for n in range(400)]
    blank = [shown(f"white-{n}", Image.new("RGB", size, "white"), make_caption(n)) for n, size in enumerate(sizes)]
    dark = [shown(f"black-{n}", Image.new("RGB", size, "black"), make_caption(n)) for n, size in enumerate(sizes[:5])]
    found = curated(tmp_path, blank + dark)
    assert len(found) == 403
    assert {original for _, original in found.values()} == {"white-399", "black-4"}
    assert all(key[:5] == original[:5] for key, (_, original) in found.items())


def test_near_duplicate_texts_are_dropped_only_when_asked(tmp_path):
    text = "A large brown dog is running along the beach with a yellow ball in its mouth at sunset"
    samples = [
        shown("long", make_picture(90, 90, 1), text + " today"),
        shown("plain", make_picture(90, 90, 2), text),
        shown(
            "other",
            make_picture(90, 90, 3),
            "Two children in red coats are building a snowman in front of a wooden house",
        ),
    ]
    assert curated(tmp_path, samples) == {}
    assert curated(tmp_path, samples, near_duplicate_texts=True) == {"plain": ("near-duplicate text", "long")}


def test_text_that_fits_every_image_is_dropped(tmp_path):
    samples = [shown(f"stock-{n}", make_picture(90, 90, n), "Stock photo, royalty free") for n in range(5)]
    samples += [shown(f"fine-{n}", make_picture(90, 90, 10 + n), "a dog on the beach") for n in range(3)]
    write_samples(tmp_path / "00000.tar", samples)
    report = curate(tmp_path, CurationSettings(max_images_per_text=3), num_workers=1)
    assert report.dropped == {"text shared by many images": 5}


# ------------------------------------------------------------------ edited copies


def cropped(share):
    return lambda image: image.crop([round(side * x) for x in (share, 1 - share) for side in image.size])


def with_logo(image):
    image = image.copy()
    image.paste((220, 30, 30), (image.width - 50, image.height - 50, image.width - 10, image.height - 10))
    return image


EDITS = {
    "crop 1 %": cropped(0.01),
    "crop 2.5 %": cropped(0.025),
    "crop 5 %": cropped(0.05),
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "turned left": lambda image: image.transpose(Image.Transpose.ROTATE_90),
    "upside down": lambda image: image.transpose(Image.Transpose.ROTATE_180),
    "brighter 5 %": lambda image: image.point(lambda value: min(255, round(1.05 * value))),
    "darker 10 %": lambda image: image.point(lambda value: round(0.9 * value)),
    "grey": lambda image: image.convert("L").convert("RGB"),
    "logo": with_logo,
    "mirrored, crop 2.5 %": lambda image: cropped(0.0125)(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
}

TURNED = {"turned left", "upside down"}
"""Edits that only curation searches for."""


def test_edited_copies_are_found_by_contamination_and_by_curation(tmp_path):
    """One training folder with a copy of each edit of every evaluation image, and as many other pictures."""
    pictures = [make_picture(256, 192, seed) for seed in range(12)]
    write_samples(tmp_path / "test" / "00000.tar", [shown(f"t{n}", picture) for n, picture in enumerate(pictures)])
    copies = [
        shown(f"{n}-{number}", encode(edit(picture), "JPEG", quality=80), make_caption(n))
        for number, edit in enumerate(EDITS.values())
        for n, picture in enumerate(pictures)
    ]
    others = [shown(f"other-{n}", make_picture(256, 192, 100 + n), make_caption(n)) for n in range(100)]
    write_samples(tmp_path / "train" / "00000.tar", copies + others)
    report = find_contamination(tmp_path / "train", tmp_path / "test", num_workers=1)
    pairs = [(match.training.partition("/")[2], match.evaluation.partition("/t")[2]) for match in report.matches]
    assert all(copy.partition("-")[0] == original for copy, original in pairs), "nothing but copies"
    found = {copy for copy, _ in pairs}
    for number, edit in enumerate(EDITS):
        if edit in TURNED:
            continue
        assert sum(f"{n}-{number}" in found for n in range(len(pictures))) >= 11, edit

    dropped = curated(tmp_path / "train", copies + others)
    assert all(reason == "near-duplicate image" for reason, _ in dropped.values())
    assert all(key.partition("-")[0] == original.partition("-")[0] for key, (_, original) in dropped.items())
    left = {copy.key for copy in copies} - dropped.keys()
    assert len(left) <= 2 * len(pictures) + 3, "one of each picture, and its copies with a logo, which hide something"


# ------------------------------------------------------------------ contamination


def test_evaluation_images_among_training_images_are_found_and_dropped(tmp_path):
    test, train = tmp_path / "test", tmp_path / "train"
    pictures = [make_picture(160, 120, seed) for seed in range(6)]
    write_samples(test / "00000.tar", [shown(f"t{n}", picture) for n, picture in enumerate(pictures)])
    make_shards(train, 2, 6, seed=100)
    album = {
        "0.png": encode(make_picture(160, 120, 50), "PNG"),
        "1.jpg": encode(pictures[4].resize((120, 90)), "JPEG", quality=70),
    }
    leaked = [
        shown("exact", pictures[1], make_caption(1)),
        shown("near", encode(pictures[2].resize((100, 75)), "WEBP", quality=60), make_caption(2)),
        make_sample("album", members={**album, "txt": b"two pictures of a trip"}),
    ]
    write_samples(train / "00002.tar", leaked)
    report = find_contamination(train, test, num_workers=1)
    assert (report.num_training, report.num_evaluation) == (15, 6)
    assert [(m.training, m.evaluation, m.is_exact) for m in report.matches] == [
        ("00002.tar/exact", "00000.tar/t1", True),
        ("00002.tar/near", "00000.tar/t2", False),
        ("00002.tar/album", "00000.tar/t4", False),
    ]
    result = curate(train, CurationSettings(evaluation_sets=(str(test),)), num_workers=1)
    assert result.dropped == {"in evaluation set": 3}
    assert find_contamination(test, train, num_workers=1).num_training == 6


def test_every_evaluation_image_that_a_training_sample_shows_is_found(tmp_path):
    """Twenty evaluation samples of one picture, three of them the same file, and an album of two others."""
    picture, first, second = (make_picture(160, 120, seed) for seed in (1, 2, 3))
    copies = [encode(picture, "PNG")] * 3 + [encode(picture, "JPEG", quality=60 + n) for n in range(17)]
    write_samples(
        tmp_path / "test" / "0.tar",
        [shown(f"t{n:02}", copy) for n, copy in enumerate(copies)] + [shown("u0", first), shown("u1", second)],
    )
    album = {"0.png": encode(first, "PNG"), "1.png": encode(second, "PNG"), "txt": b"two pictures of a trip"}
    others = [shown(f"other-{n}", make_picture(160, 120, 50 + n), make_caption(n)) for n in range(12)]
    leaked = [shown("same", picture, make_caption(0)), make_sample("album", members=album)]
    write_samples(tmp_path / "train" / "0.tar", others + leaked)
    report = find_contamination(tmp_path / "train", tmp_path / "test", num_workers=1)
    found = {(match.training, match.evaluation): match.is_exact for match in report.matches}
    assert found == {
        **{("0.tar/same", f"0.tar/t{n:02}"): n < 3 for n in range(20)},
        ("0.tar/album", "0.tar/u0"): True,
        ("0.tar/album", "0.tar/u1"): True,
    }
    assert len(found) == len(report.matches)


# ------------------------------------------------------------------ real photos


def flickr():
    folder = Path(os.environ.get("SACCADE_DATA", "/nowhere")) / "flickr8k"
    shards = sorted(folder.glob("train-*.tar"))
    if not shards:
        pytest.skip("needs flickr8k in $SACCADE_DATA")
    return shards


def test_copies_of_real_photos_are_found_and_no_two_photos_match(tmp_path):
    rng = np.random.default_rng(0)
    for shard in flickr()[:3]:
        (tmp_path / shard.name).write_bytes(shard.read_bytes())
    index = open_index(tmp_path)
    places = [(shard, row) for shard in range(3) for row in range(1000)]
    with ShardWriter(tmp_path) as writer:
        for number in rng.permutation(3000)[:600].tolist():
            photo = images(index.read_sample(*places[number]))[0]
            data = photo if number % 3 == 0 else copy_of(Image.open(io.BytesIO(photo)), rng)
            kind = "exact" if number % 3 == 0 else "near"
            writer.write(shown(f"{kind}-{number}", data, f"copy {number} of a photo"))
    curate(tmp_path, CurationSettings(keep_one_per="image"), num_workers=1)
    index = open_index(tmp_path)
    copies = next(shard for shard, name in enumerate(index.shards) if name == "00000.tar")
    keys = index.read(copies, ["key"])["key"].to_pylist()
    originals = {key: places[int(key.partition("-")[2])] for key in keys}
    found, others = set(), []
    for shard in range(len(index.shards)):
        for row, decision in enumerate(index.decisions(shard).to_pylist()):
            if decision["repeats_shard"] is None:
                continue
            one, other = (shard, row), (index.shards.index(decision["repeats_shard"]), decision["repeats_row"])
            copy = next((keys[row] for shard, row in (one, other) if shard == copies), None)
            if copy is not None and (originals[copy][0] + 1, originals[copy][1]) in (one, other):
                found.add(copy)
            else:
                others.append((one, other))
    for kind, least in (("exact", 0.99), ("near", 0.95)):
        planted = [key for key in keys if key.startswith(kind)]
        assert np.mean([key in found for key in planted]) >= least, kind

    def thumbnail(place):
        image = Image.fromarray(load_image(images(index.read_sample(*place))[0], MediaLimits()))
        return np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR), float)

    false = [pair for pair in others if np.abs(thumbnail(pair[0]) - thumbnail(pair[1])).mean() > 4]
    assert len(false) <= 0.001 * len(found), false


def test_edited_copies_of_real_photos_are_found(tmp_path):
    """The shares are those that bench/data_duplicates.py prints for 500 copies, with room for 60 copies."""
    least = {"crop 1 %": 58, "crop 2.5 %": 57, "crop 5 %": 55, "logo": 50}
    photos = []
    with tarfile.open(flickr()[0]) as tar:
        photos = [tar.extractfile(name).read() for name in tar.getnames() if name.endswith(".jpg")][:600]
    write_samples(tmp_path / "test" / "0.tar", [shown(f"t{n}", photo) for n, photo in enumerate(photos[:300])])
    opened = [Image.open(io.BytesIO(photo)).convert("RGB") for photo in photos[:60]]
    copies = [
        shown(f"{n}-{number}", encode(edit(photo), "JPEG", quality=75), make_caption(n))
        for number, edit in enumerate(EDITS.values())
        for n, photo in enumerate(opened)
    ]
    others = [shown(f"other-{n}", photo, make_caption(n)) for n, photo in enumerate(photos[300:])]
    write_samples(tmp_path / "train" / "0.tar", copies + others)
    report = find_contamination(tmp_path / "train", tmp_path / "test", num_workers=1)
    pairs = [(match.training.partition("/")[2], match.evaluation.partition("/t")[2]) for match in report.matches]
    assert all(copy.partition("-")[0] == original for copy, original in pairs)
    found = {copy for copy, _ in pairs}
    for number, edit in enumerate(EDITS):
        if edit in TURNED:
            continue
        assert sum(f"{n}-{number}" in found for n in range(60)) >= least.get(edit, 58), edit

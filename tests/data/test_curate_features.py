"""Features of images and texts are the same in every format, and damage is never mistaken for content."""

import random

import numpy as np
import pytest
from data.making import encode, make_caption, make_jpeg, make_picture, make_png, make_webp
from PIL import Image

from saccade.data.curate.image_match import COPY, SHOWN, same_picture
from saccade.data.curate.image_search import MIN_SIMILARITY, view_vectors
from saccade.data.curate.settings import DECODE_LIMITS
from saccade.data.curate.text_features import minhash_bands, similarity, text_hash, text_statistics
from saccade.data.curate.thumbnails import descriptors, small_picture, split_thumbnails, thumbnails
from saccade.errors import ImageError
from saccade.processor.image import MediaLimits


def small(data):
    return small_picture(data, DECODE_LIMITS)


def difference(one, other):
    return np.abs(small(one).astype(int) - small(other)).mean()


@pytest.mark.parametrize(("width", "height"), [(96, 64), (224, 224), (513, 301), (70, 900)])
def test_a_jpeg_decoded_at_reduced_scale_shows_what_a_full_decode_shows(width, height):
    picture = make_picture(width, height, 5)
    assert difference(encode(picture, "JPEG", quality=95), encode(picture, "PNG")) < 2.5
    assert difference(encode(picture, "JPEG", quality=95, progressive=True), encode(picture, "PNG")) < 2.5
    grey = picture.convert("L")
    assert difference(encode(grey, "JPEG", quality=95), encode(grey, "PNG")) < 2.5


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_seen_upright(orientation):
    turned, upright = make_jpeg(200, 120, 3, orientation=orientation), make_png(200, 120, 3, orientation=orientation)
    assert difference(turned, upright) < 2.5
    assert (difference(turned, make_jpeg(200, 120, 3)) > 10) == (orientation > 1)


def test_cmyk_and_transparent_images_are_measured_too():
    picture = make_picture(120, 120, 8)
    assert difference(encode(picture.convert("CMYK"), "JPEG", quality=95), encode(picture, "PNG")) < 4
    clear = Image.new("RGBA", (80, 80), (200, 0, 0, 0))
    assert small(encode(clear, "PNG")).min() == 255, "transparent is white"


@pytest.mark.parametrize("make", [make_jpeg, make_png, make_webp])
def test_a_truncated_image_is_an_error_wherever_it_is_cut(make):
    data = make(300, 200, 4)
    assert small(data).shape == (32, 32, 3)
    for share in (0.2, 0.5, 0.8, 0.95):
        with pytest.raises(ImageError):
            small(data[: int(share * len(data))])


def test_images_that_training_rejects_are_refused():
    limits = MediaLimits(max_pixels=10_000, max_side=500, max_aspect_ratio=4, max_bytes=100_000)
    for width, height in [(200, 100), (501, 8), (100, 20)]:
        with pytest.raises(ImageError):
            small_picture(make_jpeg(width, height, 1), limits)
    with pytest.raises(ImageError, match="bytes"):
        small_picture(make_jpeg(64, 64, 1) + bytes(100_000), limits)


def test_copies_have_similar_vectors_and_other_pictures_do_not_match():
    pictures = [make_picture(160, 120, seed) for seed in range(120)]
    originals = np.stack([small(encode(picture, "JPEG", quality=90)) for picture in pictures])
    copies = np.stack([small(encode(picture.resize((96, 72)), "JPEG", quality=50)) for picture in pictures])
    first, second = thumbnails(originals), thumbnails(copies)
    for tolerance in (COPY, SHOWN):
        assert same_picture(first, second, tolerance).mean() > 0.98
        assert not same_picture(first[:-1], second[1:], tolerance).any()
    one, other = (view_vectors(side)[:, 0].astype(int) for side in (first, second))
    cosines = one @ other.T / np.outer(np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1))
    assert np.mean(np.diag(cosines) > 0.99) > 0.98
    assert np.quantile(cosines[~np.eye(120, dtype=bool)], 0.99) < MIN_SIMILARITY
    assert same_picture(first[:0], second[:0], COPY).tolist() == []


@pytest.mark.parametrize("quarters", range(4))
@pytest.mark.parametrize("is_mirrored", [False, True])
def test_copies_in_any_orientation_have_similar_vectors_and_match(quarters, is_mirrored):
    pictures = [make_picture(160, 120, seed) for seed in range(60)]
    turned = [picture.rotate(90 * quarters, expand=True) for picture in pictures]
    if is_mirrored:
        turned = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for picture in turned]
    originals = thumbnails(np.stack([small(encode(picture, "JPEG", quality=90)) for picture in pictures]))
    copies = thumbnails(np.stack([small(encode(picture, "JPEG", quality=60)) for picture in turned]))
    home, views = view_vectors(originals)[:, 0].astype(int), view_vectors(copies).astype(int)
    assert np.mean(np.einsum("nvd,nd->nv", views, home).max(1) > MIN_SIMILARITY * 127**2) > 0.98
    for tolerance in (COPY, SHOWN):
        assert same_picture(originals, copies, tolerance).mean() > 0.98
        assert not same_picture(originals[:-1], copies[1:], tolerance).any()


def test_descriptors_are_unit_vectors_and_those_of_flat_pictures_match_nothing():
    pictures = np.stack([small(encode(make_picture(96, 96, seed), "PNG")) for seed in range(10)])
    pictures[0] = 200
    vectors = descriptors(split_thumbnails(thumbnails(pictures))[0])
    assert np.allclose(np.linalg.norm(vectors[1:], axis=1), 1, atol=1e-5)
    assert np.abs(vectors @ vectors[0]).max() < 0.01


def test_twins_in_another_colour_are_not_copies_but_a_grey_copy_is():
    red, blue = Image.new("RGB", (128, 128), "white"), Image.new("RGB", (128, 128), "white")
    red.paste((190, 60, 60), (30, 30, 100, 100))
    blue.paste((60, 102, 190), (30, 30, 100, 100))  # as bright as the red one
    shown = thumbnails(
        np.stack([small(encode(image, "PNG")) for image in (red, blue, red.convert("L").convert("RGB"))])
    )
    for tolerance in (COPY, SHOWN):
        assert same_picture(shown[[0, 0, 0]], shown, tolerance).tolist() == [True, False, True]


def test_flat_pictures_match_by_their_brightness():
    shown = thumbnails(np.stack([np.full((32, 32, 3), level, np.uint8) for level in (0, 200, 202, 255)]))
    assert same_picture(shown[[1, 1, 1, 1]], shown, COPY).tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("A man in a red shirt is climbing a rock", "en"),
        ("How many people live in the city?", "en"),
        ("Ein Mann mit einem roten Hemd klettert auf einen Felsen", "de"),
        ("Un homme avec une chemise rouge est sur le rocher", "fr"),
        ("Un hombre con una camisa roja está en la playa", "es"),
        ("Um homem com uma camisa vermelha não está na praia", "pt"),
        ("Een man met een rood shirt zit op het strand", "nl"),
        ("Мужчина в красной рубашке на пляже", "ru"),
        ("Чоловік сидить біля річки під деревом", "uk"),
        ("赤いシャツの男が山に登る", "ja"),
        ("一个穿红衬衫的男人在海滩上", "zh"),
        ("빨간 셔츠를 입은 남자", "ko"),
        ("رجل يرتدي قميصا أحمر", "ar"),
        ("Red dress size M", None),
        ("12345", None),
        ("", None),
    ],
)
def test_language_is_detected_by_script_and_function_words(text, language):
    assert text_statistics(text).language == language


def test_words_are_counted_in_scripts_without_blanks():
    assert text_statistics("a dog, it's big").num_words == 4
    assert text_statistics("一只猫坐").num_words == 4
    assert text_statistics("").num_words == 0


def test_repetition_is_the_share_of_repeated_ngrams():
    assert text_statistics(make_caption(3)).word_repetition < 0.2
    assert text_statistics("one two three one two three").word_repetition == pytest.approx(1 / 4)
    assert text_statistics("a" * 109).character_repetition == pytest.approx(0.99)
    assert text_statistics(" ".join(f"word{n}" for n in range(3000))).num_words == 3000


def edited(text, num_words, rng):
    words = text.split()
    for _ in range(num_words):
        words[rng.randrange(len(words))] = f"w{rng.randrange(10**6)}"
    return " ".join(words)


def test_minhash_finds_similar_texts_and_similarity_is_exact():
    rng = random.Random(0)
    texts = [make_caption(seed, 25) for seed in range(400)]
    changed = [edited(text, 1 + seed % 4, rng) for seed, text in enumerate(texts)]
    shares = (minhash_bands(texts) == minhash_bands(changed)).any(axis=1)
    similar = np.array([similarity(one, other) for one, other in zip(texts, changed, strict=True)])
    assert (similar >= 0.8).sum() > 50
    assert shares[similar >= 0.8].mean() > 0.97
    assert shares[similar < 0.4].mean() < 0.4 if (similar < 0.4).any() else True
    assert similarity("abcdef", "abcdef") == 1
    assert similarity("abcdef", "abcdeg") == pytest.approx(1 / 3)
    assert similarity("ab", "") == 0


def test_texts_are_hashed_alone_or_together_alike_whatever_their_script():
    texts = ["", "ab", "Ein Hund  LÄUFT", "一只猫坐在墙上", "x" * 5000, "\ud83d\ude00 smile"]
    texts[-1] = texts[-1].encode("utf-16", "surrogatepass").decode("utf-16")
    together = minhash_bands(texts)
    for row, text in zip(together, texts, strict=True):
        assert minhash_bands([text]).tolist() == [row.tolist()]
    assert minhash_bands([]).shape == (0, 20)
    assert text_hash("Ein Hund  LÄUFT") == text_hash(" ein hund läuft\n") != text_hash("ein hund lauft")

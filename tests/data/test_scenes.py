"""Scenes: deterministic, and held-out ones show combinations that training never does."""

import io
import json
import re
from itertools import pairwise

from PIL import Image

from saccade.data.sample import TextRules, conversations
from saccade.data.scenes import COLOURS, SHAPES, THINGS, Thing, scene_sample


def things_of(number, *, held_out):
    """The things of a captioned scene, as its caption names them."""
    text = scene_sample(number, held_out=held_out).members["txt"].decode()
    return [Thing(*words) for words in re.findall(rf"({'|'.join(COLOURS)}) ({'|'.join(SHAPES)})", text)]


def test_a_scene_depends_on_its_number_seed_and_side_alone():
    assert scene_sample(7).members == scene_sample(7).members
    others = [scene_sample(8), scene_sample(7, seed=1), scene_sample(7, held_out=True)]
    assert all(one.members["png"] != scene_sample(7).members["png"] for one in others)


def test_held_out_scenes_combine_things_that_are_never_together_in_training():
    trained = [things_of(number, held_out=False) for number in range(0, 4000, 2)]
    held_out = [things_of(number, held_out=True) for number in range(0, 300, 2)]
    together = {frozenset(things) for things in trained}
    assert all(len(things) == 2 for things in held_out)
    assert not together & {frozenset(things) for things in held_out}
    assert {thing for things in trained for thing in things} == set(THINGS), "every thing is shown in training"
    assert len({frozenset(things) for things in held_out}) > 40


def test_every_scene_is_a_sample_with_an_image_and_a_conversation():
    for number in range(12):
        sample = scene_sample(number)
        assert Image.open(io.BytesIO(sample.members["png"])).size == (112, 84)
        [messages] = conversations(sample, TextRules())
        assert [message["role"] for message in messages[:2]] == ["user", "assistant"]


def test_no_answer_follows_from_the_question_before():
    for number in range(200):
        asked = json.loads(scene_sample(number).members.get("json", b'{"questions": []}'))["questions"]
        for one, other in pairwise(asked):
            assert not {one["answer"], *one["question"].rstrip("?").split()[-1:]} & {other["answer"]}

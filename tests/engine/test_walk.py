"""ARCHITECTURE's walk through one engine step names the files and functions that a traced step executes."""

import random
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from engine.tiny import conversation, make_core, prompt_of, request_of
from model.hugging_face import SHAPES, make_checkpoint

import saccade.engine
from saccade.engine.config import EngineConfig
from saccade.engine.core.messages import AddRequest
from saccade.engine.load_core import load_grammars
from saccade.engine.sampling_params import SamplingParams
from saccade.processor import Processor

ENGINE = Path(saccade.engine.__file__).parent
ARCHITECTURE = ENGINE.parents[1] / "ARCHITECTURE.md"


def walk() -> list[tuple[str, list[str]]]:
    """The numbered items of ARCHITECTURE's section: each begins with a file; with the functions that it names."""
    section = ARCHITECTURE.read_text().split("## One engine step")[1].split("\n## ")[0]
    items = re.findall(r"^\d+\. (.*?)(?=^\d+\. |\n\n|\Z)", section, re.M | re.S)
    found = []
    for item in items:
        file = re.match(r"`(\w+/\w+\.py)`", item)
        assert file, f"an item begins with a file: {item}"
        found.append((file[1], re.findall(r"`(\w+\.\w+|\w+)`", item)))
    return found


def functions_of(step) -> dict[str, set[str]]:
    """Names of the functions of the engine that a call executes, by file in the order of their first calls."""
    calls: dict[str, set[str]] = defaultdict(set)

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ENGINE):
            calls[str(file.relative_to(ENGINE))].add(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def decode_step(tmp_path_factory):
    """The functions of a step that decodes two requests with deadlines, in a core that also serves grammars."""
    folder = make_checkpoint(tmp_path_factory.mktemp("walk") / "checkpoint", SHAPES[0])
    processor, rng = Processor.load(folder), random.Random(0)
    core = make_core(folder, EngineConfig(max_draft_tokens=0), grammars=load_grammars(folder, processor))
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    for name in ("a", "b"):
        inputs = processor([conversation(rng, num_images=1, num_words=9)], add_generation_prompt=True)
        prompt = prompt_of(inputs, processor.rules)
        core.handle(AddRequest(request=request_of(name, prompt, sampling, timeout_s=600.0), prompt=prompt))
    while core.scheduler.num_decoding < 2:
        core.step()
    steps = [functions_of(core.step) for _ in range(8)]
    core.close()
    return min(steps, key=len)  # of 8 steps some register a full page in the prefix cache or allocate one


def test_a_decode_step_executes_the_files_of_the_walk_and_no_other(decode_step):
    assert [file for file, _ in walk()] == list(decode_step)


def test_a_decode_step_executes_at_most_ten_files(decode_step):
    assert len(decode_step) <= 10


def test_the_walk_names_functions_that_the_step_executes(decode_step):
    for file, names in walk():
        executed = decode_step[file]
        named = [name for name in names if "." in name and not name.endswith(".py")]
        assert named, f"{file}: the walk names a function"
        assert set(named) <= executed, f"{file}: {set(named) - executed} not executed"

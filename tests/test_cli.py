"""The command line as a user meets it: help, answers, and one line with exit status 2 for what is wrong."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import Ended
from PIL import Image
from safetensors.torch import save_file

import saccade
from saccade.cli import app
from saccade.config import load_config, override_config, write_config
from saccade.data.toy import write_toy_shards
from saccade.errors import DataError, UserError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.train import TrainConfig

pytestmark = pytest.mark.usefixtures("restore_the_logger")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    return folder


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("pictures") / "red.png"
    Image.new("RGB", (84, 56), "crimson").save(path)
    return path


def assert_refused(ended, *words):
    """Exit status 2, nothing on standard output, one line on standard error that holds the words."""
    assert ended.status == 2
    assert ended.out == ""
    assert ended.err.strip().startswith("saccade: ")
    assert len(ended.err.strip().splitlines()) == 1
    for word in words:
        assert word in ended.err


# ------------------------------------------------------------------ help and version

COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


@pytest.mark.parametrize("option", ["--help", "-h"])
@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_the_root_and_every_command_answer_help(command, name, option):
    ended = command(*([name] if name else []), option)
    assert ended.status == 0
    assert "Usage: " in ended.out
    assert ended.err == ""


def test_the_commands_are_those_of_the_design():
    assert {"quickstart", "init", "chat"} <= set(COMMANDS)


def test_version_is_the_packages(command):
    assert command("--version") == Ended(0, f"saccade {saccade.__version__}\n", "")


def test_no_words_at_all_show_the_help(command):
    ended = command()
    assert "Usage: " in ended.out + ended.err


def test_an_unknown_command_or_option_is_a_usage_error(command):
    assert command("nonsense").status == 2
    assert command("init", "x", "--sise", "tiny").status == 2
    assert command("chat").status == 2


def test_help_and_version_load_no_torch():
    code = (
        "import sys; sys.argv = ['saccade', '--version']\n"
        "try:\n  from saccade.cli import main; main()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------ user errors through the shell


def test_a_user_error_is_one_line_and_exit_status_2_in_the_shell(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "saccade", "chat", tmp_path / "nowhere", "hi"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("saccade: ")
    assert "nowhere" in ended.stderr
    assert "Traceback" not in ended.stderr


HEEDS_CTRL_C = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from saccade.cli.entry import run; run()"
)
"""Handles SIGINT as in a terminal; children of a test run in the background would ignore it."""


@pytest.mark.parametrize(("ending", "status"), [("ctrl-c", 130), ("closed pipe", 141)])
def test_an_interrupted_chat_ends_without_a_traceback(checkpoint, ending, status):
    command = [sys.executable, "-c", HEEDS_CTRL_C, "chat", str(checkpoint), "hello", "--max-tokens", "50000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as chat:
        assert chat.stdout.read(1)
        if ending == "ctrl-c":
            chat.send_signal(signal.SIGINT)
            chat.stdout.read()
        else:
            chat.stdout.close()
        assert chat.stderr.read() == b""
    assert chat.returncode == status


TINY_RECIPE = """
run = "run"
model = { folder = "tiny", dtype = "fp32" }

[[stages]]
name = "learn"
epochs = 1
data = { sources = [{ path = "shards" }], max_seq_len = 256, num_workers = 0 }
"""


@pytest.fixture
def training(checkpoint, tmp_path, monkeypatch):
    """A folder with a recipe of one epoch, its checkpoint and shards."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(checkpoint)
    write_toy_shards(tmp_path / "shards", first=0, count=8)
    (tmp_path / "recipe.toml").write_text(TINY_RECIPE)
    return tmp_path


def test_training_that_ctrl_c_stops_is_saved_and_exits_130(training):
    command = [
        sys.executable,
        "-c",
        HEEDS_CTRL_C,
        "train",
        "recipe.toml",
        "--device",
        "cpu",
        "--set",
        "stages.learn.steps=100000",
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        lines = []
        for line in run.stderr:
            lines.append(line)
            if re.search(r"step +0*1/100000", line):
                run.send_signal(signal.SIGINT)
    assert run.returncode == 130, "".join(lines)
    assert "Traceback" not in "".join(lines)
    assert lines[-1] == "stopped\n"
    assert list((training / "run" / "state").iterdir())


def test_a_length_given_on_the_command_line_replaces_that_of_the_recipe(training, command):
    for key, value in (("steps", 4), ("tokens", 4000), ("epochs", 2)):
        ended = command("train", "recipe.toml", "--check", "--device", "cpu", "--set", f"stages.learn.{key}={value}")
        assert ended.status == 0, ended.err


def test_the_name_of_a_packaged_recipe_that_is_no_file_leads_to_recipes_copy(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny.toml", "recipes/tiny.toml", "qwen2.5-vl-3b-lora"):
        ended = command("train", name)
        assert ended.status == 2
        expected = "tiny" if "tiny" in name else name
        assert ended.err.endswith(f"saccade recipes copy {expected}\n")
    assert "saccade recipes list" in command("train", "mine.toml").err


STOPS_AT = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
import_module = builtins.__import__

def interrupt_at(name, *rest, **named):
    if name == {module!r} and name not in sys.modules:
        os.kill(os.getpid(), signal.SIGINT)
    return import_module(name, *rest, **named)

builtins.__import__ = interrupt_at
from saccade.cli.entry import run
run()
"""


@pytest.mark.parametrize("module", ["typer", "saccade.serve", "saccade.serve.supervisor"])
def test_ctrl_c_while_a_server_starts_ends_it_without_a_traceback(module, checkpoint):
    """Ctrl-C comes at the import of a module: of the command line, of the server, of what the server needs."""
    command = [sys.executable, "-c", STOPS_AT.format(module=module), "serve", str(checkpoint), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_ctrl_c_while_a_server_loads_the_model_ends_it_without_a_traceback(checkpoint):
    command = [sys.executable, "-c", HEEDS_CTRL_C, "serve", str(checkpoint), "--port", "0", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert "loading" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        log = server.stderr.read()
    assert "Traceback" not in log
    assert server.returncode == 130, log


def test_a_malformed_rank_is_a_user_error_in_the_shell(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "saccade", "init", "x"],
        env={"RANK": "first"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert (
        ended.stderr
        == "saccade: environment variable RANK is 'first', not a number. Start through torchrun, or unset it\n"
    )


# ------------------------------------------------------------------ init


def test_init_makes_a_checkpoint_that_answers(command, tmp_path):
    ended = command("init", tmp_path / "new", "--size", "tiny")
    assert ended.status == 0
    assert ended.out.startswith(f"{tmp_path / 'new'}: qwen2_5_vl, ")
    assert len(ended.out.splitlines()) == 1
    assert command("chat", tmp_path / "new", "hi", "--max-tokens", 1, "--device", "cpu").status == 0


def test_init_as_json(command, tmp_path):
    ended = command("init", tmp_path / "new", "--size", "tiny", "--dtype", "fp32", "--json")
    weights = (tmp_path / "new" / "model.safetensors").stat().st_size
    assert json.loads(ended.out) == {"checkpoint": str(tmp_path / "new"), "family": "qwen2_5_vl", "bytes": weights}


def test_progress_is_silent_without_a_terminal(command, tmp_path):
    assert command("init", tmp_path / "new", "--size", "tiny").err == ""


def test_init_from_custom_sizes(command, tmp_path):
    chosen = override_config(named_size("tiny"), ["language.num_layers=1"], "tiny")
    write_config(chosen, tmp_path / "mine.toml")
    assert command("init", tmp_path / "a", "--config", tmp_path / "mine.toml").status == 0
    assert load_model(tmp_path / "a", device="cpu").config == chosen
    assert command("init", tmp_path / "b", "--config", tmp_path / "mine.toml", "--set", "tied_head=false").status == 0
    assert load_model(tmp_path / "b", device="cpu").config == override_config(chosen, ["tied_head=false"], "mine")


def test_init_takes_another_checkpoints_tokenizer(command, tmp_path, checkpoint):
    assert command("init", tmp_path / "new", "--size", "tiny", "--tokenizer", checkpoint).status == 0
    assert json.loads((tmp_path / "new" / "tokenizer.json").read_text()) == json.loads(
        (checkpoint / "tokenizer.json").read_text()
    )


def test_the_seed_decides_the_weights(command, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert command("init", tmp_path / name, "--size", "tiny", "--seed", seed).status == 0
    first, same, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert first == same != other


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["exactly one of --size, --config and --text"]),
        (["--size", "tiny", "--text", "x"], ["exactly one of --size, --config and --text"]),
        (["--size", "tiny", "--config", "x"], ["exactly one of --size, --config and --text"]),
        (["--config", "x", "--text", "x"], ["exactly one of --size, --config and --text"]),
        (["--size", "tiny", "--config", "x", "--text", "x"], ["exactly one of --size, --config and --text"]),
        (["--text", "x", "--set", "a=1"], ["--set and --tokenizer go with --size or --config"]),
        (["--text", "x", "--tokenizer", "y"], ["--set and --tokenizer go with --size or --config"]),
        (["--size", "huge"], ["unknown size 'huge'. Sizes: tiny, 3b, 7b, 32b, 72b"]),
        (["--text", "x", "--tower", "huge"], ["unknown vision tower 'huge'. Towers: tiny, 22m, 90m, 670m"]),
        (["--text", "nowhere"], ["nowhere: no such folder"]),
        (["--text", "nowhere.gguf"], ["nowhere.gguf"]),
        (["--config", "nowhere.toml"], ["nowhere.toml: no such file"]),
        (["--config", "."], ["."]),
        (["--size", ""], ["size"]),
        (
            ["--size", "tiny", "--set", "languge.num_layers=1"],
            ["size tiny: unknown key languge. Did you mean language?"],
        ),
        (
            ["--size", "tiny", "--set", "language.num_layer=1"],
            ["unknown key language.num_layer. Did you mean num_layers?"],
        ),
        (
            ["--size", "tiny", "--set", "language.num_layers=x"],
            ["language.num_layers = 'x' has type str, expected int"],
        ),
        (["--size", "tiny", "--set", "language"], ["write it as section.key=value"]),
        (["--size", "tiny", "--set", "language.vocab_size=100"], ["263 tokens", "Raise language.vocab_size"]),
        (["--size", "tiny", "--set", "language.num_kv_heads=3"], ["language: 4 heads cannot share 3 key/value heads"]),
        (["--size", "tiny", "--tokenizer", "nowhere"], ["nowhere", "tokenizer.json"]),
        (["--size", "tiny", "--tower", "tiny"], ["--tower"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_init_refuses_what_it_cannot_do_and_makes_nothing(command, tmp_path, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    assert_refused(command("init", "new", *options), *words)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override",
    [
        "language.num_heads=0",
        "language.num_kv_heads=0",
        "language.num_layers=-1",
        "language.intermediate_size=-3",
        "vision.num_heads=0",
        "vision.patch_size=0",
        "vision.merge_size=0",
        "vision.intermediate_size=0",
        "vision.temporal_patch_size=0",
        "vision.in_channels=4",
    ],
)
def test_init_refuses_impossible_sizes(command, tmp_path, override):
    assert_refused(
        command("init", tmp_path / "new", "--size", "tiny", "--set", override), override.split("=")[0].split(".")[0]
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "override",
    [
        "language.rope_theta=5e5",
        "language.norm_eps=1e-5",
        "language.max_positions=100",
        "vision.window_size=56",
        "vision.tokens_per_second=3",
        "vision.full_attention_layers=[0]",
        "vision.norm_eps=0.5",
        "family=llama",
    ],
)
def test_a_checkpoint_says_what_init_was_asked_for_or_init_refuses(command, tmp_path, override):
    ended = command("init", tmp_path / "new", "--size", "tiny", "--set", override)
    if ended.status == 2:
        return
    assert load_model(tmp_path / "new", device="cpu").config == override_config(named_size("tiny"), [override], "tiny")


def test_init_leaves_a_folder_that_holds_something_untouched(command, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("chapter 1")
    assert_refused(command("init", tmp_path / "mine", "--size", "tiny"), "not empty. Choose another folder")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "chapter 1"


def test_init_onto_a_file_is_refused(command, tmp_path):
    (tmp_path / "file").write_text("x")
    assert_refused(command("init", tmp_path / "file", "--size", "tiny"), "file")
    assert_refused(command("init", tmp_path / "file" / "below", "--size", "tiny"), "below")
    assert (tmp_path / "file").read_text() == "x"


def test_init_fills_an_empty_folder(command, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert command("init", tmp_path / "empty", "--size", "tiny").status == 0
    assert (tmp_path / "empty" / "config.json").is_file()


def test_init_fills_the_current_empty_folder(command, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert command("init", ".", "--size", "tiny").status == 0
    assert (tmp_path / "here" / "config.json").is_file()


def test_init_through_a_link_to_an_empty_folder_works_or_is_refused(command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    ended = command("init", tmp_path / "link", "--size", "tiny")
    if ended.status == 0:
        assert (tmp_path / "link" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "link"]


@pytest.mark.parametrize("failure", [RuntimeError("the disk is on fire"), KeyboardInterrupt()], ids=repr)
def test_a_crashed_init_leaves_no_partial_folder_behind(tmp_path, failure):
    names = []

    def crash(name):
        names.append(name)
        if len(names) == 5:
            raise failure

    with pytest.raises(type(failure)):
        initialize_random(tmp_path / "new", named_size("tiny"), on_tensor=crash, max_shard_bytes=1000)
    assert len(names) == 5
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ chat


def test_chat_prints_the_answer(command, checkpoint):
    ended = command("chat", checkpoint, "hi", "--max-tokens", 5, "--device", "cpu")
    assert ended.status == 0
    assert ended.out.endswith("\n")
    assert ended.err == ""


def test_chat_as_json_has_the_same_text(command, checkpoint, picture):
    words = ["chat", checkpoint, picture, picture, "what?", "--max-tokens", 12, "--device", "cpu", "--temperature", 1]
    shown, told = command(*words), command(*words, "--json")
    answer = json.loads(told.out)
    assert answer.keys() == {"text", "prompt_tokens", "tokens", "finish_reason"}
    assert answer["tokens"] == 12
    assert answer["finish_reason"] == "length"
    assert shown.out == answer["text"] + "\n"


def test_chat_samples_a_video_file(command, checkpoint, tmp_path):
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "clip.mp4"), "w") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 56, 56, "yuv420p"
        for level in range(0, 200, 10):
            frame = av.VideoFrame.from_image(Image.new("RGB", (56, 56), (level, 0, 0)))
            out.mux(stream.encode(frame))
        out.mux(stream.encode())
    asked = [
        command("chat", checkpoint, tmp_path / "clip.mp4", "what?", "--max-tokens", 2, "--json", "--fps", fps)
        for fps in (2, 10)
    ]
    few, many = (json.loads(ended.out)["prompt_tokens"] for ended in asked)
    assert many - few == (20 - 4) // 2 * 4, "a frame pair of 56 x 56 pixels is four tokens"
    assert_refused(command("chat", checkpoint, tmp_path / "clip.mp4", "what?", "--fps", 1e-9), "fps is 1e-09")


def test_an_image_and_a_system_message_make_the_prompt_longer(command, checkpoint, picture):
    def prompt_tokens(*words):
        return json.loads(command("chat", checkpoint, *words, "--json", "--max-tokens", 1, "--device", "cpu").out)[
            "prompt_tokens"
        ]

    plain = prompt_tokens("hi")
    assert prompt_tokens(picture, "hi") == plain + 3 * 2 + 2
    assert prompt_tokens("hi", "--system", "") == plain - len("You are a helpful assistant.")


def test_chat_says_when_the_model_stopped_by_itself(command, checkpoint, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(320))}))
    answer = json.loads(command("chat", folder, "hi", "--json", "--device", "cpu").out)
    assert answer["tokens"] == 1
    assert answer["finish_reason"] == "stop"


def test_the_same_seed_gives_the_same_answer(command, checkpoint):
    def answer(seed):
        return command(
            "chat", checkpoint, "hi", "--temperature", 2, "--max-tokens", 8, "--seed", seed, "--device", "cpu"
        ).out

    assert answer(1) == answer(1) != answer(2)


def test_a_long_question_is_a_question(command, checkpoint):
    assert command("chat", checkpoint, "why? " * 100, "--max-tokens", 1, "--device", "cpu").status == 0


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nope.png", "hi"], "image 1: nope.png: No such file"),
        (["http://example.org/a.png", "hi"], "image 1: remote images are not fetched"),
        (["hi", "--device", "nonsense"], "unknown device 'nonsense'. Use cpu, cuda, cuda:1 or auto"),
        (["hi", "--device", "meta"], "device 'meta'"),
        (["hi", "--temperature", "-1"], "temperature is -1.0"),
        (["hi", "--top-k", "0"], "top_k is 0"),
        (["hi", "--top-p", "1.5"], "top_p is 1.5"),
        (["hi", "--temperature", "1", "--seed", "99999999999999999999999"], "seed"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_chat_refuses_what_it_cannot_do(command, checkpoint, tmp_path, monkeypatch, words, expected):
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in words else ["--device", "cpu"]
    assert_refused(command("chat", checkpoint, *words, *device, "--max-tokens", 1), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_chat_refuses_a_gpu_that_is_not_there(command, checkpoint):
    assert_refused(command("chat", checkpoint, "hi", "--device", "cuda"), "sees no GPU. Use --device cpu")


@pytest.mark.parametrize("words", [["hi", "--max-tokens", "0"], ["hi", "--dtype", "int3"]])
def test_chat_refuses_options_out_of_range(command, checkpoint, words):
    ended = command("chat", checkpoint, *words)
    assert ended.status == 2
    assert "Usage: " in ended.err


def test_chat_with_a_folder_that_is_no_checkpoint(command, tmp_path):
    assert_refused(command("chat", tmp_path / "nowhere", "hi"), "nowhere: no such folder")
    assert_refused(command("chat", tmp_path, "hi"), "config.json", "checkpoint folder")


def test_chat_asks_for_a_question_behind_the_image(command, checkpoint, picture):
    assert_refused(command("chat", checkpoint, picture), "question", str(picture))


# ------------------------------------------------------------------ chat, line by line


@pytest.fixture
def converse(command, monkeypatch):
    """Run `saccade chat --json` with lines on standard input; the answers as records, and standard error."""

    def run(checkpoint, *lines, words=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        ended = command("chat", checkpoint, "--json", "--max-tokens", 4, "--device", "cpu", *words)
        assert ended.status == 0, ended.err
        return [json.loads(line) for line in ended.out.splitlines()], ended.err

    return run


def test_without_a_question_chat_answers_line_by_line_and_remembers(converse, checkpoint):
    (first, second, again), err = converse(checkpoint, "hi", "", "and you?", "/new", "hi", "/exit", "never asked")
    assert err == ""
    assert second["prompt_tokens"] > first["prompt_tokens"] + first["tokens"], "the history is part of the prompt"
    assert again == first, "/new forgets it"


def test_a_conversation_has_the_answers_of_the_same_messages(converse, checkpoint):
    from saccade.engine import Engine, SamplingParams

    (first, second), _ = converse(checkpoint, "hi", "and you?", words=("--system", "Be kind."))
    messages = [("system", "Be kind."), ("user", "hi"), ("assistant", first["text"]), ("user", "and you?")]
    with Engine.load(checkpoint, device="cpu") as engine:
        [completion] = engine.generate(
            [{"role": role, "content": text} for role, text in messages], SamplingParams(max_tokens=4)
        )
    assert second["text"] == completion.text


def test_images_are_added_by_a_command_or_a_path_in_the_line(converse, checkpoint, picture, tmp_path):
    spaced = tmp_path / "my picture.png"
    shutil.copy(picture, spaced)
    image_tokens = 3 * 2 + 2
    for lines in (
        [f"/image {picture}", "hi"],
        [f"{picture}", "hi"],
        [f"{picture} hi"],
        [f"/image '{spaced}'", "hi"],
        [f'"{spaced}" hi'],
        [str(spaced).replace(" ", "\\ ") + " hi"],
    ):
        ([plain], _), ([seen], _) = converse(checkpoint, "hi"), converse(checkpoint, *lines)
        assert seen["prompt_tokens"] == plain["prompt_tokens"] + image_tokens, lines
    [compared], _ = converse(checkpoint, f"is {picture}, it's {picture}?")
    [text], _ = converse(checkpoint, "is, it's?")
    assert compared["prompt_tokens"] == text["prompt_tokens"] + 2 * image_tokens


def test_a_line_that_is_refused_does_not_end_the_conversation(converse, checkpoint, tmp_path):
    (tmp_path / "empty.png").touch()
    ([answer], err), ([plain], _) = (
        converse(checkpoint, "/image nope.png", f"{tmp_path / 'empty.png'} what?", "/nonsense", "hi"),
        converse(checkpoint, "hi"),
    )
    assert answer == plain, "refused questions are not part of the conversation"
    assert "nope.png: no such file" in err
    assert "image 1" in err
    assert "/new" in err, "an unknown command shows the commands"


def test_chat_answers_with_an_adapter(command, converse, checkpoint, tmp_path):
    write_adapter(checkpoint, tmp_path / "a=b")
    [plain], _ = converse(checkpoint, "hi")
    named, unnamed = (
        converse(checkpoint, "hi", words=("--adapter", given))[0]
        for given in (f"odd={tmp_path / 'a=b'}", tmp_path / "a=b")
    )
    assert named == unnamed != [plain]
    once = command(
        "chat", checkpoint, "hi", "--json", "--max-tokens", 4, "--device", "cpu", "--adapter", tmp_path / "a=b"
    )
    assert [json.loads(once.out)] == named
    assert_refused(command("chat", checkpoint, "hi", "--adapter", tmp_path), "no adapter_config.json")
    config = tmp_path / "a=b" / "adapter_config.json"
    config.write_text(config.read_text().replace('"LORA"', '"IA3"'))
    refused = command("chat", checkpoint, "hi", "--device", "cpu", "--adapter", tmp_path / "a=b")
    assert refused.status == 2
    assert "peft_type is 'IA3'" in refused.err


def test_ctrl_c_stops_an_answer_and_twice_ends_the_conversation(checkpoint):
    command = [sys.executable, "-c", HEEDS_CTRL_C, "chat", str(checkpoint), "--max-tokens", "50000", "--device", "cpu"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0) as chat:
        for _ in range(2):
            chat.stdin.write(b"hello\n")
            assert chat.stdout.read(1), "an answer has started"
            chat.send_signal(signal.SIGINT)
            assert [chat.stderr.readline() for _ in range(2)] == [b"\n", b"(Ctrl-C again or /exit ends)\n"]
            os.set_blocking(chat.stdout.fileno(), False)
            while chat.stdout.read(65536):
                pass  # the rest of the stopped answer
            os.set_blocking(chat.stdout.fileno(), True)
        chat.send_signal(signal.SIGINT)
        assert chat.stdout.read() == b""
        assert chat.stderr.read() == b""
    assert chat.returncode == 130


def write_adapter(checkpoint, folder):
    """An adapter of one projection, in PEFT's layout, large enough to change the answer."""
    model = load_model(checkpoint, device="cpu")
    outputs, inputs = model.language.layers[0].self_attn.o_proj.stored_shape
    torch.manual_seed(0)
    prefix = "base_model.model.model.language_model.layers.0.self_attn.o_proj"
    folder.mkdir()
    save_file(
        {f"{prefix}.lora_A.weight": torch.randn(4, inputs), f"{prefix}.lora_B.weight": torch.randn(outputs, 4)},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": str(checkpoint)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


# ------------------------------------------------------------------ plan


@pytest.fixture
def tiny_recipe(checkpoint, tmp_path):
    path = tmp_path / "recipe.toml"
    overrides = [f"run={tmp_path / 'run'}", f"model.folder={checkpoint}", "stages.learn.steps=100"]
    write_config(load_config(TrainConfig, Path(__file__).parents[1] / "recipes" / "tiny.toml", overrides), path)
    return path


def test_a_recipe_is_planned_with_its_own_settings_or_those_of_set(command, tiny_recipe):
    def plan_of(*words):
        ended = command("plan", tiny_recipe, "--json", *words)
        assert ended.status == 0, ended.err
        return json.loads(ended.out)["stage learn"]["plan"]["total_gib"]

    assert plan_of("--set", "stages.learn.data.max_seq_len=65536") > plan_of() + 0.1


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("--tokens", "4096", "stages.NAME.data.max_seq_len=4096"),
        ("--patches", "0", "stages.NAME.data.max_patches=0"),
        ("--recompute-vision", "full", "parallel.recompute_vision=full"),
        ("--recompute-language", "none", "parallel.recompute_language=none"),
    ],
)
def test_flags_that_a_recipe_answers_itself_are_refused_with_it(command, tiny_recipe, flag, value, key):
    assert_refused(command("plan", tiny_recipe, flag, value), flag, f"--set {key}")


def test_set_without_a_recipe_is_refused_by_plan(command):
    assert_refused(command("plan", "3b", "--set", "parallel.recompute_vision=full"), "--set applies to a recipe")


SIZES = ("--parameters", "13e9", "--layers", "40", "--heads", "40", "--head-dim", "128")


def test_serving_is_planned_from_sizes_a_folder_or_a_name(command, checkpoint):
    words = ("--text-tokens", "512", "--image-tokens", "576", "--concurrency", "8", "--json")
    ended = command("plan", *SIZES, *words, "--gpu", "A100-40GB")
    assert ended.status == 0, ended.err
    record = json.loads(ended.out)
    assert record["kv_bytes"] == 2 * 40 * 40 * 128 * 1088 * 8 * 2
    assert record["chosen"] == {"scheme": "bf16", "kv_format": "model"}
    for model in (checkpoint, "tiny"):
        ended = command("plan", model, "--serve", "--image-size", "56x56", "--gpus", "2", "--gpu", "24", "--json")
        assert ended.status == 0, ended.err
        assert json.loads(ended.out)["load"]["image_tokens"] == 4
    ended = command("plan", "tiny", "--requests-per-second", "5", "--image-size", "672x672")
    assert "choose bf16 weights and a bf16 KV cache" in ended.out
    assert "requests in progress" in ended.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("3b", "--serve", "--tokens", "4096"), "--tokens is for training"),
        (("3b", *SIZES), "both a model (3b) and sizes"),
        (SIZES[:4], "Add --heads and --head-dim"),
        ((*SIZES, "--image-size", "56x56"), "Use --image-tokens"),
        (("3b", "--image-size", "big"), "write WIDTHxHEIGHT"),
        (("3b", "--image-size", "56x56", "--image-tokens", "4"), "Give one of them"),
        (("--serve",), "Give one"),
        ((), "no model"),
        (("checkpoints/nowhere",), "checkpoints/nowhere: neither a checkpoint folder"),
        (("checkpoints/nowhere", "--serve"), "checkpoints/nowhere: neither a checkpoint folder"),
    ],
)
def test_plans_that_are_not_clear_are_refused(command, words, message):
    assert_refused(command("plan", *words), message)


def test_plan_names_the_checkpoint_folder_that_a_recipe_lacks(command, tiny_recipe, tmp_path):
    ended = command("plan", tiny_recipe, "--set", f"model.folder={tmp_path / 'nowhere'}")
    assert_refused(ended, "nowhere: no such folder")


@pytest.mark.slow
def test_a_recipe_is_planned_before_its_published_checkpoint_is_downloaded(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = Path(__file__).parents[1] / "recipes" / "qwen2.5-vl-3b-lora.toml"
    folder, small = (
        "checkpoints/Qwen2.5-VL-3B-Instruct",
        ("--set", "stages.0.data.max_seq_len=256", "--set", "stages.0.data.max_patches=64"),
    )
    ended = command("plan", recipe, "--json", *small)
    assert ended.status == 0, ended.err
    [planned] = json.loads(ended.out).values()
    assert 7 < planned["plan"]["parts_gib"]["parameters"] < 8, "3.75 billion weights in bf16"
    download = f"hf download Qwen/Qwen2.5-VL-3B-Instruct --local-dir {folder}"
    assert ended.err == f"{folder} is not here: planned with its published sizes. Download it: {download}\n"
    assert_refused(
        command("train", recipe, "--check", "--device", "cpu"), f"{folder}: no such folder. Download it: {download}"
    )
    ended = command("plan", "Qwen/Qwen2.5-VL-3B-Instruct", "--tokens", 256, "--patches", 64, "--json")
    assert ended.status == 0, ended.err


def test_every_published_checkpoint_has_a_named_size():
    from saccade.model.families import VISION_LANGUAGE, published_as

    for family in VISION_LANGUAGE.values():
        assert set(family.published.values()) == set(family.sizes) - {"tiny"}
        for hub_name in family.published:
            known = published_as(f"somewhere/{hub_name.partition('/')[2]}")
            assert known[0] == hub_name
            assert named_size(known[1]).family == family.model_type


# ------------------------------------------------------------------ recipes


def test_recipes_are_listed_and_copied(command, tmp_path):
    listed = json.loads(command("recipes", "list", "--json").out)
    assert {"tiny.toml", "smollm2-vlm.toml"} <= listed.keys()
    assert all(name in command("recipes", "list").out for name in listed)
    assert command("recipes", "copy", "tiny", tmp_path).status == 0
    assert command("recipes", "copy", "tiny.toml", tmp_path / "mine.toml").status == 0
    assert command("recipes", "copy", "tiny", tmp_path / "new").status == 0
    original = (Path(__file__).parents[1] / "recipes" / "tiny.toml").read_text()
    assert (tmp_path / "new" / "tiny.toml").read_text() == original
    assert (tmp_path / "tiny.toml").read_text() == (tmp_path / "mine.toml").read_text() == original


def test_the_next_command_can_be_pasted_into_a_shell(command, tmp_path):
    copied = command("recipes", "copy", "tiny", tmp_path / "my recipe.toml").out
    assert shlex.split(copied.partition("next: ")[2]) == ["saccade", "train", str(tmp_path / "my recipe.toml")]
    copied = command("recipes", "copy", "slurm", tmp_path).out
    assert shlex.split(copied.partition("next: ")[2]) == ["sbatch", str(tmp_path / "slurm.sh"), "RECIPE"]


def test_recipes_copy_refuses_an_unknown_name_and_an_existing_file(command, tmp_path):
    assert_refused(command("recipes", "copy", "huge", tmp_path), "no recipe 'huge'", "tiny.toml")
    (tmp_path / "tiny.toml").write_text("mine")
    assert_refused(command("recipes", "copy", "tiny", tmp_path), "exists", "saccade recipes copy tiny FILE")
    assert (tmp_path / "tiny.toml").read_text() == "mine"
    assert_refused(command("recipes", "copy", "tiny", tmp_path / "no" / "folder.toml"), "No such file")


def test_toy_shards_are_not_added_to_a_folder_that_has_some(tmp_path):
    write_toy_shards(tmp_path, first=0, count=2)
    with pytest.raises(DataError, match="contains shards already"):
        write_toy_shards(tmp_path, first=0, count=2)
    assert [path.name for path in tmp_path.glob("*.tar")] == ["00000.tar"]


def test_every_user_error_is_caught_by_main():
    from saccade import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 6
    assert all(issubclass(kind, UserError) for kind in kinds)
    assert issubclass(errors.ImageError, errors.RequestError)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--size", "9b"], "unknown size '9b'"),
        (["--size", "tiny", "--workload", "foo"], "--workload foo: no such workload"),
        (["--size", "tiny", "--open-loop", "0"], "positive number of requests per second"),
        (["--size", "tiny", "--trace", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--checkpoint", "nowhere"], "nowhere: no such folder"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_bench_serve_checks_its_options_first(command, options, said):
    assert_refused(command("bench", "serve", *options), said)


# ------------------------------------------------------------------ models


def test_models_lists_families_and_sizes_that_init_takes(command, tmp_path):
    ended = command("models")
    assert ended.status == 0
    assert "Qwen3-VL (model_type qwen3_vl)" in ended.out
    assert "3b (3.8B)" in ended.out
    described = json.loads(command("models", "--json").out)
    families = ["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "llava_next", "llava_onevision"]
    assert [one["family"] for one in described["families"]] == families
    size = next(iter(described["families"][2]["sizes"]))
    assert command("init", tmp_path / "new", "--size", size).out.startswith(f"{tmp_path / 'new'}: qwen3_vl, ")
    ended = command("init", tmp_path / "odd", "--size", size, "--set", "language.qkv_bias=true")
    assert ended.status == 2
    assert "family qwen3_vl has no language.qkv_bias = True" in ended.err


# ------------------------------------------------------------------ adapters


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "{tiny}", "--adapter", "mine={run}"),
        ("evaluate", "{tiny}", "--tasks", "vqa", "--data", "x", "-o", "out", "--adapter", "{run}"),
    ],
)
def test_a_run_folder_given_as_an_adapter_is_answered_with_the_path_of_its_adapter(
    words, checkpoint, tmp_path, command
):
    for step in ("step-00000002", "step-00000010"):
        adapter = tmp_path / "run" / "checkpoints" / step / "adapter"
        adapter.mkdir(parents=True)
        (adapter / "adapter_config.json").write_text("{}")
    for folder in (tmp_path / "run", adapter.parents[1], adapter.parent):
        ended = command(*(word.format(tiny=checkpoint, run=folder) for word in words))
        assert ended.status == 2
        assert "--adapter" in ended.err
        assert ended.err.endswith(f"The adapter is {adapter}\n")
    assert "no such folder" in command(*(word.format(tiny=checkpoint, run=tmp_path / "nowhere") for word in words)).err


# ------------------------------------------------------------------ help


def test_help_cuts_no_word_at_80_columns_and_the_main_commands_have_examples(command, monkeypatch):
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", "80")
    words = [[]]
    for name, one in get_command(app).commands.items():
        words += [[name], *([name, inner] for inner in getattr(one, "commands", {}))]
    for each in words:
        shown = command(*each, "--help").out
        assert "\u2026" not in shown
        assert not re.search(r"\w\.\.\.$", shown, re.M), shown
        assert max(map(len, shown.partition("Examples:")[0].splitlines())) <= 80, "examples are lines to copy"
    for each in (["train"], ["serve"], ["chat"], ["evaluate"], ["init"], ["data", "prepare"], ["data", "split"]):
        assert "Examples:\n    saccade" in command(*each, "--help").out

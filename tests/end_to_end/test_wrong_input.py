"""What a user sees after a mistake: one line that says what happened and what to do, exit status 2, no traceback."""

import json
import logging
import struct
import sys
import zlib

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from saccade.cli import main
from saccade.errors import UserError
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "checkpoint"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32, max_shard_bytes=500_000)
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path):
    """A checkpoint to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture
def show(capsys):
    """Print the message in the test log, and check its form."""

    def show(message: str, *expected: str) -> None:
        with capsys.disabled():
            print(f"\n  {message}")
        assert "\n" not in message.strip()
        assert "Traceback" not in message
        for part in expected:
            assert part in message

    return show


@pytest.fixture
def saccade(monkeypatch, capsys):
    """Run a command that must fail, through its real entry in this process: its one line on standard error."""
    logger = logging.getLogger("saccade")
    before = logger.handlers[:], logger.propagate, logger.level

    def run(*arguments) -> str:
        monkeypatch.setattr(sys, "argv", ["saccade", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert ended.value.code == 2, err
        assert out == ""
        return err.strip()

    yield run
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


def test_a_truncated_jpeg(checkpoint, tmp_path, saccade, show):
    Image.effect_noise((300, 200), 80).convert("RGB").save(tmp_path / "photo.jpg")
    (tmp_path / "photo.jpg").write_bytes((tmp_path / "photo.jpg").read_bytes()[:9000])
    show(
        saccade("chat", checkpoint, tmp_path / "photo.jpg", "What?"),
        "image 1",
        "300x200",
        "truncated or corrupt",
        "Send the whole file",
    )


def test_a_png_header_of_60000_by_60000(checkpoint, tmp_path, saccade, show):
    (tmp_path / "bomb.png").write_bytes(png_header(60000, 60000))
    show(saccade("chat", checkpoint, tmp_path / "bomb.png", "What?"), "60000x60000", "16384", "Shrink it first")


def test_a_zero_byte_file(checkpoint, tmp_path, saccade, show):
    (tmp_path / "empty.jpg").touch()
    show(saccade("chat", checkpoint, tmp_path / "empty.jpg", "What?"), "image 1", "zero bytes")


def test_outputs_below_a_file(checkpoint, tmp_path, saccade, show):
    file = tmp_path / "a file"
    file.touch()
    show(saccade("keys", "create", file / "keys.json", "--name", "alice"), str(file), "choose another path")
    show(saccade("compress", checkpoint, "--scheme", "int8", "-o", file / "out"), str(file), "choose another path")


def test_an_image_placeholder_without_an_image(checkpoint, show):
    with pytest.raises(UserError) as caught:
        Processor.load(checkpoint)(
            [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]]
        )
    show(str(caught.value), "messages[0].content[0]", "placeholder without an image")


def test_an_image_without_a_placeholder(copy, tmp_path, saccade, show):
    (copy / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    Image.new("RGB", (60, 60)).save(tmp_path / "black.png")
    show(saccade("chat", copy, tmp_path / "black.png", "What?"), "an image without a placeholder", "template")


def test_an_unknown_model_type(copy, saccade, show):
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"model_type": "florence2"}))
    show(saccade("chat", copy, "What?"), str(copy), "model_type 'florence2' is not supported", "qwen2_5_vl")


@pytest.mark.parametrize("model_type", ["llava", "mllama", "llama"])
def test_a_model_of_another_kind_is_called_what_it_is(tmp_path, saccade, show, model_type):
    """A published folder has another preprocessor, other token ids, and no file that is read before `model_type`."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "image_token_index": 32000}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": 336}, "resample": 2}))
    reason = "saccade init OUT --text" if model_type == "llama" else "not supported. Supported: qwen2_5_vl"
    show(saccade("chat", tmp_path, "What?"), str(tmp_path), model_type, reason)


def test_weights_with_nan_or_infinity(copy, saccade, show):
    file = next(copy.glob("model-00002-*.safetensors"))
    tensors = load_file(file)
    first, second = list(tensors)[:2]
    tensors[first].view(-1)[-1] = float("nan")
    tensors[second].view(-1)[0] = float("-inf")
    save_file(tensors, file, metadata={"format": "pt"})
    show(saccade("chat", copy, "What?"), str(copy), "NaN or infinity in", first, second, "earlier checkpoint")


def test_a_missing_shard_file(copy, saccade, show):
    lost = sorted(copy.glob("model-*.safetensors"))[0]
    lost.unlink()
    show(saccade("chat", copy, "What?"), lost.name, "missing")


def test_a_toml_key_with_a_typo(tmp_path, saccade, show):
    (tmp_path / "sizes.toml").write_text(
        "tied_head = true\nfamily = 'qwen2_5_vl'\n[vision]\nnum_layers = 2\nhiden_size = 64\n[language]\n"
    )
    show(
        saccade("init", tmp_path / "out", "--config", tmp_path / "sizes.toml"),
        "unknown key vision.hiden_size",
        "Did you mean hidden_size?",
    )


def test_a_checkpoint_that_is_not_there(tmp_path, saccade, show):
    show(saccade("chat", tmp_path / "nowhere", "What?"), "nowhere: no such folder", "saccade init")
    (tmp_path / "empty").mkdir()
    show(saccade("chat", tmp_path / "empty", "What?"), "empty: no config.json")


def test_the_name_of_a_model_on_the_hub(saccade, show):
    name = "Qwen/Qwen2.5-VL-3B-Instruct"
    show(saccade("chat", name, "What?"), name, f"hf download {name} --local-dir Qwen2.5-VL-3B-Instruct")

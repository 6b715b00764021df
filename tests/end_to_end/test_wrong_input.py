"""What a user sees after a mistake: one line that says what happened and what to do, exit status 2, no traceback."""

import json
import struct
import subprocess
import sys
import zlib

import pytest
import torch
from PIL import Image

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


def saccade(*arguments) -> str:
    """The one line on standard error of a command that must fail."""
    command = [sys.executable, "-m", "saccade", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    return run.stderr.strip()


def png_header(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))


def test_a_truncated_jpeg(checkpoint, tmp_path, show):
    Image.effect_noise((300, 200), 80).convert("RGB").save(tmp_path / "photo.jpg")
    (tmp_path / "photo.jpg").write_bytes((tmp_path / "photo.jpg").read_bytes()[:9000])
    show(
        saccade("chat", checkpoint, tmp_path / "photo.jpg", "What?"),
        "image 1",
        "300x200",
        "truncated or corrupt",
        "Send the whole file",
    )


def test_a_png_header_of_60000_by_60000(checkpoint, tmp_path, show):
    (tmp_path / "bomb.png").write_bytes(png_header(60000, 60000))
    show(saccade("chat", checkpoint, tmp_path / "bomb.png", "What?"), "60000x60000", "16384", "Shrink it first")


def test_a_zero_byte_file(checkpoint, tmp_path, show):
    (tmp_path / "empty.jpg").touch()
    show(saccade("chat", checkpoint, tmp_path / "empty.jpg", "What?"), "image 1", "zero bytes")


def test_an_image_placeholder_without_an_image(checkpoint, show):
    with pytest.raises(UserError) as caught:
        Processor.load(checkpoint)(
            [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]]
        )
    show(str(caught.value), "messages[0].content[0]", "placeholder without an image")


def test_an_image_without_a_placeholder(copy, tmp_path, show):
    (copy / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    Image.new("RGB", (60, 60)).save(tmp_path / "black.png")
    show(saccade("chat", copy, tmp_path / "black.png", "What?"), "an image without a placeholder", "template")


def test_an_unknown_model_type(copy, show):
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(raw | {"model_type": "florence2"}))
    show(saccade("chat", copy, "What?"), "unknown model type 'florence2'", "qwen2_5_vl")


def test_a_missing_shard_file(copy, show):
    lost = sorted(copy.glob("model-*.safetensors"))[0]
    lost.unlink()
    show(saccade("chat", copy, "What?"), lost.name, "missing")


def test_a_toml_key_with_a_typo(tmp_path, show):
    (tmp_path / "sizes.toml").write_text(
        "tied_head = true\nfamily = 'qwen2_5_vl'\n[vision]\nnum_layers = 2\nhiden_size = 64\n[language]\n"
    )
    show(
        saccade("init", tmp_path / "out", "--config", tmp_path / "sizes.toml"),
        "unknown key vision.hiden_size",
        "Did you mean hidden_size?",
    )


def test_a_checkpoint_that_is_not_there(tmp_path, show):
    show(saccade("chat", tmp_path / "nowhere", "What?"), "nowhere", "no config.json", "saccade init")

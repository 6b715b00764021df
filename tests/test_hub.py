"""Checkpoints by name from the Hugging Face Hub, through a hub of our own on loopback."""

from pathlib import Path

import pytest
import torch
from commands import run_forked
from loopback_hub import serve_hub

from saccade.errors import CheckpointError
from saccade.model.initialize import initialize_random, named_size
from saccade.processor.folder import read_config


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Serve the model acme/tiny, with a file that must not be downloaded; yield environment and served files."""
    folder = tmp_path_factory.mktemp("hub") / "published"
    initialize_random(folder, named_size("tiny"), dtype=torch.float32)
    (folder / "modeling.py").write_text("raise SystemExit('remote code')")
    with serve_hub(folder, "acme/tiny") as found:
        yield found


_CHAT = (
    "import sys; sys.argv = ['saccade', 'chat', '{}', 'hi', '--max-tokens', '2', '--device', 'cpu']; "
    "from saccade.cli.entry import run; run()"
)
_MODULES = (
    "huggingface_hub",
    "saccade.engine.engine",
    "saccade.engine.device.loading",
    "saccade.engine.device.runner",
)
_WITHOUT_EXTRA = "import sys; sys.modules['huggingface_hub'] = None\n"


@pytest.fixture(scope="module")
def chats(hub, tmp_path_factory):
    """How `saccade chat NAME hi` ends, first with an empty cache.

    The cases are a name that the hub has, twice, a name that it has not, and a name without the extra.
    """
    folder = tmp_path_factory.mktemp("chats")
    tiny, nothing = _CHAT.format("acme/tiny"), _CHAT.format("acme/nothing")
    environment = hub[0] | {"HF_HOME": str(folder / "cache")}
    return run_forked([tiny, tiny, nothing, _WITHOUT_EXTRA + tiny], folder, _MODULES, **environment)


def test_a_name_of_the_hub_is_downloaded_once_without_its_code_and_answers(hub, chats):
    first, again, *_ = chats
    _, served = hub
    assert first.status == 0, first.err
    assert first.out
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(served)
    assert "modeling.py" not in served
    assert again.out == first.out
    assert len(served) == len(set(served)), "the second time it is in the cache"


def test_a_name_that_the_hub_does_not_have_is_one_line(chats):
    ended = chats[2]
    assert ended.status == 2
    [line] = ended.err.strip().splitlines()
    assert line.startswith("saccade: acme/nothing: no such folder, and the Hugging Face Hub")


def test_without_the_extra_it_says_how_to_get_the_checkpoint(chats):
    ended = chats[3]
    assert ended.status == 2
    [line] = ended.err.strip().splitlines()
    assert "pip install 'saccade[hub]'" in line
    assert "hf download acme/tiny --local-dir tiny" in line


@pytest.mark.parametrize("folder", ["checkpoints/tiny", "runs/tiny"])
def test_a_folder_of_a_recipe_is_not_taken_for_a_name_on_the_hub(folder):
    with pytest.raises(CheckpointError, match=r"saccade init makes a new checkpoint folder$"):
        read_config(Path(folder))

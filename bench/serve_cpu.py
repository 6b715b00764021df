"""The engine and transformers on a CPU: same checkpoint, prompts and number of tokens, fp32.

    python -m bench.serve_cpu [--requests 32] [--layers 12] [--width 896] [--rounds 3]

`bench.serve_cpu_http` compares servers.

A Qwen2.5-VL of 12 layers, 896 wide; each request has a 336 x 336 image, 64 tokens of text, and gets 64 tokens.
transformers' `generate` runs one request at a time, and in padded batches of 8. Times include image preprocessing.
Reported: seconds (median of the rounds) and their ratios.
"""

import argparse
import json
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.initialize import initialize_random

Conversation = list[dict[str, object]]


def make_checkpoint(folder: Path, num_layers: int, width: int) -> None:
    """Write random weights of the benchmark's shape."""
    language = LanguageConfig(
        vocab_size=151936, hidden_size=width, num_layers=num_layers, num_heads=14, num_kv_heads=2,
        intermediate_size=4864, rope_theta=1e6, rope_sections=(8, 12, 12), norm_eps=1e-6, max_positions=4096,
    )  # fmt: skip
    vision = VisionConfig(
        num_layers=8, hidden_size=640, num_heads=8, intermediate_size=1712, full_attention_layers=(3, 7)
    )  # fmt: skip
    config = ModelConfig(vision=vision, language=language, tied_head=True, family="qwen2_5_vl")
    initialize_random(folder, config, dtype=torch.float32)


def conversations(count: int) -> list[Conversation]:
    """Return conversations of one noise image and 64 tokens of text (the tokenizer reads bytes)."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        image = Image.fromarray(rng.integers(0, 256, (336, 336, 3), dtype=np.uint8))
        text = "".join(rng.choice(list("abcdefgh "), 64))
        made.append([{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}])
    return made


class Transformers:
    """transformers with its own image processor and `generate`."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        config = json.loads((folder / "config.json").read_text())
        self.pad_id = config["image_token_id"]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.template = (folder / "chat_template.jinja").read_text()

    def generate(self, batch: list[Conversation], num_tokens: int) -> torch.Tensor:
        """Return the new token ids of a padded batch."""
        texts, pictures = [], []
        for [message] in batch:
            picture, text = message["content"]  # type: ignore[misc]
            pictures.append(picture["image"])
            messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text["text"]}]}]
            texts.append(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self.template, add_generation_prompt=True, tokenize=False
                )
            )
        pixels = self.images(pictures, return_tensors="pt")
        pad = self.tokenizer.convert_ids_to_tokens(self.pad_id)
        texts = [
            text.replace(pad, pad * int(grid.prod() // 4))
            for text, grid in zip(texts, pixels["image_grid_thw"], strict=True)
        ]
        tokens = self.tokenizer(texts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"], **pixels,
                mm_token_type_ids=(tokens["input_ids"] == self.pad_id).int(),
                max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            )  # fmt: skip
        new: torch.Tensor = out[:, tokens["input_ids"].shape[1] :]
        return new


def saccade(
    folder: Path, asked: list[Conversation], first: Conversation, num_tokens: int
) -> tuple[float, list[list[int]]]:
    """Return seconds and tokens of the engine."""
    config = EngineConfig(max_requests=64, max_length=2048, num_workers=0)
    with Engine.load(folder, device="cpu", config=config) as engine:
        engine.generate([first], SamplingParams(max_tokens=2))
        begin = time.perf_counter()
        completions = engine.generate(asked, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
        return time.perf_counter() - begin, [list(completion.token_ids) for completion in completions]


def transformers(
    folder: Path, asked: list[Conversation], first: Conversation, num_tokens: int, batch: int
) -> tuple[float, list[list[int]]]:
    """Return seconds and tokens of `generate`."""
    peer = Transformers(folder)
    peer.generate([first], 2)
    begin = time.perf_counter()
    tokens = [
        row.tolist()
        for start in range(0, len(asked), batch)
        for row in peer.generate(asked[start : start + batch], num_tokens)
    ]
    return time.perf_counter() - begin, tokens


SIDES = {
    "saccade": saccade,
    "transformers, one by one": partial(transformers, batch=1),
    "transformers, batches of 8": partial(transformers, batch=8),
}


def main() -> None:
    """Run each side in a separate process, so that memory use of one does not affect another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    *asked, first = conversations(options.requests + 1)
    seconds: dict[str, list[float]] = {name: [] for name in SIDES}
    tokens: dict[str, list[list[int]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        make_checkpoint(folder, options.layers, options.width)
        for _ in range(options.rounds):
            for name, side in SIDES.items():
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    taken, tokens[name] = pool.submit(side, folder, asked, first, options.tokens).result()
                seconds[name].append(taken)
    same = sum(
        ours == theirs for ours, theirs in zip(tokens["saccade"], tokens["transformers, one by one"], strict=True)
    )
    print(f"outputs equal to transformers': {same} of {len(asked)}")
    ours = statistics.median(seconds["saccade"])
    for name, found in seconds.items():
        taken = statistics.median(found)
        rate = options.requests * options.tokens / taken
        print(
            f"{name:<28}{taken:8.1f} s {rate:8.1f} tok/s   saccade is {taken / ours:.2f}x as fast   "
            f"{[round(x, 1) for x in found]}"
        )


if __name__ == "__main__":
    main()

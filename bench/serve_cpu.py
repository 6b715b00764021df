"""The engine on a CPU beside transformers: the same checkpoint, prompts and number of tokens, fp32.

    python -m bench.serve_cpu [--requests 32] [--layers 12] [--width 896]

A Qwen2.5-VL of 12 layers, 896 wide; each request has a 336 x 336 image, 64 tokens of text, and gets 64 tokens. transformers' `generate` runs
one request at a time, and in padded batches of 8. Images are prepared inside the time. Reported as seconds and as ratios of one run.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from saccade.engine import Engine, EngineConfig, SamplingParams
from saccade.model.config import LanguageConfig, ModelConfig, VisionConfig
from saccade.model.initialize import initialize_random


def make_checkpoint(folder: Path, num_layers: int, width: int) -> None:
    """Random weights of the benchmark's shape."""
    language = LanguageConfig(
        vocab_size=151936, hidden_size=width, num_layers=num_layers, num_heads=14, num_kv_heads=2,
        intermediate_size=4864, rope_theta=1e6, rope_sections=(8, 12, 12), norm_eps=1e-6, max_positions=4096,
    )  # fmt: skip
    vision = VisionConfig(
        num_layers=8, hidden_size=640, num_heads=8, intermediate_size=1712, full_attention_layers=(3, 7)
    )  # fmt: skip
    config = ModelConfig(vision=vision, language=language, tied_head=True, family="qwen2_5_vl")
    initialize_random(folder, config, dtype=torch.float32)


def conversations(count: int) -> list[list[dict[str, object]]]:
    """One noise image and 64 tokens of text each (the tokenizer reads bytes)."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        image = Image.fromarray(rng.integers(0, 256, (336, 336, 3), dtype=np.uint8))
        text = "".join(rng.choice(list("abcdefgh "), 64))
        made.append([{"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}])
    return made


class Transformers:
    """What a user of transformers writes: its own image processor, `generate`."""

    def __init__(self, folder: Path) -> None:
        from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        config = json.loads((folder / "config.json").read_text())
        self.pad_id = config["image_token_id"]
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        self.images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.template = (folder / "chat_template.jinja").read_text()

    def generate(self, batch: list[list[dict[str, object]]], num_tokens: int) -> torch.Tensor:
        """New token ids of a padded batch."""
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


def main() -> None:
    """Ours, then theirs in both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=896)
    options = parser.parse_args()
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    *asked, first = conversations(options.requests + 1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "checkpoint"
        make_checkpoint(folder, options.layers, options.width)
        config = EngineConfig(max_requests=64, max_length=2048, num_workers=0, prefix_cache=False)
        with Engine.load(folder, device="cpu", config=config) as engine:
            engine.generate([first], SamplingParams(max_tokens=2))
            begin = time.perf_counter()
            ours = engine.generate(asked, sampling)
            seconds = {"saccade": time.perf_counter() - begin}
        peer = Transformers(folder)
        peer.generate([first], 2)
        begin = time.perf_counter()
        alone = [peer.generate([one], options.tokens)[0].tolist() for one in asked]
        seconds["transformers, one by one"] = time.perf_counter() - begin
        begin = time.perf_counter()
        for start in range(0, len(asked), 8):
            peer.generate(asked[start : start + 8], options.tokens)
        seconds["transformers, batches of 8"] = time.perf_counter() - begin
    same = sum(answer.token_ids == tokens for answer, tokens in zip(ours, alone, strict=True))
    print(f"answers equal to transformers': {same} of {len(asked)}")
    for name, taken in seconds.items():
        rate = options.requests * options.tokens / taken
        print(f"{name:<28}{taken:8.1f} s {rate:8.1f} tok/s   saccade is {taken / seconds['saccade']:.2f}x as fast")


if __name__ == "__main__":
    main()

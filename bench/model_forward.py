"""Forward pass of the 3B shape on a GPU, over 16 packed conversations.

    python bench/model_forward.py [--size 3b] [--json]

A conversation is one 672 x 672 image (576 tokens) and 478 text tokens. A small model in bf16 on the GPU is compared
with fp32 on the CPU first; the time is the median of 10 forwards after 3 warm-ups. MFU counts the matmuls of tower,
merger, decoder and head, and attention (causal half, tower windows of 64 keys).
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from saccade.model.config import ModelConfig
from saccade.model.initialize import initialize_random, named_size
from saccade.model.vlm import VLM
from saccade.model.weights import load_model
from saccade.processor import ModelInputs, Processor
from saccade.train.flops import forward_flops, peak_flops


def conversations(processor: Processor, count: int, side: int, text_tokens: int) -> ModelInputs:
    """`count` conversations of one noise image and about `text_tokens` tokens of text, a letter each."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(count):
        image = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        content = [{"type": "image", "image": image}, {"type": "text", "text": "a" * text_tokens}]
        rows.append([{"role": "user", "content": content}])
    return processor(rows)


def relative_error(folder: Path) -> float:
    """bf16 on the GPU against fp32 on the CPU, on a small model: relative RMS of the logits."""
    inputs = conversations(Processor.load(folder), 3, 200, 40)
    with torch.no_grad():
        reference = load_model(folder, device="cpu", dtype="fp32")(inputs)
        actual = load_model(folder, device="cuda", dtype="bf16")(inputs.to("cuda")).float().cpu()
    return float((actual - reference).norm() / reference.norm())


def random_model(config: ModelConfig) -> VLM:
    """The shape with random weights, made on the GPU."""
    with torch.device("meta"):
        model = VLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cuda")
    model.tie_head()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1 and name.endswith("weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02)
    return model.eval()


def main() -> None:
    """Check, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "tiny"
        initialize_random(folder, named_size("tiny"), dtype=torch.float32)
        error = relative_error(folder)
        assert error < 2e-2, f"bf16 on the GPU is {error:.1e} away from fp32 on the CPU"
        inputs = conversations(Processor.load(folder), 16, 672, 430).to("cuda")
    config = named_size(options.size)
    model = random_model(config)
    times = []
    with torch.no_grad():
        for step in range(13):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            logits = model(inputs)
            end.record()
            torch.cuda.synchronize()
            assert torch.isfinite(logits).all()
            if step >= 3:
                times.append(start.elapsed_time(end))
    ms = statistics.median(times)
    flops = sum(forward_flops(config, inputs.cu_seqlens.diff().tolist(), inputs.image_grids.tolist()))
    peak = peak_flops(torch.device("cuda"))
    record = {
        "size": options.size,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bf16_error_small_model": error,
        "tokens": inputs.num_tokens,
        "patches": inputs.patches.shape[0],
        "ms": ms,
        "tokens_per_s": inputs.num_tokens / ms * 1e3,
        "mfu": None if peak is None else flops / ms * 1e3 / peak,
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30,
    }
    if options.json:
        print(json.dumps(record))
        return
    for name, value in record.items():
        print(f"{name:24} {value:.4g}" if isinstance(value, float) else f"{name:24} {value}")


if __name__ == "__main__":
    main()

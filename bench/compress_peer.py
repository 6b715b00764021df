"""GPTQ of llm-compressor compared with ours: one decoder, calibrated on the same conversations without their images.

    pip install --target peers --no-deps llmcompressor compressed-tensors==0.19.0 \\
        'transformers<=5.17' loguru datasets accelerate ...
    PYTHONPATH=peers python -m bench.compress_peer quantize TEXT-MODEL SAMPLES.json OUT    (in the peer's environment)
    python -m bench.compress_peer compare CHECKPOINT --calibration SHARDS --held-out SHARDS \\
        --peer 'PYTHONPATH=peers python'

`compare` writes the decoder as a text model and has the peer quantize it (W4A16, groups of 128, its defaults). It puts
the peer's weights into a copy of our own folder, and compares all on held-out text with the same code.
"""

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from safetensors.torch import load_file, save_file


def quantize(model: Path, samples: Path, out: Path) -> None:
    """Quantize a text model with llm-compressor."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    rows = json.loads(samples.read_text())
    dataset = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    loaded = AutoModelForCausalLM.from_pretrained(model)
    recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(
        model=loaded, dataset=dataset, recipe=recipe, num_calibration_samples=len(rows), max_seq_length=4096,
        pad_to_max_length=False, shuffle_calibration_samples=False,
    )  # fmt: skip
    loaded.save_pretrained(out, save_compressed=True)


def write_text_model(checkpoint: Path, out: Path) -> None:
    """The decoder of a checkpoint as a text model of the Qwen2 family."""
    import torch

    from saccade.compress.source import Source
    from saccade.processor.folder import read_config

    source, raw = Source(checkpoint), read_config(checkpoint)
    text = raw.get("text_config", raw)
    rope = text.get("rope_parameters") or {}
    fields = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
        "tie_word_embeddings",
    )
    config = {name: text[name] for name in fields if name in text}
    config |= {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": source.model.config.tied_head,
    }
    config["rope_theta"] = rope.get("rope_theta", text.get("rope_theta", 1e6))
    names = [name for name in source.names.values() if name.startswith(("language.", "head."))]
    tensors = source.read(names, torch.device("cpu"))
    renamed = {name.replace("language.", "model.", 1).replace("head.", "lm_head.", 1): t for name, t in tensors.items()}
    out.mkdir(parents=True)
    save_file(renamed, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))


def compare(checkpoint: Path, calibration: str, held_out: str, num_samples: int, peer: str) -> None:
    """Compare both, and rounding to nearest, on held-out text."""
    from saccade.compress import compress
    from saccade.compress.calibration import CalibrationConfig, load_batches
    from saccade.compress.scheme import Rule, Scheme
    from saccade.compress.verify import Reference
    from saccade.model import load_model
    from saccade.processor import Processor

    config = CalibrationConfig(shards=(calibration,), num_samples=num_samples, kind="text")
    processor, model = Processor.load(checkpoint), load_model(checkpoint, device="cpu")
    unseen = load_batches(CalibrationConfig(shards=(held_out,), num_samples=num_samples, kind="text"), processor, 0)
    reference = Reference(model, unseen)
    rows = [
        batch.token_ids[start:end].tolist()
        for batch in load_batches(config, processor, 0)
        for start, end in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for method in ("rtn", "gptq"):
            scheme = Scheme(name=method, rules=(Rule(part="language", form="int4", method=method),))
            compress(checkpoint, folder / method, scheme=scheme, calibration=config, device="cpu")
        write_text_model(checkpoint, folder / "text")
        (folder / "samples.json").write_text(json.dumps(rows))
        command = (
            f"{peer} -m bench.compress_peer quantize {folder / 'text'} {folder / 'samples.json'} {folder / 'peer'}"
        )
        subprocess.run(["bash", "-c", command], check=True, env=os.environ, cwd=Path(__file__).parents[1])
        theirs = {}
        for file in (folder / "peer").glob("*.safetensors"):
            theirs |= load_file(file)
        mixed = load_file(folder / "rtn" / "model.safetensors")
        stems = {name.split("layers.")[-1]: name for name in mixed if "layers." in name and "visual" not in name}
        replaced = {
            stems[name.split("layers.")[-1]]: tensor
            for name, tensor in theirs.items()
            if "layers." in name and name.split("layers.")[-1] in stems
        }
        packed = [name for name in replaced if name.endswith("weight_packed")]
        assert len(packed) == sum(name.endswith("weight_packed") for name in mixed), (
            "the peer quantized every projection"
        )
        save_file(mixed | replaced, folder / "rtn" / "model.safetensors.new", metadata={"format": "pt"})
        plain = reference.compare(load_model(folder / "rtn", device="cpu"))
        ours = reference.compare(load_model(folder / "gptq", device="cpu"))
        (folder / "rtn" / "model.safetensors.new").rename(folder / "rtn" / "model.safetensors")
        peers = reference.compare(load_model(folder / "rtn", device="cpu"))
    print(f"{'':<16}{'perplexity':>12}{'KL':>12}{'same token':>12}   ({ours.num_tokens} tokens)")
    print(f"{'original':<16}{ours.original_perplexity:>12.5f}")
    for label, one in (("to nearest", plain), ("ours", ours), ("llm-compressor", peers)):
        print(f"{label:<16}{one.perplexity:>12.5f}{one.kl:>12.3e}{one.agreement:>12.3%}")


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("quantize")
    for name in ("model", "samples", "out"):
        one.add_argument(name, type=Path)
    both = commands.add_parser("compare")
    both.add_argument("checkpoint", type=Path)
    both.add_argument("--calibration", required=True)
    both.add_argument("--held-out", required=True)
    both.add_argument("--num-samples", type=int, default=128)
    both.add_argument("--peer", required=True, help="command that starts the peer's Python")
    options = parser.parse_args()
    if options.command == "quantize":
        quantize(options.model, options.samples, options.out)
    else:
        compare(options.checkpoint, options.calibration, options.held_out, options.num_samples, options.peer)


if __name__ == "__main__":
    main()

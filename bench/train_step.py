"""Training steps of the 3B shape on one GPU (loss, backward, clipping and AdamW), and those of transformers.

    python -m bench.train_step [--workload uniform ragged] [--recompute none selective/none full] [--lora] \\
        [--peers] [--out rows.json]

`--recompute a` (activation checkpointing) is for both, `a/b` for vision tower and decoder.

The peers are transformers with SDPA and with Liger. Workloads are those of `bench/workloads.py`; random weights, bf16
compute, fp32 masters (the peers train in pure bf16, which costs them less). A row has the median of the steps after
warm-up, tokens/s, MFU (vision tower included, 3 x forward, activation checkpointing not counted) and peak memory. For
ragged batches the time is the mean over the batches.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import torch

from bench.workloads import IMAGE_PAD, VISION_END, VISION_START, WORKLOADS, packed_sequence
from saccade.model.config import ModelConfig
from saccade.model.initialize import named_size
from saccade.model.linear import Linear
from saccade.model.vlm import VLM
from saccade.processor.inputs import ModelInputs
from saccade.train.batches import MicroBatch
from saccade.train.flops import PEAK_FLOPS, micro_batch_work
from saccade.train.loss import ModelWithLoss, count_labels, next_token_labels
from saccade.train.optimizer import build_optimizer
from saccade.train.parallel_config import Recompute
from saccade.train.parallelize import ParallelModel, prepare_model, recompute
from saccade.train.parameter_groups import PARTS, OptimizerConfig
from saccade.train.stage_config import LoraConfig
from saccade.train.train_state import TrainState
from saccade.world import World

Record = dict[str, Any]


def random_model(config: ModelConfig, lora: LoraConfig | None = None) -> VLM:
    """The model with random weights, initialized on the GPU; with `lora`, only adapters are trained."""
    with torch.device("meta"):
        model = VLM(config).to(torch.bfloat16)
        prepare_model(model, OptimizerConfig(), lora, None, "bf16")
    model = model.to_empty(device="cuda")
    model.tie_head()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        is_scale = parameter.ndim == 1 and name.endswith("weight")
        parameter.data.fill_(1.0) if is_scale else parameter.data.normal_(0.0, 0.02)
    for module in model.modules():
        if isinstance(module, Linear):
            module.zero_padding()
    return model.train()


def extents(name: str) -> tuple[Recompute, Recompute]:
    """Activation checkpointing of vision tower and decoder: `selective`, or `full/none`."""
    of_vision, _, of_language = name.partition("/")
    both = of_vision, of_language or of_vision
    for extent in both:
        if extent not in get_args(Recompute):
            raise SystemExit(
                f"--recompute {name}: use {', '.join(get_args(Recompute))}, or two of them as vision/decoder"
            )
    return both  # type: ignore[return-value]


def ours(config: ModelConfig, extent: str, lora: LoraConfig | None = None) -> Callable[[ModelInputs], None]:
    """One step with the trainer's components."""
    model = random_model(config, lora)
    of_vision, of_language = extents(extent)
    recompute(model.vision.blocks, of_vision)
    recompute(model.language.layers, of_language)
    trained = ModelWithLoss(model)
    optimizer = build_optimizer(model.named_parameters(), OptimizerConfig(lr=1e-5, weight_decay=0.1))
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cuda"))
    train_state = TrainState(ParallelModel(trained, trained, "none"), optimizer, world)

    def step(inputs: ModelInputs) -> None:
        labels = next_token_labels(inputs)
        count = count_labels(labels)
        batch = MicroBatch(inputs.to("cuda", non_blocking=True), labels.to("cuda", non_blocking=True), count, [])
        loss, _ = train_state.backward(batch, torch.tensor(float(count), device="cuda"), is_last_micro_batch=True)
        norm = train_state.grad_norm()
        loss_value, norm_value = torch.stack([loss, norm]).tolist()
        assert loss_value == loss_value, "the loss is not a number"
        train_state.step(1.0, min(1.0, 1.0 / (norm_value + 1e-6)))

    return step


def transformers_step(config: ModelConfig, *, liger: bool) -> Callable[[ModelInputs], None]:
    """What a user of transformers gets: padded batch, SDPA, gradient checkpointing, fused AdamW in bf16."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from saccade.model.families import family_named

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen2_5_vl

        apply_liger_kernel_to_qwen2_5_vl()
    token_ids = {"image": IMAGE_PAD, "video": IMAGE_PAD + 1, "vision_start": VISION_START, "vision_end": VISION_END}
    described = family_named("qwen2_5_vl").describe_config(config, token_ids)
    with torch.device("cuda"):
        kind = Qwen2_5_VLConfig(**described)
        model = Qwen2_5_VLForConditionalGeneration._from_config(kind, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step(inputs: ModelInputs) -> None:
        batch = padded(inputs)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert loss.item() == loss.item(), "the loss is not a number"

    return step


def padded(inputs: ModelInputs) -> dict[str, torch.Tensor]:
    """The packed sequence as a padded batch for transformers."""
    pieces = inputs.token_ids.split(inputs.cu_seqlens.diff().tolist())
    ids = torch.nn.utils.rnn.pad_sequence(pieces, batch_first=True, padding_value=0)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(p) for p in pieces], batch_first=True)
    batch = {
        "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100),
        "pixel_values": inputs.normalized_patches().bfloat16(), "image_grid_thw": inputs.image_grids,
        "mm_token_type_ids": (ids == IMAGE_PAD).int(),
    }  # fmt: skip
    return {name: value.to("cuda", non_blocking=True) for name, value in batch.items()}


def timed(step: Callable[[ModelInputs], None], batches: list[ModelInputs], rounds: int) -> tuple[float, float]:
    """Milliseconds of a step (mean over the batches of each one's median), and peak memory in GiB."""
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times: list[list[float]] = [[] for _ in batches]
    for _ in range(rounds):
        for batch, mine in zip(batches, times, strict=True):
            begin = time.perf_counter()
            step(batch)
            torch.cuda.synchronize()
            mine.append((time.perf_counter() - begin) * 1e3)
    return statistics.mean(statistics.median(mine) for mine in times), torch.cuda.max_memory_allocated() / 2**30


def measure(
    path: str,
    workload: str,
    config: ModelConfig,
    make: Callable[[], Callable[[ModelInputs], None]],
    rounds: int,
    num_batches: int | None = None,
    trained: Iterable[str] = PARTS,
) -> Record:
    """One line of the report; running out of memory is a result."""
    batches = [
        packed_sequence(samples, config.vision, seed=i) for i, samples in enumerate(WORKLOADS[workload]()[:num_batches])
    ]
    work = [micro_batch_work(config, batch, count_labels(next_token_labels(batch)), trained) for batch in batches]
    flops = statistics.mean(w.vision_flops + w.decoder_flops for w in work)
    tokens = statistics.mean(batch.num_tokens for batch in batches)
    record: Record = {"path": path, "workload": workload, "tokens": round(tokens)}
    try:
        ms, peak = timed(make(), batches, rounds)
        mfu = flops / ms * 1e3 / PEAK_FLOPS["H200"]
        record |= {
            "ms": round(ms, 1),
            "tokens_per_s": round(tokens / ms * 1e3),
            "mfu": round(mfu, 4),
            "peak_gib": round(peak, 1),
        }
    except torch.cuda.OutOfMemoryError:
        record |= {"failed": "out of memory"}
    gc.collect()
    torch.cuda.empty_cache()
    print(json.dumps(record), flush=True)
    return record


def main() -> None:
    """Measure ours, then the peers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="3b")
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--recompute", nargs="*", default=["none"])
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters of the default rank alone")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument(
        "--peer-batches", type=int, help="ragged batches the peers are given, from the first; all if not given"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = named_size(options.size)
    lora = LoraConfig() if options.lora else None
    records = []
    for workload in options.workload:
        for extent in options.recompute:
            records.append(
                measure(
                    f"saccade, recompute {extent}{', LoRA' if lora else ''}",
                    workload,
                    config,
                    lambda e=extent: ours(config, e, lora),
                    options.rounds,
                    trained=("language.lora",) if lora else PARTS,
                )
            )
    if options.peers:
        for liger in (False, True):
            name = "transformers SDPA" + (" + Liger" if liger else "") + ", recompute full"
            for workload in options.workload:
                records.append(
                    measure(
                        name,
                        workload,
                        config,
                        lambda has_liger=liger: transformers_step(config, liger=has_liger),
                        1,
                        options.peer_batches,
                    )
                )
    if options.out:
        versions = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.out.write_text(json.dumps(versions | {"rows": records}, indent=1))


if __name__ == "__main__":
    main()

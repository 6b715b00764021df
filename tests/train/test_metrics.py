import json
import math

import pytest
import torch
from PIL import Image

from saccade.model.initialize import initialize_random, named_size
from saccade.model.linear import checkpoint_shapes
from saccade.model.vlm import VLM
from saccade.processor import Processor
from saccade.train.flops import Flops, Work, forward_flops, micro_batch_work, peak_flops, training_flops
from saccade.train.log_line import duration, format_line
from saccade.train.metrics import Meter, Step, device_memory_gib

EVERYTHING = ("vision", "projector", "embedding", "language", "head")


def step_of(number, **changes):
    work = Work(samples=4, text_tokens=600, image_tokens=400, loss_tokens=100, vision_flops=2e12, decoder_flops=6e12)
    values = {"loss": 2.0, "grad_norm": 0.5, "seconds": 0.5, "data_wait_s": 0.05, "work": work}
    return Step(number=number, **values | changes)


# ------------------------------------------------------------------ FLOPs


def test_matrix_products_cost_two_per_weight_and_token():
    config = named_size("3b")
    with torch.device("meta"):
        shapes = checkpoint_shapes(VLM(config))

    def weights(prefix):
        return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix) and len(shape) > 1)

    tokens, patches = 1000, 24 * 36
    flops = forward_flops(config, [tokens], [(1, 24, 36)])
    attention = 4 * tokens**2 / 2 * config.language.hidden_size * config.language.num_layers
    assert flops.language - attention == 2 * tokens * weights("language.layers.")
    assert flops.head == 2 * tokens * weights("language.embed_tokens.")
    assert flops.projector == 2 * patches / 4 * weights("projector.")
    windows = 4 * patches * 64 * 1280 * 28
    assert flops.vision - windows - 4 * patches**2 * 1280 * 4 == 2 * patches * weights("vision.")


def test_packed_conversations_and_frames_do_not_attend_to_each_other():
    config = named_size("tiny")
    apart = [forward_flops(config, [n], [grid]) for n, grid in ((300, (1, 8, 8)), (50, (1, 8, 8)))]
    packed = forward_flops(config, [300, 50], [(1, 8, 8), (1, 8, 8)])
    assert packed == pytest.approx(Flops(*(a + b for a, b in zip(*apart, strict=True))))
    assert forward_flops(config, [300, 50], [(2, 8, 8)]).vision == packed.vision, "a video's frame pairs are images"
    assert forward_flops(config, [350], []).language > packed.language


def test_only_loss_tokens_pay_for_the_head():
    config = named_size("tiny")
    assert forward_flops(config, [100], [], 25).head * 4 == forward_flops(config, [100], []).head


def test_frozen_parts_cost_less_than_three_forward_passes():
    forward = Flops(1.0, 1.0, 1.0, 1.0)
    assert training_flops(forward, EVERYTHING, tied_head=True) == (3, 3, 3, 3)
    assert training_flops(forward, ["projector"], tied_head=True) == (1, 3, 2, 2)
    assert training_flops(forward, ["language", "head"], tied_head=False) == (1, 1, 3, 3)
    assert training_flops(forward, ["language"], tied_head=False) == (1, 1, 3, 2)


def test_the_work_of_a_micro_batch_is_counted(tmp_path):
    initialize_random(tmp_path, named_size("tiny"), dtype=torch.float32)
    image = Image.new("RGB", (112, 56))
    conversation = [
        {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "Nothing."},
    ]
    inputs = Processor.load(tmp_path)([conversation, [{"role": "user", "content": "Hi"}]])
    work = micro_batch_work(named_size("tiny"), inputs, 9, EVERYTHING)
    assert work.samples == 2
    assert work.image_tokens == 8
    assert work.text_tokens == inputs.num_tokens - 8
    assert work.loss_tokens == 9
    flops = forward_flops(named_size("tiny"), inputs.cu_seqlens.diff().tolist(), inputs.image_grids.tolist(), 9)
    assert work.vision_flops + work.decoder_flops == pytest.approx(3 * sum(flops))
    assert work.plus(work).samples == 4


def test_a_cpu_has_no_peak_and_no_device_memory():
    assert peak_flops(torch.device("cpu")) is None
    assert device_memory_gib(torch.device("cpu")) is None


# ------------------------------------------------------------------ records


def test_a_record_holds_averages_of_its_interval():
    meter = Meter(num_steps=100, world_size=2, peak_flops=16e12, num_warmup=0)
    meter.add(step_of(1, loss=2.0, source_losses={"a": (10.0, 4), "b": (3.0, 1)}))
    meter.add(step_of(2, loss=4.0, seconds=1.5, source_losses={"a": (2.0, 2), "c": (0.0, 0)}))
    record = meter.record("align", {"default": 1e-4}, memory_gib=3.5)
    assert record["step"] == 2
    assert record["stage"] == "align"
    assert record["loss"] == 3.0
    assert record["ms"] == 1000.0
    assert record["text_tokens_per_s"] == 600
    assert record["image_tokens_per_s"] == 400
    assert record["mfu"] == pytest.approx(16e12 / 2.0 / (2 * 16e12))
    assert record["mfu_decoder"] == pytest.approx(12e12 / 2.0 / (2 * 16e12))
    assert record["data_wait"] == pytest.approx(0.05)
    assert record["source_loss"] == {"a": 2.0, "b": 3.0}
    assert record["eta_s"] == 98.0
    assert record["tokens"] == 2000
    assert record["samples"] == 8
    assert json.loads(json.dumps(record)) == record
    meter.add(step_of(3, loss=1.0))
    assert meter.record("align", {})["loss"] == 1.0, "an interval forgets the one before"


def test_warm_up_steps_are_left_out_of_times_but_not_of_losses():
    meter = Meter(num_steps=10, peak_flops=1e15, num_warmup=2)
    meter.add(step_of(1, seconds=60.0, loss=6.0))
    record = meter.record("a", {"default": 1e-4})
    assert record["loss"] == 6.0
    assert record["ms"] is None
    assert record["mfu"] is None
    assert record["eta_s"] is None
    meter.add(step_of(2, seconds=60.0))
    meter.add(step_of(3, seconds=0.25))
    record = meter.record("a", {"default": 1e-4})
    assert record["ms"] == 250.0
    assert record["eta_s"] == 7 * 0.25


def test_skipped_steps_are_counted_and_their_losses_left_out():
    meter = Meter(num_steps=10, num_warmup=0)
    meter.add(step_of(1, loss=2.0))
    meter.add(step_of(2, loss=math.nan, grad_norm=math.inf, is_skipped=True))
    record = meter.record("a", {})
    assert record["loss"] == 2.0
    assert record["skipped"] == 1
    meter.add(step_of(3, loss=math.nan, is_skipped=True))
    assert meter.record("a", {})["loss"] is None


def test_a_resumed_run_continues_its_counts():
    meter = Meter(num_steps=10, tokens=5000, samples=7)
    meter.add(step_of(4))
    assert (meter.tokens, meter.samples) == (6000, 11)


def test_the_log_line_of_a_record():
    record = {
        "step": 1200,
        "loss": 1.842,
        "grad_norm": 0.41,
        "lr": {"a": 1e-5, "b": 2.9e-4},
        "ms": 412.0,
        "text_tokens_per_s": 200e3,
        "image_tokens_per_s": 118e3,
        "mfu": 0.41,
        "data_wait": 0.003,
        "eta_s": 7740.0,
        "skipped": 0,
    }
    line = format_line(record, 20000)
    assert (
        " ".join(line.split())
        == "step 01200/20000 6.0% loss 1.842 grad 0.41 lr 2.9e-4 412 ms 318k tok/s mfu 41% data wait 0.3% eta 2h09m"
    )
    other = record | {
        "step": 20000,
        "loss": 12.5,
        "ms": 12345.0,
        "eta_s": 5.0,
        "mfu": None,
        "data_wait": 1.0,
        "lr": {"a": 1e-5},
    }
    assert len(format_line(other, 20000)) == len(line), "lines are aligned"
    unknown = record | dict.fromkeys(["loss", "ms", "mfu", "data_wait", "eta_s", "grad_norm"]) | {"lr": {}}
    assert len(format_line(unknown, 20000)) == len(line)
    assert format_line(record | {"skipped": 2}, 20000).endswith("skipped 2")


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (12.3, "12s"), (200, "3m20s"), (7740, "2h09m"), (187200, "2d04h")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text

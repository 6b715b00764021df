"""Objectives: cross entropy equals the plain loss, and the training loop knows no objective by name."""

import ast
import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from train.running import (
    losses,
    make_root,
    read_recipe,
    recipe_in,
    records,
    run_together,
    write_recipe,
)

import saccade.train
from saccade.compress import compress
from saccade.data.index import open_index
from saccade.data.sample import Sample, TextRules, preference_pair
from saccade.data.shards import ShardWriter
from saccade.data.toy import toy_sample
from saccade.errors import UserError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor
from saccade.train.batches import BatchIterator, open_stage_stream
from saccade.train.check import check_run
from saccade.train.log_line import format_line
from saccade.train.loss import IGNORED, next_token_labels
from saccade.train.objectives import chunks
from saccade.train.objectives.objective import Labelled
from saccade.train.parallelize import parallelize
from saccade.train.stages import train
from saccade.world import World

CPU = World(0, 1, 0, torch.device("cpu"))
SETTINGS = {
    "fp32": [],
    "bf16": ["model.dtype=bf16"],
    "lora": ["stages.0.lora.rank=4"],
    "qlora": ["stages.0.lora.rank=4", "stages.0.lora.quantize_base=int4", "model.dtype=bf16"],
    "recompute": ["parallel.recompute_vision=full", "parallel.recompute_language=selective"],
    "smoothed": ["stages.0.objective.label_smoothing=0.1"],
}
RECORDED = {
    "fp32": [5.676171, 5.248135, 5.012188, 4.599062],
    "bf16": [5.675918, 5.252604, 5.015436, 4.602083],
    "lora": [5.676171, 5.596066, 5.486110, 5.243531],
}
"""Losses of the steps before the objectives had a seam of their own."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("objectives"), text_every=3)


def recipe(root, name, *settings):
    return read_recipe(recipe_in(root, name), *settings)


def micro_batches(config, count=2):
    """Packed sequences of the recipe's first step, with their labels."""
    stage = config.stages[0]
    built = parallelize(config.model.folder, stage, config.parallel, CPU, dtype=config.model.dtype, seed=config.seed)
    with open_stage_stream(config, stage) as stream:
        batches = BatchIterator(stream, built.model.config, (), CPU.device, built.module.objective)
        found = list(batches.next(with_sources=False).on_device)
    return built, found[:count]


@pytest.mark.parametrize("name", SETTINGS)
def test_cross_entropy_behind_the_seam_is_that_of_the_head_to_the_last_bit(root, name):
    config = recipe(root, name, *SETTINGS[name])
    built, batches = micro_batches(config)
    smoothing = config.stages[0].objective.label_smoothing
    for batch in batches:
        count = torch.tensor(float(batch.num_loss_tokens))
        found = []
        for is_direct in (True, False):
            built.module.zero_grad()
            if is_direct:
                hidden = built.model.hidden_states(batch.inputs, encode_dummy_image=built.module.encode_dummy_image)
                loss = built.model.head.cross_entropy(
                    hidden, batch.labels, count=count, num_labels=batch.num_loss_tokens, label_smoothing=smoothing
                )
            else:
                loss, _ = built.wrapped(batch.inputs, batch.labels, count, batch.num_loss_tokens)
            loss.backward()
            gradients = {name: p.grad for name, p in built.model.named_parameters() if p.grad is not None}
            found.append((loss.detach(), gradients))
        (direct, direct_gradients), (seam, gradients) = found
        assert torch.equal(direct, seam)
        assert gradients.keys() == direct_gradients.keys()
        assert all(torch.equal(gradients[name], direct_gradients[name]) for name in gradients)


@pytest.mark.parametrize("name", RECORDED)
def test_a_run_has_the_losses_recorded_before_the_seam(root, name):
    """The bits depend on the CPU's matrix products; on the machine they were recorded on they are equal."""
    config = recipe(root, f"recorded-{name}", f"stages.0.steps={len(RECORDED[name])}", *SETTINGS[name])
    train(config, device="cpu")
    assert losses(config.run) == pytest.approx(RECORDED[name], rel=5e-3 if name == "bf16" else 1e-5)


def test_nothing_outside_their_package_names_an_objective_but_the_default():
    package = Path(saccade.train.__file__).parent
    files = {path.stem for path in (package / "objectives").glob("*.py")}
    others = files - {"__init__", "objective", "config", "build", "cross_entropy"}
    assert {"distillation", "preference"} <= others
    for path in package.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("saccade.train.objectives."):
                assert node.module.rpartition(".")[2] not in others, path.name


# ------------------------------------------------------------------ distillation


def teacher_of(root):
    """A model of another size with the same vocabulary."""
    folder = root / "teacher"
    if not folder.exists():
        size = named_size("tiny")
        language = dataclasses.replace(size.language, num_layers=3)
        initialize_random(folder, dataclasses.replace(size, language=language), dtype=torch.float32, seed=1)
    return folder


def step_of(config, count=None):
    """Return (objective's terms of the first micro-batch, the model, the micro-batch)."""
    built, [batch, *_] = micro_batches(config)
    labelled = Labelled(batch.inputs, batch.labels, batch.num_loss_tokens)
    units = built.module.objective.num_units(batch.inputs, batch.num_loss_tokens)
    hidden = built.model.hidden_states(batch.inputs)
    terms = built.module.objective.loss(built.model, hidden, labelled, torch.tensor(float(count or units)))
    return terms, built, batch, units


@pytest.mark.parametrize("chunk_rows", [1000, 7])
def test_distillation_is_the_kl_divergence_of_full_logits(root, monkeypatch, chunk_rows):
    """Loss and gradients, for any chunk size."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 320 * chunk_rows)
    settings = {"teacher": str(teacher_of(root)), "temperature": 2.0, "kl_weight": 0.7, "hidden_weight": 0.3}
    config = recipe(root, "kl", *(f"stages.0.objective.distillation.{key}={value}" for key, value in settings.items()))
    terms, built, batch, units = step_of(config)
    terms.total.backward()
    gradients = {name: p.grad.clone() for name, p in built.model.named_parameters()}

    built.module.zero_grad()
    model, teacher = built.model, load_model(teacher_of(root), device="cpu")
    rows = batch.labels != IGNORED
    logits, taught = model(batch.inputs)[rows], teacher(batch.inputs)[rows].detach()
    target = torch.softmax(taught / 2, 1)
    kl = 4 * (target * (target.log() - torch.log_softmax(logits / 2, 1))).sum(1).mean()
    h, t = model.hidden_states(batch.inputs)[rows], teacher.hidden_states(batch.inputs)[rows].detach()
    distance = (((h - t) ** 2).mean(1) / (t**2).mean(1)).mean()
    cross_entropy = F.cross_entropy(logits, batch.labels[rows])
    expected = 0.7 * kl + 0.3 * cross_entropy + 0.3 * distance
    expected.backward()
    assert float(terms.total.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    means = {name: float(value) / units for name, value in terms.metrics.items()}
    wanted = {"kl": kl, "cross_entropy": cross_entropy, "hidden": distance}
    assert means == pytest.approx({name: float(value.detach()) for name, value in wanted.items()}, abs=1e-5)
    for name, parameter in model.named_parameters():
        assert torch.allclose(gradients[name], parameter.grad, atol=2e-6), name


def test_a_quantized_teacher_teaches_through_its_own_form(root):
    stored = root / "teacher-int8"
    compress(teacher_of(root), stored, scheme="int8-rtn", device="cpu")
    found = []
    for teacher in (teacher_of(root), stored):
        terms, *_, units = step_of(recipe(root, "q", f"stages.0.objective.distillation.teacher={teacher}"))
        found.append(float(terms.metrics["kl"]) / units)
    assert found[1] == pytest.approx(found[0], rel=0.1)
    assert found[1] != found[0]


def test_no_logits_of_a_whole_packed_sequence_are_formed(root, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 320 * 8)
    config = recipe(root, "chunked", f"stages.0.objective.distillation.teacher={teacher_of(root)}")
    built, [batch, *_] = micro_batches(config)
    seen, objective = [], built.module.objective
    for head in (built.model.head, objective._teacher.head):
        head.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    loss, _ = built.wrapped(batch.inputs, batch.labels, torch.tensor(1.0), batch.num_loss_tokens)
    loss.backward()
    assert batch.num_loss_tokens > 16
    assert max(seen) == 8


def test_a_run_distils_towards_its_teacher_which_stays_as_it_is(root):
    teacher = teacher_of(root)
    config = recipe(
        root, "distilled", "stages.0.steps=12", f"stages.0.objective.distillation.teacher={teacher}",
        "stages.0.objective.distillation.kl_weight=1.0",
    )  # fmt: skip
    before = (teacher / "model.safetensors").read_bytes()
    train(config, device="cpu")
    found = [record["objective"] for _, record in sorted(records(config.run).items())]
    assert found[-1]["kl"] < 0.8 * found[0]["kl"]
    assert (teacher / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [("vocabulary", "another vocabulary"), ("width", "hidden_weight compares"), ("missing", "no such folder")],
)
def test_a_teacher_that_does_not_fit_is_refused_before_training(root, tmp_path, change, words):
    teacher = tmp_path / "teacher"
    size = named_size("tiny")
    if change == "width":
        size = dataclasses.replace(
            size, language=dataclasses.replace(size.language, hidden_size=256, rope_sections=(8, 12, 12))
        )
    if change != "missing":
        initialize_random(teacher, size, dtype=torch.float32)
    if change == "vocabulary":
        content = json.loads((teacher / "tokenizer.json").read_text())
        content["added_tokens"][0]["content"] = "<|other|>"
        (teacher / "tokenizer.json").write_text(json.dumps(content))
    settings = [
        f"stages.0.objective.distillation.teacher={teacher}",
        "stages.0.objective.distillation.hidden_weight=1.0",
    ]
    with pytest.raises(UserError, match=words):
        check_run(recipe(root, "refused", *settings), device="cpu")


# ------------------------------------------------------------------ preference optimization


def write_pairs(folder, count=24):
    with ShardWriter(folder, max_samples=16) as writer:
        for number in range(count):
            image = toy_sample(number, side=56).members
            fields = {"prompt": "What is it?", "chosen": "a b c", "rejected": "z y x " * (1 + number % 2)}
            members = {name: data for name, data in image.items() if name != "json"}
            members |= {"json": json.dumps(fields).encode()}
            writer.write(Sample(key=f"{number:08d}", source="pairs", members=members))
    return folder


@pytest.fixture(scope="module")
def pairs(root):
    return write_pairs(root / "pairs")


def preference_recipe(root, name, *settings):
    pairs = root / "pairs"
    chosen = ["stages.0.objective.dpo.beta=0.3", f'stages.0.data.sources=[{{path="{pairs}"}}]']
    return recipe(root, name, *chosen, *settings)


def direct_preference_loss(model, reference, inputs, beta):
    """DPO from full logits, one conversation at a time."""

    def log_probability(logits, start, end):
        ids, mask = inputs.token_ids[start + 1 : end], inputs.loss_mask[start + 1 : end]
        return torch.log_softmax(logits[start : end - 1], 1).gather(1, ids[:, None])[:, 0][mask].sum()

    bounds = inputs.cu_seqlens.tolist()
    ours, theirs = model(inputs), reference(inputs).detach()
    ratios = [log_probability(ours, a, b) - log_probability(theirs, a, b) for a, b in pairwise(bounds)]
    margins = beta * (torch.stack(ratios[0::2]) - torch.stack(ratios[1::2]))
    return -F.logsigmoid(margins).mean(), margins.detach()


@pytest.mark.parametrize("lora", [False, True])
def test_preference_optimization_is_the_formula_on_full_logits(root, pairs, lora):
    settings = ["stages.0.lora.rank=4"] if lora else []
    config = preference_recipe(root, f"dpo-{lora}", *settings)
    built, [batch, *_] = micro_batches(config)
    with torch.no_grad():  # a model that differs from its reference
        for number, parameter in enumerate(p for p in built.model.parameters() if p.requires_grad):
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
    assert batch.inputs.num_conversations % 2 == 0
    units = built.module.objective.num_units(batch.inputs, batch.num_loss_tokens)
    loss, sums = built.wrapped(batch.inputs, batch.labels, torch.tensor(float(units)), batch.num_loss_tokens)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}
    built.module.zero_grad()
    reference = load_model(root / "checkpoint", device="cpu")
    expected, margins = direct_preference_loss(built.model, reference, batch.inputs, 0.3)
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    metrics = dict(zip(built.module.objective.metric_names, (sums / units).tolist(), strict=True))
    assert metrics["margin"] == pytest.approx(float(margins.mean()), abs=1e-5)
    assert metrics["accuracy"] == pytest.approx(float((margins > 0).float().mean()))
    assert metrics["chosen"] - metrics["rejected"] == pytest.approx(float(margins.mean()) / 0.3, abs=1e-4)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, built.model.get_parameter(name).grad, atol=2e-6), name


def test_a_run_learns_to_prefer_the_chosen_answers(root, pairs):
    config = preference_recipe(
        root, "prefers", "stages.0.steps=8", "stages.0.lora.rank=4", "stages.0.optimizer.lr=1e-2"
    )
    train(config, device="cpu")
    found = [record for _, record in sorted(records(config.run).items())]
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found[0]["objective"]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert found[-1]["objective"]["accuracy"] > 0.9
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[-1]["samples"] <= 24 * 8
    assert "  accuracy " in format_line(found[-1], 8)


def two_stages(root, name, *settings):
    """Three steps of cross entropy on the chosen answers, then four of DPO."""
    pairs, path = root / "pairs", root / f"{name}.toml"
    write_recipe(path, run=root / name, checkpoint=root / "checkpoint", shards=pairs)
    text = path.read_text().replace("steps = 20", "steps = 3")
    stage = text[text.index("[[stages]]") :].replace("learn", "prefer").replace("\nsteps = 3", "\nsteps = 4")
    path.write_text(f"{text}{stage}[stages.objective.dpo]\nbeta = 0.3\n")
    return read_recipe(
        path, "checkpoint.every=2", "checkpoint.keep_last=1", "stages.prefer.schedule.warmup_steps=1", *settings
    )


REFERENCES = {
    "plain": [],
    "averaged": ["stages.learn.ema_decay=0.5", "stages.prefer.ema_decay=0.5"],
    "lora": ["stages.learn.lora.rank=4", "stages.prefer.lora.rank=4", "stages.learn.optimizer.lr=1e-2"],
    "lora-after-all": ["stages.prefer.lora.rank=4"],
}


SLOW = dict.fromkeys(("averaged", "lora", "lora-after-all"), pytest.mark.slow)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in REFERENCES])
def test_the_reference_is_the_model_at_the_start_of_the_stage_also_after_a_resume(root, pairs, name):
    config = two_stages(root, f"two-{name}", *REFERENCES[name])
    train(config, device="cpu")
    found = [record for _, record in sorted(records(config.run).items())]
    assert [record["stage"] for record in found] == ["learn"] * 3 + ["prefer"] * 4
    assert found[0]["loss"] > found[2]["loss"] + 0.1, "the first stage has changed the model"
    assert found[3]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert found[3]["objective"] == pytest.approx(
        {"margin": 0.0, "chosen": 0.0, "rejected": 0.0, "accuracy": found[3]["objective"]["accuracy"]}, abs=1e-4
    )
    shorter = two_stages(root, f"two-{name}-resumed", *REFERENCES[name], "stages.prefer.steps=2")
    train(shorter, device="cpu")
    resumed = two_stages(root, f"two-{name}-resumed", *REFERENCES[name])
    train(resumed, device="cpu")
    assert losses(resumed.run) == losses(config.run)


def test_a_resume_without_the_state_that_the_stage_started_from_says_what_to_do(root, pairs):
    config = two_stages(root, "start-removed", "stages.prefer.steps=2")
    train(config, device="cpu")
    shutil.rmtree(config.run / "state/step-00000003")
    with pytest.raises(UserError, match=r"step-00000003: .*gone.*--set stages\.prefer\.objective\.dpo\.reference="):
        train(two_stages(root, "start-removed"), device="cpu")


def test_validation_reports_the_objective_and_the_cross_entropy_of_chosen_answers(root, pairs):
    config = preference_recipe(
        root, "validated", "stages.0.steps=4", "stages.0.lora.rank=4", "stages.0.optimizer.lr=1e-2",
        "validation.every=4", f'validation.sources=[{{path="{pairs}"}}]', "validation.num_generations=0",
    )  # fmt: skip
    train(config, device="cpu")
    [scores] = [
        json.loads(line)["validation"]
        for line in (config.run / "metrics.jsonl").read_text().splitlines()
        if "validation" in line
    ]
    model = load_model(config.run / "checkpoints" / "step-00000004", device="cpu")
    reference, processor = load_model(root / "checkpoint", device="cpu"), Processor.load(root / "checkpoint")
    index, rules, losses, margins, count = open_index(pairs), TextRules(), 0.0, [], 0
    for shard in range(len(index.shards)):
        for row in index.kept(shard).tolist():
            both = processor(list(preference_pair(index.read_sample(shard, row), rules)))
            with torch.no_grad():
                margins.append(float(direct_preference_loss(model, reference, both, 0.3)[1]))
                chosen = processor([preference_pair(index.read_sample(shard, row), rules)[0]])
                labels = next_token_labels(chosen)
                losses += float(F.cross_entropy(model(chosen), labels, reduction="sum"))
                count += int((labels != IGNORED).sum())
    assert scores["loss"] == pytest.approx(losses / count, rel=1e-3)
    assert scores["objective_margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-3)
    assert scores["objective_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(margins))


def test_data_without_pairs_is_refused_by_a_stage_that_needs_them(root):
    config = recipe(root, "no-pairs", "stages.0.objective.dpo.beta=0.1")
    with pytest.raises(UserError, match=r"bad|no preference pair|no sample"):
        check_run(config, device="cpu")


def test_a_pair_is_its_chosen_conversation_where_pairs_are_not_asked_for(root, pairs):
    _, batches = micro_batches(recipe(root, "sft", f'stages.0.data.sources=[{{path="{pairs}"}}]'))
    ids = torch.cat([batch.labels[batch.labels != IGNORED] for batch in batches])
    text = Processor.load(root / "checkpoint").decode(ids.tolist())
    assert "a b c" in text
    assert "z y x" not in text


# ------------------------------------------------------------------ several ranks


@pytest.mark.slow
def test_objectives_on_two_sharded_or_context_ranks_have_the_losses_of_one(root, pairs):
    """Odd numbers of packed sequences: one rank runs an empty micro-batch."""
    settings = {
        "distil": [f"stages.0.objective.distillation.teacher={teacher_of(root)}"],
        "lora-dpo": [
            "stages.0.objective.dpo.beta=0.3", f'stages.0.data.sources=[{{path="{pairs}"}}]', "stages.0.lora.rank=4",
        ],
    }  # fmt: skip
    common = ["stages.0.steps=3", "stages.0.data.global_batch_size=3"]
    jobs = []
    for name, own in settings.items():
        train(recipe(root, f"{name}-one", *common, *own), device="cpu")
        two = recipe(root, f"{name}-two")
        jobs.append({"recipe": str(two.run.with_suffix(".toml")), "set": [*common, *own]})
        context = recipe(root, f"{name}-context").run.with_suffix(".toml")
        jobs.append({"recipe": str(context), "set": [*common, *own, "parallel.context=2"]})
    # A stage of DPO after another one, begun on one rank and resumed on two.
    after = [
        "stages.learn.lora.rank=4",
        "stages.prefer.lora.rank=4",
        "checkpoint.every=2",
        "stages.prefer.schedule.warmup_steps=1",
    ]
    train(two_stages(root, "after-one", *after), device="cpu")
    train(two_stages(root, "after-two", *after, "stages.prefer.steps=2"), device="cpu")
    jobs.append({"recipe": str(root / "after-two.toml"), "set": after})
    run_together(jobs, root, num_ranks=2)
    for name in (*settings, "after"):
        for ranks in ("two", "context") if name in settings else ("two",):
            assert losses(root / f"{name}-{ranks}") == pytest.approx(losses(root / f"{name}-one"), rel=2e-5), name
            ours, alone = (records(root / f"{name}-{ranks}")[3], records(root / f"{name}-one")[3])
            for metric, value in alone.get("objective", {}).items():
                assert ours["objective"][metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric

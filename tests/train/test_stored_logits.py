"""Distillation from stored logits: with k = vocabulary the loss equals the teacher's, and no teacher is in memory."""

import dataclasses
import shutil

import pytest
import torch
from train.running import (
    losses,
    make_checkpoint,
    read_recipe,
    recipe_in,
    records,
    run_together,
    write_shards,
)
from typer.testing import CliRunner

from saccade.cli import app
from saccade.data.shards import ShardWriter
from saccade.data.toy import toy_sample
from saccade.errors import ConfigError, DataError
from saccade.model import load_model
from saccade.model.initialize import initialize_random, named_size
from saccade.train.batches import BatchIterator, open_stage_stream
from saccade.train.check import check_run
from saccade.train.loss import IGNORED
from saccade.train.objectives.objective import Labelled
from saccade.train.objectives.teacher_logits import compute_teacher_logits
from saccade.train.parallelize import parallelize
from saccade.train.stages import train
from saccade.world import World

CPU = World(0, 1, 0, torch.device("cpu"))
VOCABULARY = 320


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    make_checkpoint(folder / "checkpoint")
    write_shards(folder / "shards", 40, text_every=3)
    write_shards(folder / "held-out", 6)
    size = named_size("tiny")
    language = dataclasses.replace(size.language, num_layers=3)
    initialize_random(folder / "teacher", dataclasses.replace(size, language=language), dtype=torch.float32, seed=1)
    return folder


def recipe(root, name, *settings, top_k=None):
    distillation = {"teacher": root / "teacher", "kl_weight": 0.7, "temperature": 2.0}
    distillation |= {} if top_k is None else {"top_k": top_k}
    own = [f"stages.0.objective.distillation.{key}={value}" for key, value in distillation.items()]
    return read_recipe(recipe_in(root, name), *own, *settings)


def first_step(config):
    """(terms, model, micro-batch) of the recipe's first micro-batch."""
    stage = config.stages[0]
    built = parallelize(config.model.folder, stage, config.parallel, CPU, dtype=config.model.dtype, seed=config.seed)
    with open_stage_stream(config, stage) as stream:
        batches = BatchIterator(stream, built.model.config, (), CPU.device, built.module.objective)
        [batch, *_] = batches.next(with_sources=False).on_device
    labelled = Labelled(batch.inputs, batch.labels, batch.num_loss_tokens, targets=batch.targets)
    hidden = built.model.hidden_states(batch.inputs)
    count = torch.tensor(float(batch.num_loss_tokens))
    return built.module.objective.loss(built.model, hidden, labelled, count), built.model, batch


def test_with_k_of_the_vocabulary_loss_and_gradients_are_those_of_the_teacher(root):
    stored = recipe(root, "all", top_k=VOCABULARY)
    compute_teacher_logits(stored, device="cpu")
    found = []
    for config in (stored, recipe(root, "online")):
        terms, model, _ = first_step(config)
        terms.total.backward()
        sums = {name: float(value) for name, value in terms.metrics.items()}
        found.append((float(terms.total.detach()), sums, {name: p.grad for name, p in model.named_parameters()}))
    (loss, sums, gradients), (expected, expected_sums, expected_gradients) = found
    assert loss == pytest.approx(expected, rel=1e-6)
    assert sums == pytest.approx(expected_sums, rel=1e-5)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected_gradients[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("chunk_rows", [1000, 7])
def test_all_other_tokens_count_as_one(root, monkeypatch, chunk_rows):
    monkeypatch.setattr("saccade.train.objectives.chunks.CHUNK_BYTES", 4 * VOCABULARY * chunk_rows)
    config = recipe(root, "few", top_k=8)
    compute_teacher_logits(config, device="cpu")
    terms, model, batch = first_step(config)
    rows = batch.labels != IGNORED
    with torch.no_grad():
        taught = load_model(root / "teacher", device="cpu")(batch.inputs)[rows]
        p, q = (torch.softmax(logits / 2, 1) for logits in (taught, model(batch.inputs)[rows]))
    top = p.topk(8, dim=1).indices
    p_top, q_top = p.gather(1, top), q.gather(1, top)
    p_rest, q_rest = 1 - p_top.sum(1), 1 - q_top.sum(1)
    expected = 4 * ((p_top * (p_top / q_top).log()).sum(1) + p_rest * (p_rest / q_rest).log())
    assert float(terms.metrics["kl"]) == pytest.approx(float(expected.sum()), rel=1e-4)
    whole = 4 * (p * (p / q).log()).sum()
    assert 0 < float(terms.metrics["kl"]) < float(whole)


def test_a_run_has_the_losses_of_one_with_its_teacher_and_holds_none(root, monkeypatch):
    settings = [
        "stages.0.steps=3",
        "validation.every=3",
        f'validation.sources=[{{path="{root / "held-out"}"}}]',
        "validation.num_generations=0",
    ]
    stored = recipe(root, "run-stored", *settings, top_k=VOCABULARY)
    compute_teacher_logits(stored, device="cpu")
    online = recipe(root, "run-online", *settings)
    train(online, device="cpu")
    monkeypatch.setattr(
        "saccade.train.objectives.build.load_model", lambda *_, **__: pytest.fail("a teacher is loaded")
    )
    train(stored, device="cpu")
    assert losses(stored.run) == pytest.approx(losses(online.run), rel=1e-5)
    last, expected = (records(one.run)[3] for one in (stored, online))
    assert last["objective"] == pytest.approx(expected["objective"], rel=1e-4)


def test_every_caption_of_a_sample_has_its_own_logits(root):
    """The caption changes with the epoch."""
    shards = root / "captions"
    with ShardWriter(shards, max_samples=4) as writer:
        for number in range(4):
            sample = toy_sample(number, side=56)
            members = {name: data for name, data in sample.members.items() if not name.endswith("json")}
            members["json"] = b'{"captions": ["a red square", "two green circles in a row", "blue"]}'
            writer.write(dataclasses.replace(sample, members=members))
    config = recipe(root, "captions-run", f'stages.0.data.sources=[{{path="{shards}"}}]', "stages.0.steps=4", top_k=4)
    [line] = compute_teacher_logits(config, device="cpu")
    assert "1 shards" in line
    train(config, device="cpu")
    assert len(losses(config.run)) == 4


def test_samples_in_folders_of_their_shard_have_their_logits(root):
    """The key of a sample is its path in the tar up to the first dot of the file's name."""
    with ShardWriter(root / "nested", max_samples=4) as writer:
        for number in range(6):
            sample = toy_sample(number, side=56)
            writer.write(dataclasses.replace(sample, key=f"photos/{number % 2}/{number}"))
    settings = [f'stages.0.data.sources=[{{path="{root / "nested"}"}}]', "stages.0.steps=3"]
    config = recipe(root, "nested-run", *settings, top_k=4)
    compute_teacher_logits(config, device="cpu")
    train(config, device="cpu")
    assert len(losses(config.run)) == 3


def test_a_longer_maximum_length_computes_what_was_too_long_and_a_shorter_one_nothing(root):
    shards = write_shards(root / "lengths", 12, text_every=3)

    def of(max_seq_len):
        settings = [f'stages.0.data.sources=[{{path="{shards}"}}]', f"stages.0.data.max_seq_len={max_seq_len}"]
        return recipe(root, "lengths-run", *settings, "stages.0.steps=3", "stages.0.data.max_bad_share=1", top_k=4)

    [line] = compute_teacher_logits(of(100), device="cpu")
    assert int(line.split(" loss tokens")[0].split()[-1]) > 0
    with pytest.raises(DataError, match=r"1 of 1 shards have no logits.*--teacher-logits"):
        check_run(of(240), device="cpu")
    assert "1 shards" in compute_teacher_logits(of(240), device="cpu")[0]
    for max_seq_len in (240, 100, 4000):
        check_run(of(max_seq_len), device="cpu")
    train(of(240), device="cpu")
    assert len(losses(root / "lengths-run")) == 3


def logits_files(root, folder="shards"):
    return sorted((root / folder / "index").glob("logits-*/*.safetensors"))


def test_finished_shards_are_kept_and_missing_ones_are_named(root):
    config = recipe(root, "resumed", top_k=3)
    before = set(logits_files(root))
    assert "3 shards" in compute_teacher_logits(config, device="cpu")[0]
    new = sorted(set(logits_files(root)) - before)
    assert len(new) == 3
    check_run(config, device="cpu")
    stamps = [file.stat().st_mtime_ns for file in new]
    new[1].unlink()
    with pytest.raises(DataError, match=r"1 of 3 shards have no logits.*--teacher-logits"):
        check_run(config, device="cpu")
    assert "1 shards" in compute_teacher_logits(config, device="cpu")[0]
    assert [file.stat().st_mtime_ns for file in (new[0], new[2])] == [stamps[0], stamps[2]]
    check_run(config, device="cpu")


@pytest.mark.parametrize("change", ["teacher", "tokenizer", "temperature", "top_k"])
def test_logits_of_another_teacher_tokenizer_or_setting_are_not_read(root, tmp_path, change):
    compute_teacher_logits(recipe(root, "named", top_k=2), device="cpu")
    check_run(recipe(root, "named", top_k=2), device="cpu")
    settings = []
    if change == "teacher":
        size = named_size("tiny")
        initialize_random(tmp_path / "teacher", size, dtype=torch.float32, seed=2)
        settings = [f"stages.0.objective.distillation.teacher={tmp_path / 'teacher'}"]
    elif change == "tokenizer":
        for name in ("checkpoint", "teacher"):
            folder = shutil.copytree(root / name, tmp_path / name)
            text = (folder / "chat_template.jinja").read_text()
            (folder / "chat_template.jinja").write_text(text.replace("helpful", "kind"))
        settings = [f"model.folder={tmp_path / 'checkpoint'}"]
    elif change == "temperature":
        settings = ["stages.0.objective.distillation.temperature=1.0"]
    with pytest.raises(DataError, match="have no logits of the teacher"):
        check_run(recipe(root, "named", *settings, top_k=5 if change == "top_k" else 2), device="cpu")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["stages.0.objective.distillation.hidden_weight=0.1"], "stores no hidden states"),
        (["stages.0.data.augment.flip=0.5"], "not augmented"),
        (["stages.0.data.token_dropout=0.1"], "not replaced"),
        (["stages.0.objective.distillation.top_k=0"], "1 or more"),
    ],
)
def test_what_cannot_be_stored_is_refused(root, settings, words):
    with pytest.raises(ConfigError, match=words):
        recipe(root, "refused", *settings, top_k=None if "top_k" in settings[0] else 4)


def test_the_command_computes_them(root):
    config = recipe(root, "command", top_k=1)
    settings = ["teacher", "top_k"]
    values = [
        f"stages.0.objective.distillation.{key}={getattr(config.stages[0].objective.distillation, key)}"
        for key in settings
    ]
    arguments = ["train", str(root / "command.toml"), "--device", "cpu", "--teacher-logits"]
    result = CliRunner().invoke(app, [*arguments, *(part for value in values for part in ("--set", value))])
    assert result.exit_code == 0, result.output
    assert "loss tokens computed" in result.output
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code != 0
    assert "top_k" in str(result.exception)


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(root):
    """One micro-batch of three is empty on the second rank."""
    settings = ["stages.0.steps=3", "stages.0.data.global_batch_size=3"]
    one = recipe(root, "one-rank", *settings, top_k=6)
    compute_teacher_logits(one, device="cpu")
    train(one, device="cpu")
    recipe(root, "two-ranks")
    own = {"teacher": root / "teacher", "kl_weight": 0.7, "temperature": 2.0, "top_k": 6}
    own = [f"stages.0.objective.distillation.{key}={value}" for key, value in own.items()]
    recipe(root, "context")
    jobs = [
        {"recipe": str(root / "two-ranks.toml"), "set": [*settings, *own]},
        {"recipe": str(root / "context.toml"), "set": [*settings, *own, "parallel.context=2"]},
    ]
    run_together(jobs, root, num_ranks=2)
    for name in ("two-ranks", "context"):
        assert losses(root / name) == pytest.approx(losses(one.run), rel=2e-5)

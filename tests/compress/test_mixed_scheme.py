"""Picked schemes against uniform ones, on a trained model."""

from dataclasses import replace

import pytest
import torch

from saccade.compress import compress, mixed_scheme
from saccade.compress.calibration import CalibrationConfig, load_batches
from saccade.compress.mixed_scheme import Picker, scheme_of
from saccade.compress.original import Original
from saccade.compress.scheme import BUILT_IN
from saccade.compress.sensitivity import CANDIDATES, measure_sensitivity
from saccade.compress.verify import Reference
from saccade.errors import ConfigError
from saccade.evaluate.statistics import paired_difference, ratio_metric
from saccade.model import load_model
from saccade.model.families import named_sizes
from saccade.model.initialize import initialize_random, named_size
from saccade.processor import Processor


@pytest.fixture(scope="module")
def calibration(trained):
    return CalibrationConfig(shards=(str(trained / "train"),), num_samples=16)


@pytest.fixture(scope="module")
def picker(trained, calibration):
    return Picker(trained / "checkpoint", calibration, trained, device="cpu")


def samples(trained, config):
    return load_batches(config, Processor.load(trained / "checkpoint"), 320)


def uniform_trials(picker):
    return {scheme.name: trial for scheme, trial in picker.trials.items() if scheme.name in BUILT_IN}


@pytest.mark.slow
def test_what_is_picked_is_no_larger_than_any_uniform_scheme_of_its_size_and_no_further_from_the_original(picker):
    uniform = uniform_trials(picker)
    assert uniform.keys() == BUILT_IN.keys()
    for target in (uniform[name].ratio for name in ("int8-gptq", "w4a16-gptq")):
        picked = picker.trials[picker.within_size(target)]
        assert picked.ratio <= target
        for trial in uniform.values():
            assert trial.ratio > target or picked.fidelity.kl <= trial.fidelity.kl, trial.scheme.name


@pytest.mark.slow
def test_on_held_out_samples_it_is_not_worse_either(picker, trained, calibration, tmp_path):
    held_out = CalibrationConfig(shards=(str(trained / "held-out"),), num_samples=48)
    reference = Reference(load_model(trained / "checkpoint", device="cpu"), samples(trained, held_out))
    best = min(uniform_trials(picker).values(), key=lambda trial: trial.fidelity.kl)
    picked = picker.within_size(best.ratio)
    assert picked.name not in BUILT_IN
    kl = []
    for number, scheme in enumerate((picked, best.scheme)):
        out = tmp_path / str(number)
        compress(trained / "checkpoint", out, scheme=scheme, calibration=calibration, device="cpu")
        model = load_model(out, device="cpu")
        sums = reference.kl_by_conversation(model)
        assert sums.shape == (48, 2)
        assert float(sums[:, 0].sum() / sums[:, 1].sum()) == pytest.approx(reference.compare(model).kl, rel=1e-9)
        kl.append(ratio_metric(*sums.T.numpy()))
    change = paired_difference(*kl, [str(number) for number in range(48)])
    assert change.low <= 0, change


@pytest.mark.parametrize("name", ["int8-gptq", "w4a16-awq"])
def test_a_map_that_is_uniform_gives_the_folder_of_the_uniform_scheme(name, picker, trained, calibration, tmp_path):
    uniform, sensitivity = BUILT_IN[name], picker.sensitivity
    chosen = {}
    for group, options in sensitivity.candidates.items():
        rule = uniform.rule(sensitivity.projections[group][0])
        wanted = (
            ("keep", "rtn", None) if rule is None else (rule.form, rule.method, 128 if rule.form == "int4" else None)
        )
        chosen[group] = replace(options[0], **dict(zip(("form", "method", "group_size"), wanted, strict=True)))
    same = scheme_of(chosen, sensitivity, name="map")
    folders = [tmp_path / "uniform", tmp_path / "map"]
    for folder, scheme in zip(folders, (uniform, same), strict=True):
        compress(trained / "checkpoint", folder, scheme=scheme, calibration=calibration, device="cpu")
    for file in ("model.safetensors", "config.json"):
        assert len({(folder / file).read_bytes() for folder in folders}) == 1


@pytest.mark.parametrize(
    ("methods", "factor"), [({"int8": "gptq", "int4": "gptq"}, 1.2), ({"int8": "smoothquant", "int4": "awq"}, 3.0)]
)
def test_a_group_costs_alone_what_it_costs_in_a_folder(methods, factor, trained, calibration, tmp_path):
    """Results agree up to sums in another order: if two scales of inputs are equally good, either may be found."""
    checkpoint = trained / "checkpoint"
    model, source, batches = load_model(checkpoint, device="cpu"), Original(checkpoint), samples(trained, calibration)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    group = "language.layers.1.self_attn.q_proj+k_proj+v_proj"
    source.blocks = {"language.layers.1": source.blocks["language.layers.1"]}
    sensitivity = measure_sensitivity(source, model, batches, methods)
    assert len(sensitivity.candidates) == 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    one = sensitivity.candidates[group][-1]
    assert (one.form, one.method, one.group_size) == ("int4", methods["int4"], 128)
    scheme = scheme_of({group: one}, sensitivity, name="alone")
    compress(checkpoint, tmp_path / "out", scheme=scheme, calibration=calibration, device="cpu")
    in_folder = Reference(model, batches).compare(load_model(tmp_path / "out", device="cpu")).kl
    assert one.kl / factor < in_folder < one.kl * factor


def test_the_smallest_map_within_a_loss_is_picked(picker, monkeypatch):
    monkeypatch.setattr(mixed_scheme, "_BISECTIONS", 3)
    picked = picker.trials[picker.within_loss(0.002)]
    assert picked.fidelity.perplexity_increase <= 0.002
    smaller = [trial for trial in uniform_trials(picker).values() if trial.ratio <= picked.ratio]
    assert all(
        trial.fidelity.perplexity_increase > 0.002 or trial.fidelity.kl >= picked.fidelity.kl for trial in smaller
    )
    with pytest.raises(ConfigError, match="every mixed scheme loses more"):
        picker.within_loss(-1.0)


@pytest.mark.parametrize("size", [size for size in named_sizes() if size.endswith("/tiny")])
def test_the_rules_of_a_map_are_about_the_projections_of_their_groups(size, tmp_path):
    from saccade.compress.sensitivity import Candidate, Sensitivity, _groups

    initialize_random(tmp_path / "model", named_size(size))
    source = Original(tmp_path / "model")
    groups = _groups(source)
    assert sorted(name for names in groups.values() for name in names) == sorted(source.plain_projections())
    sensitivity = Sensitivity(candidates={}, projections=groups, other_bytes=0)
    chosen = {}
    for number, group in enumerate(groups):
        form, group_size = CANDIDATES[number % len(CANDIDATES)]
        chosen[group] = Candidate(group=group, form=form, group_size=group_size, num_bytes=0, kl=0.0, loss_change=0.0)
    rules = source.rules(scheme_of(chosen, sensitivity, name="map"))
    for group, one in chosen.items():
        assert {(rules[name].form, rules[name].group_size) for name in groups[group]} == {(one.form, one.group_size)}

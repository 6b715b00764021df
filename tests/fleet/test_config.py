"""FLEET.toml: what it says, and what is refused in one line."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from saccade.config import describe_keys, load_config, write_config
from saccade.engine.config import EngineConfig
from saccade.errors import ConfigError
from saccade.fleet.config import EncoderPool, FleetConfig, ModelConfig, Pool, VersionConfig
from saccade.fleet.experiments import Experiment, Variant
from saccade.fleet.probes import Probe
from saccade.serve.config import ServeConfig

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fleet.toml"


def version(name="v1", **fields):
    return VersionConfig(**({"name": name, "checkpoint": "checkpoint", "traffic": 100} | fields))


def model(name="assistant", **fields):
    return ModelConfig(**({"name": name, "versions": (version(),)} | fields))


def test_the_example_loads_and_survives_a_round_trip(tmp_path):
    config = load_config(FleetConfig, EXAMPLE)
    write_config(config, tmp_path / "fleet.toml")
    assert load_config(FleetConfig, tmp_path / "fleet.toml") == config


def test_the_reference_page_of_fleet_keys_is_current():
    page = (ROOT / "docs" / "fleet-keys.md").read_text()
    assert page == describe_keys(FleetConfig), "run: saccade fleet check --keys > docs/fleet-keys.md"


def test_an_unknown_key_is_refused_with_the_nearest(tmp_path):
    file = tmp_path / "fleet.toml"
    file.write_text(EXAMPLE.read_text().replace("traffic =", "trafic ="))
    with pytest.raises(ConfigError, match=r"unknown key models\[0\].versions\[0\].trafic. Did you mean traffic"):
        load_config(FleetConfig, file)


def experiment(name="colours", versions=("v1", "v2"), **fields):
    variants = tuple(Variant(name=f"with {one}", version=one) for one in versions)
    return Experiment(**({"name": name, "variants": variants} | fields))


V1, V2 = version(traffic=50), version("v2", traffic=50)
TWO = {"versions": (V1, V2), "engines": Pool(max_replicas=2)}
REFUSED = {
    "images that an engine would decode itself": (
        lambda: FleetConfig(name="f", models=(model(versions=(version(engine=EngineConfig(num_workers=0)),)),)),
        "'v1' of model 'assistant' has engine.num_workers 0: images of clients are decoded in worker processes",
    ),
    "two versions with one name": (
        lambda: model(versions=(V1, V1)),
        "versions of model 'assistant': the name 'v1' is used twice",
    ),
    "traffic below 100": (
        lambda: model(versions=(V1, version("v2", traffic=40))),
        r"sums to 90 \(v1 50, v2 40\). Make it 100",
    ),
    "no versions": (lambda: model(versions=()), r"sums to 0 \(no versions\)"),
    "negative traffic": (lambda: version(traffic=-1), "use percent from 0 to 100"),
    "fewer replicas than versions": (
        lambda: model(versions=(V1, V2)),
        "has 2 versions with traffic or in experiments, and engines.max_replicas is 1",
    ),
    "adapters without slots": (lambda: version(adapters={"a": "runs/a"}), "Set engine.max_adapters to 1"),
    "two GPUs for an engine": (lambda: version(gpus_per_replica=2), "an engine uses one GPU"),
    "an empty checkpoint": (lambda: version(checkpoint=""), "has an empty checkpoint"),
    "a name with a space": (lambda: model("my model"), "model name 'my model'"),
    "bounds in the wrong order": (lambda: Pool(min_replicas=3, max_replicas=2), "above max_replicas 2"),
    "no replicas at all": (lambda: Pool(min_replicas=0, max_replicas=0), "use 0 or more, and 1 or more"),
    "negative CPUs": (lambda: Pool(cpus_per_replica=-1), "cpus_per_replica is -1"),
    "two models with one name": (
        lambda: FleetConfig(name="f", models=(model(), model())),
        "models and adapters: the name 'assistant' is used twice",
    ),
    "an adapter called like a model": (
        lambda: FleetConfig(
            name="f",
            models=(
                model(
                    versions=(version(adapters={"assistant": "runs/a"}, engine=EngineConfig(max_adapters=1)),),
                ),
            ),
        ),
        "the name 'assistant' is used twice",
    ),
    "no models": (lambda: FleetConfig(name="f", models=()), "Add a \\[\\[models\\]\\] section"),
    "no front": (lambda: FleetConfig(name="f", models=(model(),), front=Pool(min_replicas=0)), "front.min_replicas"),
    "a setting of a single server": (
        lambda: FleetConfig(name="f", models=(model(),), server=ServeConfig(model_name="x")),
        "server.model_name applies to a single server",
    ),
    "a probe that accepts anything": (lambda: Probe(name="p", question="?"), "accepts any answer"),
    "a schema that is no JSON": (lambda: Probe(name="p", question="?", schema="{"), "schema is not JSON"),
    "an experiment with an unknown version": (
        lambda: model(**TWO, experiments=(experiment(versions=("v1", "v3")),)),
        "experiment 'colours' has version 'v3', and model 'assistant' has v1, v2",
    ),
    "two experiments with one name": (
        lambda: model(**TWO, experiments=(experiment(), experiment())),
        "experiments of model 'assistant': the name 'colours' is used twice",
    ),
    "an experiment after one with all users": (
        lambda: model(**TWO, experiments=(experiment("first"), experiment("second", share=0.5))),
        "experiment 'second' has no users: one before it has all",
    ),
    "an experiment with a name of two words": (
        lambda: model(**TWO, experiments=(experiment("two words"),)),
        "experiment name 'two words'",
    ),
    "an experiment with one variant": (lambda: experiment(versions=("v1",)), "Use two or more"),
    "an experiment without users": (lambda: experiment(share=0), "share is 0. Use a share above 0"),
    "an experiment with more than all users": (lambda: experiment(share=20), "share is 20. Use a share above 0"),
    "more versions in experiments than replicas": (
        lambda: model(versions=(version(), version("v2", traffic=0)), experiments=(experiment(),)),
        "has 2 versions with traffic or in experiments, and engines.max_replicas is 1",
    ),
    "a schema that is a list": (lambda: Probe(name="p", question="?", schema="[]"), "use a JSON object"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_could_not_run_is_refused(case):
    make, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        make()


def test_an_experiment_of_a_file_is_read_and_one_with_an_unknown_metric_or_key_is_refused(command, tmp_path):
    file = tmp_path / "fleet.toml"
    variants = '{ name = "a", version = "v1" }, { name = "b", version = "v1", proportion = 3 }'
    for more, expected in (
        ("share = 0.2", None),
        ('metrics = ["thumbs"]', r"models\[0\].experiments\[0\].metrics\[0\] = 'thumbs' is not one of 'errors'"),
        ("shares = 0.2", "Did you mean share"),
    ):
        file.write_text(f'{EXAMPLE.read_text()}\n[[models.experiments]]\nname = "e"\nvariants = [{variants}]\n{more}\n')
        if expected is None:
            [one] = load_config(FleetConfig, file).models[0].experiments
            assert (one.share, [variant.proportion for variant in one.variants]) == (0.2, [1.0, 3.0])
            assert "experiment e  20 % of users: a (v1), b (v1)" in command("fleet", "check", str(file)).out
        else:
            with pytest.raises(ConfigError, match=expected):
                load_config(FleetConfig, file)


def test_versions_of_a_model_may_share_an_adapter_name():
    both = [replace(one, adapters={"a": "runs/a"}, engine=EngineConfig(max_adapters=1)) for one in (V1, V2)]
    fleet = FleetConfig(name="f", models=(model(versions=tuple(both), engines=Pool(max_replicas=2)),))
    assert fleet.served_names == ("assistant", "a")


def test_resources_count_every_live_version_and_every_pool():
    versions = (version(traffic=60, gpus_per_replica=0.5), version("v2", traffic=0), version("v3", traffic=40))
    versions += (version("v4", traffic=0),)  # v2 runs for an experiment, v4 for nothing
    served = model(
        experiments=(experiment(),),
        versions=versions,
        engines=Pool(min_replicas=1, max_replicas=4, cpus_per_replica=8),
        encoders=EncoderPool(max_replicas=2, cpus_per_replica=2),
    )
    least, most = FleetConfig(name="f", models=(served,), front=Pool(max_replicas=3)).resources()
    assert (least.cpus, least.gpus) == (1 + 3 * 8, 2.5)
    assert (most.cpus, most.gpus) == (3 + 4 * 8 + 2 * 2, 0.5 + 3 * 1 + 2)


def test_a_pool_at_zero_reserves_nothing():
    fleet = FleetConfig(name="f", models=(model(engines=Pool(min_replicas=0)),))
    assert fleet.resources()[0].gpus == 0


def test_a_probe_accepts_its_answers_and_json():
    stop = Probe(name="p", question="?", answers=("stop",))
    assert stop.accepts(" STOP. ")
    assert not stop.accepts("go")
    structured = Probe(name="p", question="?", schema="{}")
    assert structured.accepts('{"a": 1}')
    assert not structured.accepts("stop")


def test_the_check_names_the_fleet_what_it_reserves_and_what_is_not_here(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ended = command("fleet", "check", str(EXAMPLE))
    assert ended.status == 0, ended.err
    assert "v1  100 % of traffic  checkpoint" in ended.out
    assert "reserves 1.5 to 2 CPUs, 0 GPUs" in ended.out
    assert "note: checkpoint is not on this machine" in ended.out
    (tmp_path / "checkpoint").mkdir()
    record = json.loads(command("fleet", "check", str(EXAMPLE), "--json").out)
    assert record["config"]["name"] == "laptop"
    assert record["resources"]["most"] == {"cpus": 2.0, "gpus": 0.0}
    assert record["not_here"] == []


def test_a_fleet_that_does_not_exist_is_one_line(command):
    assert "no such file" in command("fleet", "check", "nothing.toml").err
    assert "Give a file such as examples/fleet.toml" in command("fleet", "check").err

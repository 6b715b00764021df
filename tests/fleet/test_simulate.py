"""Simulation: every request ends, times follow the cost model, and routing by content beats simpler policies."""

import json
from pathlib import Path

import pytest

from saccade.config import load_config
from saccade.errors import ConfigError, DataError
from saccade.fleet.config import FleetConfig
from saccade.fleet.costs import H200_8B
from saccade.fleet.replicas import PREFIX_BLOCK, Image, RoutedRequest
from saccade.fleet.simulate import POLICIES, simulate
from saccade.fleet.simulated_encoders import SimulatedEncoders
from saccade.fleet.simulated_engine import Progress, SimulatedEngine
from saccade.fleet.workloads import VERSION, WORKLOADS, read_trace, simulated_replicas

EXAMPLE = Path(__file__).parents[2] / "examples" / "fleet.toml"
LINE = '{"time": 0.5, "text": 300, "output": 64, "images": [["a", 1764]], "prefix": ["p"]}\n'


def replicas(count):
    return simulated_replicas(load_config(FleetConfig, EXAMPLE).models[0], count)


def request(number, *, images=(), prefix=(), tokens=1000, output=11):
    return RoutedRequest(
        id=str(number), version=VERSION, prompt_tokens=tokens, output_tokens=output, images=images, prefix=prefix
    )


def finish(engine):
    """Run an engine until it has nothing to do."""
    while (when := engine.next_event()) < float("inf"):
        engine.advance(when)


def test_one_request_takes_the_time_of_the_cost_model():
    [replica] = replicas(1)
    engine, progress = SimulatedEngine(replica), Progress(request(0, images=(Image(b"a", 1764, 441),)), 0.0)
    engine.accept(progress)
    finish(engine)
    assert progress.first_token == pytest.approx(H200_8B.work_s(1764, 1000))
    assert progress.end - progress.first_token == pytest.approx(10 * H200_8B.step_s)


def test_what_is_cached_is_not_computed_again():
    engine, image, prefix = SimulatedEngine(replicas(1)[0]), (Image(b"a", 1764, 441),), (b"0", b"1")
    first, second, other = (Progress(request(number, images=image), 0.0) for number in range(3))
    first.request = request(0, images=image, prefix=prefix)
    second.request = request(1, images=image, prefix=prefix)
    for progress in (first, second, other):
        progress.arrived = engine.now
        engine.accept(progress)
        finish(engine)
    assert [one.resident_images for one in (first, second, other)] == [0, 1, 1]
    assert second.first_token - second.arrived == pytest.approx(H200_8B.work_s(0, 1000 - 2 * PREFIX_BLOCK))
    assert other.first_token - other.arrived == pytest.approx(H200_8B.work_s(0, 1000))


def test_prompts_are_slower_while_requests_decode_and_tokens_while_prompts_are_computed():
    engine = SimulatedEngine(replicas(1)[0])
    long, short = Progress(request(0, output=1000), 0.0), Progress(request(1, tokens=4000), 0.0)
    engine.accept(long)
    engine.advance(engine.next_event())
    begun = engine.now
    engine.accept(short)
    finish(engine)
    assert short.first_token - begun == pytest.approx(H200_8B.work_s(0, 4000) / H200_8B.prompt_share(1))
    assert long.end - long.first_token > 999 * H200_8B.step_s


def test_an_engine_that_computes_prompts_gets_images_from_encoder_replicas():
    [replica] = replicas(1)
    encoders = SimulatedEncoders(1, H200_8B, replica.cached_patches)
    engine = SimulatedEngine(replica, encoders)
    text, image = Progress(request(0), 0.0), Progress(request(1, images=(Image(b"a", 1764, 441),)), 0.0)
    engine.accept(text)
    engine.accept(image)
    finish(engine)
    assert image.pooled == {b"a"}
    assert encoders.busy_s == pytest.approx(1764 * H200_8B.patch_s)
    alone = H200_8B.work_s(0, 1000)
    assert image.first_token == pytest.approx(alone + alone / H200_8B.prompt_share(1))


def test_an_idle_engine_encodes_an_image_earlier_than_encoder_replicas():
    [replica] = replicas(1)
    encoders = SimulatedEncoders(4, H200_8B, replica.cached_patches)
    engine, progress = SimulatedEngine(replica, encoders), Progress(request(0, images=(Image(b"a", 1764, 441),)), 0.0)
    engine.accept(progress)
    finish(engine)
    assert not progress.pooled
    assert encoders.busy_s == 0
    assert progress.first_token == pytest.approx(H200_8B.work_s(1764, 1000))


def test_a_prompt_that_waits_for_features_lets_others_pass():
    [replica] = replicas(1)
    engine = SimulatedEngine(replica, SimulatedEncoders(3, H200_8B, replica.cached_patches))
    images = tuple(Image(bytes([number]), 40_000, 10_000) for number in range(3))
    large, small = Progress(request(0, images=images, tokens=30_000), 0.0), Progress(request(1), 0.0)
    engine.accept(large)
    engine.accept(small)
    finish(engine)
    assert len(large.pooled) == 3
    assert small.first_token == pytest.approx(H200_8B.work_s(0, 1000))
    assert large.first_token > large.ready_at > small.first_token


def test_features_that_encoder_replicas_keep_are_not_encoded_again():
    encoders = SimulatedEncoders(1, H200_8B, 2000)
    first, second = [Image(b"a", 1764, 441)], [Image(b"b", 1764, 441)]
    ready = encoders.encode(first, 0.0)
    assert encoders.encode(first, 1.0) == pytest.approx(1.0 + ready - 1764 * H200_8B.patch_s)
    encoders.encode(second, 2.0)  # there is room for one
    assert encoders.ready_at(first, 3.0) == pytest.approx(3.0 + ready)
    assert encoders.busy_s == pytest.approx(2 * 1764 * H200_8B.patch_s)


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_ends_under_every_policy(workload, policy):
    arrivals = list(WORKLOADS[workload](20.0, 200, 1))
    result = simulate(arrivals, replicas(4), policy)
    assert result.requests == 200
    assert 0 < result.ttft_p50_s <= result.ttft_p90_s <= result.ttft_p99_s
    assert result.max_over_mean_load >= 1
    assert (result.image_hit_rate or 0) <= 0.9
    assert simulate(arrivals, replicas(4), policy) == result
    assert simulate(arrivals, replicas(3), policy, num_encoders=1).requests == 200


def test_workloads_have_the_rate_and_the_sizes_that_they_name():
    groups = list(WORKLOADS["image-groups"](40.0, 3000, 0))
    assert groups[-1].time == pytest.approx(3000 / 40, rel=0.1)
    assert {one.request.prompt_tokens for one in groups} == {3 * 920 + 1300}
    assert len({image.key for one in groups for image in one.request.images}) == 3 * 600
    for workload in WORKLOADS.values():
        for one in workload(10.0, 300, 0):
            assert len(one.request.prefix) * PREFIX_BLOCK <= one.request.prompt_tokens
            assert all(image.end <= one.request.prompt_tokens for image in one.request.images)


def test_image_groups_are_routed_almost_as_well_as_by_an_oracle():
    arrivals = list(WORKLOADS["image-groups"](40.0, 1500, 0))
    results = {policy: simulate(arrivals, replicas(8), policy) for policy in POLICIES}
    oracle, ours = results["oracle"], results["expected-finish"]
    assert ours.image_hit_rate >= 0.95 * oracle.image_hit_rate
    assert ours.max_over_mean_load <= 1.25
    for other in ("round-robin", "power-of-two"):
        assert ours.ttft_p90_s < 0.7 * results[other].ttft_p90_s


def test_a_trace_is_read_and_bad_lines_are_named(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(LINE.replace("0.5", "1.5") + LINE)
    first, second = read_trace(file)
    assert (first.time, second.time) == (0.5, 1.5)
    assert first.request.images == (Image(b"a", 1764, 441),)
    assert first.request.prompt_tokens == 741
    for bad in ("no JSON", "[]", '{"time": 1}', LINE.replace("300", '"x"'), LINE.replace('["p"]', '["p","q","r"]')):
        file.write_text(LINE + bad)
        with pytest.raises(DataError, match="line 2"):
            read_trace(file)
    file.write_text("")
    with pytest.raises(DataError, match="no requests"):
        read_trace(file)
    with pytest.raises(ConfigError, match="Give a file of JSON lines"):
        read_trace(tmp_path / "nothing")


def test_the_command_prints_a_row_per_policy(command, tmp_path):
    words = ("fleet", "simulate", str(EXAMPLE), "--requests", "40", "--rate", "10")
    ended = command(*words)
    assert ended.status == 0, ended.err
    assert [line.split()[0] for line in ended.out.splitlines()[2:]] == list(POLICIES)
    file = tmp_path / "trace.jsonl"
    file.write_text(LINE * 3)
    record = json.loads(command("fleet", "simulate", str(EXAMPLE), "--trace", str(file), "--json").out)
    assert (record["replicas"], record["requests"]) == (2, 3)
    assert [one["policy"] for one in record["policies"]] == list(POLICIES)
    pooled = command(*words, "--encoders", "2")
    assert ("pooled" in ended.out, "pooled" in pooled.out) == (False, True)
    assert "Use one of image-groups" in command(*words, "--workload", "other").err
    assert "Models: tiny" in command(*words, "--model", "other").err


def test_replicas_have_the_caches_of_the_file():
    [replica] = replicas(1)
    assert (replica.cached_patches, replica.cached_tokens) == (65536 * 4, 700_000)

"""A fleet on a real Ray: its processes are killed, its versions updated, and its commands run."""

import base64
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest
import torch
from PIL import Image

from bench.fleet_process import FleetProcess
from saccade.model.initialize import initialize_random, named_size

TIMEOUT_S = 120
ENGINE, ENCODER = "ServeReplica:test:engine:tiny:v1:engine", "ServeReplica:test:engine:tiny:v1:encoder"
DICE = json.dumps({"type": "array", "items": {"enum": [1, 2, 3, 4, 5, 6]}, "minItems": 6, "maxItems": 6})
COSTS = """
[models.versions.costs]
patch_s = 1e-3
token_s = 1e-5
request_s = 1e-3
step_s = 1e-3
step_request_s = 0.0
target_step_s = 0.0
"""
MODEL = f"""
encoders = {{ min_replicas = 1, max_replicas = 1, cpus_per_replica = 0.1, gpus_per_replica = 0 }}
rollout = {{ ramp = [50, 100], hold_s = 1, min_requests = 0, settle_s = 0 }}

[[models.probes]]
name = "dice"
question = "Throw six dice."
schema = {json.dumps(DICE)}
max_tokens = 200
"""
WRONG_PROBE = 'answers = ["[7, 7, 7, 7, 7, 7]"]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def checkpoints(folder):
    """Checkpoints with different weights. Those of the first answer the probe."""
    for seed in (1, 2):
        initialize_random(folder / f"tiny-{seed}", named_size("tiny"), dtype=torch.float32, seed=seed)
    return [folder / "tiny-1", folder / "tiny-2"]


@pytest.fixture(scope="module")
def fleet(folder, checkpoints):
    with FleetProcess(folder, checkpoints[0], model=MODEL, version=COSTS) as fleet:
        wait_until(lambda: fleet.sample("saccade:fleet_replicas_ready") == 2)
        yield fleet
        assert fleet.stop() == 130
    assert [one for one in children_of(fleet.process.pid) if one.is_running()] == []


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.1)


def children_of(pid):
    with_parent = psutil.process_iter(["ppid"])
    return [one for one in with_parent if one.info["ppid"] == pid]


def processes(title):
    """Processes of Ray with this title: those of this test's fleet, not of another one on the machine."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if (line := one.cmdline()) and line[0].startswith(f"ray::{title}"):
                found.append(one.pid)
    return found


def run(*words):
    command = [sys.executable, "-m", "saccade", "fleet", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def body(**fields):
    message = {"role": "user", "content": "hello"}
    return {"model": "tiny", "messages": [message], "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields


def chat(fleet, **fields):
    return httpx.post(f"{fleet.url}/v1/chat/completions", json=body(**fields), timeout=TIMEOUT_S)


def streamed(fleet, *, at=None, do=None, **fields):
    """Text of a streamed answer; `do` runs after the chunk with this number."""
    text, endings, number = "", 0, 0
    request = body(stream=True, **fields)
    with httpx.stream("POST", f"{fleet.url}/v1/chat/completions", json=request, timeout=TIMEOUT_S) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["delta"].get("content") or ""
                number += 1
                if number == at:
                    do()
            endings += line == "data: [DONE]"
    assert endings == 1
    return text


def kill(*titles):
    for title in titles:
        for pid in processes(title):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_request_is_answered_by_a_version(fleet):
    answer = chat(fleet)
    assert answer.status_code == 200, answer.text
    assert answer.headers["saccade-version"] == "v1"
    assert [one["id"] for one in httpx.get(f"{fleet.url}/v1/models").json()["data"]] == ["tiny"]


@pytest.mark.slow
def test_a_stream_continues_when_all_engines_are_killed(fleet):
    expected = streamed(fleet, max_tokens=600)
    before = fleet.sample("saccade:fleet_requests_continued_total")
    answer = streamed(fleet, max_tokens=600, at=20, do=lambda: kill(ENGINE))
    assert answer == expected
    # It continues twice if it reaches the second engine before that one is killed too.
    assert before + 1 <= fleet.sample("saccade:fleet_requests_continued_total") <= before + 2
    assert fleet.sample("saccade:fleet_requests_lost_total") == 0


def about_an_image(seed):
    """A question about an image that no other has."""
    file = io.BytesIO()
    Image.effect_noise((84, 56), 10.0 + seed).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what?"}]
    return {"messages": [{"role": "user", "content": parts}]}


def version_status(fleet):
    """What `fleet status` says of the first version."""
    return json.loads(run("status", fleet.file, "--json").stdout)["models"][0]["versions"][0]


@pytest.mark.slow
def test_requests_continue_when_the_encoder_is_killed(fleet):
    wait_until(lambda: fleet.sample("saccade:fleet_encoders_ready") == 1)
    asked = [about_an_image(seed) for seed in range(6)]
    with ThreadPoolExecutor(2) as pool:  # engines that decode ask the encoder for images
        decoding = [pool.submit(streamed, fleet, max_tokens=900) for _ in range(2)]
        answers = [chat(fleet, **one) for one in asked[:2]]
        kill(ENCODER)
        answers += [chat(fleet, **one) for one in asked[2:]]
        assert all(one.result() for one in decoding)
    assert [answer.status_code for answer in answers] == [200] * 6
    wait_until(lambda: fleet.sample("saccade:fleet_replica_pooled_patches") > 0)
    assert fleet.sample("saccade:fleet_requests_lost_total") == 0
    wait_until(lambda: processes(ENCODER))
    wait_until(lambda: version_status(fleet)["replicas"]["encoders"] == [1, 0])


@pytest.mark.slow
def test_streams_do_not_notice_that_both_controllers_are_killed(fleet):
    expected = streamed(fleet, max_tokens=600)
    controllers = ("ServeController", "ServeReplica:test:controller")
    assert streamed(fleet, max_tokens=600, at=20, do=lambda: kill(*controllers)) == expected
    wait_until(lambda: processes("ServeReplica:test:controller") and fleet.sample("saccade:fleet_replicas_ready") == 2)
    status = json.loads(run("status", fleet.file, "--json").stdout)
    assert [one["share"] for one in status["models"][0]["versions"]] == [1.0]
    assert chat(fleet).status_code == 200


@pytest.mark.slow
def test_a_version_with_wrong_answers_gets_no_users_and_one_with_right_answers_gets_all(fleet, checkpoints):
    head = fleet.head
    fleet.head = head.replace("max_tokens = 200\n", f"max_tokens = 200\n{WRONG_PROBE}")
    fleet.write(fleet.version("v1", checkpoints[0], 0), fleet.version("v2", checkpoints[1]))
    refused = run("update", fleet.file)
    assert refused.returncode == 1, refused
    assert "probe" in refused.stdout + refused.stderr
    assert chat(fleet).headers["saccade-version"] == "v1"
    fleet.head = head
    fleet.write(fleet.version("v1", checkpoints[0], 0), fleet.version("v3", checkpoints[0]))
    statuses, must_stop = [], threading.Event()

    def load():
        while not must_stop.is_set():
            statuses.append(chat(fleet, max_tokens=2).status_code)

    loading = threading.Thread(target=load)
    loading.start()
    try:
        updated = run("update", fleet.file)
    finally:
        must_stop.set()
        loading.join()
    assert updated.returncode == 0, updated
    assert set(statuses) == {200}
    assert chat(fleet).headers["saccade-version"] == "v3"


@pytest.mark.slow
def test_a_second_up_is_refused_by_one_line(fleet):
    second = run("up", fleet.file)
    assert second.returncode == 2
    assert "is up already" in second.stderr
    assert second.stderr.count("\n") == 1

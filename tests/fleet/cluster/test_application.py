"""The controller's application as KubeRay deploys it: by a configuration of Ray Serve that names a FLEET.toml."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
from model.hugging_face import SHAPES, make_checkpoint

SCRIPT = """
import json, sys, time, urllib.request
from pathlib import Path
from saccade.fleet.cluster.ray_session import local_ray
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from saccade.fleet.state import FleetState

file, state = sys.argv[1:]
application = {
    "name": "photos:controller", "route_prefix": None, "import_path": "saccade.fleet.cluster.application:build",
    "args": {"file": file},
}
config = ServeDeploySchema.model_validate({"proxy_location": "Disabled", "applications": [application]})

def urls():
    snapshot = FleetState(state).snapshot()
    return [] if snapshot is None else snapshot.content["urls"]

with local_ray():
    _get_global_client().deploy_apps(config)
    deadline = time.monotonic() + 200
    while not urls():
        assert time.monotonic() < deadline, "no front has reported"
        time.sleep(0.3)
    with urllib.request.urlopen(urls()[0] + "/fleet", timeout=30) as answer:
        print(answer.read().decode())
"""
FLEET = """
name = "photos"
state = {state}
server = {{ port = 0 }}
front = {{ cpus_per_replica = 0.1 }}

[[models]]
name = "tiny"
engines = {{ cpus_per_replica = 0.1 }}

[[models.versions]]
name = "may"
checkpoint = {checkpoint}
traffic = 100
gpus_per_replica = 0
engine = {{ num_workers = 1, num_pages = 400, max_length = 1000 }}
"""


@pytest.mark.slow
def test_the_application_brings_up_the_fleet_of_its_file(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "tiny", SHAPES[0])
    file, state = tmp_path / "FLEET.toml", tmp_path / "state"
    file.write_text(FLEET.format(state=json.dumps(str(state)), checkpoint=json.dumps(str(checkpoint))))
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        environment = os.environ | {"RAY_TMPDIR": folder}
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(file), str(state)]
        run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert (found["name"], found["generation"]) == ("photos", 1)
    assert [version["name"] for version in found["models"][0]["versions"]] == ["may"]

"""What other processes can do with the ports that a local Ray opens: Ray runs code for whoever may call it."""

import json
import os
import pickle
import subprocess
import sys

import grpc
import psutil
import pytest

SCRIPT = """
import json, os, sys
from ray import serve
from saccade.fleet.cluster.ray_session import local_ray

class Process:
    def id(self):
        return os.getpid()

with local_ray():
    deployment = serve.deployment(Process, ray_actor_options={"num_cpus": 0})
    handle = serve.run(deployment.bind(), name="ports", route_prefix=None)
    print(json.dumps({"replica": handle.id.remote().result(), "token": os.environ["RAY_AUTH_TOKEN"]}), flush=True)
    sys.stdin.readline()
"""


METADATA = 1
"""Number of the field of Ray Serve's `ASGIRequest` that a replica unpickles."""


class Touch:
    """Makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """Replica and token of a local Ray, whose user has turned tokens off."""
    folder = tmp_path_factory.mktemp("ray")
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "HOME": str(folder)}
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=pipe, stdout=pipe, text=True, env=environment)
    try:
        yield json.loads(process.stdout.readline()) | {"process": process.pid, "home": folder}
    finally:
        process.communicate("\n", timeout=120)


def listening(pid):
    """Addresses at which a process listens."""
    connections = psutil.Process(pid).net_connections("tcp")
    return [one.laddr for one in connections if one.status == psutil.CONN_LISTEN]


def call(port, path, token=None):
    """Send what a replica unpickles; returns how it answers."""
    metadata = [] if token is None else [("authorization", f"Bearer {token}")]
    pickled = pickle.dumps(Touch(path))
    length = [len(pickled) & 127 | 128, len(pickled) >> 7]
    request = bytes([METADATA << 3 | 2, *length]) + pickled  # a message with one field of bytes
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel, pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary("/ray.serve.ASGIService/HandleRequest")(request, timeout=30, metadata=metadata)
    return raised.value.code()


def test_a_port_that_is_open_to_other_machines_wants_the_token(ray, tmp_path):
    ports = [address.port for address in listening(ray["replica"]) if "127.0.0.1" not in address.ip]
    assert ports, "Ray Serve opens one for each replica; if it does not, the token is not needed for it"
    for port in ports:
        for number, token in enumerate((None, "0" * 64)):
            assert call(port, tmp_path / f"{port}-{number}", token) is grpc.StatusCode.UNAUTHENTICATED
        call(port, tmp_path / f"{port}-right", ray["token"])
    assert {path.name for path in tmp_path.iterdir()} == {f"{port}-right" for port in ports}


def test_the_other_ports_are_on_loopback_and_the_token_is_in_no_file(ray):
    children = psutil.Process(ray["process"]).children(recursive=True)
    for child in [psutil.Process(ray["process"]), *children]:
        if child.pid != ray["replica"]:
            assert all("127.0.0.1" in address.ip for address in listening(child.pid)), child
    assert not (ray["home"] / ".ray" / "auth_token").exists()

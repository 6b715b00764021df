"""`deploy/kuberay/`: parsed, and compared with the fleet that it starts. Kubernetes does not run here."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from saccade.config import decode
from saccade.fleet.cluster.names import controller_app
from saccade.fleet.config import FleetConfig

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "deploy/kuberay/rayservice.yaml").read_text()
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
CONFIG_MAP, SERVICE, POLICY = yaml.safe_load_all(TEXT)
[(FILE_NAME, FILE)] = CONFIG_MAP["data"].items()
FLEET = decode(FleetConfig, tomllib.loads(FILE), "FLEET.toml")
SERVE_CONFIG = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])
CLUSTER = SERVICE["spec"]["rayClusterConfig"]
HEAD, [WORKERS] = CLUSTER["headGroupSpec"], CLUSTER["workerGroupSpecs"]
PODS = [group["template"] for group in (HEAD, WORKERS)]
CONTAINERS = [container for pod in PODS for container in pod["spec"]["containers"]]
[WORKER] = WORKERS["template"]["spec"]["containers"]


def test_the_objects_are_those_of_one_fleet_in_one_namespace():
    assert [(one["apiVersion"], one["kind"]) for one in (CONFIG_MAP, SERVICE, POLICY)] == [
        ("v1", "ConfigMap"), ("ray.io/v1", "RayService"), ("networking.k8s.io/v1", "NetworkPolicy"),
    ]  # fmt: skip
    assert {one["metadata"]["namespace"] for one in (CONFIG_MAP, SERVICE, POLICY)} == {"saccade"}


def test_ray_serve_reads_the_application_and_finds_its_builder():
    [application] = SERVE_CONFIG["applications"]
    assert application["name"] == controller_app(FLEET.name)
    assert application["route_prefix"] is None
    [mount] = [one for one in WORKER["volumeMounts"] if one["name"] == "fleet"]
    assert application["args"] == {"file": f"{mount['mountPath']}/{FILE_NAME}"}
    script = (
        "import sys, yaml; from ray._common.utils import import_attr; from ray.serve.schema import ServeDeploySchema; "
        "config = ServeDeploySchema.model_validate(yaml.safe_load(sys.stdin.read())); "
        "print(import_attr(config.applications[0].import_path).__name__, config.proxy_location.value)"
    )
    command = [sys.executable, "-W", "ignore", "-c", script]
    run = subprocess.run(
        command, input=SERVICE["spec"]["serveConfigV2"], capture_output=True, text=True, check=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.stdout.split() == ["build", "Disabled"]


def test_the_fleet_fits_the_pods_and_its_state_is_in_a_store():
    limits = {name: str(value) for name, value in WORKER["resources"]["limits"].items()}
    pods, largest = WORKERS["maxReplicas"], FLEET.resources()[1]
    assert WORKERS["minReplicas"] <= WORKERS["replicas"] <= pods
    assert largest.gpus <= pods * int(limits["nvidia.com/gpu"])
    assert largest.cpus <= pods * int(limits["cpu"])
    for model in FLEET.models:
        assert model.engines.cpus_per_replica + FLEET.front.cpus_per_replica <= int(limits["cpu"])
    assert HEAD["rayStartParams"]["num-cpus"] == "0"
    assert FLEET.state.startswith("s3://")
    assert WORKERS["template"]["spec"]["terminationGracePeriodSeconds"] > FLEET.server.drain_timeout_s


def test_paths_of_the_file_are_mounted_and_volumes_exist():
    mounts = {one["name"]: one["mountPath"] for one in WORKER["volumeMounts"]}
    checkpoints = [version.checkpoint for model in FLEET.models for version in model.versions]
    assert all(path.startswith(mounts["checkpoints"] + "/") for path in checkpoints)
    assert str(FLEET.server.api_keys).startswith(mounts["keys"] + "/")
    for pod in PODS:
        volumes = {one["name"] for one in pod["spec"]["volumes"]}
        for container in pod["spec"]["containers"]:
            assert {one["name"] for one in container["volumeMounts"]} == volumes


def test_only_the_port_of_the_fronts_is_open():
    [port] = SERVICE["spec"]["serveService"]["spec"]["ports"]
    assert port["targetPort"] == FLEET.server.port == WORKER["ports"][0]["containerPort"]
    assert SERVICE["spec"]["serveService"]["spec"]["type"] == "ClusterIP"
    assert WORKER["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": FLEET.server.port}
    labels = POLICY["spec"]["podSelector"]["matchLabels"]
    assert all(pod["metadata"]["labels"] == labels for pod in PODS)
    assert POLICY["spec"]["policyTypes"] == ["Ingress"]
    inside, operator, clients = POLICY["spec"]["ingress"]
    assert inside == {"from": [{"podSelector": {"matchLabels": labels}}]}
    assert operator["from"][0]["namespaceSelector"]
    assert [one["port"] for one in operator["ports"]] == [8265]
    assert clients == {"ports": [{"protocol": "TCP", "port": FLEET.server.port}]}


def test_probes_need_no_program_that_the_image_lacks():
    probes = [container[name] for container in CONTAINERS for name in ("livenessProbe", "readinessProbe")]
    assert [probe for probe in probes if "httpGet" not in probe] == []


def test_ray_wants_a_token_and_no_secret_is_in_the_file():
    assert CLUSTER["authOptions"] == {"mode": "token"}
    assert FLEET.server.api_keys is not None
    assert not FLEET.server.no_auth
    assert not re.search(r"kind:\s*Secret", TEXT)
    for container in CONTAINERS:
        assert "env" not in container, "credentials come from secrets"
        assert container["envFrom"] == [{"secretRef": {"name": "saccade-store"}}]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    for pod in PODS:
        security = pod["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user.groups()


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda one: one["name"])
def test_the_image_is_the_one_that_the_head_of_the_file_builds(container):
    built = re.search(r"docker build -f deploy/Dockerfile -t (\S+) --build-arg EXTRAS=(\S+)", TEXT)
    assert container["image"] == built[1]
    assert {"fleet", "s3"} <= set(built[2].split(","))
    assert f"EXTRAS={built[2]} " in DOCKERFILE
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert CLUSTER["rayVersion"] == pinned[1]

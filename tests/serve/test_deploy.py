"""`deploy/`: files for other programs are checked against the server. None of those programs runs here."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from serve.monitoring import (
    DASHBOARDS,
    DEPLOY,
    FLEET_ALERTS,
    OPERATIONS,
    ROOT,
    SERVER_ALERTS,
    assert_exported,
    expressions_of,
    panels_of,
    selectors_of,
    undocumented,
)
from serve.scraping import scrape
from typer.main import get_command

from saccade.cli import app
from saccade.serve import ServeConfig

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
GPU = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())
SERVE_OPTIONS = {name for parameter in get_command(app).commands["serve"].params for name in parameter.opts}


@pytest.fixture(scope="module")
def metrics(server):
    server.chat()
    return scrape(server)


# ------------------------------------------------------------------ expressions


def test_selectors_are_found_in_expressions():
    assert selectors_of(
        'sum by (le) (rate(a:b_bucket{x=~"y(1)", z!="w"}[5m])) / c > 1 and on (instance) time() - d > 2'
    ) == {
        "a:b_bucket": ["x", "z"],
        "c": [],
        "d": [],
    }


EXPRESSIONS = expressions_of("saccade", SERVER_ALERTS)


@pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])
def test_every_metric_and_label_of_an_expression_is_exported(metrics, where, expression):
    assert_exported(metrics, where, expression)


# ------------------------------------------------------------------ dashboard, alerts


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_is_one_that_grafana_can_load(name):
    dashboard, shown = DASHBOARDS[name], panels_of(name)
    assert dashboard["schemaVersion"] >= 36
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    taken = set()
    for panel in dashboard["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert box["x"] + box["w"] <= 24
        assert not cells & taken, f"{panel['title']} overlaps another panel"
        taken |= cells
    for panel in shown:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables


def test_dashboards_have_ids_of_their_own():
    uids = [dashboard["uid"] for dashboard in DASHBOARDS.values()]
    assert "saccade" in uids
    assert len(uids) == len(set(uids)) == 2


@pytest.mark.parametrize("rule", [*SERVER_ALERTS, *FLEET_ALERTS], ids=lambda rule: rule["alert"])
def test_every_alert_says_what_to_do_and_is_documented(rule):
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
    assert f"**{rule['alert']}**" in OPERATIONS


def test_every_metric_is_documented(metrics):
    assert undocumented(metrics) == []


def test_prometheus_and_grafana_find_what_compose_gives_them():
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    [scraped] = prometheus["scrape_configs"]
    secret = Path(scraped["authorization"]["credentials_file"])
    assert secret.parent == Path("/run/secrets")
    assert secret.name in COMPOSE["services"]["prometheus"]["secrets"]
    assert scraped["static_configs"][0]["targets"] == ["saccade:8000"]
    assert [(DEPLOY / "prometheus" / name).exists() for name in prometheus["rule_files"]] == [True]
    for path in (DEPLOY / "grafana" / "provisioning").rglob("*.yaml"):
        assert yaml.safe_load(path.read_text())["apiVersion"] == 1


# ------------------------------------------------------------------ Compose


def test_compose_services_have_no_rights_they_do_not_need():
    for name, service in COMPOSE["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"], name
        assert not service.get("privileged"), name
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:"), f"{name} listens on every address"
        assert set(service.get("secrets", ())) <= COMPOSE["secrets"].keys()
        image = service["image"]
        assert "build" in service or re.search(r":v?\d+\.\d+\.\d+$", image), f"{name}: pin {image}"
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists()
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())
    assert "secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_gpu_file_changes_a_service_that_exists_with_arguments_that_the_dockerfile_has():
    [(name, service)] = GPU["services"].items()
    assert name in COMPOSE["services"]
    arguments = {words.split("=")[0] for kind, words in INSTRUCTIONS if kind == "ARG"}
    assert service["build"]["args"].keys() <= arguments


# ------------------------------------------------------------------ Dockerfile


def instructions_of(text):
    joined = re.sub(r"\\\n", " ", "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#")))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


INSTRUCTIONS = instructions_of((DEPLOY / "Dockerfile").read_text())


def words_of(kind):
    return [words for name, words in INSTRUCTIONS if name == kind]


def test_the_image_runs_as_another_user_with_a_health_check_and_no_secrets():
    kinds = [kind for kind, _ in INSTRUCTIONS]
    known = {"FROM", "ARG", "ENV", "RUN", "WORKDIR", "COPY", "LABEL", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert set(kinds) <= known | {"ENTRYPOINT", "CMD"}
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", words_of("USER")[-1])
    assert kinds.index("USER") > max(index for index, kind in enumerate(kinds) if kind in ("RUN", "COPY"))
    assert "/health" in words_of("HEALTHCHECK")[0]
    bases = re.findall(r"BASE=(\S+)", (DEPLOY / "Dockerfile").read_text())
    for base in [*bases, GPU["services"]["saccade"]["build"]["args"]["BASE"]]:
        assert ":" in base
        assert not base.endswith(":latest")
    for words in words_of("ENV") + words_of("ARG"):
        assert not re.search(r"key|secret|token|password", words, re.IGNORECASE)
    for kind in ("ENTRYPOINT", "CMD"):
        assert isinstance(json.loads(words_of(kind)[0]), list)


def test_the_image_is_small_and_built_from_files_that_exist():
    for words in words_of("RUN"):
        if "apt-get install" in words:
            assert words.count("apt-get install") == words.count("--no-install-recommends")
            assert "rm -rf /var/lib/apt/lists/*" in words
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    for words in words_of("COPY"):
        if not words.startswith("--from"):
            for source in words.split()[:-1]:
                assert (ROOT / source).exists()
                assert f"!{source}" in ignored, f"{source} is not in the build context"
    assert '".[${EXTRAS}]"' in "".join(words_of("RUN"))
    extras = re.findall(r"EXTRAS=([\w,]+)", (DEPLOY / "Dockerfile").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(extras) == 2, "of a server, and of a fleet"
    for names in extras:
        assert set(names.split(",")) <= project["optional-dependencies"].keys()


def options_in(command):
    return {word for word in command.split() if word.startswith("--")}


def test_commands_use_options_that_the_server_has():
    for command in (" ".join(json.loads(words_of("CMD")[0])), UNIT["ExecStart"][0]):
        assert options_in(command) <= SERVE_OPTIONS
    assert json.loads(words_of("ENTRYPOINT")[0]) == ["saccade", "serve"]
    [secret] = COMPOSE["services"]["saccade"]["secrets"]
    assert f"/run/secrets/{secret}" in json.loads(words_of("CMD")[0])


# ------------------------------------------------------------------ systemd


def unit_of(text):
    unit = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            unit.setdefault(name, []).append(value)
    return unit


UNIT = unit_of((DEPLOY / "saccade.service").read_text())


def seconds(text):
    return float(re.fullmatch(r"(\d+)s?", text)[1])


def test_a_stopped_service_has_time_to_drain():
    drain_s = ServeConfig().drain_timeout_s
    assert seconds(UNIT["TimeoutStopSec"][0]) > drain_s
    assert seconds(COMPOSE["services"]["saccade"]["stop_grace_period"]) > drain_s
    assert UNIT["KillMode"] == ["mixed"], "only the front gets SIGTERM: it stops the others"


def test_the_unit_gives_the_service_no_rights_it_does_not_need():
    hardening = {
        "NoNewPrivileges": "yes", "ProtectSystem": "strict", "ProtectHome": "yes", "PrivateTmp": "yes",
        "RestrictSUIDSGID": "yes",
        "ProtectKernelTunables": "yes", "ProtectKernelModules": "yes", "ProtectControlGroups": "yes",
        "RestrictNamespaces": "yes",
        "CapabilityBoundingSet": "", "LockPersonality": "yes", "SystemCallArchitectures": "native",
        "DevicePolicy": "closed",
    }  # fmt: skip
    assert {name: UNIT[name][0] for name in hardening} == hardening
    assert UNIT["User"][0] != "root"
    assert "landlock_restrict_self" in UNIT["SystemCallFilter"][0], "workers seal themselves"
    assert UNIT["LoadCredential"][0].startswith("keys.json:")

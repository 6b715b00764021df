"""Dashboards and alerts of `deploy/`, and the metrics and labels that their expressions name."""

import json
import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DASHBOARDS = {
    path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
}
ALERTS = {
    group["name"]: group["rules"]
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
}
FLEET_ALERTS = ALERTS["saccade-fleet"]
SERVER_ALERTS = [rule for name, rules in ALERTS.items() if name != "saccade-fleet" for rule in rules]
OF_PROMETHEUS = {"up"}


def panels_of(dashboard):
    return [panel for panel in DASHBOARDS[dashboard]["panels"] if panel["type"] != "row"]


def expressions_of(dashboard, alerts):
    """Where each expression stands, and the expression."""
    shown = [(panel["title"], target["expr"]) for panel in panels_of(dashboard) for target in panel["targets"]]
    return [(rule["alert"], rule["expr"]) for rule in alerts] + shown


def selectors_of(expression):
    """Return the metric names of a PromQL expression, each with the labels that match it."""
    plain = re.sub(r'"[^"]*"', '""', expression)
    plain = re.sub(r"\b(by|on|without|ignoring|group_left|group_right)\s*\([^)]*\)", " ", plain)
    found = re.findall(r"([a-zA-Z_:][\w:]*)\s*(\{[^}]*\})?(?!\s*[\w:(])", re.sub(r"\[[^\]]*\]", "", plain))
    labels = {name: re.findall(r"(\w+)\s*[=!]", matcher) for name, matcher in found}
    return {name: matched for name, matched in labels.items() if name not in ("and", "or", "unless")}


def assert_exported(metrics, where, expression):
    """Every metric of an expression is exported, with the labels that match it."""
    selectors = selectors_of(expression)
    assert selectors
    families = {f"{name}{end}" for name in metrics.types for end in ("", "_total", "_bucket", "_sum", "_count")}
    for name, labels in selectors.items():
        assert name in families | OF_PROMETHEUS, f"{where} uses {name}, which /metrics does not have"
        for known, _ in metrics.samples_of(name)[:1]:
            assert set(labels) <= known.keys() | {"instance", "job"}, (
                f"{where} matches labels that {name} does not have"
            )


def undocumented(metrics):
    """Metrics of ours that docs/operations.md does not explain."""
    own = [name for name, kind in metrics.types.items() if name.startswith(("saccade:", "vllm:", "http_"))]
    assert len(own) > 30
    return [name for name in own if f"`{name}" not in OPERATIONS]

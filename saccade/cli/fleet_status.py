"""`saccade fleet status` as text."""

from datetime import datetime
from typing import Any

from saccade.fleet.status import describe


def status_lines(status: dict[str, Any]) -> list[str]:
    """The status of a fleet in a few aligned lines."""
    lines = [_headline(status), _fronts_line(status["fronts"])]
    for model in status["models"]:
        lines += _model_lines(model)
    if status["decisions"]:
        lines.append("decisions")
        lines += [f"  {_time(one.get('time_s'))}  {describe(one)}" for one in status["decisions"]]
    return lines


def _headline(status: dict[str, Any]) -> str:
    desired, controller = status["desired"], status["controller"]
    parts = [f"fleet {status['fleet']}", "up" if status["is_up"] else "down"]
    parts.append(f"generation {desired['generation']} ({desired['command']})")
    if status["is_up"] and status["generation"] != desired["generation"]:
        parts.append(f"the controller follows {status['generation'] or 'none'} yet")
    if controller is not None and status["is_up"]:
        age = controller["renewed_s_ago"]
        heard = "not heard of yet" if age is None else f"heard {age:.0f} s ago"
        parts.append(f"controller {controller['epoch']} of {controller['owner'] or 'an unknown cluster'}, {heard}")
    return "  ".join(parts)


def _fronts_line(fronts: dict[str, Any]) -> str:
    starting = f", {fronts['starting']} starting" if fronts["starting"] else ""
    failure = f"  {fronts['failure']}" if fronts.get("failure") else ""
    return f"fronts  {fronts['ready']} ready{starting}  {' '.join(fronts['urls'])}{failure}".rstrip()


def _model_lines(model: dict[str, Any]) -> list[str]:
    reason = model["refusal"] or model["reason"]
    lines = [f"model {model['name']}  {model['progress']}" + (f"  {reason}" if reason else "")]
    rows = [_version_cells(one) for one in model["versions"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        lines.append("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    for rollout in model["rollouts"]:
        lines += _rollout_lines(rollout)
    for experiment in model["experiments"]:
        lines += _experiment_lines(experiment)
    if model["rollback_to"]:
        versions = ", ".join(f"{one['version']} {one['traffic']:.3g} %" for one in model["rollback_to"])
        lines.append(f"  a rollback goes to {versions}")
    return lines


def _version_cells(version: dict[str, Any]) -> list[str]:
    replicas, bounds = version["replicas"], version["bounds"]
    found = f"{replicas['ready']} ready" + (f", {replicas['starting']} starting" if replicas["starting"] else "")
    allowed = (
        "" if bounds is None else f"of {bounds[0]}" if bounds[0] == bounds[1] else f"of {bounds[0]} to {bounds[1]}"
    )
    if (encoders := replicas.get("encoders")) is not None:
        allowed += f", encoders {encoders[0]} ready" + (f", {encoders[1]} starting" if encoders[1] else "")
    return [
        version["name"], version["state"], f"{100 * version['share']:.3g} %", f"{found} {allowed}".rstrip(),
        f"{version['requests']:,} requests", f"{version['errors']:,} errors", replicas["failure"] or "",
    ]  # fmt: skip


def _rollout_lines(rollout: dict[str, Any]) -> list[str]:
    lines = [
        f"  rollout of {rollout['version']}: {rollout['state']}, {100 * rollout['share']:.3g} % now, "
        f"{100 * rollout['next_share']:.3g} % next, {100 * rollout['target']:.3g} % in the end"
    ]
    for one in rollout["evidence"]:
        new, running = one["new"], one["running"]
        found = max((one[name] for name in ("log_e_maximum", "log_e_running") if name in one), default=0.0)
        lines.append(
            f"    {one['objective']}: {new['exceeding']} of {new['requests']} exceed, running version "
            f"{running['exceeding']} of {running['requests']}; "
            f"evidence {max(0.0, found):.1f} of {one['log_e_needed']:.1f}"
        )
    return lines


def _experiment_lines(experiment: dict[str, Any]) -> list[str]:
    state = experiment["failure"] or ("runs" if experiment["is_running"] else "waits for its versions")
    fallbacks = f", {experiment['fallbacks']:,} requests followed the traffic" if experiment["fallbacks"] else ""
    lines = [
        f"  experiment {experiment['experiment']}: {state}, with {100 * experiment['share']:.3g} % of users{fallbacks}"
    ]
    if not experiment["sample_ratio"]["is_as_expected"]:
        lines.append("    users are missing from a variant: the means say nothing")
    for name, one in experiment["variants"].items():
        means = [f"{metric} {mean:.4g}" for metric, mean in one["means"].items() if mean is not None]
        expected = f"{100 * one['expected_share']:.3g} % expected"
        counts = f"{one['users']:,} users ({expected}), {one['requests']:,} requests"
        lines.append("  ".join([f"    {name}: {counts}", *means]))
    for one in experiment["comparisons"]:
        interval = f", {one['difference']:+.3g} ({one['low']:+.3g} to {one['high']:+.3g})" if "low" in one else ""
        lines.append(f"    {one['variant']} against {one['control']}, {one['metric']}: {one['verdict']}{interval}")
    return lines


def _time(seconds: float | None) -> str:
    return "--:--:--" if seconds is None else datetime.fromtimestamp(seconds).strftime("%H:%M:%S")

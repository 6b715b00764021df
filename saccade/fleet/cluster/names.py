"""Names of a fleet's applications and deployments on Ray Serve."""

from __future__ import annotations

CONTROLLER, FRONT, ENGINE, ENCODER = "controller", "front", "engine", "encoder"
"""Names of deployments. The encoders of a version are in the application of its engines."""


def controller_app(fleet: str) -> str:
    """Application of the controller."""
    return f"{fleet}:controller"


def front_app(fleet: str) -> str:
    """Application of the fronts."""
    return f"{fleet}:front"


def engine_app(fleet: str, model: str, version: str) -> str:
    """Application of one version's engines."""
    return f"{fleet}:engine:{model}:{version}"


def model_and_version(fleet: str, app: str) -> tuple[str, str] | None:
    """Inverse of `engine_app`; None: an application of another kind or fleet."""
    parts = app.split(":")
    return (parts[2], parts[3]) if parts[:2] == [fleet, "engine"] and len(parts) == 4 else None

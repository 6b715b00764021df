"""The application of a fleet's controller for Ray Serve's own configuration, such as that of a KubeRay `RayService`.

    proxy_location: Disabled
    applications:
      - name: photos:controller                    # FLEET:controller
        import_path: saccade.fleet.cluster.application:build
        args: {file: /etc/saccade/fleet/FLEET.toml}

The controller deploys everything else. The file starts the fleet; later changes are made by `saccade fleet update`.
"""

from __future__ import annotations

import time
from pathlib import Path

from ray import serve

from saccade.config import load_config
from saccade.errors import ConfigError
from saccade.fleet.cluster.controller import controller_application
from saccade.fleet.cluster.ray_session import cluster_name
from saccade.fleet.config import FleetConfig
from saccade.fleet.operations import request_up, with_absolute_paths
from saccade.fleet.state import FleetState


def build(args: dict[str, str]) -> serve.Application:
    """Build the controller of the fleet in the file that `args` name. Ray calls this in a process of the cluster.

    A fleet that runs already keeps its desired state, so that a rebuilt application undoes no update and no rollback.
    """
    if set(args) != {"file"}:
        raise ConfigError(f"arguments of the fleet's application are {sorted(args)}. Give one: file, a FLEET.toml")
    config = with_absolute_paths(load_config(FleetConfig, Path(args["file"])))
    state = FleetState(config.state)
    desired = state.desired()
    if desired is None or desired.is_down:
        request_up(state, config, time.time(), is_new_cluster=True)
    return controller_application(config.name, config.state, cluster_name())

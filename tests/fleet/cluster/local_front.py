"""A front over HTTP without Ray: real engines in this process, and a controller that answers what the test says."""

from __future__ import annotations

import time
from dataclasses import replace

import httpx
from fleet.cluster.local_fleet import TIMEOUT_S
from fleet.cluster.local_replicas import LocalCalls, LocalReplicas

from saccade.fleet.cluster.front_server import FrontServer
from saccade.fleet.cluster.names import ENGINE, engine_app
from saccade.fleet.cluster.running_replicas import note_replicas
from saccade.fleet.cluster.view import FleetView, FrontReport, ModelView, VersionView
from saccade.fleet.split import Split
from saccade.serve import ServeConfig


class LocalFront:
    """A front of the fleet "photos" with the model "tiny". Its version "may" is ready and has replicas."""

    def __init__(self, checkpoint, names=("one", "two"), *, key=None, **server):
        self.replicas = LocalReplicas(checkpoint, adapters={})
        for name in names:
            self.replicas.start(name)
        version = self.replicas.version
        model = ModelView(
            name="tiny", versions=(VersionView(config=version, state="ready"),), split=Split(default="may")
        )
        self.view = FleetView(epoch=1, generation=1, models=(model,))
        """What the controller answers; None: it is away."""
        self.reports: list[FrontReport] = []
        config = ServeConfig(port=0, **server)
        self.server = FrontServer("front", "photos", config, self._sync, self._connect, num_workers=1)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.server.url, timeout=TIMEOUT_S, headers=headers)
        note_replicas((engine_app("photos", "tiny", "may"), ENGINE), frozenset(names))
        self.wait_until(lambda: self.http.get("/ready").status_code == 200)

    async def _sync(self, report):
        self.reports.append(FrontReport.from_bytes(report))
        if self.view is None:
            raise ConnectionError("there is no controller")
        return self.view.to_bytes()

    def _connect(self, front, app):
        return LocalCalls(self.replicas, front)

    def add_version(self, name, **changed):
        """Have the controller say that there is another version of the model. It has no replicas."""
        [model] = self.view.models
        config = replace(model.versions[0].config, name=name)
        versions = (*model.versions, VersionView(config=config, state="starting"))
        self.view = replace(self.view, models=(replace(model, versions=versions),), **changed)

    @property
    def url(self):
        return self.server.url

    def fleet(self):
        """What `/fleet` answers."""
        response = self.http.get("/fleet")
        assert response.status_code == 200, response.text
        return response.json()

    def version(self, name="may"):
        [model] = self.fleet()["models"]
        return next(one for one in model["versions"] if one["name"] == name)

    def wait_until(self, condition):
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline, "this takes too long"
            time.sleep(0.02)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.close()
        self.server.stop()
        self.replicas.close()

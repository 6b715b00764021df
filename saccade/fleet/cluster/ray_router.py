"""Ray's side of routing: a request router that sends every call to the replica that the caller chose.

Ray asks a router of each handle for ranked replicas, and takes the shortest queue within a rank. The front has chosen
by `saccade.fleet.routing` before it calls, so the router returns one replica. (An engine calls encoder replicas in the
same way.) The front learns which replicas run
through another module, `running_replicas`: Ray copies the class with this module, and makes the router itself.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from saccade.fleet.cluster.running_replicas import note_replicas


class ChosenReplicaRouter(RequestRouter):
    """Sends a call to the replica that its argument `replica` names."""

    @property
    def supports_rejection_protocol(self) -> bool:
        """Replicas accept every call: admission is the front's."""
        return False

    @property
    def _deployment(self) -> tuple[str, str]:
        return self._deployment_id.app_name, self._deployment_id.name

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Pass on to the front which replicas run."""
        super().update_replicas(replicas)
        note_replicas(self._deployment, frozenset(replica.replica_id.unique_id for replica in replicas))

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Pass on to the front that a replica is gone."""
        super().on_replica_actor_died(replica_id)
        note_replicas(self._deployment, frozenset(one.unique_id for one in self.curr_replicas))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The chosen replica alone. If it is gone, any other one, which refuses the call.

        Ray has few tasks that route calls: a call without a replica would occupy one of them for ever.
        """
        chosen = None if pending_request is None else pending_request.kwargs.get("replica")
        found = [one for one in candidate_replicas if one.replica_id.unique_id == chosen]
        return [found or candidate_replicas]

"""A fleet on Ray Serve: the code that carries out the decisions of `saccade.fleet`.

front.py           deployment of fronts: front_server.py is its HTTP server, fleet_models.py the models that it serves,
                   served_version.py one version of one of them, replica_set.py the replicas of that
engine_replica.py  deployment of engines: replica_service.py is what fronts call
controller.py      deployment of the controller, which decides what fronts follow (view.py): control_loop.py is a round,
                   front_registry.py the fronts that report, ray_cluster.py carries actions out
ray_session.py     the Ray of this machine, or the connection to a cluster
deployments.py     how the three are deployed; ray_router.py and ray_scaling.py are what Ray asks
"""

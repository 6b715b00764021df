"""A fleet: replicas of the server over several machines, described by one file.

    config.py      FLEET.toml: models, versions, traffic, pools
    probes.py      fixed questions that a version answers before it gets traffic
    routing.py     which replica answers a request: `Router`
                   (replicas.py, costs.py, residency.py, expected_work.py and rendezvous.py are its parts)
    simulate.py    that policy over simulated engines, next to simpler ones
                   (simulated_engine.py and workloads.py are its parts)
    rollout.py     a new version gets more users step by step, or is rolled back by a sequential test
                   (objectives.py, evidence.py and comparison.py are its parts)
    split.py       which version a user gets
    experiments.py A/B experiments: sticky variants, sample ratio, verdicts
    scaling.py     how many replicas a pool needs, by the queue time that is predicted for after a warm-up
    driver.py      what a fleet does next: actions, a view for the fronts, decisions
                   (its parts: versions.py, model_state.py, version_run.py, introduction.py, bounds.py, actions.py)
    state.py       the folder of the desired state and of what was decided
                   (objects.py and lease.py are its parts)
    operations.py  what the commands write into that folder, and how they follow it
                   (status.py is what they print)
    cluster        the processes of a fleet on Ray Serve, which carry the decisions out

Decisions are plain Python and numpy: no Ray, no torch, no clock, no I/O. What they need to know and what follows from
them passes through the state folder and `cluster`.
"""

"""A fleet: replicas of the server over several machines, described by one file.

    config.py      FLEET.toml: models, versions, traffic, pools
    probes.py      fixed questions that a version answers before it gets traffic
    routing.py     which replica answers a request: `Router`
                   (replicas.py, costs.py, residency.py and rendezvous.py are its parts)
    simulate.py    that policy over simulated engines, next to simpler ones
                   (simulated_engine.py and workloads.py are its parts)
    rollout.py     a new version gets more users step by step, or is rolled back by a sequential test
                   (objectives.py, evidence.py and comparison.py are its parts)
    split.py       which version a user gets
    experiments.py A/B experiments: sticky variants, sample ratio, verdicts
    scaling.py     how many replicas a pool needs, by the queue time that is predicted for after a warm-up
    driver.py      what a fleet does next: actions, a view for the fronts, decisions
                   (versions.py, version_run.py, introduction.py, bounds.py and actions.py are its parts)
    state.py       the folder of the desired state and of what was decided
                   (objects.py and lease.py are its parts)

Decisions here are plain Python and numpy: no Ray, no torch, no clock, no I/O but that of the state folder. Deployments
that carry them out do not exist yet; `saccade fleet check` reads a file and `simulate` runs its policies in simulated
time.
"""

"""A fleet: replicas of the server over several machines, described by one file.

    config.py    FLEET.toml: models, versions, traffic, pools
    probes.py    fixed questions that a version answers before it gets traffic
    objectives.py, evidence.py, comparison.py, rollout.py
                 a new version gets more users step by step, or is rolled back by a sequential test

Decisions here are plain Python: no Ray, no torch, no clock, no I/O. Deployments that carry them out do not exist yet;
`saccade fleet check` reads a file and refuses what could not run.
"""

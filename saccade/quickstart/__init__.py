"""The whole flow on one machine: `saccade quickstart`.

    draw scenes -> data prepare -> init -> train -> evaluate -> serve

Every step but the first is a command of this package, run as a process of its own and printed, so that it can be repeated by hand.
Start reading at `flow.py`. `plan.py` has the commands, as plain values; `progress.py` what is done, so that a second start continues;
`process.py` runs a command; `serving.py` starts the server and asks it.
"""

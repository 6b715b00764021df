"""Tensor parallelism: one core plans, and the ranks, a process per GPU, carry out its steps together.

    core -> LeadingRunner (rank 0) --commands--> Follower (rank 1, 2, ...)
                  \\--- broadcasts and sums over the ranks, inside a step ---/

Start with `leading_runner.py`. The leader decides and samples; followers do what they are sent and report whether it
failed. `launch.py` starts and ends their processes, `reports.py` is the memory in which they report.
"""

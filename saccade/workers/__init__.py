"""Worker processes: forked from a process that has loaded everything, sealed where they decode untrusted bytes.

    ForkServer (fork_server.py)  forks  ->  workers  <-  WorkerPool (pool.py): jobs, results, replaced workers

Start reading at `pool.py`. `messages.py` has the format on the sockets, `shared_memory.py` the arrays that a message
does not carry, `sandbox.py` the limits of a sealed worker, `process.py` how a process starts, ends and keeps its
memory. Importing this package imports no torch.
"""

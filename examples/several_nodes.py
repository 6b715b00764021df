"""A fleet on a Ray cluster of several nodes, all of them on this machine: no Docker, and loopback alone.

    saccade init checkpoint --size tiny --dtype fp32
    python examples/several_nodes.py examples/fleet.toml --nodes 3

The nodes are processes as on several machines, so this shows what `saccade fleet up` does with an `address`. Ctrl-C
ends the fleet and the nodes.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray then stays on loopback, and reads this when it is imported
os.environ["RAY_AUTH_MODE"] = "token"  # its ports run code for whoever may call them
os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)

from ray.cluster_utils import Cluster


@contextmanager
def nodes(count: int, cpus: int) -> Iterator[str]:
    """Start a head that runs no replicas, and nodes that do; yields the address of the cluster."""
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=0, node_ip_address="127.0.0.1", include_dashboard=False)
        for _ in range(count):
            cluster.add_node(num_cpus=cpus, node_ip_address="127.0.0.1")
        yield cluster.address
    finally:
        cluster.shutdown()


def saccade(*words: str) -> None:
    """Run a command of `saccade fleet`."""
    subprocess.run([sys.executable, "-m", "saccade", "fleet", *words], check=True)


def main() -> None:
    """Start the nodes and the fleet, and wait for Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fleet", type=Path, help="FLEET.toml without an address")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--cpus", type=int, default=2, help="CPUs that each node offers to replicas")
    arguments = parser.parse_args()
    with nodes(arguments.nodes, arguments.cpus) as address, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "FLEET.toml"
        file.write_text(f'address = "{address}"\n' + arguments.fleet.read_text())
        saccade("up", str(file))
        saccade("status", str(file))
        print("Ctrl-C ends it", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            saccade("down", str(file))


if __name__ == "__main__":
    main()

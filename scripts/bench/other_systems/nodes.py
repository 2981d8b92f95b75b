"""A launcher for each node of the bench's training, and one for a spare, as a cluster has them.

    python -m other_systems.nodes NODES STORE LAUNCHER ARGUMENTS OF THE LAUNCHER

NODES is a number, or minimum:maximum for a launcher that continues with fewer, without a spare.
LAUNCHER is torch.distributed.run or a module with the same flags. STORE is the place of the
rendezvous: ``apart`` (in this process, as on a host without faults) or ``first`` (in the first
launcher, if it must have the store itself). The process with the store must not be lost.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import torch.distributed as dist
from common.plain_ranks import free_port

# The number of the node, for keepers that store something there.
NODE_VARIABLE = "DEADPOOL_BENCH_NODE"


def main(argv: list[str]) -> int:
    """Start all and wait for them: a single node may be killed, all others must end well."""
    nodes, holder, launcher, arguments = argv[0], argv[1], argv[2], argv[3:]
    started = int(nodes.partition(":")[2] or int(nodes) + 1)
    port = free_port()
    store = None
    if holder == "apart":
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    command = [
        *(sys.executable, "-m", launcher, "--nnodes", nodes),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"),
        *("--rdzv-id", uuid.uuid4().hex),
    ]
    launchers = []
    for node in range(started):
        is_host = int(store is None and node == 0)
        # A launcher that reads GROUP_RANK gives the first ranks to the first nodes.
        variables = {NODE_VARIABLE: str(node), "GROUP_RANK": str(node)}
        # An address of its own, as a host has.
        place = ("--rdzv-conf", f"is_host={is_host}", "--local-addr", f"127.0.0.{node + 1}")
        own = [*command, *place, *arguments]
        launchers.append(subprocess.Popen(own, env={**os.environ, **variables}))
    statuses = [launcher.wait() for launcher in launchers]
    bad = [status for status in statuses if status not in (0, -signal.SIGKILL)]
    return 1 if bad or statuses.count(-signal.SIGKILL) > 1 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

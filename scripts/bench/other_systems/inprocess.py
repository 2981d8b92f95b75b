"""The bench's training under nvidia-resiliency-ext's in-process restart, with one warm spare.

    python -m other_systems.inprocess RANKS ARGUMENTS OF rank.py

Starts RANKS + 1 processes, forked from a process that has imported everything. On gloo: the
package's abort ends NCCL communicators only, so ranks that wait for a dead rank's neighbours never
leave their collectives (no step ended within 180 s of the kill). So an abort is added that closes
the connections between the ranks, as an abort of NCCL does.
"""

import datetime
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from common.plain_ranks import fork_ranks, free_port
from nvidia_resiliency_ext import inprocess

from deadpool_megatron import failpoints
from deadpool_megatron.trainer.megatron_api import parallel_state
from other_systems.rank import notify_node, parse, train


class CloseConnections(inprocess.abort.Abort):
    """Shuts down this process's connections to other ranks, so that gloo's operations end.

    All TCP connections but those to the store that the restart itself is agreed through.
    """

    def __init__(self, kept_port: int) -> None:
        self._kept_port = kept_port

    def __call__(self, state: inprocess.state.FrozenState) -> inprocess.state.FrozenState:
        for entry in list(Path("/proc/self/fd").iterdir()):
            try:
                if stat.S_ISSOCK(entry.stat().st_mode):
                    self._shut_down(int(entry.name))
            except OSError:
                continue  # closed meanwhile, or not connected
        return state

    def _shut_down(self, number: int) -> None:
        with socket.socket(fileno=os.dup(number)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return
            ports = connection.getsockname()[1], connection.getpeername()[1]
            if self._kept_port not in ports:
                connection.shutdown(socket.SHUT_RDWR)


def wrapped(ranks: int, port: int, monitors: Path) -> Callable[[list[str]], None]:
    """Return the training in the form of the package: called again in every surviving process.

    Everything else has the package's defaults. The package reads the annotations of the wrapped
    function, which must be plain classes.
    """
    # The last is applied first.
    aborts = inprocess.abort.AbortTorchDistributed(), CloseConnections(port)

    @inprocess.Wrapper(
        store_kwargs={"port": port},
        abort=inprocess.Compose(*aborts),
        monitor_process_pidfile=str(monitors / "{rank}"),
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(ranks),
            inprocess.rank_assignment.FillGaps(),
        ),
    )
    def run(arguments: list, call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        namespace, config = parse(arguments)
        parallel_state.destroy_model_parallel()
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=os.environ["RANK"] == "0",
            multi_tenant=True,
        )
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(str(call_wrapper.iteration), store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=datetime.timedelta(minutes=10),
        )
        if call_wrapper.iteration == 0:
            rank = dist.get_rank()
            monitor = int((monitors / str(rank)).read_text())
            notify_node(namespace.facts.parent, rank, [monitor])
        train(namespace, config)
        dist.destroy_process_group()

    return run


def main(argv: list[str]) -> int:
    """Fork the ranks and wait for them: a single rank may be killed, all others must end well."""
    ranks, arguments = int(argv[0]), argv[1:]
    store_port = free_port()
    monitors = parse(arguments)[0].facts.parent / "monitors"
    monitors.mkdir()
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(ranks + 1)
    )

    def run() -> int:
        # It checks the GPU of this number before a restart, and fails where there is none.
        if not torch.cuda.is_available():
            del os.environ["LOCAL_RANK"]
        failpoints.load()
        wrapped(ranks, store_port, monitors)(arguments)
        return 0

    statuses = fork_ranks(ranks + 1, run)
    bad = [status for status in statuses if status not in (0, -signal.SIGKILL)]
    return 1 if bad or statuses.count(-signal.SIGKILL) > 1 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

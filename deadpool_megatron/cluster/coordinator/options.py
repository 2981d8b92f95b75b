"""What a coordinator is started with."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from deadpool_megatron.cluster.coordinator.first_state import Estate
from deadpool_megatron.cluster.journal.entries import Journal
from deadpool_megatron.cluster.journal.terms import Term
from deadpool_megatron.cluster.machine.inputs import NodeLost
from deadpool_megatron.cluster.machine.state import Config
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.cluster.run_directory.slots import is_followed
from deadpool_megatron.layout.decision import Planner
from deadpool_megatron.layout.records import Generation, Restore


@dataclass(frozen=True)
class CoordinatorOptions:
    """``listener`` is a bound and listening TCP socket; ``host`` the address agents reach it by;
    ``term`` was claimed by the caller, who gives up its journal to the coordinator.
    ``estate``: what was read before that. ``restarted``: all processes of the run had ended before.
    """

    run: RunDirectory
    info: RunInfo
    secret: bytes
    host: str
    listener: socket.socket
    planner: Planner
    term: Term
    journal: Journal
    estate: Estate
    lifeline_fd: int | None = None
    restarted: bool = False

    def node_lost(self, node: int, cause: str) -> NodeLost:
        """What the end of an agent's connection means; a launcher may start another agent on what
        the ended one held."""
        launched = self.lifeline_fd is not None
        followed = launched and is_followed(self.info.settings, self.run, node)
        return NodeLost(node, cause, slots_left=followed)


def machine_config(options: CoordinatorOptions) -> Config:
    """The facts that the state machine needs."""
    info = options.info
    start = Restore("initial", Generation(0, 0))
    if info.restore:
        start = Restore.from_dict(info.restore)
    return Config(
        nodes=info.nodes,
        spares=info.spares,
        nproc=info.nproc_per_node,
        settings=info.settings,
        dump_directory=str(options.run.dump),
        start=start,
        restarted=options.restarted,
        # A launcher counts a dead agent as a dead host, and takes its memory away, unless there is
        # nothing else (node_lost).
        returns=options.lifeline_fd is None,
        check_only=info.check_only,
    )

"""The start options of an agent and of its members."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from deadpool_megatron.cluster.process.fork_server import ForkServer
from deadpool_megatron.cluster.process.member_main import MemberSpec
from deadpool_megatron.cluster.process.member_place import MemberPlace
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.preflight import host as gpus
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.settings import ENVIRONMENT_NAME

#: stands for the number of a node to which the coordinator has not assigned a number yet
NO_NUMBER = -1


@dataclass(frozen=True)
class AgentOptions:
    """Options of one node. ``fixed_address``: the address of the coordinator, where the run
    directory is not shared.

    ``server``, if any, forks members; a parked process imports ``modules``. ``standby`` is the
    command of the standby, () for none. ``launcher_fd`` is set where a launcher on this host
    started the agent: its end of file means that the launcher is gone, which ends the node, and a
    byte from it starts the standby (elsewhere the standby starts with the agent). Under a launcher
    no network lies between this node and the others, and its slots are lost with it.
    ``keeps_slots``: after a fence a new agent is started, which takes over the slots. ``facts``
    about the host are read before the agent starts; None where checks are off. ``leave_seconds`` is
    the time for the roles to move to a spare when the agent is ordered to end; 0 to end at once.
    ``siblings`` are the nodes that the same command starts on this host: their agents may not have
    started yet. ``gpus`` of the node are read before the agent starts, so that the loss of a GPU
    later gives no member another GPU. ``more_hosts``: addresses that the vault uses besides
    ``host``.
    """

    node: int
    run: run_files.RunDirectory
    info: run_files.RunInfo
    secret: bytes
    host: str
    domain: str
    server: ForkServer | None = None
    modules: tuple[str, ...] = ()
    directory: Path = field(default_factory=Path.cwd)
    standby: tuple[str, ...] = ()
    launcher_fd: int | None = None
    keeps_slots: bool = False
    facts: HostFacts | None = None
    fixed_address: tuple[str, int] | None = None
    leave_seconds: float = 0.0
    siblings: frozenset[int] = frozenset()
    gpus: tuple[str, ...] = ()
    more_hosts: tuple[str, ...] = ()

    @property
    def segments(self) -> Path:
        """Return the shared-memory directory of the node."""
        return self.run.segments(self.info.run_id, self.node)

    @property
    def logs(self) -> Path:
        """Return the directory of the logs of the node's processes (see logs.py)."""
        return self.segments / run_files.LOGS


def device_environment(options: AgentOptions, local_rank: int) -> dict[str, str]:
    """Return the variables that show a member its GPU; with NCCL no two members share a GPU."""
    communicator = options.info.settings.communicator
    return gpus.member_variables(options.gpus, local_rank, may_share=communicator != "nccl")


def member_spec(
    options: AgentOptions, local_rank: int, incarnation: int, provisional_role: int
) -> MemberSpec:
    """Return the specification of a member process of the node."""
    info = options.info
    environment = {
        run_files.ENVIRONMENT_DIRECTORY: str(options.run.path),
        run_files.ENVIRONMENT_RUN_ID: info.run_id,
        # Communicators bind to the address at which this host is reached, as the vault does.
        ENVIRONMENT_NAME: replace(info.settings, interface=options.host).to_json(),
    }
    return MemberSpec(
        place=MemberPlace(
            options.node,
            local_rank,
            incarnation,
            options.segments,
            str(options.segments / "vault.sock"),
            info.world_size,
            info.nproc_per_node,
            provisional_role,
        ),
        command=info.command,
        environment={**environment, **device_environment(options, local_rank)},
        log=options.logs
        / f"{run_files.member_log_name(options.node, local_rank, incarnation)}.log",
        directory=options.directory,
        ended_epoch=info.ended_epoch,
    )

"""The GPUs of this host, for the nodes that ``deadpool run`` makes on it to share out."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.run_directory.directory import RunInfo
from deadpool_megatron.nccl_environment import will_be_nccl
from deadpool_megatron.preflight.gpus import VISIBLE, visible_gpus


def has_nccl_limits(communicator: str, processes: int, environment: Mapping[str, str]) -> bool:
    """Returns whether a run has NCCL's limits of time: its ``processes`` on this host use NCCL, and
    are not to train on CPUs because there are fewer GPUs.
    """
    has_gpu = communicator == "auto" and len(visible_gpus(environment)) >= max(1, processes)
    return will_be_nccl(communicator, has_gpu=has_gpu)


def gpus_to_share(
    info: RunInfo, nodes_here: int, environment: MutableMapping[str, str]
) -> tuple[str, ...]:
    """Returns the GPUs that there are for ``nodes_here`` nodes; none where they do not suffice.

    Then NCCL is refused (CommandError). Where the choice of a communicator is left open, the GPUs
    are hidden in ``environment``, so that it falls on gloo, and one line says so. With gloo as the
    user's own word, processes may share GPUs.
    """
    seen, needed = visible_gpus(environment), nodes_here * info.nproc_per_node
    if len(seen) >= needed:
        return seen
    there = (
        f"{nodes_here} nodes x {info.nproc_per_node} processes (spares count), and"
        f" {len(seen)} visible {'GPU' if len(seen) == 1 else 'GPUs'}"
    )
    if info.settings.communicator == "nccl":
        raise CommandError(f"NCCL needs a GPU for each process, there are {there}: start fewer")
    if info.settings.communicator == "auto" and seen:
        print(
            f"deadpool: {there}: trains on CPUs, with gloo (NCCL needs a GPU for each process:"
            " start fewer to have it)",
            file=sys.stderr,
            flush=True,
        )
        environment[VISIBLE] = ""
    return ()

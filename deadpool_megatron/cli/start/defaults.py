"""Defaults of a run on this host: its size, and its directory.

A node of such a run is a set of processes on the host. With visible GPUs, the default size is the
largest number of roles that leaves GPUs for a spare node and fits the script's parallel sizes and
batch, on as many nodes as possible. Without GPUs it is the smallest number that fits.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deadpool_megatron import arguments, file_systems
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunDirectoryError
from deadpool_megatron.hookpoints import FLAG
from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.model_replicas import Workload, describe
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.planning.traffic import GIGA
from deadpool_megatron.preflight.host import visible_gpus
from deadpool_megatron.settings import NEVER, Settings
from deadpool_megatron.support import flags

_RUNS = Path("runs")


@dataclass(frozen=True)
class Size:
    """Nodes that train, spare nodes, and the processes of each node."""

    nodes: int
    spares: int
    processes: int

    @property
    def roles(self) -> int:
        """Return the number of processes that train."""
        return self.nodes * self.processes

    def __str__(self) -> str:
        return f"--nodes {self.nodes} --spares {self.spares} --nproc-per-node {self.processes}"


def choose(
    gpus: int,
    command: Sequence[str],
    nodes: int | None = None,
    spares: int | None = None,
    processes: int | None = None,
) -> Size | None:
    """Return the size of a run on a host with ``gpus`` GPUs, in which the parts that are not None
    are kept; None if no size fits. Pure, except that it reads the command's argument files."""
    work = Workload.of(flags.named_arguments(list(_tokens(command))))
    replica, spare = work.grid.ranks, (1 if nodes is None else 0) if spares is None else spares
    unit = replica * work.grid.unit

    def fits(size: Size) -> bool:
        is_divided = size.roles % unit == 0 and not work.problem(size.roles // replica)
        return is_divided and (not gpus or (size.nodes + spare) * size.processes <= gpus)

    counts = range(1, gpus + 1) if gpus else range(2, max(2, unit) + 1)
    sizes = [
        candidate
        for count in (counts if nodes is None else (nodes,))
        for each in (range(1, (gpus or unit) + 1) if processes is None else (processes,))
        if fits(candidate := Size(count, spare, each))
    ]
    if gpus:
        return max(sizes, key=lambda size: (size.roles, size.nodes), default=None)
    return min(sizes, key=lambda size: (size.roles, -size.nodes), default=None)


def fill(args: argparse.Namespace, command: Sequence[str]) -> list[str]:
    """Set the missing ``args`` of ``deadpool run``, and return them in the form of a command line.
    ``command``: the user's command. Raises CommandError if no size fits."""
    if args.nodes is not None and args.nproc_per_node is not None:
        args.spares = args.spares or 0
    names = ("run_dir", "nodes", "spares", "nproc_per_node")
    missing = [name for name in names if getattr(args, name) is None]
    if not {"nodes", "nproc_per_node"}.isdisjoint(missing):
        _fill_size(args, command)
    if args.run_dir is None:
        program = command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem
        args.run_dir = _RUNS / time.strftime(f"%Y-%m-%d-%H%M%S-{program}")
    return [
        str(word)
        for name in missing
        for word in (f"--{name.replace('_', '-')}", getattr(args, name))
    ]


def sizes_line(command: Sequence[str], roles: int, processes: int, settings: Settings) -> str:
    """Return a line with the sizes that a run can have; empty if its command does not show them."""
    tokens = list(_tokens(command))
    is_shown = FLAG in tokens or "--global-batch-size" in tokens
    text = describe(tokens, roles, processes, settings.protection) if is_shown else ""
    # With --deadpool-elastic on, the coordinator itself warns if there is only a single size.
    return "" if settings.elastic == "on" and " only (" in text else text


def advice(gpus: int, command: Sequence[str]) -> str:
    """Return the size that fits a host with ``gpus``, in the form of flags; empty if none fits."""
    size = choose(gpus, command) if gpus else None
    return "" if size is None else f"'{size}'"


def _fill_size(args: argparse.Namespace, command: Sequence[str]) -> None:
    """Set the missing parts of the size: those of the run that is restarted or resumed, if it can
    be read, else parts that fit. Raises CommandError if no size fits."""
    numbers = args.nodes, args.spares, args.nproc_per_node
    gpus = 0
    if arguments.communicator_in(args) in ("auto", "nccl"):
        gpus = len(visible_gpus(os.environ))
    size = choose(gpus, command, *numbers)
    for path in filter(None, (args.resume, args.run_dir)):
        with contextlib.suppress(RunDirectoryError, NotADirectoryError):
            old = RunDirectory(path).read_run()
            size = Size(old.nodes, old.spares, old.nproc_per_node)
    if size is None:
        where = f"{gpus} visible {'GPU' if gpus == 1 else 'GPUs'}" if gpus else "this host"
        other = choose(gpus, command, args.nodes, 0, args.nproc_per_node)
        flags = zip(("--nodes", "--spares", "--nproc-per-node"), numbers, strict=True)
        options = " ".join(f"{flag} {number}" for flag, number in flags if number is not None)
        problem = f"{options} does not fit" if options else "no number of nodes and processes fits"
        raise CommandError(
            f"{problem} {where}, the script's parallel sizes, its batch and the spares: "
            + (f"without one '{other}' does" if other else "choose other numbers")
        )
    chosen = size.nodes, size.spares, size.processes
    args.nodes, args.spares, args.nproc_per_node = (
        default if value is None else value for default, value in zip(chosen, numbers, strict=True)
    )


def files_outlive_hosts(command: Sequence[str], run: RunDirectory) -> bool:
    """Return whether the run directory is shared, or the user has a directory for checkpoints."""
    return "--save" in flags.tokens_of(command) or file_systems.is_shared(run.path)


def resolve(settings: Settings, plan: Path | None, *, outlives_hosts: bool) -> Settings:
    """Return the settings with automatic values resolved. Checkpoints in the background are off if
    the files would not outlive the hosts. ``plan`` determines the memory of a node for slots, and
    for its part of a checkpoint. Raises PlanError."""
    interval, shm_gb = settings.persist_interval, settings.shm_gb
    if interval == "auto" and not outlives_hosts:
        interval = "off"
    if plan is not None and not shm_gb:
        assessment = assess(read_plan(plan))
        parts = ("memory_bytes", "unique_bytes")[: 1 if interval in NEVER else 2]
        shm_gb = sum(assessment.busiest(part)[1] for part in parts) / GIGA
    return replace(settings, persist_interval=interval, shm_gb=shm_gb)


def _tokens(command: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command, with those of its argument files (``@FILE``)."""
    for word in command:
        file = Path(word[1:])
        yield from (
            file.read_text(errors="replace").split()
            if word[:1] == "@" and file.is_file()
            else (word,)
        )

"""What ``--deadpool`` adds to Megatron-LM's command line, and what it refuses to go with.

What is refused is a table in :mod:`deadpool_megatron.refusals`. Without ``--deadpool`` all of the
flags do nothing.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Mapping, Sequence

from deadpool_megatron import arguments
from deadpool_megatron.cluster.coordinator.checkpoints.durable import saves_refusal
from deadpool_megatron.hookpoints import FLAG
from deadpool_megatron.refusals.refused import REFUSED, one_logger_complaint
from deadpool_megatron.refusals.rows import complaint
from deadpool_megatron.refusals.unreviewed import unreviewed
from deadpool_megatron.settings import Settings


class FlagsRefused(ValueError):
    """A flag of Megatron-LM that a protected run cannot have; one line: which, why, what to do."""


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group ``deadpool``, with the settings of the run that this process belongs to.

    Those given to ``deadpool run`` itself are its defaults, so that Megatron's list of arguments
    shows what is in force.
    """
    defaults = Settings.from_environment(os.environ)
    arguments.add_arguments(parser, switches=True, defaults=defaults)
    return parser


def refuse(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Raise FlagsRefused for arguments, validated by Megatron, that cannot be protected, and for
    flags in ``argv``, the script's command line, that nobody has looked at."""
    if not getattr(args, "deadpool", False):
        return
    line = complaint(row for row in REFUSED if row.applies(args))
    line = line or unreviewed(argv) or one_logger_complaint(args)
    line = line or saves_refusal(getattr(args, "save", None), os.environ)
    if line:
        raise FlagsRefused(line)


def launch_problem(environ: Mapping[str, str], argv: Sequence[str]) -> str | None:
    """Why this process cannot be protected as it was started, and the command that can; one line.

    None for a member of a run, and without ``--deadpool``.
    """
    if FLAG not in argv or "DEADPOOL_AGENT_FD" in environ:
        return None
    if any(name.startswith("TORCHELASTIC_") for name in environ):
        reason = "torchrun kills all ranks when one dies, so no spare could take over"
    elif "SLURM_STEP_ID" in environ:
        reason = "started by srun directly, no agent watches this process or starts another"
    else:
        reason = "no agent watches this process or starts another"
    nodes, processes = _size(environ)
    options = f"--nodes {nodes} --spares 1 --nproc-per-node {processes} --run-dir DIR"
    advice = f"start it with: deadpool run {options} -- {shlex.join(argv)}"
    if nodes > 1:
        advice += (
            " (all on this host; over several hosts, one 'deadpool agent' on each, with the same"
            " options and its --node-id)"
        )
    return f"{reason}; {advice}"


def _size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Nodes, and processes on each, as another launcher has set them; 1 where it says nothing."""
    if "SLURM_STEP_ID" in environ and "LOCAL_WORLD_SIZE" not in environ:
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
        return nodes, max(1, _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") // nodes)
    world = _number(environ, "WORLD_SIZE")
    local = min(world, _number(environ, "LOCAL_WORLD_SIZE"))
    return world // local, local


def _number(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        if environ.get(name, "").isdigit():
            return max(1, int(environ[name]))
    return 1

"""The GPUs of this host, and what they make of a run: NCCL or gloo, decided once for all of its
processes. Who sees GPUs and cannot use them is sent away, and does not train on CPUs instead.
"""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Mapping

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.process.exit_words import last_words
from deadpool_megatron.cluster.run_directory.directory import RunInfo
from deadpool_megatron.preflight.gpus import VISIBLE, visible_gpus
from deadpool_megatron.process_names import interpreter

#: asks torch for its own words, which a process that is forked from must not
_PROBE = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
_PROBE_SECONDS = 120.0
_CPUS = f"'{VISIBLE}=' in front of the command trains on CPUs"


def decided(communicator: str, nodes_here: int, nproc: int, environment: Mapping[str, str]) -> str:
    """Returns the communicator of a run, of which ``nodes_here`` nodes of ``nproc`` processes are
    on this host: NCCL for "auto" where GPUs are visible. Raises CommandError where they are too
    few, or torch cannot use them.
    """
    if communicator not in ("nccl", "auto"):
        return communicator
    seen, needed = visible_gpus(environment), max(1, nodes_here * nproc)
    if communicator == "auto" and not seen:
        return communicator  # that is gloo, and every node is asked whether it sees none
    if len(seen) < needed:
        fits = len(seen) // nodes_here
        raise CommandError(
            f"NCCL needs a GPU for each process, there are {nodes_here}"
            f" {'node' if nodes_here == 1 else 'nodes'} x {nproc} processes here (spares count),"
            f" and {len(seen)} visible {'GPU' if len(seen) == 1 else 'GPUs'}: "
            + (f"start fewer, as with --nproc-per-node {fits}; {_CPUS}" if fits else _CPUS)
        )
    if problem := _problem_of_torch(seen[:needed], tuple(environment.items())):
        raise CommandError(
            f"{len(seen)} GPUs are visible, and torch cannot use {needed} of them: {problem};"
            f" './scripts/setup.sh --gpu' installs a torch with CUDA; {_CPUS}"
        )
    return "nccl"


def check_agreed(info: RunInfo, environment: Mapping[str, str]) -> None:
    """Look at the GPUs of one node of a run. Raises CommandError where it can have no part in it:
    see :func:`decided`; or one that sees GPUs, in a run that was made where none was seen.
    """
    communicator = info.settings.communicator
    if decided(communicator, 1, info.nproc_per_node, environment) != communicator:
        raise CommandError(
            f"the run trains on CPUs, as the node that made it saw no GPU, and this one sees"
            f" {len(visible_gpus(environment))}: look at nvidia-smi there; or start all with"
            " --deadpool-communicator nccl, or gloo"
        )


def gpus_to_share(
    info: RunInfo, nodes_here: int, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns the GPUs that there are for ``nodes_here`` nodes; none where they do not suffice, as
    processes may share them with gloo."""
    seen = visible_gpus(environment)
    return seen if len(seen) >= nodes_here * info.nproc_per_node else ()


@functools.cache
def _problem_of_torch(gpus: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> str:
    """Returns why torch cannot use all of these GPUs, in its own words; empty if it can."""
    try:
        asked = subprocess.run(
            interpreter("-c", _PROBE),
            env={**dict(environment), VISIBLE: ",".join(gpus)},
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""  # as from a cold file system; the members will say it
    if asked.returncode:
        return last_words(asked.stderr) or f"it ended with {asked.returncode}"
    # Of MIG devices a process is shown one, whatever it asks for.
    wanted, found = 1 if gpus[0].startswith("MIG") else len(gpus), int(asked.stdout.split()[-1])
    return "" if found >= wanted else f"it finds {found}"

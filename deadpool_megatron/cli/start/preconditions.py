"""Checks all preconditions of a run before a process is started.

Each check raises CommandError with a line that names the error and the remedy. The GPUs of the host
determine the communicator of a run, NCCL or gloo, once for all of its processes. A host whose GPUs
are unusable is refused and does not train on CPUs instead.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.process.logs import last_output
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.bad_nodes import noted_against
from deadpool_megatron.cluster.run_directory.cleanup import run_processes
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.layout.memory_needs import refusal
from deadpool_megatron.layout.placement import parse_domains
from deadpool_megatron.layout.schemes import first_plan, losses_survived
from deadpool_megatron.preflight.host import GPU_VARIABLE, visible_gpus
from deadpool_megatron.process_names import interpreter
from deadpool_megatron.settings import Settings

_MIB = 1 << 20
# Bytes of a role's segment for each copy: header pages and the smallest useful slots.
COPY_BYTES = 1 * _MIB
#: program that tries torch in another process, as a process that forks must not load CUDA
_PROBE = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
_PROBE_SECONDS = 120.0
_ON_CPUS = {
    "auto": f"'{GPU_VARIABLE}=' in front of the command trains on CPUs",
    "nccl": "'--deadpool-communicator gloo' trains on CPUs",
}


def check_command(command: Sequence[str]) -> None:
    """Check that the user's command is ``-m MODULE ...`` or ``SCRIPT.py ...`` and exists."""
    if not command:
        raise CommandError(
            "no command: end with '-- -m MODULE ARGS' or '-- SCRIPT.py ARGS',"
            " e.g. -- -m deadpool_megatron.trainer"
        )
    if command[0] == "-m":
        if len(command) < 2:
            raise CommandError("'-m' needs the name of a module")
        _check_main_module(command[1])
        return
    script = Path(command[0])
    if script.name.startswith("python") and not script.suffix == ".py":
        raise CommandError(f"leave {command[0]!r} out: the script, or -m MODULE, follows the '--'")
    if not script.is_file():
        raise CommandError(f"command not found: there is no script {command[0]!r}")
    if not os.access(script, os.R_OK):
        raise CommandError(f"script {command[0]!r} cannot be read")


def check_host_not_quarantined(run: RunDirectory, info: RunInfo) -> None:
    """Check that no earlier run has quarantined this host, which has all nodes of the run."""
    if info.settings.check == "off":
        return
    if evidence := noted_against(socket.gethostname(), run.path.parent, info.run_id):
        raise CommandError(f"this host is excluded: {evidence}")


def check_sizes(info: RunInfo) -> None:
    """Check that there are enough nodes for the planned copies."""
    nodes = info.nodes + info.spares
    if reason := refusal(first_plan(info.settings), nodes, info.settings):
        hint = "; without --nodes one host is cut into several" if nodes == 1 else ""
        raise CommandError(f"--deadpool-protection {info.settings.protection}: {reason}{hint}")


def read_domains(settings: Settings) -> dict[str, str]:
    """Return the failure domain of each node id or host name in the domains file. Return nothing
    without a file: then each node is a failure domain."""
    if not settings.domains_file:
        return {}
    try:
        return parse_domains(Path(settings.domains_file).read_text("utf-8"))
    except ValueError as error:  # an invalid line, or bytes that are no text
        raise CommandError(f"--deadpool-domains {settings.domains_file}: {error}") from error


def check_run_directory(run: RunDirectory) -> None:
    """Check that the directory is new or empty, and writable. The directory of a run that failed
    before its first iteration is renamed."""
    path = run.path
    if path.exists() and not path.is_dir():
        raise CommandError(f"--run-dir {path} is not a directory")
    if _has_failed_early(run):
        count = sum(1 for _ in path.parent.glob(f"{path.name}.failed-*"))
        path.rename(path.with_name(f"{path.name}.failed-{count + 1}"))
    if path.exists() and not all(_belongs_to_no_run(run, entry) for entry in path.iterdir()):
        raise CommandError(_occupied_reason(run))


def check_address(run: RunDirectory, host: str) -> None:
    """Check that nodes on other hosts can reach this address; a node with a wrong address would
    only be silent."""
    if host in ("", "0.0.0.0"):  # a failed command in the user's shell gives an empty address
        raise CommandError(
            f"{host!r} is no address that other nodes reach: give --host ADDRESS or --interface"
            " NAME"
        )
    here, listings = socket.gethostname(), run.node_listings().values()
    others = {str(listing.get("hostname", here)) for listing in listings} - {here}
    if host.startswith("127.") and others:
        raise CommandError(
            f"this node would listen on {host}, but the run has nodes on other hosts"
            f" ({', '.join(sorted(others)[:3])}): give --host ADDRESS or --interface NAME"
        )


def check_shared_memory(info: RunInfo, nodes_here: int) -> None:
    """Check that /dev/shm exists and has space for the smallest slots of ``nodes_here`` nodes.

    The needs of the model are known once it is built; the members check them then.
    """
    root = run_files.SEGMENT_ROOT
    if not root.is_dir() or not os.access(root, os.W_OK):
        raise CommandError(f"{root} is missing or not writable: it holds the generations")
    free = shutil.disk_usage(root).free
    copies = 1 + losses_survived(info.settings)
    needed = info.nproc_per_node * nodes_here * copies * COPY_BYTES
    if free < needed:
        raise CommandError(
            f"{root} has {free // _MIB} MiB free, even a tiny model needs"
            f" {needed // _MIB} MiB: 'deadpool clean' removes the memory of dead runs, and lists"
            " those that can continue; in a container raise --shm-size"
        )


def choose_communicator(
    communicator: str,
    nodes_here: int,
    nproc: int,
    environment: Mapping[str, str],
    advice: Callable[[int], str] = lambda _: "",
) -> str:
    """Return the communicator of a run with ``nodes_here`` nodes of ``nproc`` processes on this
    host: NCCL for "auto" if GPUs are visible. Raises CommandError if there are too few GPUs, or
    torch cannot use them. ``advice`` returns a text with a size that fits a number of GPUs.
    """
    if communicator not in ("nccl", "auto"):
        return communicator
    gpus, needed = visible_gpus(environment), max(1, nodes_here * nproc)
    if communicator == "auto" and not gpus:
        return communicator  # means gloo; each node checks that it sees no GPU, too
    on_cpus = _ON_CPUS[communicator]
    if len(gpus) < needed:
        each = len(gpus) // nodes_here
        fits = advice(len(gpus)) or (each and f"start fewer, as with --nproc-per-node {each}")
        raise CommandError(
            f"NCCL needs a GPU for each process, there are {nodes_here}"
            f" {'node' if nodes_here == 1 else 'nodes'} x {nproc} processes here (spares count),"
            f" and {len(gpus)} visible {'GPU' if len(gpus) == 1 else 'GPUs'}: "
            + (f"{fits}; {on_cpus}" if fits else on_cpus)
        )
    if problem := torch_problem(gpus[:needed], tuple(environment.items())):
        raise CommandError(
            f"{len(gpus)} GPUs are visible, and torch cannot use {needed} of them: {problem};"
            f" './scripts/setup.sh --gpu' installs a torch with CUDA; {on_cpus}"
        )
    return "nccl"


def check_communicator(info: RunInfo, environment: Mapping[str, str]) -> None:
    """Check the GPUs of a node of a run. Raises CommandError as :func:`choose_communicator` does,
    or if the node sees GPUs and the node that created the run saw none.
    """
    communicator = info.settings.communicator
    if choose_communicator(communicator, 1, info.nproc_per_node, environment) != communicator:
        raise CommandError(
            f"the run trains on CPUs, as the node that made it saw no GPU, and this one sees"
            f" {len(visible_gpus(environment))}: look at nvidia-smi there; or start all with"
            " --deadpool-communicator nccl, or gloo"
        )


def gpus_to_share(
    info: RunInfo, nodes_here: int, environment: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the GPUs to divide among ``nodes_here`` nodes. Return none if there are too few: with
    gloo, processes may share GPUs."""
    gpus = visible_gpus(environment)
    return gpus if len(gpus) >= nodes_here * info.nproc_per_node else ()


def _check_main_module(name: str) -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise CommandError(f"command not found: module {name!r} ({error})") from error
    if spec is None:
        raise CommandError(f"command not found: there is no module {name!r}")


def _has_failed_early(run: RunDirectory) -> bool:
    """Return whether a run in this directory failed before its first iteration and left no state
    and no process."""
    try:
        end, info = run.read_final(), run.read_run()
    except (run_files.RunDirectoryError, OSError):
        return False
    failed = end["exit_status"] != 0 and end["iterations"] == 0
    return failed and not run_files.slots_are_kept(run) and not run_processes(run, info.run_id)


def _belongs_to_no_run(run: RunDirectory, entry: Path) -> bool:
    """Return whether a launcher may have left this entry before it created a run, because it was
    refused or the disk was full."""
    if entry.name in run_files.SUB_DIRECTORIES:
        return entry.is_dir() and not any(entry.iterdir())
    return entry in (run.launcher_lock, run.path / "secret")


def _occupied_reason(run: RunDirectory) -> str:
    """Return the reason, with the remedy, why a directory that is not empty cannot be used."""
    try:
        info = run.read_run()
    except run_files.RunDirectoryError:
        return f"--run-dir {run.path} is not empty: choose another"
    if run_processes(run, info.run_id):
        return f"--run-dir {run.path} is in use by run {info.run_id}, which is alive"
    with contextlib.suppress(run_files.RunDirectoryError):
        if (end := run.read_final())["exit_status"] == 0:
            text = f"holds a run that is over, after {end['iterations']} iterations"
            return f"--run-dir {run.path} {text}: choose another one"
    return (
        f"--run-dir {run.path} holds an earlier run: choose another one"
        f" (to continue that run: --resume {run.path} --run-dir NEW)"
    )


@functools.cache
def torch_problem(gpus: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> str:
    """Return the reason why torch cannot use all of these GPUs; empty if it can."""
    try:
        probe = subprocess.run(
            interpreter("-c", _PROBE),
            env={**dict(environment), GPU_VARIABLE: ",".join(gpus)},
            capture_output=True,
            text=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ""  # perhaps a cold file system; the members will report real problems
    if probe.returncode:
        return last_output(probe.stderr) or f"it ended with {probe.returncode}"
    # A process sees only a single MIG device, whatever it requests.
    needed, usable = 1 if gpus[0].startswith("MIG") else len(gpus), int(probe.stdout.split()[-1])
    return "" if usable >= needed else f"it finds {usable}"

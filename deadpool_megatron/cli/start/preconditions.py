"""Everything that can be wrong before a run starts, found before anything is started.

Each check raises CommandError with one line that says what is wrong and what to do. The GPUs of the
host make of a run what it is, NCCL or gloo, once for all of its processes: who sees GPUs and cannot
use them is sent away, and does not train on CPUs instead.
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
from deadpool_megatron.cluster.process.logs import last_words
from deadpool_megatron.cluster.run_directory.bad_nodes import noted_against
from deadpool_megatron.cluster.run_directory.cleanup import run_processes
from deadpool_megatron.cluster.run_directory.directory import (
    SEGMENT_ROOT,
    SUB_DIRECTORIES,
    RunDirectory,
    RunDirectoryError,
    RunInfo,
    slots_are_kept,
)
from deadpool_megatron.layout.placement import parse_domains
from deadpool_megatron.layout.schemes import first_plan, losses_survived
from deadpool_megatron.layout.sizing import refusal
from deadpool_megatron.preflight.host import VISIBLE, visible_gpus
from deadpool_megatron.process_names import interpreter
from deadpool_megatron.settings import Settings

_MIB = 1 << 20
# Header pages and the smallest useful slots of one role's generations, per copy.
COPY_BYTES = 1 * _MIB
#: asks torch for its own words, which a process that is forked from must not
_PROBE = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
_PROBE_SECONDS = 120.0
_ON_CPUS = {
    "auto": f"'{VISIBLE}=' in front of the command trains on CPUs",
    "nccl": "'--deadpool-communicator gloo' trains on CPUs",
}


def check_command(command: Sequence[str]) -> None:
    """The user's command is ``-m MODULE ...`` or ``SCRIPT.py ...`` and is there."""
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


def check_host_is_not_bad(run: RunDirectory, info: RunInfo) -> None:
    """All nodes of the run will be on this host: better said before they start than by each."""
    if info.settings.check == "off":
        return
    if noted := noted_against(socket.gethostname(), run.path.parent, info.run_id):
        raise CommandError(f"this host is excluded: {noted}")


def check_sizes(info: RunInfo) -> None:
    """There are enough nodes for the wanted copies."""
    nodes = info.nodes + info.spares
    if why := refusal(first_plan(info.settings), nodes, info.settings):
        hint = "; without --nodes one host is cut into several" if nodes == 1 else ""
        raise CommandError(f"--deadpool-protection {info.settings.protection}: {why}{hint}")


def read_domains(settings: Settings) -> dict[str, str]:
    """Return what the domains file says; without one every node is a failure domain of its own."""
    if not settings.domains_file:
        return {}
    try:
        return parse_domains(Path(settings.domains_file).read_text("utf-8"))
    except ValueError as error:  # of a line that says nothing, or of bytes that are no text
        raise CommandError(f"--deadpool-domains {settings.domains_file}: {error}") from error


def check_run_directory(run: RunDirectory) -> None:
    """It does not exist, or is empty, and can be written. A start that has come to nothing makes
    room for the next one."""
    path = run.path
    if path.exists() and not path.is_dir():
        raise CommandError(f"--run-dir {path} is not a directory")
    if _came_to_nothing(run):
        taken = sum(1 for _ in path.parent.glob(f"{path.name}.failed-*"))
        path.rename(path.with_name(f"{path.name}.failed-{taken + 1}"))
    if path.exists() and not all(_is_of_no_run(run, entry) for entry in path.iterdir()):
        raise CommandError(_why_occupied(run))


def check_address(run: RunDirectory, host: str) -> None:
    """A node that others on other hosts cannot reach would only be found out by its silence."""
    if host in ("", "0.0.0.0"):  # the first from a shell, of a command that has failed
        raise CommandError(
            f"{host!r} is no address that other nodes reach: give --host ADDRESS or --interface"
            " NAME"
        )
    here = socket.gethostname()
    others = {str(one.get("hostname", here)) for one in run.node_listings().values()} - {here}
    if host.startswith("127.") and others:
        raise CommandError(
            f"this node would listen on {host}, but the run has nodes on other hosts"
            f" ({', '.join(sorted(others)[:3])}): give --host ADDRESS or --interface NAME"
        )


def check_shared_memory(info: RunInfo, nodes_here: int) -> None:
    """/dev/shm is there and has room for at least small slots.

    How much a model needs is known when it has been built: its processes look before they take any.
    """
    if not SEGMENT_ROOT.is_dir() or not os.access(SEGMENT_ROOT, os.W_OK):
        raise CommandError(f"{SEGMENT_ROOT} is missing or not writable: it holds the generations")
    free = shutil.disk_usage(SEGMENT_ROOT).free
    copies = 1 + losses_survived(info.settings)
    needed = info.nproc_per_node * nodes_here * copies * COPY_BYTES
    if free < needed:
        raise CommandError(
            f"{SEGMENT_ROOT} has {free // _MIB} MiB free, even a tiny model needs"
            f" {needed // _MIB} MiB: 'deadpool clean' removes the memory of dead runs, and lists"
            " those that can continue; in a container raise --shm-size"
        )


def decided(
    communicator: str,
    nodes_here: int,
    nproc: int,
    environment: Mapping[str, str],
    advice: Callable[[int], str] = lambda _: "",
) -> str:
    """Returns the communicator of a run, of which ``nodes_here`` nodes of ``nproc`` processes are
    on this host: NCCL for "auto" where GPUs are visible. Raises CommandError where they are too
    few, or torch cannot use them. ``advice``: the size that fits so many GPUs, in words.
    """
    if communicator not in ("nccl", "auto"):
        return communicator
    seen, needed = visible_gpus(environment), max(1, nodes_here * nproc)
    if communicator == "auto" and not seen:
        return communicator  # that is gloo, and every node is asked whether it sees none
    on_cpus = _ON_CPUS[communicator]
    if len(seen) < needed:
        each = len(seen) // nodes_here
        fits = advice(len(seen)) or (each and f"start fewer, as with --nproc-per-node {each}")
        raise CommandError(
            f"NCCL needs a GPU for each process, there are {nodes_here}"
            f" {'node' if nodes_here == 1 else 'nodes'} x {nproc} processes here (spares count),"
            f" and {len(seen)} visible {'GPU' if len(seen) == 1 else 'GPUs'}: "
            + (f"{fits}; {on_cpus}" if fits else on_cpus)
        )
    if problem := _problem_of_torch(seen[:needed], tuple(environment.items())):
        raise CommandError(
            f"{len(seen)} GPUs are visible, and torch cannot use {needed} of them: {problem};"
            f" './scripts/setup.sh --gpu' installs a torch with CUDA; {on_cpus}"
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


def _check_main_module(name: str) -> None:
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise CommandError(f"command not found: module {name!r} ({error})") from error
    if spec is None:
        raise CommandError(f"command not found: there is no module {name!r}")


def _came_to_nothing(run: RunDirectory) -> bool:
    """Return whether a run ended there before its first iteration, with nothing left of it."""
    try:
        end, info = run.read_final(), run.read_run()
    except (RunDirectoryError, OSError):
        return False
    failed = end["exit_status"] != 0 and end["iterations"] == 0
    return failed and not slots_are_kept(run) and not run_processes(run, info.run_id)


def _is_of_no_run(run: RunDirectory, entry: Path) -> bool:
    """Return whether a launcher that was refused, or that found the disk full, has left it."""
    if entry.name in SUB_DIRECTORIES:
        return entry.is_dir() and not any(entry.iterdir())
    return entry in (run.launcher_lock, run.path / "secret")


def _why_occupied(run: RunDirectory) -> str:
    try:
        info = run.read_run()
    except RunDirectoryError:
        return f"--run-dir {run.path} is not empty: choose another"
    if run_processes(run, info.run_id):
        return f"--run-dir {run.path} is in use by run {info.run_id}, which is alive"
    with contextlib.suppress(RunDirectoryError):
        if (end := run.read_final())["exit_status"] == 0:
            said = f"holds a run that is over, after {end['iterations']} iterations"
            return f"--run-dir {run.path} {said}: choose another one"
    return (
        f"--run-dir {run.path} holds an earlier run: choose another one"
        f" (to continue that run: --resume {run.path} --run-dir NEW)"
    )


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

"""Facts that Slurm tells the one task that it starts on each node, read once and checked.

``deadpool agent --from-slurm`` takes node id and failure domain from here. Tested with Slurm 22.05;
the variables are those of srun's manual page.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_megatron.cli.common import CommandError

INTERFACE_VARIABLE = "DEADPOOL_INTERFACE_NAME"
_SIOCGIFADDR = 0x8915
_TASK_COUNTS = re.compile(r"(?P<tasks>\d+)(\(x(?P<nodes>\d+)\))?")


@dataclass(frozen=True)
class SlurmNode:
    """One node of a job step. ``nodes``: how many the step has; ``host``: Slurm's name of this one.

    ``domain`` is the lowest switch (or block) above the node, empty where the site names none.
    """

    job_id: str
    node_id: int
    nodes: int
    host: str
    domain: str


def slurm_environment(environment: Mapping[str, str]) -> SlurmNode:
    """Read a task's environment. Pure. Raises CommandError: not a task, or not one per node."""
    job_id = environment.get("SLURM_JOB_ID")
    if job_id is None:
        raise CommandError(
            "--from-slurm: this is no Slurm job (no SLURM_JOB_ID): start it with sbatch and srun,"
            " or give --node-id and --host"
        )
    # sbatch's script has SLURM_PROCID, too, but is no step.
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        raise CommandError(
            "--from-slurm: this is no task of a job step: put 'srun --ntasks-per-node=1' before it"
        )
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    if any(tasks != 1 for tasks in _tasks_per_node(counts)):
        raise CommandError(
            f"--from-slurm: this step has several tasks on a node ({counts}); one agent serves a"
            " whole node: use 'srun --ntasks-per-node=1' and --nproc-per-node"
        )
    return SlurmNode(
        job_id=job_id,
        node_id=_number(environment, "SLURM_PROCID"),
        nodes=_number(environment, "SLURM_STEP_NUM_NODES"),
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        domain=_domain(environment),
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdigit():
        raise CommandError(f"--from-slurm: {name} is {text!r}, not a number: start it with srun")
    return int(text)


def _tasks_per_node(text: str) -> list[int]:
    """``2(x3),1`` -> [2, 1]; the numbers of nodes do not matter here."""
    found = [_TASK_COUNTS.fullmatch(part) for part in text.split(",")]
    if not all(found):
        raise CommandError(f"--from-slurm: SLURM_STEP_TASKS_PER_NODE is {text!r}: start it by srun")
    return [int(match["tasks"]) for match in found if match is not None]


def _domain(environment: Mapping[str, str]) -> str:
    """``core.rack0.node1`` with the pattern ``switch.switch.node`` -> ``rack0``."""
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # A node's name may have dots itself; what stands above it does not.
    above = [name for name, kind in zip(names, kinds, strict=False) if kind not in ("node", "")]
    return above[-1] if above else ""


def host_address(host: str) -> str:
    """The IPv4 address that a host's name resolves to. Raises CommandError when other nodes cannot
    reach it, or there is none.
    """
    try:
        address = socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
    except (OSError, UnicodeError) as error:  # a name with an empty or a long label is none
        why = getattr(error, "strerror", None) or error
        raise CommandError(
            f"the address of {host!r} is not known ({why}): give --host ADDRESS or"
            f" --interface NAME (or {INTERFACE_VARIABLE})"
        ) from error
    if str(address).startswith("127."):
        raise CommandError(
            f"{host!r} resolves to {address}, which other nodes cannot reach: give --host ADDRESS"
            f" or --interface NAME (or {INTERFACE_VARIABLE})"
        )
    return str(address)


def local_address(text: str) -> str:
    """Return what ``--deadpool-interface`` means on this machine: the address of the interface of
    that name, or the address (or host name) itself. Raises CommandError for what is neither.
    """
    names = [name for _, name in socket.if_nameindex()]
    if text in names:
        return interface_address(text)
    try:
        socket.getaddrinfo(text, None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise CommandError(
            f"--deadpool-interface {text!r} is neither an address nor a network interface of"
            f" {socket.gethostname()}; there are: {', '.join(names)}"
        ) from error
    return text


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface. Raises CommandError when it has none."""
    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            there = ", ".join(found for _, found in socket.if_nameindex())
            raise CommandError(
                f"network interface {name!r} has no IPv4 address ({error.strerror}); there are:"
                f" {there}"
            ) from error
    return socket.inet_ntoa(answer[20:24])

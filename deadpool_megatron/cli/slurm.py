"""Watches the nodes of a run in Slurm, and drains each node that Slurm drains: its roles move to a
spare, and nothing is computed again. Without a spare, the node trains until a spare joins, and
a line reports this. The command ends with the run. Start it on a host that has sinfo and sees the
run directory.
"""

# ``deadpool agent --from-slurm`` gets its node id and failure domain from this module, too. Tested
# with Slurm 22.05; srun's manual page documents the variables. No privileges in Slurm are needed.

from __future__ import annotations

import argparse
import functools
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cli import common
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.run_directory.directory import RunDirectory

_ANSWER_SECONDS = 60.0
_PAUSE_SECONDS = 0.2
_MAX_SECONDS = 86_400.0
_TASK_COUNTS = re.compile(r"(?P<tasks>\d+)(\(x(?P<nodes>\d+)\))?")


@dataclass(frozen=True)
class SlurmNode:
    """A node of a job step. ``host``: its name in Slurm. ``domain``: its failure domain, the lowest
    switch (or block) above the node; empty if the site names none.
    """

    node_id: int
    host: str
    domain: str


def slurm_environment(environment: Mapping[str, str]) -> SlurmNode:
    """Return the node of a task, from the task's environment. Pure. Raises CommandError if the
    process is no task of a step, or the step has several tasks on a node."""
    if "SLURM_JOB_ID" not in environment:
        raise CommandError(
            "--from-slurm: this is no Slurm job (no SLURM_JOB_ID): start it with sbatch and srun,"
            " or give --node-id and --host"
        )
    # The batch script has SLURM_PROCID, too, but is no task of a step.
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
    if not (number := environment["SLURM_PROCID"]).isdigit():
        raise CommandError(f"--from-slurm: SLURM_PROCID is {number!r}: start it with srun")
    return SlurmNode(
        node_id=int(number),
        host=environment.get("SLURMD_NODENAME") or socket.gethostname(),
        domain=_domain(environment),
    )


def complete_size(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    """Set the sizes that are missing in ``args`` to those of this step in Slurm. The number of GPUs
    is the requested number, so that a node that has lost a GPU does not make the run smaller."""
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "0"))
    gpus = environment.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2]
    if args.nproc_per_node is None and gpus.isdigit():
        args.nproc_per_node = int(gpus) or None
    if args.spares is None:
        args.spares = max(0, nodes - (args.nodes or max(1, nodes - 1)))
    if args.nodes is None and nodes > args.spares:
        args.nodes = nodes - args.spares


def _tasks_per_node(text: str) -> list[int]:
    """Parse the numbers of tasks per node: ``2(x3),1``, two tasks on each of three nodes and one
    task on the next, gives [2, 1]."""
    matches = [_TASK_COUNTS.fullmatch(part) for part in text.split(",")]
    if not all(matches):
        raise CommandError(f"--from-slurm: SLURM_STEP_TASKS_PER_NODE is {text!r}: start it by srun")
    return [int(match["tasks"]) for match in matches if match is not None]


def _domain(environment: Mapping[str, str]) -> str:
    """Return the domain of a topology address: ``core.rack0.node1`` with the pattern
    ``switch.switch.node`` gives ``rack0``."""
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".")
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    # A node's name may contain dots; the names above it do not.
    above = [name for name, kind in zip(names, kinds, strict=False) if kind not in ("node", "")]
    return above[-1] if above else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    common.add_run_directory(parser)
    kind, text = common.number(float, 1, _MAX_SECONDS), "between calls of sinfo (default: 15)"
    parser.add_argument("--every", type=kind, default=15.0, metavar="SECONDS", help=text)


def run(args: argparse.Namespace) -> int:
    """Follow Slurm until the run is over. Raises CommandError."""
    directory = RunDirectory(args.run_dir)
    directory.read_run()
    if shutil.which("sinfo") is None:
        raise CommandError("sinfo was not found: start it on a host of the Slurm cluster")
    send = functools.partial(common.ask, directory)
    follower = SlurmFollower(directory, drained_hosts, send)
    while not directory.has_final():
        follower.poll()
        poll_at = time.monotonic() + args.every
        while time.monotonic() < poll_at and not directory.has_final():
            time.sleep(_PAUSE_SECONDS)
    return 0


class SlurmFollower:
    """Drains the nodes of a run that Slurm drains. ``list_drained`` returns the names of the hosts,
    or raises CommandError. ``send`` sends a message to the run and returns the answer; it raises
    RequestRefused or TRANSIENT.
    """

    def __init__(
        self,
        directory: RunDirectory,
        list_drained: Callable[[], frozenset[str]],
        send: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self._directory, self._list_drained, self._send = directory, list_drained, send
        # The run recognizes a repeated request by its token, and does not drain a node twice.
        self._tokens: dict[int, str] = {}
        self._finished_nodes: set[int] = set()
        # The last printed text about each node, and about Slurm itself (None).
        self._last_texts: dict[int | None, str] = {}

    def poll(self) -> None:
        """Poll Slurm, request the same drains from the run, and print changes."""
        try:
            drained = self._list_drained()
        except CommandError as error:
            self._print(None, f"Slurm does not say which nodes it drains: {error}")
            return
        self._print(None, "")
        for node, listing in sorted(self._directory.node_listings().items()):
            host = _short(str(listing.get("hostname")))
            if host in drained and node not in self._finished_nodes:
                self._drain(node, host)

    def _drain(self, node: int, host: str) -> None:
        token = self._tokens.setdefault(node, secrets.token_hex(8))
        try:
            answer = self._send({"command": str(Verb.DRAIN), "token": token, "node": node})
        except common.RequestRefused as error:
            self._finished_nodes.add(node)
            self._print(node, f"Slurm drains {host}, node {node} is not drained: {error}")
            return
        except common.TRANSIENT as error:
            self._print(node, f"the run does not know yet that Slurm drains {host}: {error}")
            return
        request = Request.from_dict(answer["request"])
        if not request.is_open:
            self._finished_nodes.add(node)
        stage = {Stage.REFUSED: "refused", Stage.DONE: "done"}.get(request.stage, "")
        text = ", ".join(filter(None, (stage, request.reason)))
        self._print(node, f"Slurm drains {host}: node {node} is drained{text and f': {text}'}")

    def _print(self, node: int | None, text: str) -> None:
        if text and self._last_texts.get(node) != text:
            print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)
        self._last_texts[node] = text


def drained_hosts() -> frozenset[str]:
    """Return the short names of the hosts that Slurm drains or has drained. Raises CommandError."""
    try:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%n|%T"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"sinfo gave no answer within {_ANSWER_SECONDS:g} s") from error
    except OSError as error:
        raise CommandError(f"sinfo cannot be run: {error}") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise CommandError(f"sinfo ended with status {done.returncode}: {lines[-1]}")
    rows = (line.partition("|") for line in done.stdout.splitlines())
    return frozenset(_short(host.strip()) for host, _, state in rows if state.startswith("drain"))


def _short(host: str) -> str:
    return host.partition(".")[0]

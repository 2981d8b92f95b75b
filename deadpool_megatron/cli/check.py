"""``deadpool check``: are the nodes fit for a run, and which of them shall train?"""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cli import check_table
from deadpool_megatron.cli.common import CommandError, raw
from deadpool_megatron.cli.sizes import add_size
from deadpool_megatron.cli.slurm_environment import (
    INTERFACE_VARIABLE,
    host_address,
    interface_address,
    slurm_environment,
)
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.layout.domains import DomainsError, domain_of, parse_domains
from deadpool_megatron.planning.assess import assess, busiest
from deadpool_megatron.planning.file import read_plan
from deadpool_megatron.planning.keys import PlanError
from deadpool_megatron.preflight.attendance import Options, attend
from deadpool_megatron.preflight.facts import Wanted
from deadpool_megatron.preflight.follower import CheckError
from deadpool_megatron.preflight.judge import problems
from deadpool_megatron.preflight.machine import Instruments, RealInstruments, attempt_name
from deadpool_megatron.preflight.schedule import Pair
from deadpool_megatron.wire import auth

_DESCRIPTION = """\
One process per node, spares included, all at once. They meet in DIR/check, compare versions,
clocks, shared memory, limits and GPUs, connect to each other, and measure the link to the node
that would hold their copies. The verdict is written to DIR/check.json: 'deadpool agent' with the
same run directory then takes its node id from there, and does not start where it was left out.

Without --nodes: facts and problems of this machine alone.
"""
_EPILOG = """\
examples:
  deadpool check
  srun --ntasks-per-node=1 deadpool check --from-slurm --run-dir DIR --nodes 64 --spares 2 \\
      --nproc-per-node 8 --plan configs/65b.yaml
  deadpool check --node-id 0 --host 10.0.0.1 --run-dir DIR --nodes 4 --spares 1 --nproc-per-node 8

exit status, on all nodes: 0 there are N good nodes; 1 there are not, or this machine alone has a
problem; 2 bad input, or this node is cut off from most others
"""
_NOT_GOOD = 1
_GB = 1e9


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    parser = raw(
        subparsers.add_parser(
            "check",
            help="before a run: which nodes are fit to train",
            description=_DESCRIPTION,
            epilog=_EPILOG,
        )
    )
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="shared by all nodes")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--node-id", type=int, metavar="I", help="0 to N + S - 1")
    place.add_argument("--from-slurm", action="store_true", help="node id and rack from Slurm")
    add_size(parser, required=False)
    address = parser.add_mutually_exclusive_group()
    address.add_argument("--host", metavar="ADDRESS", help="address that other nodes reach")
    address.add_argument(
        "--interface",
        metavar="NAME",
        help=f"or the network interface that has it (default: the variable {INTERFACE_VARIABLE})",
    )
    parser.add_argument("--domain", default="", help="failure domain (rack) of this node")
    parser.add_argument(
        "--domains", type=Path, metavar="FILE", help="lines 'NODE DOMAIN', as --deadpool-domains"
    )
    need = parser.add_mutually_exclusive_group()
    need.add_argument(
        "--plan", type=Path, metavar="FILE", help="memory and links as 'deadpool plan FILE' says"
    )
    need.add_argument(
        "--shm-gb", type=float, default=0.0, metavar="X", help="GB of shared memory a node needs"
    )
    parser.add_argument(
        "--wait-seconds",
        type=float,
        default=120.0,
        metavar="X",
        help="for nodes that have not come (default: 120)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    return check(args, RealInstruments())


def check(args: argparse.Namespace, instruments: Instruments) -> int:
    """:func:`run` with other instruments, for tests of clusters that one machine is not."""
    failpoints.load()
    if args.nodes is None and args.node_id is None and not args.from_slurm:
        return _check_machine(args, instruments)
    wanted, pairs = _wanted(args)
    options = _options(args, wanted, pairs)
    try:
        outcome = attend(options, instruments)
    except CheckError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(
            f"{error.filename or options.directory}: {error.strerror}: all nodes need to share"
            " and write --run-dir"
        ) from error
    if outcome.content is not None:
        if args.json:
            print(json.dumps(outcome.content, allow_nan=False))
        else:
            check_table.show(outcome.content)
    return 0 if outcome.ok else _NOT_GOOD


def _check_machine(args: argparse.Namespace, instruments: Instruments) -> int:
    wanted = Wanted(nodes=1, shm_bytes=_shm_bytes(args)[0])
    try:
        host = _address(args, socket.gethostname())
    except CommandError:
        if args.interface:
            raise
        host = ""  # of no interest to a machine alone
    facts = instruments.facts(host, args.domain)
    found = [finding.text for finding in problems(facts, wanted)]
    if args.json:
        answer = {"ok": not found, "facts": facts.to_dict(), "problems": found}
        print(json.dumps(answer, allow_nan=False))
    else:
        print("\n".join(check_table.describe_machine(facts, found)))
    return _NOT_GOOD if found else 0


def _wanted(args: argparse.Namespace) -> tuple[Wanted, list[Pair] | None]:
    if args.run_dir is None:
        raise CommandError("--run-dir is missing: the nodes meet there")
    for name, least in (("nodes", 1), ("spares", 0), ("nproc_per_node", 1)):
        value, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if value is None:
            raise CommandError(f"{flag} is missing: the verdict depends on it")
        if value < least:
            raise CommandError(f"{flag} must be at least {least}, got {value}")
    if not args.wait_seconds > 0:
        raise CommandError(f"--wait-seconds must be positive, got {args.wait_seconds:g}")
    shm_bytes, pairs = _shm_bytes(args)
    wanted = Wanted(args.nodes, args.spares, args.nproc_per_node, shm_bytes)
    return wanted, pairs


def _shm_bytes(args: argparse.Namespace) -> tuple[int, list[Pair] | None]:
    """Shared memory that a node needs, 0 if that is not known, and the links that copies take."""
    if args.plan is None:
        if args.shm_gb < 0:
            raise CommandError(f"--shm-gb must not be negative, got {args.shm_gb:g}")
        return int(args.shm_gb * _GB), None
    try:
        found = assess(read_plan(args.plan))
    except PlanError as error:
        raise CommandError(f"--plan {error}") from error
    cluster = found.plan.cluster
    given = (args.nodes, args.nproc_per_node)
    if args.nodes is not None and given != (cluster.nodes, cluster.gpus_per_node):
        raise CommandError(
            f"--plan {args.plan} is for {cluster.nodes} nodes of {cluster.gpus_per_node} GPUs, not"
            f" for --nodes {args.nodes} --nproc-per-node {args.nproc_per_node}"
        )
    # The first role of a node stands for all: the measurement is about the link, not the bytes.
    first = {role.node: role for role in reversed(found.placement.roles)}
    pairs = {
        (min(node, role.buddies[0]), max(node, role.buddies[0])) for node, role in first.items()
    }
    return busiest(found.loads, "memory_bytes")[1], sorted(pairs)


def _options(args: argparse.Namespace, wanted: Wanted, pairs: list[Pair] | None) -> Options:
    slurm = slurm_environment(os.environ) if args.from_slurm else None
    node = args.node_id if slurm is None else slurm.node_id
    if node is None:
        raise CommandError("--node-id I or --from-slurm is missing: which node is this?")
    if not 0 <= node < wanted.total:
        raise CommandError(
            f"there is no node {node}: with --nodes {wanted.nodes} --spares {wanted.spares} they"
            f" are 0 to {wanted.total - 1}"
        )
    hostname = socket.gethostname() if slurm is None else slurm.host
    host = _address(args, hostname)
    try:
        RunDirectory(args.run_dir).make()
        if auth.ENVIRONMENT_NAME not in os.environ:
            auth.create_secret(args.run_dir)
    except OSError as error:
        raise CommandError(f"--run-dir {args.run_dir} cannot be made: {error.strerror}") from error
    return Options(
        directory=args.run_dir.absolute(),
        node=node,
        wanted=wanted,
        listener=_listen(host),
        domain=args.domain or _domain(args, node) or (slurm.domain if slurm else ""),
        secret=auth.load_secret(args.run_dir),
        wait_seconds=args.wait_seconds,
        attempt=attempt_name(),
        pairs=pairs,
    )


def _address(args: argparse.Namespace, hostname: str) -> str:
    if args.host is not None:
        return str(args.host)
    interface = args.interface or os.environ.get(INTERFACE_VARIABLE, "")
    return interface_address(interface) if interface else host_address(hostname)


def _domain(args: argparse.Namespace, node: int) -> str:
    if args.domains is None:
        return ""
    try:
        return domain_of(parse_domains(args.domains.read_text()), node, socket.gethostname())
    except (OSError, DomainsError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"--domains {args.domains}: {reason}") from error


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=1024)
    except OSError as error:
        raise CommandError(
            f"cannot listen on {host} ({error.strerror or error}): give --host an address of this"
            " machine"
        ) from error

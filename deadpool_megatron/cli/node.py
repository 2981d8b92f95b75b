"""``deadpool coordinator`` and ``deadpool agent``: the processes of a run, for schedulers.

``deadpool run`` starts both by itself; on a cluster each is started where it belongs.
"""

from __future__ import annotations

import argparse
import os
import socket
from pathlib import Path
from typing import Any

from deadpool_megatron import arguments
from deadpool_megatron.cli import scripts
from deadpool_megatron.cli.checks import check_command
from deadpool_megatron.cli.common import (
    CommandError,
    ask_at,
    coordinator_address,
    parse_address,
    raw,
)
from deadpool_megatron.cli.sizes import add_size, make_info
from deadpool_megatron.cluster.run_directory import RunDirectory, RunInfo
from deadpool_megatron.layout import domains
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire import auth
from deadpool_megatron.wire.framing import WireError

_COORDINATOR_EXAMPLES = """\
example (then start one agent on every node, spares included):
  deadpool coordinator --run-dir /shared/run1 --nodes 16 --spares 2 --nproc-per-node 8 \\
      --host 10.0.0.1 --port 29400 -- -m deadpool_megatron.trainer @train.txt
"""
_AGENT_EXAMPLES = """\
example:
  deadpool agent --coordinator head:29400 --run-dir /shared/run1 --node-id $SLURM_NODEID \\
      --host $(hostname -i)
"""


def add_parser(subparsers: Any) -> None:
    """Add both sub-commands."""
    coordinator = raw(
        subparsers.add_parser(
            "coordinator",
            help="only the coordinator of a run (clusters)",
            epilog=_COORDINATOR_EXAMPLES,
        )
    )
    coordinator.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    add_size(coordinator, required=False)
    coordinator.add_argument("--host", metavar="ADDRESS", help="address that agents reach")
    coordinator.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    coordinator.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    coordinator.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    arguments.add_arguments(coordinator)

    agent = raw(
        subparsers.add_parser(
            "agent", help="only the agent of one node (clusters)", epilog=_AGENT_EXAMPLES
        )
    )
    agent.add_argument("--coordinator", metavar="HOST:PORT", help="default: as the run dir says")
    agent.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    agent.add_argument("--run-id", metavar="ID", help="refuse to serve another run")
    agent.add_argument("--node-id", type=int, required=True, metavar="I")
    agent.add_argument("--nproc-per-node", type=int, metavar="P", help="must agree with the run's")
    agent.add_argument("--host", metavar="ADDRESS", help="address that other nodes reach")
    agent.add_argument("--domain", default="", help="failure domain (rack) of this node")
    agent.add_argument(
        "--preload", metavar="MODULES", help="imported once per node (default: torch, megatron)"
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    return _coordinator(args) if args.subcommand == "coordinator" else _agent(args)


def _coordinator(args: argparse.Namespace) -> int:
    # The planner comes from a layer above the cluster package, so it is handed in from here.
    from deadpool_megatron.cluster.coordinator import run_coordinator
    from deadpool_megatron.cluster.coordinator_options import CoordinatorOptions
    from deadpool_megatron.recovery import plan

    run = RunDirectory(args.run_dir)
    if run.final.exists():
        raise CommandError(f"the run in {run.path} is over")
    if not (run.path / "run.json").exists():
        if args.nodes is None or args.nproc_per_node is None or not args.command:
            raise CommandError("a new run needs --nodes, --nproc-per-node and -- COMMAND")
        check_command(args.command)
        scripts.adopt(args)
        run.create(make_info(args, arguments.settings_from(args)))
        auth.create_secret(run.path)
    info = run.read_run()
    host = args.host or info.settings.interface
    if args.listen_fd is not None:
        listener = socket.socket(fileno=args.listen_fd)
    else:
        listener = listen(host, args.port)
        print(f"coordinator of run {info.run_id} at {host}:{listener.getsockname()[1]}", flush=True)
    return run_coordinator(
        CoordinatorOptions(
            run=run,
            info=info,
            secret=auth.load_secret(run.path),
            host=host,
            listener=listener,
            planner=plan,
            lifeline_fd=args.lifeline_fd,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises CommandError when the address cannot be had."""
    if not 0 <= port <= 65535:
        raise CommandError(f"--port {port} is no port: choose one between 1 and 65535, or 0")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise CommandError(
            f"cannot listen on {host}:{port} ({error.strerror}): choose another --port or"
            " --deadpool-interface"
        ) from error
    return listener


def _agent(args: argparse.Namespace) -> int:
    from deadpool_megatron.cli.launch import DEFAULT_PRELOAD, preload_modules
    from deadpool_megatron.cluster.agent import AgentOptions, NodeTaken, run_agent
    from deadpool_megatron.cluster.cleanup import claim_segments

    run = RunDirectory(args.run_dir)
    fixed = None if args.coordinator is None else parse_address(args.coordinator)
    if not (run.path / "run.json").exists() and fixed is not None:
        _fetch_run(run, args, fixed)
    info = _run_of(run, args)
    if fixed is None and coordinator_address(run) is None:
        raise CommandError(f"{run.path} names no coordinator: give --coordinator HOST:PORT")
    if fixed is not None:
        _probe(fixed, auth.load_secret(run.path), info)
    modules = scripts.modules(args.preload, DEFAULT_PRELOAD, info.command)
    if (script := scripts.script_of(info.command)) is not None:
        check_command([script])  # this may be another host than the coordinator's
    scripts.announce(info.command, os.environ)
    preload_modules(info.settings, modules)
    claim_segments(run, info.run_id)
    if os.getpgid(0) != os.getpid():
        os.setsid()
    options = AgentOptions(
        node=args.node_id,
        run=run,
        info=info,
        secret=auth.load_secret(run.path),
        # The file names the newest coordinator, wherever it was started again.
        address=lambda: coordinator_address(run) or fixed,
        host=args.host or info.settings.interface,
        domain=args.domain or domain_of(info.settings, args.node_id),
        modules=modules,
        directory=Path.cwd(),
    )
    try:
        return run_agent(options)
    except NodeTaken as error:
        raise CommandError(f"{error}: choose another --node-id") from error


def _run_of(run: RunDirectory, args: argparse.Namespace) -> RunInfo:
    info = run.read_run()
    if run.final.exists():
        raise CommandError(f"the run in {run.path} is over")
    if args.run_id is not None and args.run_id != info.run_id:
        raise CommandError(f"{run.path} belongs to run {info.run_id}, not {args.run_id}")
    if args.nproc_per_node is not None and args.nproc_per_node != info.nproc_per_node:
        raise CommandError(f"the run has --nproc-per-node {info.nproc_per_node}")
    if args.command and scripts.member_command(args.command) != info.command:
        raise CommandError(f"the run has another command: {' '.join(info.command)}")
    return info


def _fetch_run(run: RunDirectory, args: argparse.Namespace, address: tuple[str, int]) -> None:
    """Without a shared file system: the facts of the run come from the coordinator."""
    if args.run_id is None or auth.ENVIRONMENT_NAME not in os.environ:
        raise CommandError(
            f"{run.path} is no run directory: share the coordinator's, or give --run-id and"
            f" {auth.ENVIRONMENT_NAME}"
        )
    answer = ask_at(address, run, args.run_id, {"command": "info"})
    run.create(RunInfo.from_dict(answer["info"]))


def _probe(address: tuple[str, int], secret: bytes, info: RunInfo) -> None:
    """Fail at once for a wrong address or secret, rather than after the whole fence limit."""
    try:
        auth.connect(address, secret, info.run_id, info.settings.connect_seconds).close()
    except auth.AuthenticationError:
        raise
    except (OSError, WireError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CommandError(f"no coordinator at {address[0]}:{address[1]} ({reason})") from error


def domain_of(settings: Settings, node: int) -> str:
    """Failure domain from the domains file; every node its own without one."""
    table = {}
    if settings.domains_file:
        table = domains.parse_domains(Path(settings.domains_file).read_text())
    return domains.domain_of(table, node, socket.gethostname())

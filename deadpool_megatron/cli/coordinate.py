"""``deadpool coordinator``, and ``standby``, which each agent starts for itself.

``deadpool run`` starts its coordinator by itself; on a cluster the standbys see to there being one.
"""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deadpool_megatron import arguments, failpoints, ownership
from deadpool_megatron.cli import scripts
from deadpool_megatron.cli.checks import check_command
from deadpool_megatron.cli.common import CommandError, listen, raw
from deadpool_megatron.cli.sizes import add_size, make_info
from deadpool_megatron.cli.slurm_environment import local_address
from deadpool_megatron.cluster.journal.choice import open_journal
from deadpool_megatron.cluster.journal.entries import Journal, JournalError
from deadpool_megatron.cluster.journal.terms import Term, claim_term, newest_term
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.wire import auth, tls

if TYPE_CHECKING:
    from deadpool_megatron.cluster.coordinator.first_state import Estate

EXIT_JOURNAL = 1
_EXAMPLES = """\
Agents that share a run directory need no such command: one of their standbys coordinates.

example (then start one agent on every node, spares included):
  deadpool coordinator --run-dir /shared/run1 --nodes 16 --spares 2 --nproc-per-node 8 \\
      --host 10.0.0.1 --port 29400 -- -m deadpool_megatron.trainer @train.txt
"""


def add_parser(subparsers: Any) -> None:
    """Add both sub-commands."""
    coordinator = raw(
        subparsers.add_parser(
            "coordinator", help="only the coordinator of a run (clusters)", epilog=_EXAMPLES
        )
    )
    coordinator.add_argument("--run-dir", type=Path, required=True, metavar="DIR")
    add_size(coordinator, required=False)
    coordinator.add_argument("--host", metavar="ADDRESS", help="address that agents reach")
    coordinator.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    coordinator.add_argument("--listen-fd", type=int, help=argparse.SUPPRESS)
    coordinator.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    coordinator.add_argument("--restarted", action="store_true", help=argparse.SUPPRESS)
    arguments.add_arguments(coordinator)

    standby = subparsers.add_parser("standby")
    standby.add_argument("--run-dir", type=Path, required=True)
    standby.add_argument("--node-id", type=int, required=True)
    standby.add_argument("--host", required=True)
    standby.add_argument("--port", type=int, required=True)
    standby.add_argument("--report-fd", type=int, required=True)
    standby.add_argument("--follow", action="store_true")


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    return _coordinator(args) if args.subcommand == "coordinator" else _standby(args)


def _coordinator(args: argparse.Namespace) -> int:
    run = RunDirectory(args.run_dir)
    ownership.check_directory(run.path)
    if run.final.exists():
        raise CommandError(f"the run in {run.path} is over")
    if not (run.path / "run.json").exists():
        if args.nodes is None or args.nproc_per_node is None or not args.command:
            raise CommandError("a new run needs --nodes, --nproc-per-node and -- COMMAND")
        check_command(args.command)
        scripts.adopt(args)
        settings = arguments.settings_from(args)
        tls.contexts(settings)
        run.create(make_info(args, settings))
        auth.create_secret(run.path)
    info = run.read_run()
    host = args.host or local_address(info.settings.interface)
    if args.listen_fd is not None:
        listener = socket.socket(fileno=args.listen_fd)
    else:
        listener = listen(host, args.port)
        print(f"coordinator of run {info.run_id} at {host}:{listener.getsockname()[1]}", flush=True)
    # All of it before the claim: from there on a sign of life is awaited.
    from deadpool_megatron.cluster.coordinator import service
    from deadpool_megatron.cluster.coordinator.first_state import look_up
    from deadpool_megatron.recovery import plan

    del service, plan
    try:
        journal = open_journal(info.settings, info.run_id, run.journal)
        last = newest_term(journal)
        number = 1 if last is None else last.number + 1
        estate = look_up(run, journal)
        term = claim_term(journal, number, host, listener.getsockname()[1], None)
    except (JournalError, OSError) as error:
        if args.lifeline_fd is None:
            raise CommandError(str(error)) from error
        # The launcher tries again what may have been an outage.
        print(f"deadpool coordinator: {error}", file=sys.stderr)
        return EXIT_JOURNAL
    lifeline, restarted = args.lifeline_fd, args.restarted
    return _coordinate(run, listener, term, journal, estate, lifeline, restarted=restarted)


def _standby(args: argparse.Namespace) -> int:
    # Warm: nothing is left to import in a takeover.
    from deadpool_megatron.cluster.coordinator import service
    from deadpool_megatron.cluster.coordinator.standby import Standby, StandbyOptions
    from deadpool_megatron.cluster.process import posix
    from deadpool_megatron.recovery import plan

    del service, plan
    posix.set_process_name(f"dp-standby{args.node_id}")
    run = RunDirectory(args.run_dir)
    info = run.read_run()
    failpoints.load()
    failpoints.set_context(run_dir=str(run.path), node=args.node_id, process="standby")
    journal = open_journal(info.settings, info.run_id, run.journal)
    options = StandbyOptions(
        run=run,
        info=info,
        secret=auth.load_secret(run.path),
        node=args.node_id,
        host=args.host,
        listen=lambda: listen(args.host, args.port),
        report_fd=args.report_fd,
        first=not args.follow,
    )
    standby = Standby(options, journal)
    claimed = standby.watch()
    if claimed is None:
        return 0
    term, listener = claimed
    # Where its agent never met the coordinator before it, that one has died with all the others.
    restarted = term.number > 1 and not standby.was_in_touch
    return _coordinate(run, listener, term, journal, standby.estate, None, restarted=restarted)


def _coordinate(
    run: RunDirectory,
    listener: socket.socket,
    term: Term,
    journal: Journal,
    estate: Estate,
    lifeline_fd: int | None,
    *,
    restarted: bool,
) -> int:
    # The planner comes from a layer above the cluster package, so it is handed in from here.
    from deadpool_megatron.cluster.coordinator.options import CoordinatorOptions
    from deadpool_megatron.cluster.coordinator.service import run_coordinator
    from deadpool_megatron.recovery import plan

    return run_coordinator(
        CoordinatorOptions(
            run=run,
            info=run.read_run(),
            secret=auth.load_secret(run.path),
            host=term.host,
            listener=listener,
            planner=plan,
            term=term,
            journal=journal,
            estate=estate,
            lifeline_fd=lifeline_fd,
            restarted=restarted,
        )
    )

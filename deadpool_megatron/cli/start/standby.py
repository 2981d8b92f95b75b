"""``deadpool standby``, which an agent starts for itself: it may become the coordinator."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from deadpool_megatron import failpoints
from deadpool_megatron.cli.common import listen
from deadpool_megatron.cluster.journal.journal import open_journal
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.process_names import set_process_name
from deadpool_megatron.wire import auth


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    standby = subparsers.add_parser("standby")
    standby.add_argument("--run-dir", type=Path, required=True)
    standby.add_argument("--node-id", type=int, required=True)
    standby.add_argument("--host", required=True)
    standby.add_argument("--port", type=int, required=True)
    standby.add_argument("--report-fd", type=int, required=True)


def run(args: argparse.Namespace) -> int:
    """Watch, and coordinate when it has to; returns the exit status."""
    # Warm: nothing is left to import in a takeover.
    from deadpool_megatron.cluster.coordinator import service
    from deadpool_megatron.cluster.coordinator.standby import Standby, StandbyOptions
    from deadpool_megatron.cluster.coordinator.succession import CoordinatorOptions

    set_process_name(f"dp-standby{args.node_id}")
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
    )
    standby = Standby(options, journal)
    claimed = standby.watch()
    if claimed is None:
        return 0
    term, listener = claimed
    newest = standby.estate.record
    begins_anew = newest is not None and newest.epoch <= info.ended_epoch
    # Where its agent never met the coordinator before it, that one has died with all the others.
    restarted = begins_anew or (term.number > 1 and not standby.was_in_touch)
    return service.run_coordinator(
        CoordinatorOptions(
            run=run,
            info=info,
            secret=options.secret,
            host=term.host,
            listener=listener,
            term=term,
            journal=journal,
            estate=standby.estate,
            restarted=restarted,
            begins_anew=begins_anew,
        )
    )

"""The process of an agent, which ``deadpool run`` and ``deadpool agent`` start, and that of its
standby (``deadpool standby``), which may become the coordinator.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from deadpool_megatron import failpoints
from deadpool_megatron.cli import common
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start.preconditions import read_domains
from deadpool_megatron.cluster.agent.options import NO_NUMBER, AgentOptions
from deadpool_megatron.cluster.agent.process import run_agent
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.cluster.run_directory.orphaned_slots import NodeTaken, remove_unclaimed
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.layout import placement as domains
from deadpool_megatron.process_names import set_process_name
from deadpool_megatron.vault.errors import SegmentError
from deadpool_megatron.wire import auth

_ATTACH_PAUSE_SECONDS = 1.0


def serve(options: AgentOptions, standby_port: int | None, rejoins: int = 0) -> int:
    """Serve as a node until the run is over. Return the exit status: that of the run if its result
    can be read, FENCED for an excluded node. A fenced agent rejoins as another node, up to
    ``rejoins`` times. Raises CommandError.

    ``options``: without a standby; ``node`` may be NO_NUMBER, and ``domain`` is the user's, if any.
    ``standby_port``: the port on which the agent's standby listens when it becomes the coordinator;
    None for no standby.
    """
    run, info, node, host = options.run, options.info, options.node, options.host
    # Read the domains once: when a node rejoins after a cut, file systems may be unavailable.
    table = {} if options.domain else read_domains(info.settings)
    for attempt in range(rejoins + 1):
        if node == NO_NUMBER:
            node = _attach(run, info, options.fixed_address)
        standby: tuple[str, ...] = ()
        if standby_port is not None:
            standby = ("-m", "deadpool_megatron", "standby", "--run-dir", str(run.path))
            standby += ("--node-id", str(node), "--host", host, "--port", str(standby_port))
        domain = options.domain or domains.domain_of(table, node, socket.gethostname())
        rejoin = attempt < rejoins
        complete = replace(options, node=node, domain=domain, standby=standby, keeps_slots=rejoin)
        try:
            status = run_agent(complete)
        except NodeTaken as error:
            raise CommandError(f"{error}: choose another --node-id") from error
        except SegmentError as error:
            raise CommandError(f"{error}; 'deadpool clean {run.path}' gives it up") from error
        if status == ExitStatus.EXCLUDED:
            return ExitStatus.FENCED
        if status != ExitStatus.FENCED or run.has_final():
            break
        node = NO_NUMBER
    try:
        run_status = int(run.read_final()["exit_status"])
    except run_files.RunDirectoryError:
        return status
    if run_status == 0:  # otherwise the memory of dead agents may complete a dump
        remove_unclaimed(run, info.run_id)
    return run_status


def _attach(run: RunDirectory, info: RunInfo, fixed: tuple[str, int] | None) -> int:
    """Return an unused node id from the coordinator, at the address ``fixed`` if the run directory
    is not shared. Raises CommandError if no coordinator assigns an id in time."""
    limit = time.monotonic() + info.settings.spare_timeout_seconds
    message = {"command": "attach", "hostname": socket.gethostname()}
    while True:
        try:
            if fixed is not None and not run.coordinator.exists():
                answer = common.ask_at(fixed, run, info.run_id, message)
            else:
                answer = common.ask(run, message)
            return int(answer["node"])
        except common.RequestRefused:
            raise
        except common.TRANSIENT as error:
            # After a cut the shared run directory may be unavailable, too.
            if run.has_final() or time.monotonic() > limit:
                raise CommandError(f"cannot attach: {error}") from error
        time.sleep(_ATTACH_PAUSE_SECONDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--node-id", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)


def run(args: argparse.Namespace) -> int:
    """Watch the coordinator, and take over if it fails; return the exit status."""
    # Import now, so that a takeover imports nothing.
    from deadpool_megatron.cluster.coordinator import service
    from deadpool_megatron.cluster.coordinator.standby import Standby, StandbyOptions
    from deadpool_megatron.cluster.coordinator.succession import CoordinatorOptions

    set_process_name(f"dp-standby{args.node_id}")
    run = RunDirectory(args.run_dir)
    info = run.read_run()
    run.run_id = info.run_id
    failpoints.load()
    failpoints.set_context(run_dir=str(run.path), node=args.node_id, process="standby")
    journal = Journal(run.journal, run.check_own)
    options = StandbyOptions(
        run=run,
        info=info,
        secret=auth.load_secret(run.path),
        node=args.node_id,
        host=args.host,
        listen=lambda: common.listen(args.host, args.port),
        agent=socket.socket(fileno=sys.stdin.fileno()),
    )
    standby = Standby(options, journal)
    claim = standby.watch()
    if claim is None:
        return 0
    term, listener = claim
    record = standby.recovered.record
    has_new_command = record is not None and record.epoch <= info.ended_epoch
    # All processes had died if this agent was never connected to the earlier coordinator.
    restarted = has_new_command or (term.number > 1 and not standby.was_in_touch)
    return service.run_coordinator(
        CoordinatorOptions(
            run=run,
            info=info,
            secret=options.secret,
            host=term.host,
            listener=listener,
            term=term,
            journal=journal,
            recovered=standby.recovered,
            restarted=restarted,
            has_new_command=has_new_command,
        )
    )

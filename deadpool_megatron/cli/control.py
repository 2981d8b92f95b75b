"""``deadpool status``, ``drain``, ``protect``, ``kill``, ``stop``: look at a run, or interfere."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import time
from typing import Any

from deadpool_megatron.cli.common import (
    CommandError,
    RunNotReachable,
    add_run_directory,
    ask,
    raw,
)
from deadpool_megatron.cluster.failures import in_words
from deadpool_megatron.cluster.journal.choice import open_journal
from deadpool_megatron.cluster.journal.entries import JournalError
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.layout.records import EpochRecord

# A coordinator that took over may not have heard of an order; it is repeated this often.
_REPEAT_SECONDS = 5.0
_KILL_EXAMPLES = """\
examples:
  deadpool kill RUN --node 1                 SIGKILL everything on node 1, agent first
  deadpool kill RUN --role 3                 SIGKILL the process that plays role 3
  deadpool kill RUN --role 0 --signal STOP   freeze it instead
"""


_PROTECT_DESCRIPTION = """\
Training pauses after a protected iteration, goes on in a new epoch with the new protection, and
computes nothing again. What is not given stays as it is. Refused with the reason where it cannot
hold. 'deadpool status' shows what is in force, and what a failure would cost (RPO). mixed
is a rule for the start of a run: here buddy, or parity with --group, are asked for themselves.
"""


def add_parser(subparsers: Any) -> None:
    """Add the five sub-commands."""
    status = subparsers.add_parser("status", help="what a run does right now")
    add_run_directory(status)
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    form.add_argument(
        "--verdict",
        action="store_true",
        help="exit with the run's own exit status (2 while it has none)",
    )

    drain = subparsers.add_parser("drain", help="move a node's roles to a spare, then let it go")
    add_run_directory(drain)
    drain.add_argument("--node", type=int, required=True, metavar="N")

    protect = raw(
        subparsers.add_parser(
            "protect",
            help="change how a running job is protected",
            description=_PROTECT_DESCRIPTION,
        )
    )
    add_run_directory(protect)
    protect.add_argument("--scheme", choices=("buddy", "parity", "local", "recompute"))
    protect.add_argument("--group", type=int, metavar="K", help="parity: roles that share blocks")
    protect.add_argument("--every", type=int, metavar="N", help="protect each N-th iteration only")

    kill = raw(
        subparsers.add_parser("kill", help="hurt a run, to see it recover", epilog=_KILL_EXAMPLES)
    )
    add_run_directory(kill)
    target = kill.add_mutually_exclusive_group(required=True)
    target.add_argument("--node", type=int, metavar="N", help="all processes of a node")
    target.add_argument("--role", type=int, metavar="R", help="the process that plays a role")
    kill.add_argument("--signal", choices=("KILL", "STOP", "SEGV"), default="KILL")

    stop = subparsers.add_parser("stop", help="end a run in order (exit status 130)")
    add_run_directory(stop)
    stop.add_argument(
        "--dump",
        action="store_true",
        help="save the state first, for --resume (exit status 75 of the run)",
    )
    stop.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="with --dump: how long the run has until something ends it; where exports are"
        " configured it trains on and writes a last checkpoint before the dump, for half that time"
        " at most",
    )
    stop.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        help="until the run is over; the order is repeated meanwhile",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    commands = {
        "status": _status,
        "drain": _drain,
        "protect": _protect,
        "kill": _kill,
        "stop": _stop,
    }
    return commands[args.subcommand](args)


def _status(args: argparse.Namespace) -> int:
    run = RunDirectory(args.run_dir)
    if args.verdict:
        run.read_run()
        if not run.final.exists():
            raise CommandError(
                f"the run in {run.path} has no verdict: it goes on, or was cut short"
            )
        print(_lines(_final(run))[0])
        return int(_final(run)["exit_status"])
    try:
        status = ask(run, {"command": "status"})["status"]
    except RunNotReachable:
        if not run.final.exists():
            raise
        status = _final(run)
    if args.json:
        print(json.dumps(status))
    else:
        print("\n".join(_lines(status)))
    return 0


def _final(run: RunDirectory) -> dict[str, Any]:
    final = read_json(run.final)
    return {"phase": "over", **{k: final[k] for k in ("exit_status", "reason", "iterations")}}


def _lines(status: dict[str, Any]) -> list[str]:
    if status["phase"] == "over":
        why = f": {status['reason']}" if status["reason"] else ""
        return [
            f"over, exit status {status['exit_status']}{why}; {status['iterations']} iterations"
        ]
    waits = f", waits for {status['waiting_for']}" if status["waiting_for"] else ""
    lines = [
        f"epoch {status['epoch']}, {status['phase']}{waits}; iteration {status['iteration']};"
        f" {status['recoveries']} recoveries; spares: {status['spares'] or 'none'}",
        _coordinator_line(status["coordinator"]),
        f"  protection: {status['protection'] or 'not yet decided'}",
        _rpo_line(status["rpo"]),
    ]
    for role, known in status["roles"].items():
        node, slot, incarnation = known["seat"]
        entered = known["waiting"]
        wait = f", waits in {entered[1]} of {entered[0]} ({entered[2]})" if entered else ""
        lines.append(
            f"  role {role:>3}: node {node} slot {slot} process {incarnation},"
            f" {known['section']} {known['iteration'] if known['iteration'] is not None else ''}"
            f"{wait}"
        )
    for node, known in status["nodes"].items():
        kind = "spare" if known["spare"] else "node "
        protection = "  ".join(f"{k}={v}" for k, v in sorted(known["vault"].items()))
        lines.append(f"  {kind} {node}: {known['host']}, {known['restarts']} restarts {protection}")
    for failure in status["failures"]:
        kind = in_words(failure["kind"])
        lines.append(f"  before epoch {failure['epoch']} {kind}: {failure['cause']}")
    if status["failing"]:
        kind, cause = in_words(status["failing"]["kind"]), status["failing"]["cause"]
        lines.append(f"  recovering now, {kind}: {cause}")
    for node, slow in status["slow"].items():
        lines.append(
            f"  node {node} is slow: {slow['seconds']:.3f} s of its own per iteration, its peers"
            f" {slow['peer_seconds']:.3f} s"
        )
    lines += _export_lines(status["export"])
    if status["aside"]:
        lines.append(f"  put aside, used only when no other spare is left: {status['aside']}")
    if status["fewer_copies"]:
        lines.append(f"  roles {status['fewer_copies']} have fewer copies than wanted")
    if status["diverged"]:
        lines.append("  A REPLAYED ITERATION GAVE OTHER NUMBERS THAN THE FIRST TIME")
    return lines


def _export_lines(export: dict[str, Any]) -> list[str]:
    """What is known of checkpoints written in the background."""
    lines = []
    if now := export["now"]:
        lines.append(f"  checkpoint in the background: iteration {now['iteration']}, {now['step']}")
    if last := export["last"]:
        how = f"failed: {last['error']}" if last["error"] else f"is in {last['path']}"
        lines.append(f"  the last one, of iteration {last['iteration']}, {how}")
    return lines


def _coordinator_line(term: dict[str, Any]) -> str:
    beside = "" if term["node"] is None else f", beside node {term['node']}"
    return f"  coordinator: term {term['term']} at {term['host']}:{term['port']}{beside}"


def _rpo_line(known: dict[str, Any]) -> str:
    seconds = known["most_lost_seconds"]
    about = "" if seconds is None else f", about {seconds:.3g} s"
    wanted = f"; becomes {known['wanted']}" if known["wanted"] else ""
    return f"  RPO: at most {known['most_lost']} iterations{about}{wanted}"


def _drain(args: argparse.Namespace) -> int:
    ask(RunDirectory(args.run_dir), {"command": "drain", "node": args.node})
    print(f"node {args.node} leaves as soon as a spare can take its roles")
    return 0


def _protect(args: argparse.Namespace) -> int:
    if args.scheme is None and args.every is None:
        raise CommandError("nothing to change: give --scheme, --every or both")
    if args.group is not None and args.scheme != "parity":
        raise CommandError("--group belongs to --scheme parity")
    wish = {"scheme": args.scheme, "group": args.group, "every": args.every}
    answer = ask(RunDirectory(args.run_dir), {"command": "protect", **wish})
    print(f"from the next protected iteration on: {answer['plan']}")
    return 0


def _stop(args: argparse.Namespace) -> int:
    run = RunDirectory(args.run_dir)
    began = time.monotonic()
    if args.within is not None and not (args.dump and args.within > 0):
        raise CommandError("--within needs --dump, and seconds above 0")
    if args.wait is None:
        _order_stop(run, args.dump, args.within)
        print("the run ends")
        return 0
    limit = began + args.wait
    while not run.final.exists():
        try:
            left = args.within and max(0.0, args.within - (time.monotonic() - began))
            _order_stop(run, args.dump, left)
        except RunNotReachable:
            pass  # a standby takes over, and may not have heard of the order
        again = time.monotonic() + _REPEAT_SECONDS
        while not run.final.exists() and time.monotonic() < min(again, limit):
            time.sleep(0.1)
        if time.monotonic() >= limit and not run.final.exists():
            raise CommandError(f"the run in {run.path} did not end within {args.wait:g} s")
    print(_lines(_final(run))[0])
    return 0


def _order_stop(run: RunDirectory, dump: bool, seconds: float | None) -> None:
    """``seconds``: how long the run may take to end, None to end at once."""
    how = "deadpool stop --dump" if dump else "deadpool stop"
    order = {"command": "dump" if dump else "stop", "reason": f"stopped by '{how}'"}
    ask(run, order if seconds is None else {**order, "seconds": seconds})


def _kill(args: argparse.Namespace) -> int:
    run = RunDirectory(args.run_dir)
    run.read_run()
    listings = run.node_listings()
    if not listings:
        raise CommandError(f"no node of {run.path} is alive")
    node, slot = (args.node, None) if args.role is None else _seat_of(run, args.role)
    if node not in listings:
        known = ", ".join(map(str, sorted(listings)))
        raise CommandError(f"node {node} is not alive (alive: {known})")
    listing = listings[node]
    if listing["hostname"] != socket.gethostname():
        raise CommandError(f"node {node} is host {listing['hostname']}: run this command there")
    members = {int(k): int(pid) for k, pid in listing["members"].items()}
    number = signal.Signals[f"SIG{args.signal}"]
    if slot is None:
        agent, others = int(listing["agent"]), [int(listing["vault"]), *members.values()]
        # The agent first: it must not see its children die and report them. Nor must they outlive
        # it, or they look as if it had died alone; only a KILL reaches who is stopped.
        first = signal.SIGSTOP if number == signal.SIGKILL else number
        last = [(agent, number)] if first != number else []
        orders = [(agent, first), *((pid, number) for pid in others), *last]
    else:
        orders = [(members[slot], number)]
    for pid, each in orders:
        ticks = listing["started"].get(str(pid))
        if ticks is not None and posix.is_alive(pid, int(ticks)):
            os.kill(pid, each)
    what = f"node {node}" if slot is None else f"role {args.role} (node {node} slot {slot})"
    print(f"SIG{args.signal} sent to {what}")
    return 0


def _seat_of(run: RunDirectory, role: int) -> tuple[int, int]:
    info = run.read_run()
    try:
        newest = open_journal(info.settings, info.run_id, run.journal).newest("epoch")
    except JournalError as error:
        raise CommandError(str(error)) from error
    if newest is None:
        raise CommandError("no roles have been given yet")
    seats = EpochRecord.from_dict(newest[1]).seats
    if role not in seats:
        raise CommandError(f"there is no role {role} (there are 0 to {len(seats) - 1})")
    return seats[role].node, seats[role].slot

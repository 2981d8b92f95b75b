"""``deadpool status``, ``drain``, ``protect``, ``kill``, ``stop``: look at a run, or interfere."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deadpool_megatron.cli.common import (
    CommandError,
    Refused,
    RunNotReachable,
    add_run_directory,
    ask,
    count,
    shown,
)
from deadpool_megatron.cli.control.asking import add_wait, final_line, refused, request
from deadpool_megatron.cluster.coordinator.commands import PARTS, SIGNALS
from deadpool_megatron.cluster.failures import in_words
from deadpool_megatron.cluster.journal.requests import Request, Verb
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE

_KILL_EXAMPLES = """\
examples:
  deadpool kill RUN --node 1                 SIGKILL everything on node 1, agent first
  deadpool kill RUN --role 3                 SIGKILL the process that plays role 3
  deadpool kill RUN --role 0 --signal STOP   freeze it instead
  deadpool kill RUN --vault 2                SIGKILL a vault

It is an order, sent once: one that crosses a takeover of the coordinator may be lost.
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
    add_wait(drain)

    protect = subparsers.add_parser(
        "protect",
        help="change how a running job is protected",
        description=_PROTECT_DESCRIPTION,
    )
    add_run_directory(protect)
    protect.add_argument(
        "--scheme", choices=("buddy", "parity", "local", "local-twice", "recompute")
    )
    protect.add_argument("--group", type=int, metavar="K", help="parity: roles that share blocks")
    protect.add_argument("--every", type=int, metavar="N", help="protect each N-th iteration only")
    add_wait(protect)

    kill = subparsers.add_parser(
        "kill", help="hurt a run, to see it recover", epilog=_KILL_EXAMPLES
    )
    add_run_directory(kill)
    target = kill.add_mutually_exclusive_group(required=True)
    target.add_argument("--node", type=int, metavar="N", help="all processes of a node")
    target.add_argument("--role", type=int, metavar="R", help="the process that plays a role")
    target.add_argument("--vault", type=int, metavar="N", help="the vault of a node")
    target.add_argument("--agent", type=int, metavar="N", help="the agent of a node")
    target.add_argument("--coordinator", action="store_true", help="the coordinator")
    kill.add_argument("--signal", choices=SIGNALS, default="KILL")

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
    add_wait(stop)


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
        final = run.read_final()
        print(final_line(final))
        return int(final["exit_status"])
    try:
        status = ask(run, {"command": "status"})["status"]
    except RunNotReachable:
        if not run.final.exists():
            raise
        final = run.read_final()
        status = {"phase": "over", **{k: final[k] for k in ("exit_status", "reason", "iterations")}}
    if args.json:
        print(json.dumps(status))
        return 0
    try:
        lines = _lines(status)
    except DAMAGE as error:
        raise CommandError(
            f"the coordinator is of another version of deadpool, and its status has another form"
            f" ({error!r}): use that one, or --json"
        ) from error
    print(shown("\n".join(lines)))
    return 0


def _lines(status: dict[str, Any]) -> list[str]:
    if status["phase"] == "over":
        return [final_line(status)]
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
        lines += [f"  node {node} is {known['standing']}: {why}" for why in known["reasons"]]
    events = status["events"]
    if events["trouble"] or events["dropped"]:
        trouble = events["trouble"] or "events can be written again"
        lines.append(f"  {trouble}; {events['waiting']} wait, {events['dropped']} were dropped")
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
    lines += [_request_line(values) for values in status["requests"]]
    lines += _export_lines(status["export"])
    if status["aside"]:
        lines.append(f"  put aside, used only when no other spare is left: {status['aside']}")
    if status["fewer_copies"]:
        lines.append(f"  roles {status['fewer_copies']} have fewer copies than wanted")
    if status["diverged"]:
        lines.append("  A REPLAYED ITERATION GAVE OTHER NUMBERS THAN THE FIRST TIME")
    return lines


def _request_line(values: dict[str, Any]) -> str:
    known = Request.from_dict(values)
    why = f": {known.why}" if known.why else ""
    return f"  request {known.number}, {known.in_words()}: {known.stage}{why}"


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
    return f"  RPO: at most {count(known['most_lost'], 'iteration')}{about}{wanted}"


def _drain(args: argparse.Namespace) -> int:
    told = f"node {args.node} leaves as soon as a spare can take its roles"
    return request(args, Verb.DRAIN, lambda _: told, node=args.node)


def _protect(args: argparse.Namespace) -> int:
    if args.scheme is None and args.every is None:
        raise CommandError("nothing to change: give --scheme, --every or both")
    if args.group is not None and args.scheme != "parity":
        raise CommandError("--group belongs to --scheme parity")

    def taken(known: Request) -> str:
        return f"from the next protected iteration on: {known.what['words']}"

    wish = {"scheme": args.scheme, "group": args.group, "every": args.every}
    return request(args, Verb.PROTECT, taken, **wish)


def _stop(args: argparse.Namespace) -> int:
    if args.within is not None and not (args.dump and args.within > 0):
        raise CommandError("--within needs --dump, and seconds above 0")
    how = "deadpool stop --dump" if args.dump else "deadpool stop"
    what = {"dump": args.dump, "reason": f"stopped by '{how}'"}
    return request(args, Verb.STOP, lambda _: "the run ends", within=args.within, **what)


def _kill(args: argparse.Namespace) -> int:
    numbers = {part: getattr(args, part) for part in PARTS if part != "coordinator"}
    given = {part: number for part, number in numbers.items() if number is not None}
    part, number = next(iter(given.items()), ("coordinator", None))
    what = {"part": part, "number": number, "signal": args.signal}
    try:
        ask(RunDirectory(args.run_dir), {"command": "kill", **what})
    except Refused as error:
        return refused("kill", str(error))
    whom = part if number is None else f"{part} {number}"
    print(f"SIG{args.signal} to {whom} (give it again if the coordinator was just replaced)")
    return 0

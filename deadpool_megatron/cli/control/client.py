"""Sends a request to a run until a coordinator accepts it, and with --wait until it is done.

exit status: 0 done (without --wait: taken); 1 refused; 2 bad input, or no coordinator that can take
it; 5 not done within the seconds of --wait
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cli import common
from deadpool_megatron.cli.common import CommandError, RequestRefused, RunNotReachable
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.coordinator.commands import PARTS, SIGNALS
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.run_directory import cleanup
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.observe.narration import printable
from deadpool_megatron.settings import SchemeKind

EXIT_REFUSED = 1
EXIT_NOT_YET = 5
_POLL_SECONDS = 0.3
# A stop is sent again: after a takeover, the coordinator does not know a stop that the journal
# did not record.
_REPEAT_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
# With default settings a standby has taken over from a dead coordinator within this time.
_TAKEOVER_SECONDS = 10.0
_KILL = "kill"
_KILL_DESCRIPTION = "Sends a signal to processes of a run, to see how it recovers."
_KILL_EXAMPLES = """\
examples:
  deadpool kill RUN --node 1                 SIGKILL everything on node 1, agent first
  deadpool kill RUN --role 3                 SIGKILL the process that plays role 3
  deadpool kill RUN --role 0 --signal STOP   freeze it instead
  deadpool kill RUN --vault 2                SIGKILL a vault

The order is sent once; a takeover of the coordinator may lose it.
"""
_DESCRIPTIONS: dict[str, str] = {
    Verb.DRAIN: """\
Moves the roles of a node to a spare at the end of an iteration, so that its host can be taken
out of service. Nothing is computed again. Without a spare the request waits for one.
""",
    Verb.PROTECT: """\
Changes scheme and cadence of a running job. Training pauses after a protected iteration and
continues in a new epoch with the new protection; nothing is computed again. Options that are not
given keep their values. A change that cannot hold is refused with the reason; a group larger than
the run has roles is reduced to that number. 'deadpool status' shows the protection, and the cost of
a failure (RPO).
""",
    Verb.PERSIST: """\
Writes one of the next iterations as a torch_dist checkpoint that Megatron loads with --load.
Training does not pause; --deadpool-persist-keep does not remove it.
""",
    Verb.STOP: """\
Ends a run cleanly. Its state stays in memory, or is saved (--dump) or removed (--discard).
""",
}
_PERSIST_EXAMPLES = """\
examples:
  deadpool persist RUN                        into --deadpool-persist-directory, or RUN/exports
  deadpool persist RUN /shared/before-update --wait 600
"""
# Texts for an accepted request without --wait; the request's values are filled in.
_ACCEPTED = {
    Verb.DRAIN: "node {node} leaves as soon as a spare can take its roles",
    Verb.PROTECT: "from the next protected iteration on: {words}",
    Verb.PERSIST: "a checkpoint will be written to {directory}: see 'deadpool status'",
    Verb.STOP: "the run ends",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command that the parser is named after."""
    common.add_run_directory(parser)
    command = parser.prog.split()[-1]
    parser.description = _DESCRIPTIONS.get(command, _KILL_DESCRIPTION)
    match command:
        case Verb.DRAIN:
            text = "the node that gives its roles away"
            parser.add_argument("--node", type=int, required=True, metavar="N", help=text)
        case Verb.PROTECT:
            _add_protect(parser)
        case Verb.STOP:
            _add_stop(parser)
        case Verb.PERSIST:
            parser.epilog = f"{_PERSIST_EXAMPLES}\n{parser.epilog}"
            text = "a directory of all nodes"
            parser.add_argument("directory", type=Path, nargs="?", metavar="TO", help=text)
        case _:
            _add_kill(parser)
            return
    text = "wait until it is done; exit with 0 if it was, 1 if it was refused, 5 if it was not"
    text += " done by then (without SECONDS: as long as it takes)"
    add = parser.add_argument
    add("--wait", type=_seconds, nargs="?", const=math.inf, metavar="SECONDS", help=text)


def _add_protect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scheme", choices=[kind.value for kind in SchemeKind])
    text = "parity: roles that share blocks"
    parser.add_argument("--group", type=common.number(int, 2), metavar="K", help=text)
    text = "protect each N-th iteration only"
    parser.add_argument("--every", type=common.number(int, 1), metavar="N", help=text)


def _add_stop(parser: argparse.ArgumentParser) -> None:
    state = parser.add_mutually_exclusive_group()
    text = "save the state first, for --resume (exit status 75 of the run); without it the state"
    text += " stays in memory: the same command continues, 'deadpool clean' on each host removes it"
    state.add_argument("--dump", action="store_true", help=text)
    state.add_argument("--discard", action="store_true", help="remove the state from memory")
    text = "with --dump: the time until a limit ends the run; where exports are configured it"
    text += " trains on and writes a last checkpoint before the dump, for half that time at most"
    parser.add_argument("--within", type=float, metavar="SECONDS", help=text)


def _add_kill(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _KILL_EXAMPLES
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--node", type=int, metavar="N", help="all processes of a node")
    target.add_argument("--role", type=int, metavar="R", help="the process that plays a role")
    target.add_argument("--vault", type=int, metavar="N", help="the vault of a node")
    target.add_argument("--agent", type=int, metavar="N", help="the agent of a node")
    target.add_argument("--coordinator", action="store_true", help="the coordinator")
    parser.add_argument("--signal", choices=SIGNALS, default="KILL")


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command; return the exit status."""
    try:
        if args.subcommand == _KILL:
            print(_kill(args))
            return 0
        with contextlib.closing(Display(sys.stderr)) as display:
            outcome = _request(args, Verb(args.subcommand), _values(args), display)
        if outcome is None:
            return EXIT_NOT_YET
        print(outcome)
        return 0
    except RequestRefused as error:
        print(printable(f"deadpool {args.subcommand}: {error.prefix}: {error}"), file=sys.stderr)
        return EXIT_REFUSED


def _values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the request. Raises CommandError for invalid arguments."""
    match args.subcommand:
        case Verb.DRAIN:
            return {"node": args.node}
        case Verb.PROTECT:
            if args.group is not None and args.scheme != SchemeKind.PARITY:
                raise CommandError("--group needs --scheme parity")
            if args.scheme is None and args.every is None:
                raise CommandError("nothing to change: give --scheme, --every or both")
            return {"scheme": args.scheme, "group": args.group, "every": args.every}
        case Verb.STOP:
            if args.within is not None and not (args.dump and args.within > 0):
                raise CommandError("--within needs --dump, and seconds above 0")
            option = " --dump" if args.dump else " --discard" if args.discard else ""
            return {
                "dump": args.dump,
                "keeps": not args.discard,
                "reason": f"stopped by 'deadpool stop{option}'",
            }
    if args.directory is None:
        return {"directory": ""}
    target = args.directory.absolute()
    existing = next(path for path in (target, *target.parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise CommandError(f"{existing} is not a directory that can be written")
    return {"directory": str(target)}


def _request(
    args: argparse.Namespace, verb: Verb, values: Mapping[str, Any], display: Display
) -> str | None:
    """Send the request until it is accepted, with --wait until it is done, and show its stage on
    the display. Return a line with the outcome; None if the request is not done in time. Raises
    CommandError, in particular RequestRefused.
    """
    run, start = RunDirectory(args.run_dir), time.monotonic()
    limit = start + (0.0 if args.wait is None else args.wait)
    accept_limit = start + _TAKEOVER_SECONDS if args.wait is None else limit
    message = {"command": str(verb), "token": secrets.token_hex(8), **values}
    entry: Request | None = None
    is_reported = False
    while True:
        if verb is Verb.STOP and args.within is not None:
            message["seconds"] = max(0.0, args.within - (time.monotonic() - start))
        try:
            entry = Request.from_dict(common.ask(run, message)["request"])
        except RunNotReachable as error:
            # An accepted request is always sent again: a standby that takes over may not know it.
            # Before the acceptance, retry only while another coordinator may take over.
            is_over = run.final.exists()
            may_come = isinstance(error, common.NotNow) or cleanup.may_be_alive(run)
            if entry is None and not (is_over and verb is Verb.STOP and args.wait is not None):
                if is_over or not may_come or time.monotonic() > accept_limit:
                    raise
                if not is_reported:
                    display.line(f"deadpool {verb}: {error}; tried again")
                is_reported = True
        if entry is not None:
            if entry.stage is Stage.REFUSED:
                raise RequestRefused(entry.reason)
            if entry.stage is Stage.FAILED:
                raise common.DumpFailed(entry.reason)
            if not entry.is_open and verb is not Verb.STOP:
                return f"{entry.describe()}: done{f': {entry.reason}' if entry.reason else ''}"
            if args.wait is None:
                return _ACCEPTED[verb].format(**entry.content)
            display.status(entry.to_line())
        repeat_at = time.monotonic() + (_REPEAT_SECONDS if verb is Verb.STOP else _POLL_SECONDS)
        repeat_at = min(repeat_at, accept_limit if entry is None else limit)
        while time.monotonic() < repeat_at and not run.final.exists():
            time.sleep(_PAUSE_SECONDS)
        if run.final.exists():
            line = final_line(run)
            if verb is not Verb.STOP:
                raise RequestRefused(f"the run is {line}")
            return line
        if entry is not None and time.monotonic() >= limit:
            state = f"{entry.stage}{f', {entry.reason}' if entry.reason else ''}; it continues"
            if verb is Verb.STOP:
                state = f"the run in {args.run_dir} did not end"
            display.line(f"deadpool {verb}: not done within {args.wait:g} s: {state}")
            return None


def final_line(run: RunDirectory) -> str:
    """Return a line with the result of a run, and its remaining memory on this host."""
    final = run.read_final()
    reason = f": {final['reason']}" if final["reason"] else ""
    line = f"over, exit status {final['exit_status']}{reason}; {final['iterations']} iterations"
    return printable("; ".join(filter(None, (line, cleanup.remaining_memory(run)))))


def _kill(args: argparse.Namespace) -> str:
    """Have the coordinator send the signal; return a line with the target. Raises CommandError."""
    numbers = {part: getattr(args, part) for part in PARTS if part != "coordinator"}
    targets = {part: number for part, number in numbers.items() if number is not None}
    part, number = next(iter(targets.items()), ("coordinator", None))
    message = {"command": _KILL, "part": part, "number": number, "signal": args.signal}
    run, limit = RunDirectory(args.run_dir), time.monotonic() + _TAKEOVER_SECONDS
    while True:
        try:
            common.ask(run, message)
            return f"SIG{args.signal} to {part if number is None else f'{part} {number}'}"
        except RunNotReachable:
            if time.monotonic() > limit or run.final.exists() or not cleanup.may_be_alive(run):
                raise
            time.sleep(_POLL_SECONDS)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of seconds above 0; give DIR before --wait"
    )

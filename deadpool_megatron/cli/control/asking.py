"""``deadpool drain``, ``protect``, ``kill``, ``stop``, ``persist``: requests to a run, sent until a
coordinator has taken them, and waited for with ``--wait``.

Exit status: 0 done (without ``--wait``: taken), 1 refused, 2 bad input or no coordinator that can
take it, 5 not done within the seconds of ``--wait``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import (
    CommandError,
    NotNow,
    RequestRefused,
    RunNotReachable,
    add_run_directory,
    ask,
)
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.coordinator.commands import PARTS, SIGNALS
from deadpool_megatron.cluster.journal.user_requests import Request, Stage, Verb
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.observe.narration import shown

EXIT_REFUSED = 1
EXIT_NOT_YET = 5
_LOOK_SECONDS = 0.3
# One that could not wait for the journal is not known to a coordinator that took over.
_REPEAT_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
# A coordinator that has just died is followed by another one within this, by default settings.
_TAKEOVER_SECONDS = 10.0
_KILL_EXAMPLES = """\
examples:
  deadpool kill RUN --node 1                 SIGKILL everything on node 1, agent first
  deadpool kill RUN --role 3                 SIGKILL the process that plays role 3
  deadpool kill RUN --role 0 --signal STOP   freeze it instead
  deadpool kill RUN --vault 2                SIGKILL a vault

The order is sent once; a takeover of the coordinator may lose it.
"""
_PROTECT_DESCRIPTION = """\
Training pauses after a protected iteration and continues in a new epoch with the new protection;
nothing is computed again. Options that are not given keep their values. A change that cannot hold
is refused with the reason. 'deadpool status' shows the protection, and the cost of a failure (RPO).
mixed is a rule for the start of a run; here, give buddy, or parity with --group.
"""
_PERSIST_EXAMPLES = """\
examples:
  deadpool persist RUN                        into --deadpool-persist-directory, or RUN/exports
  deadpool persist RUN /shared/before-update --wait 600
"""


def add_parser(subparsers: Any) -> None:
    """Add the five sub-commands."""
    drain = subparsers.add_parser("drain", help="move a node's roles to a spare")
    add_run_directory(drain)
    drain.add_argument("--node", type=int, required=True, metavar="N")
    _add_wait(drain)

    protect = subparsers.add_parser(
        "protect",
        help="change the protection of a running job",
        description=_PROTECT_DESCRIPTION,
    )
    add_run_directory(protect)
    protect.add_argument(
        "--scheme", choices=("buddy", "parity", "local", "local-twice", "recompute")
    )
    protect.add_argument("--group", type=int, metavar="K", help="parity: roles that share blocks")
    protect.add_argument("--every", type=int, metavar="N", help="protect each N-th iteration only")
    _add_wait(protect)

    kill = subparsers.add_parser("kill", help="inject a failure", epilog=_KILL_EXAMPLES)
    add_run_directory(kill)
    target = kill.add_mutually_exclusive_group(required=True)
    target.add_argument("--node", type=int, metavar="N", help="all processes of a node")
    target.add_argument("--role", type=int, metavar="R", help="the process that plays a role")
    target.add_argument("--vault", type=int, metavar="N", help="the vault of a node")
    target.add_argument("--agent", type=int, metavar="N", help="the agent of a node")
    target.add_argument("--coordinator", action="store_true", help="the coordinator")
    kill.add_argument("--signal", choices=SIGNALS, default="KILL")

    stop = subparsers.add_parser("stop", help="shut a run down cleanly (exit status 130)")
    add_run_directory(stop)
    state = stop.add_mutually_exclusive_group()
    state.add_argument(
        "--dump",
        action="store_true",
        help="save the state first, for --resume (exit status 75 of the run); without it the state"
        " stays in memory: the same command continues, 'deadpool clean' on each host removes it",
    )
    state.add_argument("--discard", action="store_true", help="remove the state from memory")
    stop.add_argument(
        "--within",
        type=float,
        metavar="SECONDS",
        help="with --dump: the time until a limit ends the run; where exports are"
        " configured it trains on and writes a last checkpoint before the dump, for half that time"
        " at most",
    )
    _add_wait(stop)

    persist = subparsers.add_parser(
        "persist",
        help="write a standard checkpoint in the background",
        description="Write one of the next iterations as a torch_dist checkpoint that Megatron"
        " loads with --load. Training does not pause; --deadpool-persist-keep does not remove it.",
        epilog=_PERSIST_EXAMPLES,
    )
    add_run_directory(persist)
    persist.add_argument(
        "directory", type=Path, nargs="?", metavar="TO", help="a directory that all nodes share"
    )
    _add_wait(persist)


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    commands = {
        "drain": _drain,
        "protect": _protect,
        "kill": _kill,
        "stop": _stop,
        "persist": _persist,
    }
    return commands[args.subcommand](args)


def request(
    args: argparse.Namespace,
    verb: Verb,
    taken: Callable[[Request], str],
    *,
    within: float | None = None,
    **what: Any,
) -> int:
    """Send a request, wait for its end if the user wants it, print the outcome; returns the exit
    status. ``taken``: what is printed of one that is not waited for. ``within``: seconds that the
    run has, which go by meanwhile.
    """
    with contextlib.closing(Display(sys.stderr)) as display:
        tell_outcome = _wait(args, verb, taken, within, what, display)
    return tell_outcome()


def _wait(
    args: argparse.Namespace,
    verb: Verb,
    taken: Callable[[Request], str],
    within: float | None,
    what: Mapping[str, Any],
    display: Display,
) -> Callable[[], int]:
    """Send the request until it has ended; the display shows its stage. Returns what prints the
    outcome and gives the exit status."""
    run, began = RunDirectory(args.run_dir), time.monotonic()
    limit = began + (0.0 if args.wait is None else args.wait)
    patience = began + _TAKEOVER_SECONDS if args.wait is None else limit
    message = {"command": str(verb), "token": secrets.token_hex(8), **what}
    known: Request | None = None
    is_told = False
    while True:
        if within is not None:
            message["seconds"] = max(0.0, within - (time.monotonic() - began))
        try:
            known = Request.from_dict(ask(run, message)["request"])
        except RequestRefused as error:
            return partial(_refused, verb, str(error))
        except RunNotReachable as error:
            # Once it is taken, a standby takes over, which may not have heard of it; before, it is
            # in vain where no other coordinator can come.
            is_over = run.final.exists()
            may_come = isinstance(error, NotNow) or _may_be_alive(run)
            if known is None and not (is_over and verb is Verb.STOP and args.wait is not None):
                if is_over or not may_come or time.monotonic() > patience:
                    raise
                if not is_told:
                    display.line(f"deadpool {verb}: {error}; tried again")
                is_told = True
        if known is not None and args.wait is None:
            print(taken(known))
            is_refused = known.stage is Stage.REFUSED
            return partial(_refused, verb, known.why) if is_refused else lambda: 0
        if known is not None and not known.is_open and verb is not Verb.STOP:
            return partial(_ended, known)
        if known is not None:
            display.status(known.told())
        again = time.monotonic() + (_REPEAT_SECONDS if verb is Verb.STOP else _LOOK_SECONDS)
        until = patience if known is None else limit
        while time.monotonic() < min(again, until) and not run.final.exists():
            time.sleep(_PAUSE_SECONDS)
        if run.final.exists():
            return partial(_over, run, verb)
        if known is not None and time.monotonic() >= limit:
            why = f"{known.stage}{f', {known.why}' if known.why else ''}; it continues"
            if verb is Verb.STOP:
                why = f"the run in {args.run_dir} did not end"
            display.line(f"deadpool {verb}: not done within {args.wait:g} s: {why}")
            return lambda: EXIT_NOT_YET


def final_line(final: dict[str, Any]) -> str:
    """Return how a run ended, in one line."""
    why = f": {final['reason']}" if final["reason"] else ""
    return shown(f"over, exit status {final['exit_status']}{why}; {final['iterations']} iterations")


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
    what = {"dump": args.dump, "keeps": not args.discard, "reason": f"stopped by '{how}'"}
    return request(args, Verb.STOP, lambda _: "the run ends", within=args.within, **what)


def _kill(args: argparse.Namespace) -> int:
    numbers = {part: getattr(args, part) for part in PARTS if part != "coordinator"}
    given = {part: number for part, number in numbers.items() if number is not None}
    part, number = next(iter(given.items()), ("coordinator", None))
    what = {"part": part, "number": number, "signal": args.signal}
    run, patience = RunDirectory(args.run_dir), time.monotonic() + _TAKEOVER_SECONDS
    while True:
        try:
            ask(run, {"command": "kill", **what})
            break
        except RequestRefused as error:
            return _refused("kill", str(error))
        except RunNotReachable:
            if time.monotonic() > patience or run.final.exists() or not _may_be_alive(run):
                raise
            time.sleep(_LOOK_SECONDS)
    whom = part if number is None else f"{part} {number}"
    print(f"SIG{args.signal} to {whom}")
    return 0


def _persist(args: argparse.Namespace) -> int:
    wanted = "" if args.directory is None else str(args.directory.absolute())
    if wanted:
        there = next(one for one in (Path(wanted), *Path(wanted).parents) if one.exists())
        if not (there.is_dir() and os.access(there, os.W_OK)):
            raise CommandError(f"{there} is not a directory that can be written")

    def taken(known: Request) -> str:
        where = known.what["directory"]
        return f"a checkpoint will be written to {where}: see 'deadpool status'"

    return request(args, Verb.PERSIST, taken, directory=wanted)


def _add_wait(parser: argparse.ArgumentParser) -> None:
    """The option of every request."""
    parser.add_argument(
        "--wait",
        type=_seconds,
        nargs="?",
        const=math.inf,
        metavar="SECONDS",
        help="wait until it is done; exit with 0 if it was, 1 if it was refused, 5 if it was not"
        " done by then (without SECONDS: as long as it takes)",
    )


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:
            return seconds
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a number of seconds above 0; give DIR before --wait"
    )


def _may_be_alive(run: RunDirectory) -> bool:
    """Return whether an agent is, so that another coordinator may come: one of this host that
    lives, or one of another host, which cannot be seen from here."""
    here = socket.gethostname()
    for listing in run.node_listings().values():
        agent = listing["agent"]
        started = listing.get("started", {}).get(str(agent))  # a number may be another's by now
        if listing.get("hostname") != here or posix.is_alive(agent, started):
            return True
    return False


def _ended(known: Request) -> int:
    """Print the outcome; returns the exit status."""
    if known.stage is Stage.REFUSED:
        return _refused(known.verb, known.why)
    print(f"{known.in_words()}: done{f': {known.why}' if known.why else ''}")
    return 0


def _refused(command: str, why: str) -> int:
    """Print it; returns the exit status."""
    print(shown(f"deadpool {command}: refused: {why}"), file=sys.stderr)
    return EXIT_REFUSED


def _over(run: RunDirectory, verb: Verb) -> int:
    """The run has ended meanwhile."""
    line = final_line(run.read_final())
    if verb is Verb.STOP:
        print(line)
        return 0
    return _refused(verb, f"the run is {line}")

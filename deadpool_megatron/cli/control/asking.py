"""Requests to a run: sent until a coordinator has taken them, and waited for with ``--wait``.

Exit status: 0 done (without ``--wait``: taken), 1 refused, 2 bad input or no coordinator that can
take it, 3 not done within the seconds of ``--wait``.
"""

from __future__ import annotations

import argparse
import math
import secrets
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from deadpool_megatron.cli.common import CommandError, NotNow, Refused, RunNotReachable, ask, shown
from deadpool_megatron.cluster.journal.requests import Request, Stage, Verb
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory

EXIT_REFUSED = 1
EXIT_NOT_YET = 3
_LOOK_SECONDS = 0.3
# One that could not wait for the journal is not known to a coordinator that took over.
_REPEAT_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
# A coordinator that has just died is followed by another one within this, by default settings.
_TAKEOVER_SECONDS = 10.0


def add_wait(parser: argparse.ArgumentParser) -> None:
    """The option of every request."""
    parser.add_argument(
        "--wait",
        type=_seconds,
        nargs="?",
        const=math.inf,
        metavar="SECONDS",
        help="until it is done, and exit with 0 if it was, 1 if it was refused, 3 if it was not"
        " done by then (without SECONDS: as long as it takes)",
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return seconds


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
    run, began = RunDirectory(args.run_dir), time.monotonic()
    limit = began + (0.0 if args.wait is None else args.wait)
    patience = limit
    if args.wait is None and _may_be_alive(run):
        patience = began + _TAKEOVER_SECONDS
    message = {"command": str(verb), "token": secrets.token_hex(8), **what}
    known: Request | None = None
    failure: RunNotReachable | None = None
    while True:
        if within is not None:
            message["seconds"] = max(0.0, within - (time.monotonic() - began))
        try:
            known = Request.from_dict(ask(run, message)["request"])
        except Refused as error:
            return refused(verb, str(error))
        except RunNotReachable as error:
            # Where nobody has taken it, and nobody waits; else a standby takes over, which may not
            # have heard of it.
            waits_for_end = verb is Verb.STOP and args.wait is not None
            if run.final.exists() and (known is not None or waits_for_end):
                return _over(run, verb)
            if known is None and _is_in_vain(run, error, args.wait is not None, patience):
                raise
            if known is None and failure is None and not run.final.exists():
                so_long = " for a while" if args.wait is None else ""
                print(f"deadpool {verb}: {error}; tried again{so_long}", file=sys.stderr)
            failure = error
        if known is not None and args.wait is None:
            print(taken(known))
            return refused(verb, known.why) if known.stage is Stage.REFUSED else 0
        if known is not None and not known.is_open and verb is not Verb.STOP:
            if known.stage is Stage.REFUSED:
                return refused(verb, known.why)
            print(f"{known.in_words()}: done{f': {known.why}' if known.why else ''}")
            return 0
        again = time.monotonic() + (_REPEAT_SECONDS if verb is Verb.STOP else _LOOK_SECONDS)
        until = patience if known is None else limit
        while time.monotonic() < min(again, until) and not run.final.exists():
            time.sleep(_PAUSE_SECONDS)
        if run.final.exists():
            return _over(run, verb)
        if time.monotonic() >= limit and (known is not None or args.wait is not None):
            return _not_yet(args, verb, known, failure)


def _is_in_vain(
    run: RunDirectory, error: RunNotReachable, is_waited_for: bool, patience: float
) -> bool:
    """Whether a request that nobody has taken is not to be sent again."""
    if not is_waited_for:
        return time.monotonic() > patience
    # Where a coordinator has answered, or the run is over, there is something to wait for or tell;
    # where no node is listed the run may be about to start.
    if isinstance(error, NotNow) or run.final.exists() or not run.node_listings():
        return False
    return not _may_be_alive(run)


def _may_be_alive(run: RunDirectory) -> bool:
    """Whether an agent is, so that another coordinator may come: one of this host that lives, or
    one of another host, which cannot be seen from here."""
    here = socket.gethostname()
    for listing in run.node_listings().values():
        agent = listing["agent"]
        started = listing.get("started", {}).get(str(agent))  # a number may be another's by now
        if listing.get("hostname") != here or posix.is_alive(agent, started):
            return True
    return False


def refused(command: str, why: str) -> int:
    """Print it; returns the exit status."""
    print(f"deadpool {command}: refused: {why}", file=sys.stderr)
    return EXIT_REFUSED


def _not_yet(
    args: argparse.Namespace, verb: Verb, known: Request | None, failure: RunNotReachable | None
) -> int:
    if known is None:
        raise CommandError(f"no coordinator took the request within {args.wait:g} s: {failure}")
    why = f"{known.stage}{f', {known.why}' if known.why else ''}; it goes on"
    if verb is Verb.STOP:
        why = f"the run in {args.run_dir} did not end"
    print(f"deadpool {verb}: not done within {args.wait:g} s: {why}", file=sys.stderr)
    return EXIT_NOT_YET


def _over(run: RunDirectory, verb: Verb) -> int:
    """The run has ended meanwhile."""
    line = final_line(run.read_final())
    if verb is Verb.STOP:
        print(line)
        return 0
    return refused(verb, f"the run is {line}")


def final_line(final: dict[str, Any]) -> str:
    """How a run ended, in one line."""
    why = f": {final['reason']}" if final["reason"] else ""
    return shown(f"over, exit status {final['exit_status']}{why}; {final['iterations']} iterations")

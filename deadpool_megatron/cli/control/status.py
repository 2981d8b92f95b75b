"""``deadpool status``: what a run does right now, or how it has ended."""

from __future__ import annotations

import argparse
import json
from typing import Any

from deadpool_megatron.cli.common import CommandError, RunNotReachable, add_run_directory, ask
from deadpool_megatron.cli.control.asking import final_line
from deadpool_megatron.cluster.failures import in_words
from deadpool_megatron.cluster.journal.user_requests import Request
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.observe.narration import count, shown


def add_parser(subparsers: Any) -> None:
    """Add the sub-command."""
    status = subparsers.add_parser("status", help="what a run does right now")
    add_run_directory(status)
    form = status.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    form.add_argument(
        "--verdict",
        action="store_true",
        help="exit with the run's own exit status (2 while it has none)",
    )


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    directory = RunDirectory(args.run_dir)
    if args.verdict:
        directory.read_run()
        if not directory.final.exists():
            raise CommandError(
                f"the run in {directory.path} has no verdict: it goes on, or was cut short"
            )
        final = directory.read_final()
        print(final_line(final))
        return int(final["exit_status"])
    try:
        status = ask(directory, {"command": "status"})["status"]
    except RunNotReachable:
        if not directory.final.exists():
            raise
        final = directory.read_final()
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
    term, rpo = status["coordinator"], status["rpo"]
    waits = f", waits for {status['waiting_for']}" if status["waiting_for"] else ""
    beside = "" if term["node"] is None else f", beside node {term['node']}"
    seconds = rpo["most_lost_seconds"]
    about = "" if seconds is None else f", about {seconds:.3g} s"
    wanted = f"; becomes {rpo['wanted']}" if rpo["wanted"] else ""
    lines = [
        f"epoch {status['epoch']}, {status['phase']}{waits}; iteration {status['iteration']};"
        f" {status['recoveries']} recoveries; spares: {status['spares'] or 'none'}",
        f"  coordinator: term {term['term']} at {term['host']}:{term['port']}{beside}",
        f"  protection: {status['protection'] or 'not yet decided'}",
        f"  RPO: at most {count(rpo['most_lost'], 'iteration')}{about}{wanted}",
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
    """Return what is known of checkpoints written in the background."""
    lines = []
    if now := export["now"]:
        lines.append(f"  checkpoint in the background: iteration {now['iteration']}, {now['step']}")
    if last := export["last"]:
        how = f"failed: {last['error']}" if last["error"] else f"is in {last['path']}"
        lines.append(f"  the last one, of iteration {last['iteration']}, {how}")
    return lines

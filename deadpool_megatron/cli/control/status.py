"""Shows what a run does right now, or how it has ended."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cli import common
from deadpool_megatron.cli.control.client import final_line
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.run_result import failure_to_dict, read_recent
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE
from deadpool_megatron.failures import process_name
from deadpool_megatron.layout.descriptions import in_short
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.observe import narration
from deadpool_megatron.observe.narration import Line, count
from deadpool_megatron.observe.story import Interruption
from deadpool_megatron.observe.view import View, view

_SHOWN_FAILURES = 3
# Groups of roles with the same activity.
_SHOWN_GROUPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    common.add_run_directory(parser)
    parser.add_argument("--all", action="store_true", help="also show every role and node")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    text = "exit with the run's own exit status (2 while it has none)"
    form.add_argument("--verdict", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out the sub-command."""
    directory = RunDirectory(args.run_dir)
    if args.verdict:
        directory.read_run()
        if not directory.final.exists():
            raise common.CommandError(
                f"the run in {directory.path} has no verdict: it is not over, or was cut short"
            )
        print(final_line(directory))
        return int(directory.read_final()["exit_status"])
    try:
        status, final = common.ask(directory, {"command": "status"})["status"], None
    except common.RunNotReachable:
        if not directory.final.exists():
            raise
        status, final = None, directory.read_final()
    story = read_recent(directory.path)
    try:
        seen = view(story, status, directory.path, time.time(), final=final)
        if args.json:
            print(json.dumps(_to_dict(seen)))
            return 0
        lines = status_lines(directory, seen, every=args.all)
    except DAMAGE as error:
        raise common.CommandError(
            f"the coordinator is of another version of deadpool, and its status has another form"
            f" ({error!r}): use that one, or --json"
        ) from error
    display = Display()
    for line in lines:
        display.line(line.text, line.style)
    return 0


def _to_dict(seen: View) -> dict[str, Any]:
    """Return the coordinator's answer, or the result, with the facts of the events."""
    story = seen.story
    final = {k: seen.final.get(k) for k in ("exit_status", "reason", "iterations")}
    # Failures under all coordinators; the present one knows only its own.
    failures = [failure_to_dict(failure, seen) for failure in story.shown[-_SHOWN_FAILURES:]]
    waiting = None if story.waiting is None else dict(story.waiting.data)
    known = {"phase": "over", **final} if seen.status is None else seen.status
    texts = {"state": seen.state, "title": seen.title, "to_do": seen.to_do}
    return {**known, **texts, "failures": failures, "waiting": waiting}


def status_lines(run: RunDirectory, seen: View, *, every: bool) -> list[Line]:
    story, status = seen.story, seen.status
    failures = [
        Line(
            f"  {narration.describe_when(failure)} {narration.label(failure, story.hosts)}"
            f"{_cost(failure)}",
            "" if failure.planned else "red",
        )
        for failure in story.shown[-_SHOWN_FAILURES:]
    ]
    if earlier := len(story.shown) - len(failures):
        failures.insert(0, Line(f"  {earlier} earlier: deadpool report"))
    styles = {"good": "bold green", "bad": "bold red"}
    style = styles.get(seen.look, "bold yellow")
    advice = [Line(f"  to do: {seen.to_do}", "yellow")] if seen.to_do else []
    if status is None:
        return [Line(final_line(run), style), *advice, *failures]
    pace = narration.describe_progress(story, seen.until)
    first = f"{seen.title}; iteration {seen.iteration}{pace and f' ({pace})'}"
    first += f"; epoch {status['epoch']}"
    uses = {int(node): known["use"] for node, known in status["nodes"].items()}
    drained = in_short([node for node, use in uses.items() if use == NodeUse.DRAINED])
    lines = [
        f"  {count(len(status['roles']), 'role')} on {count(len(status['nodes']), 'node')};"
        f" spares: {status['spares'] or 'none'}{drained and f' (drained, used last: {drained})'};"
        f" failures survived: {story.survived}",
        *(f"  {name}: {text}" for name, text in common.facts(seen, status)),
    ]
    problems = [f"  node {node}: {text}" for node, text in narration.node_troubles(status)]
    for role, known in status["roles"].items() if every else ():
        lines.append(f"  role {role:>3}: {process_name(*known['seat'])}, {_activity(known)}")
    for node, known in status["nodes"].items():
        if every:
            protection = "  ".join(f"{k}={v}" for k, v in sorted(known["vault"].items()))
            lines.append(f"  node {node}, {known['use']}: {known['host']} {protection}")
        if known["restarts"]:
            lines.append(f"  node {node}: {count(known['restarts'], 'restart')} of its processes")
    events = status["events"]
    if events["trouble"] or events["dropped"]:
        wait = f"{count(seen.events_waiting, 'event')} wait in memory"
        lost = f"{events['dropped']} were dropped" if events["dropped"] else "none is lost"
        problems.append(f"  {events['trouble'] or 'events can be written again'}; {wait}, {lost}")
    if status["diverged"]:
        problems.append("  A REPLAYED ITERATION GAVE OTHER NUMBERS THAN THE FIRST TIME")
    # Heartbeats are slightly older than the newest iteration.
    beats = Line("  roles, by their last heartbeats:")
    roles = [] if every else [beats, *summary_of_roles(status["roles"])]
    yellow = (Line(text, "yellow") for text in problems)
    return [Line(first, style), *advice, *map(Line, lines), *roles, *failures, *yellow]


def _activity(known: Mapping[str, Any]) -> str:
    entered, iteration = known["waiting"], known["iteration"]
    wait = f", waits in {entered[1]} of {entered[0]} ({entered[2]})" if entered else ""
    return f"{known['section']}{'' if iteration is None else f' {iteration}'}{wait}"


def summary_of_roles(roles: Mapping[str, Any]) -> list[Line]:
    """Return a line for each group of roles with the same activity; late roles come first."""
    groups: dict[tuple[int, str], list[int]] = {}
    for role, known in roles.items():
        key = (-1 if known["iteration"] is None else known["iteration"], _activity(known))
        groups.setdefault(key, []).append(int(role))
    lines = []
    for (iteration, activity), found in sorted(groups.items()):
        # Heartbeats of synchronous roles may differ by an iteration.
        late, style = ("  late: ", "yellow") if iteration + 1 < max(groups)[0] else ("  ", "")
        nodes = in_short(sorted({roles[str(role)]["seat"][0] for role in found}))
        lines.append(Line(f"{late}roles {in_short(found)} (nodes {nodes}): {activity}", style))
    if (left := len(lines) - _SHOWN_GROUPS) > 0:
        lines[_SHOWN_GROUPS:] = [Line(f"  and {left} more kinds: --all")]
    return lines


def _cost(failure: Interruption) -> str:
    if not failure.is_over:
        return "; the run ended here" if failure.is_cut_short else "; not over yet"
    again = count(failure.steps_recomputed, "iteration")
    return f"; {failure.seconds or 0.0:.1f} s, {again} computed again"

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

_MAX_FAILURES = 3
# A group is the roles with the same activity.
_MAX_GROUPS = 8


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
        run_view = view(story, status, directory.path, time.time(), final=final)
        if args.json:
            print(json.dumps(_to_dict(run_view)))
            return 0
        lines = status_lines(directory, run_view, show_all=args.all)
    except DAMAGE as error:
        raise common.CommandError(
            f"the coordinator is of another version of deadpool, and its status has another form"
            f" ({error!r}): use that one, or --json"
        ) from error
    display = Display()
    for line in lines:
        display.line(line.text, line.style)
    return 0


def _to_dict(run_view: View) -> dict[str, Any]:
    """Return the coordinator's answer, or the result of the run if it is over, with facts from the
    events."""
    story = run_view.story
    final = {k: run_view.final.get(k) for k in ("exit_status", "reason", "iterations")}
    # The events have the failures under all coordinators, unlike the answer of the coordinator.
    failures = [failure_to_dict(each, run_view) for each in story.all_failures[-_MAX_FAILURES:]]
    waiting = None if story.waiting is None else dict(story.waiting.data)
    values = {"phase": "over", **final} if run_view.status is None else run_view.status
    texts = {"state": run_view.state, "title": run_view.title, "to_do": run_view.to_do}
    return {**values, **texts, "failures": failures, "waiting": waiting}


def status_lines(run: RunDirectory, run_view: View, *, show_all: bool) -> list[Line]:
    """Return the lines of the status; ``show_all``: with a line for each role and node. Raises an
    error of :data:`events.DAMAGE` for the status of another version."""
    story, status = run_view.story, run_view.status
    failures = [
        Line(
            f"  {narration.describe_when(failure)} {narration.label(failure, story.hosts)}"
            f"{_cost(failure)}",
            "" if failure.planned else "red",
        )
        for failure in story.all_failures[-_MAX_FAILURES:]
    ]
    if earlier := len(story.all_failures) - len(failures):
        failures.insert(0, Line(f"  {earlier} earlier: deadpool report"))
    styles = {"good": "bold green", "bad": "bold red"}
    style = styles.get(run_view.look, "bold yellow")
    advice = [Line(f"  to do: {run_view.to_do}", "yellow")] if run_view.to_do else []
    if status is None:
        return [Line(final_line(run), style), *advice, *failures]
    pace = narration.describe_progress(story, run_view.until)
    headline = f"{run_view.title}; iteration {run_view.iteration}{pace and f' ({pace})'}"
    headline += f"; epoch {status['epoch']}"
    uses = {int(node): facts["use"] for node, facts in status["nodes"].items()}
    drained = in_short([node for node, use in uses.items() if use == NodeUse.DRAINED])
    lines = [
        f"  {count(len(status['roles']), 'role')} on {count(len(status['nodes']), 'node')};"
        f" spares: {status['spares'] or 'none'}{drained and f' (drained, used last: {drained})'};"
        f" failures survived: {story.survived}",
        *(f"  {name}: {text}" for name, text in common.facts(run_view, status)),
    ]
    problems = [f"  node {node}: {text}" for node, text in narration.node_troubles(status)]
    for role, facts in status["roles"].items() if show_all else ():
        lines.append(f"  role {role:>3}: {process_name(*facts['seat'])}, {_activity(facts)}")
    for node, facts in status["nodes"].items():
        if show_all:
            protection = "  ".join(f"{k}={v}" for k, v in sorted(facts["vault"].items()))
            lines.append(f"  node {node}, {facts['use']}: {facts['host']} {protection}")
        if facts["restarts"]:
            lines.append(f"  node {node}: {count(facts['restarts'], 'restart')} of its processes")
    events = status["events"]
    if events["trouble"] or events["dropped"]:
        wait = f"{count(run_view.events_waiting, 'event')} wait in memory"
        loss = f"{events['dropped']} were dropped" if events["dropped"] else "none is lost"
        problems.append(f"  {events['trouble'] or 'events can be written again'}; {wait}, {loss}")
    if status["diverged"]:
        problems.append("  A REPLAYED ITERATION GAVE OTHER NUMBERS THAN THE FIRST TIME")
    # The headline's iteration is newer than these heartbeats.
    beats = Line("  roles, by their last heartbeats:")
    roles = [] if show_all else [beats, *summary_of_roles(status["roles"])]
    yellow = (Line(text, "yellow") for text in problems)
    return [Line(headline, style), *advice, *map(Line, lines), *roles, *failures, *yellow]


def _activity(facts: Mapping[str, Any]) -> str:
    entered, iteration = facts["waiting"], facts["iteration"]
    wait = f", waits in {entered[1]} of {entered[0]} ({entered[2]})" if entered else ""
    section = str(facts["section"]).replace("step", "iteration")
    return f"{section}{'' if iteration is None else f' {iteration}'}{wait}"


def summary_of_roles(roles: Mapping[str, Any]) -> list[Line]:
    """Return a line for each group of roles with the same activity, late groups first; above the
    limit, the number of groups that are left out."""
    groups: dict[tuple[int, str], list[int]] = {}
    for role, facts in roles.items():
        key = (-1 if facts["iteration"] is None else facts["iteration"], _activity(facts))
        groups.setdefault(key, []).append(int(role))
    lines = []
    for (iteration, activity), members in sorted(groups.items()):
        # Roles may differ by an iteration, as their heartbeats have different times.
        late, style = ("  late: ", "yellow") if iteration + 1 < max(groups)[0] else ("  ", "")
        nodes = in_short(sorted({roles[str(role)]["seat"][0] for role in members}))
        lines.append(Line(f"{late}roles {in_short(members)} (nodes {nodes}): {activity}", style))
    if (hidden := len(lines) - _MAX_GROUPS) > 0:
        lines[_MAX_GROUPS:] = [Line(f"  and {hidden} more kinds: --all")]
    return lines


def _cost(failure: Interruption) -> str:
    if not failure.is_over:
        return "; the run ended here" if failure.is_cut_short else "; not over yet"
    again = count(failure.steps_recomputed, "iteration")
    return f"; {failure.seconds or 0.0:.1f} s, {again} computed again"

"""Reports on a run and each failure in it, from its events and final.json, also during the run."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import StatusPoller, seconds, size, table
from deadpool_megatron.cli.run_result import failure_to_dict, read_result, read_story
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind, date
from deadpool_megatron.failures import MEANINGS
from deadpool_megatron.layout.descriptions import in_short
from deadpool_megatron.observe import narration
from deadpool_megatron.observe.narration import count
from deadpool_megatron.observe.steps import decimal, summary
from deadpool_megatron.observe.story import PHASES, Interruption, Story
from deadpool_megatron.observe.view import View

_MAX_STACKS = 3
# The longest name in a table, in characters.
_MAX_CELL = 48
_COUNT_TEXTS = {
    Kind.CORRUPTION: "corrupted copies caught",
    Kind.DECODED: "lost parts computed from parity",
    Kind.STALE_DIVERGENCE: "REPLAYED STEPS WITH OTHER NUMBERS",
}


def describe(directory: Path, view: View) -> list[str]:
    """Return the lines of the whole report."""
    story = view.story
    headline = f"{directory}: {view.title}"
    headline += f" ({view.reason})" if view.reason else ""
    lines = [headline, *([f"  to do: {view.to_do}"] if view.to_do else [])]
    if story.started is not None:
        facts = story.started.data
        lines.append(
            f"  {count(facts.get('roles'), 'role')} on {count(facts.get('nodes'), 'node')}"
            f" and {count(facts.get('spares'), 'spare')} at the start, epoch {story.epoch},"
            f" started {date(story.started.wall_seconds)}"
        )
    lines += _describe_steps(story)
    for failure in story.all_failures:
        lines += ["", *describe_failure(failure, view)]
    if len(recoveries := [failure for failure in story.all_failures if failure.is_over]) > 1:
        lines += ["", "Seconds in each phase", *_phase_table(recoveries)]
    lines += ["", *_describe_protection(view), *_describe_time(view)]
    return lines


def describe_failure(failure: Interruption, view: View) -> list[str]:
    """Return the lines on a failure, about a dozen."""
    story = view.story
    start = story.started.wall_seconds if story.started is not None else failure.began
    meaning = MEANINGS.get(failure.kind)
    # The title has the failure's own cause. An end on purpose (without a kind) is no loss.
    others = [loss for loss in failure.losses if loss.data.get("cause") != failure.cause]
    losses = [loss for loss in others if "kind" in loss.data]
    facts: list[tuple[str, str]] = [
        (
            "when",
            f"{narration.describe_when(failure)}, {failure.began - start:.1f} s after the start,"
            f" after iteration {failure.last_iteration}, epoch {failure.closing.epoch}",
        ),
        ("why", "" if meaning is None else f"{meaning.called}: {meaning.noticed}"),
        ("lost", _join(map(narration.describe_loss, losses))),
        *(("stack", narration.describe_stack(event)) for event in failure.stacks[:_MAX_STACKS]),
    ]
    if failure.closes > 1:
        facts.append(("again", f"failed {failure.closes} times before the run continued"))
    if failure.generation is not None:
        lineage, iteration = failure.generation
        facts.append(("state", f"of iteration {iteration} (computed in epoch {lineage})"))
    if failure.is_over:
        phases = ", ".join(f"{name} {value:.3f}" for name, value in failure.phases.items())
        until = ""
        if failure.seconds is not None:
            until = f"{failure.seconds:.3f} s until the next iteration, "
        cost = f"{until}{count(failure.steps_recomputed, 'iteration')} computed again"
        facts += [
            ("seats", narration.describe_seats(failure.seats_changed)),
            ("phases", phases and f"{phases} s"),
            ("cost", f"{cost}, {failure.exposed_seconds:.3f} s without all copies in memory"),
        ]
    else:
        reported = [part.phase for part in failure.parts if part.phase in PHASES]
        at = f"{view.title}; last phase reported: {(reported or ['close'])[-1]}"
        facts.append(("now", "the run ended here" if failure.is_cut_short else at))
    facts.append(("to do", view.advice(failure)))
    lines = [f"  {name:<8} {value}" for name, value in facts if value]
    hangs = [line for event in failure.hangs for line in describe_hang(event)]
    return [narration.title(failure, story.hosts), *lines, *hangs]


def describe_hang(event: Event) -> list[str]:
    """Return the lines of a table with the positions of the roles in each communicator group in
    which a role waits; empty if there is none."""
    rows, culprits = [], set(event.data["roles"])
    for group in event.data.get("groups", ()):
        name = _shorten(str(group["group"]))
        operation = " ".join(
            str(part) for part in (group["number"], group["operation"]) if part not in (None, "")
        )
        for row in group["rows"]:
            numbers = [str(row.get(name, "-")) for name in ("begun", "started", "ended")]
            where = f"{row['where']} in {row['operation']}" if "operation" in row else row["where"]
            if culprit_roles := sorted(culprits & set(row["roles"])):
                where += f" (culprit: {in_short(culprit_roles)})"
            roles = _shorten(in_short(row["roles"]))
            rows.append([name, operation, roles, *numbers, where])
            name, operation = "", ""
        if group["left_out"]:
            rows.append(["", "", f"{group['left_out']} more", "", "", "", ""])
    if not rows:
        return []
    if event.data["left_out"]:
        rows.append([f"and {count(event.data['left_out'], 'group')} more", *[""] * 6])
    header = ["group", "operation", "roles", "begun", "started", "ended", "where"]
    return ["  who waits for whom:", *table(header, rows, indent=4)]


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_CELL else f"{text[: _MAX_CELL - 3]}..."


def _describe_steps(story: Story) -> list[str]:
    if not story.steps:
        return ["  no iteration finished yet"]
    last, times = story.steps[-1], summary(story.step_seconds())
    text = f"  {count(len(story.steps), 'iteration')} finished, the last is {last.iteration}"
    lines = [text if last.loss is None else f"{text} with loss {decimal(last.loss):.4f}"]
    if times["count"]:
        text = ", ".join(f"{name} {times[name]:.3f}" for name in ("mean", "p50", "p95", "p99"))
        lines.append(f"  seconds per iteration: {text}")
    return lines


def _phase_table(failures: list[Interruption]) -> list[str]:
    """Return a table with a row per phase, and three columns each for failures and for planned
    changes, if there are any."""
    header, groups = ["phase"], list[list[Interruption]]()
    for noun in ("failures", "planned"):
        if group := [each for each in failures if each.planned == (noun == "planned")]:
            header, groups = [*header, noun, "mean", "longest"], [*groups, group]
    phases = {name for failure in failures for name in failure.phases}
    names = [name for name in PHASES if name in phases] + sorted(phases - PHASES.keys())
    rows = [[name, *_cells(name, groups)] for name in names]
    return table(header, [*rows, ["to next iteration", *_cells("", groups)]])


def _cells(name: str, groups: list[list[Interruption]]) -> list[str]:
    """Return count, mean and maximum of the seconds in a phase, for each group of failures. An
    empty name means the seconds to the next iteration."""
    cells = list[str]()
    for group in groups:
        values = [failure.phases.get(name) if name else failure.seconds for failure in group]
        known = [value for value in values if value is not None]
        mean = statistics.fmean(known) if known else None
        cells += [str(len(known)), seconds(mean), seconds(max(known, default=None))]
    return cells


def _describe_time(view: View) -> list[str]:
    """Return a table of the seconds of nodes by use."""
    account, goodput = view.story.account, view.story.goodput(view.until)
    if goodput is None:
        return []
    spent = {use: value for use, value in account.uses(view.until).items() if value > 0}
    total = sum(spent.values())
    rows = [[use.value, seconds(value), f"{value / total:.1%}"] for use, value in spent.items()]
    until = "the last event" if view.until is None else "now"
    lines = [f"{size} for {seconds(spent)} s" for size, spent in view.story.replicas(view.until)]
    title = f"Node time by use, until {until}: goodput {goodput:.1%} of those with roles"
    sizes = ["", f"Model replicas in turn: {', '.join(lines)}"] if lines else []
    return [*sizes, "", title, *table(["use", "seconds", "part"], rows)]


def _describe_protection(view: View) -> list[str]:
    story = view.story
    longest, role, iteration = story.longest_wait
    gate = "no role had to wait for its copies"
    if story.gate_waits:
        gate = f"{count(len(story.gate_waits), 'wait')}, {story.gate_seconds:.3f} s over all roles,"
        gate += f" the longest {longest:.3f} s (role {role}, iteration {iteration})"
    steps = max(1, len(story.steps))
    written = ", ".join(
        f"{kind.value} {size(total)} ({size(total / steps)} per iteration)"
        for kind, total in story.bytes_by_kind.items()
    )
    lines = [f"commit gate: {gate}", *([f"bytes: {written}"] if written else [])]
    if saved := story.kept[Kind.DURABLE]:
        newest = saved[-1].data.get("path")
        lines.append(f"durable checkpoints: {len(saved)}, the newest {newest}")
    if losses := _join(map(narration.describe_loss, story.unrelated_losses)):
        lines.append(f"lost without an interruption: {losses}")
    lines += [str(event.data.get("cause")) for event in story.kept[Kind.NODE_QUARANTINED]]
    lines += map(narration.describe_protection, story.protections)
    lines += map(narration.describe_slowness, story.kept[Kind.SLOW_NODE])
    if story.audits:
        half, longest = statistics.median(story.audits), max(story.audits)
        spent = f"half of them in {half:.3f} s, the longest {longest:.3f} s"
        lines.append(f"audits without a find: {len(story.audits)}, {spent}")
    lines += [
        f"{text}: {story.counts[kind]}"
        for kind, text in _COUNT_TEXTS.items()
        if kind in story.counts
    ]
    if story.late:
        late = count(story.late, "late message")
        lines.append(f"{late} of closed epochs ignored (normal after a failure)")
    if view.refusals:
        lines.append(f"refused messages or connections: {view.refusals}")
    if story.refusal is not None:
        refused = story.refusal.data
        lines.append(f"the last one refused: {refused.get('who')}: {refused.get('why')}")
    return ["Protection", *(f"  {line}" for line in lines)]


def _join(parts: Iterable[str], limit: int = 4) -> str:
    """Join the first ``limit`` parts, and name the number of the others."""
    texts = list(parts)
    more = len(texts) - limit
    return "; ".join(texts[:limit]) + (f"; and {more} more" if more > 0 else "")


def to_dict(directory: Path, view: View) -> dict[str, Any]:
    """Return the facts of the report as JSON values."""
    story = view.story
    return {
        "directory": str(directory),
        "state": view.state,
        "title": view.title,
        "reason": view.reason,
        "to_do": view.to_do,
        "exit_status": view.final.get("exit_status"),
        "started_at": None if story.started is None else date(story.started.wall_seconds),
        "epoch": story.epoch,
        "steps": len(story.steps),
        "last_iteration": view.iteration,
        "seconds_per_step": summary(story.step_seconds()),
        "failures": [failure_to_dict(failure, view) for failure in story.all_failures],
        "gate": {
            "waits": len(story.gate_waits),
            "seconds": sum(story.gate_waits.values()),
            "longest_seconds": story.longest_wait[0],
        },
        "seconds_per_audit": summary(story.audits),
        "bytes": {kind.value: total for kind, total in story.bytes_by_kind.items()},
        "counts": {kind.value: number for kind, number in story.counts.items()},
        "late": story.late,
        "durable": [event.data.get("path") for event in story.kept[Kind.DURABLE]],
        "node_seconds": {use.value: spent for use, spent in story.account.uses(view.until).items()},
        "model_replicas": story.replicas(view.until),
        "goodput": story.goodput(view.until),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool report``. Raises ResultError if DIR is no run directory."""
    run = RunDirectory(args.directory)
    result = read_result(args.directory) if run.final.exists() else None
    story = read_story(args.directory) if result is None else result.story
    view = StatusPoller(run).view(story)
    if args.json:
        print(json.dumps(to_dict(args.directory, view), indent=1))
    else:
        print(narration.printable("\n".join(describe(args.directory, view))))
    return 0

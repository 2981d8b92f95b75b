"""Reports on a run and each failure in it, from its events and final.json, also during the run."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import seconds, size, table
from deadpool_megatron.cli.run_result import (
    RunResult,
    failure_to_dict,
    read_result,
    read_story,
)
from deadpool_megatron.cluster.failures import MEANINGS
from deadpool_megatron.cluster.run_directory.cleanup import is_here, what_remains
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Event, Kind, date
from deadpool_megatron.layout.words import in_short
from deadpool_megatron.observe.narration import (
    count,
    describe_loss,
    describe_protection,
    describe_seats,
    describe_slowness,
    describe_stack,
    describe_wait,
    shown,
    title,
    to_do,
)
from deadpool_megatron.observe.story import PHASES, Interruption, Story, decimal, summary

_SHOWN_STACKS = 3
# Characters of a name in a table.
_MOST_CELL = 48
_COUNTED = {
    Kind.REFUSED: "refused messages or connections",
    Kind.CORRUPTION: "corrupted copies caught",
    Kind.DECODED: "lost parts computed from parity",
    Kind.STALE_DIVERGENCE: "REPLAYED STEPS WITH OTHER NUMBERS",
    Kind.REPLAYED: "states recomputed from a base and gradients",
}


def state_of(directory: Path, story: Story, result: RunResult | None) -> str:
    """One line: how the run ended, or what it is doing."""
    left = what_remains(RunDirectory(directory))
    if result is not None:
        ending = f"ended with exit status {result.exit_status}"
        ending += f": {result.reason}" if result.reason else ""
        return f"{ending}; {left}" if left else ending
    if story.ended is not None:
        return f"ended with exit status {story.ended.data.get('exit_status', '?')}"
    if left:
        return f"all its processes ended, without a result; {left}"
    failure = story.current
    state = "running"
    if failure is not None:
        doing = "in planned change" if failure.planned else "recovering from failure"
        state = f"{doing} {failure.number}"
    state += "" if story.waiting is None else ", waiting for a spare"
    run = RunDirectory(directory)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        coordinator = read_json(run.coordinator)
        if not is_here(coordinator):
            host = coordinator["hostname"]
            return f"{state}, as far as its events tell: its coordinator was last on host {host}"
    return state


def describe(directory: Path, story: Story, result: RunResult | None) -> list[str]:
    """The whole report as lines."""
    lines = [f"{directory}: {state_of(directory, story, result)}"]
    if story.started is not None:
        facts = story.started.data
        lines.append(
            f"  {count(facts.get('roles'), 'role')} on {count(facts.get('nodes'), 'node')}"
            f" and {count(facts.get('spares'), 'spare')} at the start, epoch {story.epoch},"
            f" started {date(story.started.wall_seconds)}"
        )
    lines += _describe_steps(story)
    for failure in story.shown:
        lines += ["", *describe_failure(failure, story)]
    if len(timed := [failure for failure in story.shown if failure.phases]) > 1:
        lines += ["", "Seconds in each phase", *_phase_table(timed)]
    lines += ["", *_describe_protection(story), *_describe_time(story)]
    return lines


def describe_failure(failure: Interruption, story: Story) -> list[str]:
    """About a dozen lines about one failure."""
    began = story.started.wall_seconds if story.started is not None else failure.began
    meaning = MEANINGS.get(failure.kind)
    # The title has the cause; what is ended on purpose loses nothing.
    others = [one for one in failure.losses if one.data.get("cause") != failure.cause]
    losses = [one for one in others if "kind" in one.data]
    facts: list[tuple[str, str]] = [
        (
            "when",
            f"{date(failure.began)}, {failure.began - began:.1f} s after the start,"
            f" after iteration {failure.last_iteration}, epoch {failure.closed.epoch}",
        ),
        ("why", "" if meaning is None else f"{meaning.called}: {meaning.noticed}"),
        ("lost", _joined(map(describe_loss, losses))),
        *(("stack", describe_stack(event)) for event in failure.stacks[:_SHOWN_STACKS]),
    ]
    if failure.closes > 1:
        facts.append(("again", f"failed {failure.closes} times before the run continued"))
    if failure.generation is not None:
        lineage, iteration = failure.generation
        facts.append(("state", f"of iteration {iteration} (computed in epoch {lineage})"))
    if failure.is_over:
        phases = ", ".join(f"{name} {value:.3f}" for name, value in failure.phases.items())
        until = "" if failure.seconds is None else f"{failure.seconds:.3f} s until the next step, "
        cost = f"{until}{count(failure.steps_recomputed, 'step')} computed again"
        facts += [
            ("seats", describe_seats(failure.seats_changed)),
            ("phases", phases and f"{phases} s"),
            ("cost", f"{cost}, {failure.exposed_seconds:.3f} s without all copies in memory"),
        ]
    else:
        facts.append(("now", _describe_progress(failure, story)))
    facts.append(("to do", to_do(failure.kind)))
    lines = [f"  {name:<8} {value}" for name, value in facts if value]
    hangs = [line for event in failure.hangs for line in describe_hang(event)]
    return [title(failure, story.hosts), *lines, *hangs]


def _describe_progress(failure: Interruption, story: Story) -> str:
    if failure.is_cut_short:
        return "the run ended here"
    if story.waiting is not None:
        return describe_wait(story.waiting)
    told = [part.phase for part in failure.parts if part.phase in PHASES]
    return f"recovering since {date(failure.began)}, last phase reported: {(told or ['close'])[-1]}"


def describe_hang(event: Event) -> list[str]:
    """Lines of a table: for each group that somebody waits in, how far its roles are."""
    rows, culprits = [], set(event.data["roles"])
    for group in event.data.get("groups", ()):
        name = _cut(str(group["group"]))
        operation = " ".join(
            str(part) for part in (group["number"], group["operation"]) if part not in (None, "")
        )
        for row in group["rows"]:
            numbers = [str(row.get(name, "-")) for name in ("begun", "started", "ended")]
            where = f"{row['where']} in {row['operation']}" if "operation" in row else row["where"]
            if found := sorted(culprits & set(row["roles"])):
                where += f" (culprit: {in_short(found)})"
            roles = _cut(in_short(row["roles"]))
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


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CELL else f"{text[: _MOST_CELL - 3]}..."


def _describe_steps(story: Story) -> list[str]:
    if not story.steps:
        return ["  no step finished yet"]
    last, times = story.steps[-1], summary(story.step_seconds())
    text = f"  {count(len(story.steps), 'step')} finished, the last is iteration {last.iteration}"
    lines = [text if last.loss is None else f"{text} with loss {decimal(last.loss):.4f}"]
    if times["count"]:
        told = ", ".join(f"{name} {times[name]:.3f}" for name in ("mean", "p50", "p95", "p99"))
        lines.append(f"  seconds per step: {told}")
    return lines


def _phase_table(failures: list[Interruption]) -> list[str]:
    """A row per phase; each failure has its own seconds."""
    known = {name for failure in failures for name in failure.phases}
    names = [name for name in PHASES if name in known] + sorted(known - PHASES.keys())
    rows = {name: [one.phases[name] for one in failures if name in one.phases] for name in names}
    rows["to next step"] = [one.seconds for one in failures if one.seconds is not None]
    cells = [
        [name, str(len(found)), seconds(statistics.fmean(found)), seconds(max(found))]
        for name, found in rows.items()
        if found
    ]
    return table(["phase", "failures", "mean", "longest"], cells)


def _describe_time(story: Story) -> list[str]:
    """A row per use, in seconds of nodes."""
    goodput = story.account.goodput()
    if goodput is None:
        return []
    spent = {use: value for use, value in story.account.uses().items() if value > 0}
    whole = sum(spent.values())
    rows = [[use.value, seconds(value), f"{value / whole:.1%}"] for use, value in spent.items()]
    lines = [
        "",
        f"Node time by use, until the last event: goodput {goodput:.1%} of those with roles",
    ]
    return [*lines, *table(["use", "seconds", "part"], rows)]


def _describe_protection(story: Story) -> list[str]:
    longest, role, iteration = story.longest_wait
    gate = "no role had to wait for its copies"
    if story.gate_waits:
        gate = f"{count(len(story.gate_waits), 'wait')}, {story.gate_seconds:.3f} s over all roles,"
        gate += f" the longest {longest:.3f} s (role {role}, iteration {iteration})"
    steps = max(1, len(story.steps))
    written = ", ".join(
        f"{kind.value} {size(total)} ({size(total / steps)} per step)"
        for kind, total in story.bytes_by_kind.items()
    )
    lines = [f"commit gate: {gate}", *([f"bytes: {written}"] if written else [])]
    if saved := story.kept[Kind.DURABLE]:
        newest = saved[-1].data.get("path")
        lines.append(f"durable checkpoints: {len(saved)}, the newest {newest}")
    if losses := _joined(map(describe_loss, story.unrelated_losses)):
        lines.append(f"lost without an interruption: {losses}")
    lines += [str(event.data.get("cause")) for event in story.kept[Kind.NODE_ASIDE]]
    lines += map(describe_protection, story.protections)
    lines += map(describe_slowness, story.kept[Kind.SLOW_NODE])
    if story.audits:
        half, most = statistics.median(story.audits), max(story.audits)
        spent = f"half of them in {half:.3f} s, the longest {most:.3f} s"
        lines.append(f"audits without a find: {len(story.audits)}, {spent}")
    lines += [f"{_COUNTED[kind]}: {number}" for kind, number in story.counts.items()]
    if story.refusal is not None:
        refused = story.refusal.data
        lines.append(f"the last one refused: {refused.get('who')}: {refused.get('why')}")
    return ["Protection", *(f"  {line}" for line in lines)]


def _joined(parts: Iterable[str], limit: int = 4) -> str:
    """The first few; a report line stays a line."""
    found = list(parts)
    more = len(found) - limit
    return "; ".join(found[:limit]) + (f"; and {more} more" if more > 0 else "")


def to_dict(directory: Path, story: Story, result: RunResult | None) -> dict[str, Any]:
    """The same facts as JSON values."""
    return {
        "directory": str(directory),
        "state": state_of(directory, story, result),
        "exit_status": result.exit_status if result is not None else None,
        "started_at": None if story.started is None else date(story.started.wall_seconds),
        "epoch": story.epoch,
        "steps": len(story.steps),
        "last_iteration": story.last_iteration,
        "seconds_per_step": summary(story.step_seconds()),
        "failures": [failure_to_dict(failure, story) for failure in story.shown],
        "gate": {
            "waits": len(story.gate_waits),
            "seconds": sum(story.gate_waits.values()),
            "longest_seconds": story.longest_wait[0],
        },
        "seconds_per_audit": summary(story.audits),
        "bytes": {kind.value: total for kind, total in story.bytes_by_kind.items()},
        "counts": {kind.value: number for kind, number in story.counts.items()},
        "durable": [event.data.get("path") for event in story.kept[Kind.DURABLE]],
        "node_seconds": {use.value: spent for use, spent in story.account.uses().items()},
        "goodput": story.account.goodput(),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool report``. Raises ResultError when DIR is no run directory."""
    finished = RunDirectory(args.directory).final.exists()
    result = read_result(args.directory) if finished else None
    story = read_story(args.directory) if result is None else result.story
    if args.json:
        print(json.dumps(to_dict(args.directory, story, result), indent=1))
    else:
        print(shown("\n".join(describe(args.directory, story, result))))
    return 0

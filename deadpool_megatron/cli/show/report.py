"""``deadpool report DIR``: the story of a run and of each failure, also while it still
continues."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deadpool_megatron.cli.common import count, seconds, shown, size, table
from deadpool_megatron.cli.show.narration import (
    advice_for,
    describe_cause,
    describe_coordinator,
    describe_hang,
    describe_loss,
    describe_protection,
    describe_seats,
    describe_slowness,
    describe_stack,
)
from deadpool_megatron.cli.show.run_result import (
    PHASES,
    FinishedRecovery,
    ResultError,
    RunResult,
    decimal,
    read_result,
)
from deadpool_megatron.cli.show.story import Interruption, Story, summary
from deadpool_megatron.cluster.run_directory.cleanup import is_here
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json
from deadpool_megatron.events import Kind, event_files, take_events

# More failures than this share one column of means instead of having one each.
_COLUMNS = 6
_SHOWN_STACKS = 3


def read_story(directory: Path) -> Story:
    """The story that the events tell. Raises ResultError when there is none."""
    path = RunDirectory(directory).events
    story = Story()
    if not event_files(path):
        raise ResultError(f"{directory} is not the directory of a run (no events.jsonl)")
    try:
        take_events(path, story.add)
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error}") from error
    return story


def state_of(directory: Path, story: Story, result: RunResult | None) -> str:
    """One line: how the run ended, or what it is doing."""
    if result is not None:
        ending = f"ended with exit status {result.exit_status}"
        return f"{ending}: {result.reason}" if result.reason else ending
    if story.ended is not None:
        return f"ended with exit status {story.ended.data.get('exit_status', '?')}"
    failure = story.current
    state = "running" if failure is None else f"recovering from failure {failure.number}"
    try:
        coordinator = read_json(RunDirectory(directory).coordinator)
        if not is_here(coordinator):
            host = coordinator["hostname"]
            return f"{state}, as far as its events tell: its coordinator was last on host {host}"
        # The number may have been given to another program since.
        cmdline = Path(f"/proc/{int(coordinator['pid'])}/cmdline").read_bytes()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        cmdline = b""
    if b"deadpool" not in cmdline:
        return "not running any more, and without a result: it was killed as a whole"
    return state


def describe(directory: Path, story: Story, result: RunResult | None) -> list[str]:
    """The whole report as lines."""
    lines = [f"{directory}: {state_of(directory, story, result)}"]
    if story.started is not None:
        facts = story.started.data
        lines.append(
            f"  {count(facts.get('roles'), 'role')} on {count(facts.get('nodes'), 'node')}"
            f" and {count(facts.get('spares'), 'spare')}, epoch {story.epoch}"
        )
    lines += _describe_steps(story)
    for failure in story.failures:
        lines += ["", *describe_failure(failure, story)]
    if story.failures:
        lines += ["", "Seconds in each phase", *_phase_table(story.failures)]
    lines += ["", *_describe_protection(story), *_describe_time(story)]
    return lines


def describe_failure(failure: Interruption, story: Story) -> list[str]:
    """About a dozen lines about one failure."""
    what = "Planned swap" if failure.planned else "Failure"
    began = story.started.wall_seconds if story.started is not None else failure.began
    facts: list[tuple[str, str]] = [
        (
            "when",
            f"after iteration {failure.last_iteration},"
            f" {failure.began - began:.1f} s into the run, epoch {failure.closed_epoch} closed",
        )
    ]
    advice = advice_for(failure.kind)
    if advice is not None:
        facts.append(("why", advice.noticed))
    if failure.losses:
        # What is ended on purpose loses nothing.
        label = "ended" if failure.planned else "lost"
        facts.append((label, _joined(describe_loss(loss) for loss in failure.losses)))
    facts += [("stack", describe_stack(event)) for event in failure.stacks[:_SHOWN_STACKS]]
    if failure.nccl_logs:
        logs = _joined(f"logs/{log}" for log in failure.nccl_logs)
        facts.append(("nccl", f"what it said of the job itself: {logs}"))
    if failure.closes > 1:
        facts.append(("again", f"struck {failure.closes} times before the run went on"))
    if failure.generation is not None:
        lineage, iteration = failure.generation
        facts.append(("state", f"of iteration {iteration} (computed in epoch {lineage})"))
    recovery = failure.recovery
    if recovery is None:
        facts.append(("now", _describe_progress(failure, story)))
    else:
        if recovery.seats_changed:
            facts.append(("seats", describe_seats(recovery.seats_changed)))
        phases = [f"{name} {value:.3f}" for name, value in recovery.phases.items()]
        facts.append(("phases", ", ".join(phases) + " s" if phases else "not recorded"))
        facts.append(("cost", _describe_cost(failure, recovery)))
    if advice is not None and advice.to_do:
        facts.append(("to do", advice.to_do))
    cause = failure.cause
    if not failure.planned:
        cause = describe_cause({"kind": failure.kind, "cause": cause})
    lines = [f"{what} {failure.number}: {cause}", *(f"  {k:<8} {v}" for k, v in facts)]
    for event in failure.hangs:
        lines += describe_hang(event)
    return lines


def _describe_cost(failure: Interruption, recovery: FinishedRecovery) -> str:
    again = f"{count(recovery.steps_recomputed, 'step')} computed again"
    exposed = f"{failure.exposure:.3f} s without all copies in memory"
    if recovery.seconds is None:
        return f"{again}, {exposed}"
    return f"{recovery.seconds:.3f} s until the next step was finished, {again}, {exposed}"


def _describe_progress(failure: Interruption, story: Story) -> str:
    if story.ended is not None:
        return "not recovered: the run ended"
    since = story.last_wall - failure.began
    if failure.parts:
        return f"recovering since {since:.1f} s, last phase heard of: {failure.parts[-1].phase}"
    reached = "the new epoch is decided" if failure.decided is not None else "leaving the epoch"
    return f"recovering since {since:.1f} s, {reached}"


def _describe_steps(story: Story) -> list[str]:
    if not story.steps:
        return ["  no step finished yet"]
    last = story.steps[-1].step
    loss = decimal(last.loss)
    text = f"  {count(len(story.steps), 'step')} finished, the last is iteration {last.iteration}"
    if loss is not None:
        text += f" with loss {loss:.4f}"
    lines = [text]
    times = summary(story.step_seconds())
    if times["count"]:
        lines.append(
            f"  seconds per step: mean {times['mean']:.3f}, p50 {times['p50']:.3f},"
            f" p95 {times['p95']:.3f}, p99 {times['p99']:.3f}"
        )
    return lines


def _phase_table(failures: list[Interruption]) -> list[str]:
    """A row per phase; a column per failure, or mean and longest when there are many."""
    recoveries = [f.recovery for f in failures]
    known = {name for r in recoveries if r is not None for name in r.phases}
    names = [name for name in PHASES if name in known] + sorted(known - PHASES.keys())
    rows: list[list[float | None]] = [
        [r.phases.get(name) if r is not None else None for r in recoveries] for name in names
    ]
    rows.append([r.seconds if r is not None else None for r in recoveries])
    titles = [*names, "to next step"]
    if len(failures) <= _COLUMNS:
        titled = (f"{'swap' if f.planned else 'failure'} {f.number}" for f in failures)
        header = ["phase", *titled]
        return table(header, [[t, *map(seconds, r)] for t, r in zip(titles, rows, strict=True)])
    cells = []
    for title, row in zip(titles, rows, strict=True):
        values = [value for value in row if value is not None]
        found = [statistics.fmean(values), max(values)] if values else [None, None]
        cells.append([title, str(len(values)), *map(seconds, found)])
    return table(["phase", "failures", "mean", "longest"], cells)


def _describe_time(story: Story) -> list[str]:
    """A row per use, in seconds of nodes."""
    goodput = story.account.goodput()
    if goodput is None:
        return []
    spent = {use: value for use, value in story.account.seconds().items() if value > 0}
    whole = sum(spent.values())
    rows = [[use.value, seconds(value), f"{value / whole:.1%}"] for use, value in spent.items()]
    lines = ["", f"Where the time of the nodes went: goodput {goodput:.1%} of those with roles"]
    return [*lines, *table(["use", "seconds", "part"], rows)]


def _describe_protection(story: Story) -> list[str]:
    lines = [f"  commit gate: {_describe_gate(story)}"]
    if story.bytes_by_kind:
        steps = max(1, len(story.steps))
        lines.append(
            "  bytes: "
            + ", ".join(
                f"{kind.value} {size(total)} ({size(total / steps)} per step)"
                for kind, total in story.bytes_by_kind.items()
            )
        )
    if story.durable:
        newest = story.durable[-1]
        lines.append(
            f"  durable checkpoints: {len(story.durable)}, the newest {newest.data.get('path')}"
        )
    if story.unrelated_losses:
        lines.append(
            "  lost without an interruption: "
            + _joined(describe_loss(loss) for loss in story.unrelated_losses)
        )
    if len(story.coordinators) > 1:
        lines.append("  coordinators: " + _joined(map(describe_coordinator, story.coordinators)))
    names = {
        Kind.REFUSED: "refused messages or connections",
        Kind.CORRUPTION: "corrupted copies caught",
        Kind.DECODED: "lost parts computed from parity",
        Kind.STALE_DIVERGENCE: "REPLAYED STEPS WITH OTHER NUMBERS",
        Kind.REPLAYED: "states recomputed from a base and gradients",
    }
    lines += [f"  {event.data.get('cause')}" for event in story.aside]
    lines += [f"  {describe_protection(event)}" for event in story.protections]
    lines += [f"  {describe_slowness(event)}" for event in story.slow]
    if story.audits:
        half, longest = statistics.median(story.audits), max(story.audits)
        spent = f"half of them in {half:.3f} s, the longest {longest:.3f} s"
        lines.append(f"  audits without a find: {len(story.audits)}, {spent}")
    lines += [f"  {names[kind]}: {number}" for kind, number in story.counts.items()]
    return ["Protection", *lines]


def _describe_gate(story: Story) -> str:
    if not story.gate_waits:
        return "no role had to wait for its copies"
    longest, role, iteration = story.longest_wait
    total = sum(story.gate_waits.values())
    return (
        f"{count(len(story.gate_waits), 'wait')}, {total:.3f} s over all roles,"
        f" the longest {longest:.3f} s (role {role}, iteration {iteration})"
    )


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
        "epoch": story.epoch,
        "steps": len(story.steps),
        "last_iteration": story.last_iteration,
        "seconds_per_step": summary(story.step_seconds()),
        "failures": [_failure_to_dict(failure) for failure in story.failures],
        "gate": {
            "waits": len(story.gate_waits),
            "seconds": sum(story.gate_waits.values()),
            "longest_seconds": story.longest_wait[0],
        },
        "seconds_per_audit": summary(story.audits),
        "bytes": {kind.value: total for kind, total in story.bytes_by_kind.items()},
        "counts": {kind.value: number for kind, number in story.counts.items()},
        "durable": [event.data.get("path") for event in story.durable],
        "node_seconds": {use.value: spent for use, spent in story.account.seconds().items()},
        "goodput": story.account.goodput(),
    }


def _failure_to_dict(failure: Interruption) -> dict[str, Any]:
    recovery = failure.recovery
    return {
        "number": failure.number,
        "cause": failure.cause,
        "kind": failure.kind,
        "planned": failure.planned,
        "closed_epoch": failure.closed_epoch,
        "last_iteration": failure.last_iteration,
        "closes": failure.closes,
        "hangs": [dict(event.data) for event in failure.hangs],
        "nccl_logs": list(failure.nccl_logs),
        "stacks": [
            {"role": event.role, "node": event.node, **event.data} for event in failure.stacks
        ],
        "losses": [describe_loss(loss) for loss in failure.losses],
        "generation": list(failure.generation) if failure.generation is not None else None,
        "recovered": recovery is not None,
        "phases": dict(recovery.phases) if recovery is not None else {},
        "seconds": recovery.seconds if recovery is not None else None,
        "steps_recomputed": recovery.steps_recomputed if recovery is not None else None,
        "exposed_seconds": failure.exposure,
    }


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``report`` to the commands."""
    parser = subparsers.add_parser(
        "report",
        help="tell the story of a run and of each failure in it",
        description="Reads events.jsonl and final.json of a run, which may still be going.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="run directory")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool report``: exit status 0, or 2 when DIR is no run directory."""
    try:
        story = read_story(args.directory)
        finished = RunDirectory(args.directory).final.exists()
        result = read_result(args.directory) if finished else None
    except ResultError as error:
        print(f"deadpool report: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(to_dict(args.directory, story, result), indent=1))
    else:
        print(shown("\n".join(describe(args.directory, story, result))))
    return 0

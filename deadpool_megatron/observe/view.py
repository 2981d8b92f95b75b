"""The view of a run: its state, numbers and advice, from its events and its coordinator. Pure.

All displays show this view: status, page, `run`, `watch`, report and metrics. states.toml has its
texts.
"""

from __future__ import annotations

import errno
import math
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from deadpool_megatron.events import Event, Kind, date
from deadpool_megatron.failures import FailureKind, describe_kind
from deadpool_megatron.layout.descriptions import in_short
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.observe.narration import advice, count, describe_wait, to_do
from deadpool_megatron.observe.story import Interruption, Story

# A coordinator that has not answered for this time has no successor.
_SILENT_SECONDS = 30.0
# A step is reported as late if it takes longer than _SILENT_SECONDS and this many usual steps.
_LATE_STEPS = 10
# A larger difference between two clocks is reported.
_CLOCK_SECONDS = 5.0
# Errors of writing events that mean a full disk.
_FULL_TEXTS = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
_TABLE = tomllib.loads(Path(__file__).with_name("states.toml").read_text())
TABLE: Mapping[str, Mapping[str, str]] = _TABLE["states"]
TROUBLES: Mapping[str, Mapping[str, str]] = _TABLE["troubles"]
_ENDS: Mapping[str, Mapping[str, str]] = _TABLE["ends"]


class State(StrEnum):
    """The state of a run, as every display calls it."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    PLANNED = "planned change"
    WAITING = "waiting for a spare"
    TAKEOVER = "taking over"
    ENDING = "ending"
    OVER = "over"
    GONE = "gone"
    UNANSWERED = "no answer"


@dataclass(frozen=True)
class View:
    """The facts of a run for people.

    ``story``: the story, with the events that the coordinator could not write yet; ``status``: the
    coordinator's answer, or None; ``final``: the result of the run, empty before the end. ``now``:
    wall clock (seconds) of the coordinator, which dates the events, or without an answer that of
    the reader. ``skew``: seconds by which the reader's clock is ahead. ``look``, ``title`` and
    ``to_do``: see states.toml. ``reason``: the reason of the end of the run.
    """

    state: State
    run: object
    story: Story
    status: Mapping[str, Any] | None
    final: Mapping[str, Any]
    now: float
    skew: float
    look: str = ""
    title: str = ""
    to_do: str = ""
    reason: str = ""

    def advice(self, failure: Interruption) -> str:
        """Return the advice about a failure; empty for none."""
        return advice(failure, self.story).replace("--run-dir DIR", f"--run-dir {self.run}")

    @property
    def until(self) -> float | None:
        """The time up to which the use of nodes is known; None for the newest event."""
        return None if self.status is None else self.now

    @property
    def iteration(self) -> int:
        """The newest finished iteration."""
        values = self.final if self.status is None else self.status
        newest = values.get("iterations" if self.status is None else "iteration", 0)
        return max(int(newest), self.story.last_iteration)

    @property
    def step_seconds_ago(self) -> float | None:
        """Seconds since the newest step; None before the first."""
        at = self.story.last_step_at
        if self.status is not None and self.status["step_seconds_ago"] is not None:
            return float(self.status["step_seconds_ago"])
        return None if at is None else max(0.0, self.now - at)

    @property
    def exposed(self) -> list[int] | None:
        """Roles with fewer copies than wanted; None if unknown."""
        if self.status is None or self.state in (State.STARTING, State.TAKEOVER, State.OVER):
            return None
        return list(self.status["fewer_copies"])

    @property
    def replicas(self) -> str:
        """A text with the present and the full number of model replicas; empty if the number cannot
        change, or is not known."""
        numbers = [] if self.status is None else self.status["model_replicas"]
        return f"{numbers[0]} of {numbers[1]} model replicas" if numbers else ""

    @property
    def max_lost(self) -> float | None:
        """The largest number of iterations that the loss of a node would cost now, infinite if it
        may cost all since the last checkpoint; None if unknown."""
        if self.exposed is None or self.status is None:
            return None
        lost = self.status["rpo"]["most_lost"]
        return math.inf if lost is None else float(lost)

    @property
    def events_waiting(self) -> int:
        """The number of events that the coordinator cannot write."""
        events = {} if self.status is None else self.status["events"]
        return int(events["waiting"]) if events.get("trouble") else 0

    @property
    def refusals(self) -> int:
        """The number of refused messages and connections, without late messages of closed
        epochs."""
        reported = 0 if self.status is None else int(self.status["refusals"])
        return max(self.story.counts.get(Kind.REFUSED, 0), reported)

    def at_risk(self) -> str:
        """Return a text on the iterations that the loss of a node would cost now."""
        lost = self.max_lost
        if lost is None:
            return "not known before all agents have come to the coordinator"
        if lost < math.inf:
            return f"at most {count(int(lost), 'iteration')}"
        saved = self.story.kept[Kind.DURABLE]
        since = f"iteration {saved[-1].iteration}" if saved else "the start (no checkpoint)"
        return f"roles {in_short(self.exposed or [])} lack copies: perhaps all since {since}"

    def notes(self) -> list[tuple[str, str]]:
        """Return names and texts of notes about the view itself."""
        order = "later" if self.skew > 0 else "earlier"
        text = (
            f"this host is {abs(self.skew):.0f} s {order} than the coordinator, whose clock counts"
        )
        return [("clock", text)] if abs(self.skew) > _CLOCK_SECONDS else []


def view(
    story: Story,
    status: Mapping[str, Any] | None,
    run: object,
    now: float,
    *,
    remaining: str = "",
    final: Mapping[str, Any] | None = None,
) -> View:
    """Return the view of a run.

    ``status``: the coordinator's answer, or None; ``run``: the run's directory; ``now``: the
    reader's wall clock, seconds; ``remaining``: a line on the memory of a run whose processes have
    all ended; ``final``: the result; None to take it from the events. Raises an error of
    :data:`events.DAMAGE` for the status of another version.
    """
    if status is not None:
        story = story.ahead(map(Event.from_dict, status["events"]["unwritten"]))
    if final is None:
        final = {} if story.ended is None else story.ended.data
    clock = now if status is None else float(status["now"])
    is_over = bool(final) or story.ended is not None
    state = State.OVER if is_over else State.GONE if remaining else _state(story, status)
    run_view = View(state, run, story, status, final, clock, now - clock)
    name = str(run).rpartition("/")[2]
    facts = {"run": run, "name": name, "remaining": remaining, **_facts(run_view)}
    row, code = TABLE[state], str(final.get("exit_status", 0))
    troubles = [] if status is None or is_over else [TROUBLES[name] for name in _troubles(run_view)]
    texts = [row["to_do"], *(trouble["to_do"] for trouble in troubles)]
    reason, orders = _reason(run_view, remaining) if is_over else ("", [])
    to_do = dict.fromkeys(filter(None, [*(text.format(**facts) for text in texts), *orders]))
    look = row["look"]
    if state is State.OVER and code in _ENDS:
        look = _ENDS[code]["look"]
    elif state is State.UNANSWERED and facts["silent"] > _SILENT_SECONDS:
        look = "bad"
    return replace(
        run_view,
        look="wait" if look == "good" and troubles else look,
        title="".join(entry["title"].format(**facts) for entry in (row, *troubles)),
        to_do="; ".join(to_do),
        reason=reason,
    )


def _state(story: Story, status: Mapping[str, Any] | None) -> State:
    if status is None:
        return State.UNANSWERED if len(story.steps) else State.STARTING
    phase, failing = str(status["phase"]), status["failing"]
    if not status["epoch"]:
        return State.STARTING
    if phase in ("dumping", "ending", "ended"):
        return State.ENDING
    if phase in ("bootstrapping", State.WAITING):
        return State.WAITING if phase == State.WAITING else State.TAKEOVER
    if not failing:
        return State.RUNNING
    return State.PLANNED if failing["kind"] == FailureKind.PLANNED else State.RECOVERING


def _facts(run_view: View) -> dict[str, Any]:
    """Return the values for the places in the texts of states.toml."""
    story, status, final = run_view.story, run_view.status, run_view.final
    code, waiting = str(final.get("exit_status", 0)), story.waiting
    how = describe_kind(str(final.get("kind") or "")) or "failed"
    facts: dict[str, Any] = {
        "joined": len(story.hosts),
        "wanted": sum(story.wanted),
        "silent": max(0.0, run_view.now - (story.last_wall or run_view.now)),
        "age": run_view.step_seconds_ago,
        "status": code,
        "how": _ENDS.get(code, {"how": how})["how"],
        "wait": "a role has no node" if waiting is None else describe_wait(waiting),
    }
    if status is None:
        return facts
    phase, waits, events = str(status["phase"]), status["waiting_for"], status["events"]
    reason = events["why"]
    return facts | {
        "phase": "replay" if phase == "running" else phase,
        "waits": f", waits for {waits}" if waits else "",
        "node": status["coordinator"]["node"],
        "full": "is full" if reason in _FULL_TEXTS else f"cannot be written ({reason})",
        "since": date(run_view.now - events["seconds"])[11:19],
        "trains": ", training continues" if run_view.state is State.RUNNING else "",
        "fewer": count(len(status["fewer_copies"]), "role"),
        "slow": count(len(status["slow"]), "slow node"),
        "replicas": run_view.replicas,
    }


def _troubles(run_view: View) -> Iterator[str]:
    """Yield the troubles of a run whose coordinator answers, by their names in states.toml."""
    story, status, ago = run_view.story, run_view.status or {}, run_view.step_seconds_ago
    if run_view.events_waiting:
        yield "full"
    if run_view.state is not State.RUNNING:
        return
    if ago is not None and ago > max(_SILENT_SECONDS, _LATE_STEPS * (story.pace() or 0.0)):
        yield "stalled"
    uses = {status["nodes"][str(node)]["use"] for node in status["spares"]}
    if story.wanted[1] and NodeUse.SPARE not in uses:
        yield "drained" if uses else "no spare"
    if len({*status["model_replicas"]}) > 1:
        yield "smaller"
    yield from ["fewer"] * bool(status["fewer_copies"]) + ["slow"] * bool(status["slow"])


def _reason(run_view: View, remaining: str) -> tuple[str, list[str]]:
    """Return the reason of a run's end, and what its user can do: the advice about the last
    failure, the commands in the reason, and ``remaining``."""
    final, last = run_view.final, run_view.story.failures[-1:]
    unknown = "no reason known" if final.get("exit_status") else ""
    parts = str(final.get("reason") or unknown).split("; ")
    orders = [part for part in parts if "'deadpool run" in part]
    reason = "; ".join(part for part in parts if part not in orders)
    advices = [run_view.advice(failure) for failure in last if failure.is_cut_short]
    return reason, [*(advices or [to_do(str(final.get("kind") or ""))]), *orders, remaining]

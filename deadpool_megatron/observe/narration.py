"""Texts for each event and each failure, equal in live output, page and report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.events import Event, Kind, date
from deadpool_megatron.failures import MEANINGS, FailureKind, describe_kind, process_name
from deadpool_megatron.layout.descriptions import in_short
from deadpool_megatron.layout.records import NodeUse
from deadpool_megatron.observe.steps import decimal
from deadpool_megatron.observe.story import Interruption, Story, by_rank

# When a failure was noticed is shown only if this was at least this much later than its begin.
_NOTICED_SECONDS = 1.0
# Enough to see the call and its caller.
_MAX_FRAMES = 4
# Event kind -> format of its text, and style.
_FORMATS = {
    Kind.NODE_JOINED: ("node {node} joined", ""),
    Kind.SIZE: ("{to} model replicas train now, {from} before: {why}", "bold yellow"),
    Kind.VAULT_LOST: (
        "vault of node {node} lost: {cause}; it is started again on its slots",
        "yellow",
    ),
    Kind.EPOCH_OPENED: ("epoch {epoch} open", "green"),
    Kind.NODE_QUARANTINED: ("{cause}", "bold red"),
    Kind.NONFINITE: ("the {number} of iteration {iteration} is {value}: {policy}", "bold red"),
    Kind.AUDIT_FAILED: (
        "the audit finds wrong numbers: {what} in iteration {iteration}: roles {roles}",
        "bold red",
    ),
    Kind.DURABLE: ("durable: {path}", ""),
    Kind.DUMPED: ("dumped: {path}", ""),
    Kind.CORRUPTION: ("damaged bytes found and not used: {data}", "bold red"),
    Kind.DECODED: ("{part} of role {role} computed from parity in {seconds:.2f} s", "green"),
    Kind.STALE_DIVERGENCE: ("A REPLAYED ITERATION GAVE OTHER NUMBERS", "bold red"),
}
_AGAIN = "if it happens again, "
_ATTACH_FLAG = "--attach"


@dataclass(frozen=True)
class Line:
    """A line for people. ``style``: words of bold, red, yellow, green; ``passes``: the line is only
    a status, which the next such line replaces."""

    text: str
    style: str = ""
    passes: bool = False


class Narrator:
    """Returns the lines of each event in turn. A failure has a line when it is noticed, and at its
    end lines with its cost and the advice. Planned changes are not red; the end of a run is a
    single line.

    ``story``: the story into which :meth:`take` folds the events, in the order of the files.
    """

    def __init__(self, story: Story) -> None:
        self.story = story
        # Lines of losses, held back until the next line: if it is that of a failure, it has their
        # cause, and they are dropped.
        self._losses = list[Line]()
        self._opened_epochs: set[int] = set()
        self._code = ""  # the kind with which the last failure was reported
        self._restored = 0  # the restored iteration

    def take(self, event: Event) -> list[Line]:
        """Fold an event into the story; return its lines, after lines that were held back. Raises
        an error of :data:`events.DAMAGE` for a damaged event."""
        story, was_over, current = self.story, self.story.ended is not None, self.story.current
        event = by_rank(event)
        if event.kind is Kind.EPOCH_DECIDED:
            self._restored = int(event.data.get("generation", (0, 0))[1])
        # After a takeover known events arrive again, and all nodes join again.
        known_until = max(story.last_iteration, self._restored)
        is_repeated = event.kind is Kind.STEP and (event.iteration or 0) <= known_until
        is_repeated |= event.kind is Kind.EPOCH_OPENED and self._is_known(event.epoch)
        is_repeated |= event.kind is Kind.NODE_JOINED and story.silence is not None
        plan_count, failure_count = len(story.protections), len(story.failures)
        story.take(event)
        if event.kind is Kind.EPOCH_OPENED and len(story.failures) > failure_count:
            # The loss of a coordinator, which did not interrupt training.
            return [_title_line(story.failures[-1], story), *self._advice()]
        is_repeated |= event.kind is Kind.PROTECTION and len(story.protections) == plan_count
        if is_repeated or (was_over and story.ended is not None):  # after the end agents leave
            return []
        match event.kind:
            case Kind.NODE_LOST | Kind.MEMBER_LOST:
                return self._lost(event, is_recovering=current is not None)
            case Kind.EPOCH_CLOSED if current is None:
                self._losses.clear()
                failure = story.failures[-1]
                self._code = failure.kind
                lines = [_title_line(failure, story)]
            case Kind.RECOVERED if story.failures:
                lines = self._recovered(story.failures[-1])
            case Kind.RUN_ENDED:
                is_cut_short = bool(story.failures) and story.failures[-1].is_cut_short
                lines = [_ending(story), *(self._advice() if is_cut_short else [])]
            case Kind.WAITING_FOR_SPARE:
                attach = "start another node as a spare: deadpool agent --run-dir DIR --attach"
                lines = [Line(describe_wait(event), "yellow"), Line(f"to do: {attach}")]
            case Kind.EPOCH_OPENED if current is not None:
                lines = []
            case Kind.NODE_JOINED if not story.epoch:
                lines = [
                    Line(f"{len(story.hosts)} of {sum(story.wanted)} nodes joined", passes=True)
                ]
            case _:
                line = line_of(event)
                lines = [] if line is None else [line]
        lines, self._losses = [*self._losses, *lines], []
        return lines

    def _lost(self, event: Event, *, is_recovering: bool) -> list[Line]:
        if "kind" not in event.data:
            return []  # ended on purpose
        line = Line(describe_loss(event), "red")
        if is_recovering:
            return [line]
        self._losses.append(line)
        return []

    def _recovered(self, failure: Interruption) -> list[Line]:
        # A better cause may be known by now.
        lines = [] if failure.kind == self._code else [_title_line(failure, self.story)]
        verb, style = ("done", "green") if failure.planned else ("recovered", "bold green")
        again = count(failure.steps_recomputed, "iteration")
        text = f"{verb} in {failure.seconds or 0.0:.2f} s{_phases(failure.phases)}"
        lines.append(Line(f"{text}; {again} computed again", style))
        return lines + self._advice()

    def _advice(self) -> list[Line]:
        text = advice(self.story.failures[-1], self.story)
        return [Line(f"to do: {text}")] if text else []

    def _is_known(self, epoch: int) -> bool:
        """Return whether the opening of the epoch was reported before, as a coordinator that took
        over repeats it."""
        is_known = epoch in self._opened_epochs
        self._opened_epochs.add(epoch)
        return is_known


def line_of(event: Event) -> Line | None:
    """Return the line of a single event; None for no line.

    Raises LookupError, TypeError, ValueError or AttributeError for data of another form.
    """
    data = event.data
    if event.kind in _FORMATS:
        text, style = _FORMATS[event.kind]
        return Line(text.format(**{**vars(event), **data, "data": dict(data)}), style)
    match event.kind:
        case Kind.STEP:
            return Line(f"iteration {event.iteration}{_numbers(data)}", passes=True)
        case Kind.EVALUATION:
            return Line(f"evaluation at iteration {event.iteration}{_numbers(data)}")
        case Kind.STACK:
            return Line(f"stack of {describe_stack(event)}", "yellow")
        case Kind.EPOCH_CLOSED:
            return Line(f"epoch {event.epoch} failed, too: {describe_cause(data)}", "yellow")
        case Kind.EPOCH_DECIDED if event.epoch > 1:
            lineage, iteration = data.get("generation", (0, 0))
            text = f"epoch {event.epoch} continues from iteration {iteration} ({lineage})"
            return Line(text, passes=True)
        case Kind.COORDINATOR if int(data.get("term", 1)) > 1:
            host = f"host {data.get('hostname')} (node {event.node})"
            return Line(f"coordinator: term {data['term']} on {host}", "yellow")
        case Kind.SLOW_NODE:
            return Line(describe_slowness(event), "yellow")
        case Kind.DRAIN:
            return Line(str(data.get("text", f"drain of node {event.node}")))
        case Kind.LOG if data.get("level") != "info":
            return Line(str(data.get("text")))
        case Kind.PROTECTION:
            style = "" if data.get("why") == "start" else "yellow"
            return Line(f"protection: {describe_protection(event)}", style)
        case Kind.GATE_WAIT if not data.get("over"):
            waited = f"role {event.role} waits for the commit of iteration {event.iteration}"
            return Line(f"{waited} for {float(data['seconds']):.0f} s", "yellow")
        case _:
            return None


def count(number: object, noun: str) -> str:
    """Return ``1 step``, ``2 steps``; a question mark for None."""
    text = "?" if number is None else number
    return f"{text} {noun}" if number == 1 else f"{text} {noun}s"


def printable(text: str) -> str:
    """Return foreign text without characters that a terminal would interpret."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def describe_cause(data: Mapping[str, Any]) -> str:
    """Return the kind and cause of a failure: ``a node was lost: node 1: connection closed``."""
    kind, cause = describe_kind(str(data.get("kind", ""))), str(data.get("cause") or "")
    return ": ".join(filter(None, (kind, cause))) or "cause not recorded"


def describe_loss(event: Event) -> str:
    """Return ``node 0: connection closed`` or ``process 1 of node 2 ended: SIGKILL (role 3)``."""
    data, name = event.data, f"node {event.node}"
    if event.kind is Kind.VAULT_LOST:
        name = f"vault of {name}"
    elif event.kind is Kind.MEMBER_LOST:
        # A run of 0.6 has the local rank as "slot".
        local_rank = data.get("local_rank", data.get("slot", 0))
        name = process_name(event.node or 0, local_rank, data.get("incarnation", 0))
    cause = str(data.get("cause") or "lost")
    role = "" if event.role is None else f" (role {event.role})"
    return (cause if name in cause else f"{name}: {cause}") + role


def title(failure: Interruption, hosts: Mapping[int, str]) -> str:
    """Return ``failure 2 [node-lost] on b7: node 1: connection closed``."""
    noun = "planned change" if failure.planned else "failure"
    colon = ":" if failure.kind == FailureKind.PLANNED else ""
    return f"{noun} {failure.number}{colon} {label(failure, hosts)}"


def label(failure: Interruption, hosts: Mapping[int, str]) -> str:
    """Return ``[node-lost] on b7: node 1: connection closed``: code, host, likeliest cause;
    for a planned change, return the cause alone."""
    if failure.kind == FailureKind.PLANNED:
        return failure.cause
    best = failure.cause_event
    cause = failure.cause if best.kind is Kind.EPOCH_CLOSED else describe_loss(best)
    host = "" if best.node is None or failure.planned else f" on {hosts.get(best.node, '?')}"
    return f"[{failure.kind or 'unknown'}]{host}: {cause}"


def to_do(kind: str, text: str | None = None) -> str:
    """Return ``text``, or else the advice for a failure of this kind, with the command that
    explains the kind; empty if there is no advice."""
    advice = MEANINGS[kind].to_do if text is None and kind in MEANINGS else text
    return f"{advice} (deadpool explain {kind})" if advice else ""


def advice(failure: Interruption, story: Story) -> str:
    """Return the advice about a failure; empty if there is none. It names the number of the failure
    if this kind has happened before on the node, and a quarantine of the node. To a run that is
    over, no node is to be attached."""
    text = MEANINGS[failure.kind].to_do if failure.kind in MEANINGS else ""
    node = failure.cause_event.node
    same = [f for f in story.failures if (f.kind, f.cause_event.node) == (failure.kind, node)]
    number = same.index(failure) + 1 if failure in same else 1
    name = f"failure {number} of this kind on node {node}"
    if text.startswith(_AGAIN) and number > 1:
        text = f"{name}: {text.removeprefix(_AGAIN)}"
    until = failure.ended or story.last_wall
    quarantines = (e for e in story.kept[Kind.NODE_QUARANTINED] if e.node == node)
    if any(failure.began <= event.wall_seconds <= until for event in quarantines):
        seats = {int(seat[0]) for _, seat in failure.seats_changed.values()}  # type: ignore[index]
        note = f", its roles are on node {in_short(sorted(seats))} now" if seats else ""
        test = "test its host (deadpool gpu-health, dmesg)"
        text = f"{name}, which is quarantined{note}: {test}; start another node as a spare:"
        text += " 'deadpool agent --run-dir DIR --attach'"
    parts = (part for part in text.split("; ") if story.ended is None or _ATTACH_FLAG not in part)
    return to_do(failure.kind, "; ".join(parts))


def _title_line(failure: Interruption, story: Story) -> Line:
    is_calm = failure.kind == FailureKind.COORDINATOR
    style = "" if failure.planned else "yellow" if is_calm else "bold red"
    return Line(title(failure, story.hosts), style)


def _ending(story: Story) -> Line:
    done = f"iteration {story.last_iteration}, {count(story.survived, 'failure')} survived"
    if story.ended is None or story.exit_status == 0:
        return Line(f"done: {done}", "bold green")
    reason = story.ended.data.get("reason") or "no reason known"
    kind = f" [{story.ended.data['kind']}]" if story.ended.data.get("kind") else ""
    return Line(f"ended with status {story.exit_status}{kind}: {done}: {reason}", "bold red")


def describe_stack(event: Event) -> str:
    """Return ``role 3 (process 0 of node 1): step (loop.py:12) < train (loop.py:80) ...``."""
    process = f"process {event.data.get('local_rank', '?')} of node {event.node}"
    process = process if event.role is None else f"role {event.role} ({process})"
    if event.data.get("missing"):
        return f"{process}: none, {event.data['missing']}"
    frames = [str(frame) for frame in event.data.get("frames", ())]
    text = " < ".join([*frames[:_MAX_FRAMES], *["..."] * (len(frames) > _MAX_FRAMES)])
    return f"{process}: {text} (all threads in logs/{event.data.get('log')})"


def describe_slowness(event: Event) -> str:
    """Return ``node 2 is slow: 0.310 s of its own per iteration, its peers 0.102 s (role 2)``."""
    state = "is as fast as its peers again" if event.data.get("over") else "is slow"
    return f"node {event.node} {state}: {_pace(event.data)} (role {event.role})"


def _pace(slow: Mapping[str, Any]) -> str:
    own, peers = float(slow["seconds"]), float(slow["peer_seconds"])
    return f"{own:.3f} s of its own per iteration, its peers {peers:.3f} s"


def node_troubles(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return pairs of a node and its problem, from the status of a run."""
    troubles = list[tuple[str, str]]()
    for node, facts in status["nodes"].items():
        troubles += [(node, facts["use"])] if facts["use"] == NodeUse.QUARANTINED else []
        troubles += [(node, f"{facts['standing']}: {reason}") for reason in facts["reasons"]]
    return troubles + [(node, f"slow: {_pace(slow)}") for node, slow in status["slow"].items()]


def describe_protection(event: Event) -> str:
    """Return ``buddy; every 3 iterations from epoch 2 on (why); RPO: at most 5 iterations``."""
    data = event.data
    reason = f" ({data['why']})" if data.get("why") else ""
    rpo = f"RPO: at most {count(data.get('most_lost'), 'iteration')}"
    return f"{data.get('new')} from epoch {event.epoch} on{reason}; {rpo}"


def describe_when(failure: Interruption) -> str:
    """Return the time when a failure began, and when it was noticed if that was later."""
    is_late = failure.noticed - failure.began >= _NOTICED_SECONDS
    text = f", noticed {date(failure.noticed)[11:19]}" if is_late else ""
    return f"{date(failure.began)[:19].replace('T', ' ')}{text}"


def describe_wait(event: Event) -> str:
    """Return ``roles [0] wait for a spare node to join; since 12:23:51 until 12:28:51, ...``."""
    until = event.wall_seconds + float(event.data["limit_seconds"])
    since, until_text = date(event.wall_seconds)[11:19], date(until)[11:19]
    then = event.data.get("then", "then the run saves what it holds and ends")
    return f"{event.data['text']}; since {since} until {until_text}, {then}"


def describe_seats(changes: Mapping[int, tuple[object, object]]) -> str:
    """Return ``role 0: process 0 of node 0 -> process 0 of node 4; ...`` for ``seats_changed``."""
    return "; ".join(
        f"role {role}: {_seat(old)} -> {_seat(new)}" for role, (old, new) in sorted(changes.items())
    )


def describe_progress(story: Story, now: float | None) -> str:
    """Return ``of 100, 12.4 samples/s, 793 tokens/s, goodput 97.1 %, 4.2 min left``, without values
    that are not known. ``now``: wall clock, seconds; None for the time of the newest event."""
    progress = story.progress()
    goodput = story.goodput(now)
    parts = {
        "of {}": progress["iterations"],
        "{} samples/s": _short(progress["samples_per_second"]),
        "{} tokens/s": _short(progress["tokens_per_second"]),
        "goodput {:.1f} %": None if goodput is None else 100 * goodput,
        "{} left": _duration(progress["seconds_left"]),
    }
    return ", ".join(text.format(value) for text, value in parts.items() if value is not None)


def _duration(value: float | None) -> str | None:
    if value is None:
        return None
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.0f} s"


def _short(number: float | None) -> str | None:
    if number is None:
        return None
    for unit in ("", "k", "M"):
        if number < 999.5:  # a larger number has four digits
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


def _seat(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        return process_name(*value)
    return str(value)


def _numbers(data: Mapping[str, Any]) -> str:
    text = ""
    if data.get("loss") is not None:
        text += f"  loss {decimal(data['loss']):.6g}"
    if data.get("grad_norm") is not None:
        text += f"  grad norm {decimal(data['grad_norm']):.4g}"
    return text + ("  (update skipped)" if data.get("skipped") else "")


def _phases(phases: Mapping[str, float]) -> str:
    """Return a text with the phases that took time, in order. Copies come last, as they are made
    during other phases."""
    spent = {name: f"{seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005}
    copies = spent.pop("reprotect", "")
    text = ", ".join(f"{name} {seconds}" for name, seconds in spent.items())
    after = f"; copies complete after {copies} s" if copies else ""
    return (f" ({text})" if text else "") + after

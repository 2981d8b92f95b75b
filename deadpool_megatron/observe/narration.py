"""Words for each event, the same ones live and in the report; and what each kind of failure means
to the people of a run: how it was noticed, and what to do. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deadpool_megatron.cluster.failures import FailureKind, in_words
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.observe.story import decimal

# Enough to see which call it is, and who made it.
_SHOWN_FRAMES = 4
_HOST = "find out what the host does; it may come back as a new node when it is sound"
_LOG = "if it repeats, read the end of the log of that process (logs/ in the run directory)"


@dataclass(frozen=True)
class Line:
    """``style`` as rich names it; ``passes``: the next such line takes its place."""

    text: str
    style: str = ""
    passes: bool = False


def tell(event: Event) -> Line | None:
    """Return what whoever watches the run is told of an event; None for nothing.

    Raises LookupError, TypeError, ValueError or AttributeError for data of another form.
    """
    data = event.data
    match event.kind:
        case Kind.NODE_JOINED:
            return Line(f"node {event.node} joined", passes=True)
        case Kind.STEP:
            return Line(f"step {event.iteration}{_numbers(data)}", passes=True)
        case Kind.EVALUATION:
            return Line(f"evaluation at step {event.iteration}{_numbers(data)}")
        case Kind.NODE_LOST | Kind.MEMBER_LOST:
            return Line(f"lost {data.get('cause', '')}", "bold red")
        case Kind.VAULT_LOST:
            return Line(f"vault of node {event.node} lost: {data.get('cause')}", "red")
        case Kind.STACK:
            return Line(f"stack of {describe_stack(event)}", "yellow")
        case Kind.EPOCH_CLOSED:
            return Line(f"epoch {event.epoch} closed: {describe_cause(data)}", "yellow")
        case Kind.EPOCH_DECIDED if event.epoch > 1:
            lineage, iteration = data.get("generation", (0, 0))
            return Line(f"epoch {event.epoch} goes on from iteration {iteration} ({lineage})")
        case Kind.EPOCH_OPENED:
            return Line(f"epoch {event.epoch} open{_phases(data.get('phases', {}))}", "green")
        case Kind.RECOVERED:
            text = f"recovered in {float(data['seconds']):.2f} s{_phases(data['phases'])}"
            again = count(data["steps_recomputed"], "iteration")
            return Line(f"{text}; {again} computed again", "bold green")
        case Kind.COORDINATOR if int(data.get("term", 1)) > 1:
            return Line(f"coordinator: {describe_coordinator(event)}", "yellow")
        case Kind.NODE_ASIDE:
            return Line(str(data.get("cause")), "bold red")
        case Kind.SLOW_NODE:
            return Line(describe_slowness(event), "yellow")
        case Kind.NONFINITE:
            text = f"the {data.get('number')} of iteration {event.iteration} is {data.get('value')}"
            return Line(f"{text}: {data.get('policy')}", "bold red")
        case Kind.AUDIT_FAILED:
            found = f"{data.get('what')} in iteration {event.iteration}: roles {data.get('roles')}"
            return Line(f"the audit finds wrong numbers: {found}", "bold red")
        case Kind.DURABLE | Kind.DUMPED:
            return Line(f"{event.kind}: {data.get('path')}")
        case Kind.DRAIN:
            return Line(str(data.get("text", f"drain of node {event.node}")))
        case Kind.WAITING_FOR_SPARE:
            return Line(str(data["text"]), "yellow")
        case Kind.LOG if data.get("level") != "info":  # those are for the report of the run
            return Line(str(data.get("text")))
        case Kind.PROTECTION:
            return Line(f"protection: {describe_protection(event)}", "yellow")
        case Kind.GATE_WAIT if not data.get("over"):
            waited = f"role {event.role} waits for the commit of iteration {event.iteration}"
            return Line(f"{waited} since {float(data['seconds']):.0f} s", "yellow")
        case Kind.CORRUPTION:
            return Line(f"damaged bytes found and not used: {dict(data)}", "bold red")
        case Kind.DECODED:
            text = f"{data.get('part')} of role {event.role} computed from parity"
            return Line(f"{text} in {float(data['seconds']):.2f} s", "green")
        case Kind.REPLAYED:
            again = f"recomputed over {data.get('steps')} updates"
            seconds = f"in {float(data['seconds']):.2f} s"
            return Line(f"role {event.role}: state {again} {seconds}", "yellow")
        case Kind.REHEARSED if not data.get("matched"):
            found = f"an update of role {event.role}, computed again, gave other bytes"
            why = f"({data.get('difference')}): whole copies instead of gradients"
            return Line(f"{found} {why}", "bold red")
        case Kind.STALE_DIVERGENCE:
            return Line("A REPLAYED ITERATION GAVE OTHER NUMBERS", "bold red")
        case _:
            return None


def count(number: object, noun: str) -> str:
    """``1 step``, ``2 steps``; a question mark for None."""
    shown = "?" if number is None else number
    return f"{shown} {noun}" if number == 1 else f"{shown} {noun}s"


def shown(text: str) -> str:
    """Return what others have written, for a terminal: no character of it does anything there."""
    return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)


def describe_cause(data: Mapping[str, Any]) -> str:
    """``a node was lost: node 1: connection closed``: the kind of a failure and its cause."""
    kind, cause = in_words(str(data.get("kind", ""))), str(data.get("cause") or "")
    return ": ".join(filter(None, (kind, cause))) or "cause not recorded"


def describe_loss(event: Event) -> str:
    """``node 0 (agent gone)``, ``node 2 slot 1 (signal 9)``: what was lost and how."""
    data, what = event.data, f"node {event.node}"
    if event.kind is Kind.VAULT_LOST:
        what = f"vault of {what}"
    elif event.kind is Kind.MEMBER_LOST:
        role = "" if event.role is None else f" with role {event.role}"
        what += f" slot {data.get('slot', '?')}{role}"
    how = [str(data["cause"])] if data.get("cause") else []
    ends = {"signal": data.get("signal"), "exit status": data.get("exit_code")}
    how += [f"{name} {number}" for name, number in ends.items() if number is not None][:1]
    return f"{what} ({', '.join(how)})" if how else what


def describe_stack(event: Event) -> str:
    """``role 3 (node 1 slot 0): step (loop.py:12) < train (loop.py:80) ... in LOG``."""
    who = f"node {event.node} slot {event.data.get('slot', '?')}"
    who = who if event.role is None else f"role {event.role} ({who})"
    if event.data.get("missing"):
        return f"{who}: none, {event.data['missing']}"
    frames = [str(frame) for frame in event.data.get("frames", ())]
    shown = " < ".join([*frames[:_SHOWN_FRAMES], *["..."] * (len(frames) > _SHOWN_FRAMES)])
    return f"{who}: {shown} (all threads in logs/{event.data.get('log')})"


def describe_slowness(event: Event) -> str:
    """``node 2 was slow: 0.310 s of its own per iteration, its peers 0.102 s (role 2)``."""
    what = "is as fast as its peers again" if event.data.get("over") else "is slow"
    own, peers = float(event.data["seconds"]), float(event.data["peer_seconds"])
    times = f"{own:.3f} s of its own per iteration, its peers {peers:.3f} s"
    return f"node {event.node} {what}: {times} (role {event.role})"


def describe_protection(event: Event) -> str:
    """``buddy; every 3 iterations from epoch 2 on (why); RPO: at most 5 iterations``."""
    data = event.data
    why = f" ({data['why']})" if data.get("why") else ""
    rpo = f"RPO: at most {count(data.get('most_lost'), 'iteration')}"
    return f"{data.get('new')} from epoch {event.epoch} on{why}; {rpo}"


def describe_coordinator(event: Event) -> str:
    """``term 2 on host b7 (node 5)``."""
    beside = "" if event.node is None else f" (node {event.node})"
    return f"term {event.data.get('term')} on host {event.data.get('hostname')}{beside}"


def describe_seats(changes: Mapping[int, tuple[object, object]]) -> str:
    """``role 0: node 0 slot 0 -> node 4 slot 0; ...`` for ``seats_changed`` of a recovery."""
    return "; ".join(
        f"role {role}: {_seat(old)} -> {_seat(new)}" for role, (old, new) in sorted(changes.items())
    )


@dataclass(frozen=True)
class Advice:
    """``noticed``: the evidence, as a sentence that continues after "why". ``to_do``: empty where
    nothing is to be done."""

    noticed: str
    to_do: str = ""


# By kind of failure; one of a newer version has none.
ADVICE: Mapping[str, Advice] = {
    FailureKind.PROCESS_CRASH: Advice("its agent saw it end, and read its log", _LOG),
    FailureKind.DEVICE_ERROR: Advice(
        "its process ended with an error of the device",
        "look at the host: deadpool gpu-health, nvidia-smi -q, dmesg",
    ),
    FailureKind.NO_ROOM: Advice(
        "its process found no room for its slots and ended with status 2",
        "look what fills /dev/shm there (deadpool clean, ls -l /dev/shm), or enlarge it",
    ),
    FailureKind.COMMUNICATOR_ERROR: Advice(
        "an operation between roles failed, and nothing better was heard within half a second",
        "if it repeats between the same hosts, look at their network",
    ),
    FailureKind.NODE_LOST: Advice(
        "the connection to its agent ended",
        "look whether the host is up and why its agent ended; start another node as a spare",
    ),
    FailureKind.NODE_CUT: Advice(
        "its agent was silent, and its host did not receive what was sent",
        f"look at its network; {_HOST}",
    ),
    FailureKind.NODE_FROZEN: Advice(
        "its agent was silent, though its host received what was sent", _HOST
    ),
    FailureKind.LEFT_OUT: Advice(
        "what was found about the host is not fit for the run", "mend what the cause names"
    ),
    FailureKind.MEMBER_FROZEN: Advice(
        "it gave no sign of life, took no processor time and did not wait for any",
        "somebody stopped it, or its host hangs: look at storage and dmesg there",
    ),
    FailureKind.HANG: Advice(
        "all lived and nothing moved; the culprit is who had not entered what others were in",
        "look at the innermost frames of the stacks",
    ),
    FailureKind.NONFINITE_LOSS: Advice(
        "a role saw it and went no further", "look at the data and the learning rate"
    ),
    FailureKind.SLOW_NODE: Advice(
        "its own work took longer than that of its data-parallel peers",
        "look for throttling, other users and errors that the host corrects",
    ),
    FailureKind.SILENT_CORRUPTION: Advice(
        "an audit computed the same again on its peers, or compared what all of them hold",
        "test processor, memory and GPU of that host before it trains again",
    ),
    FailureKind.CORRUPT_STATE: Advice(
        "a checksum, or the comparison of peers, did not hold",
        "test the memory of the node that is named before it trains again",
    ),
    FailureKind.BUG: Advice(
        "the same failure came again at the same step",
        "mend the program: another node would fail in the same way",
    ),
    FailureKind.DRAINED: Advice("it was asked for"),
    FailureKind.COORDINATOR: Advice("the new one found the epoch closed"),
    FailureKind.RESTART: Advice("no process of the run was left"),
}


def _seat(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 3:
        node, slot, incarnation = value
        return f"node {node} slot {slot}" + (f" #{incarnation}" if incarnation else "")
    return str(value)


def _numbers(data: Mapping[str, Any]) -> str:
    text = ""
    if data.get("loss") is not None:
        text += f"  loss {decimal(data['loss']):.6g}"
    if data.get("grad_norm") is not None:
        text += f"  grad norm {decimal(data['grad_norm']):.4g}"
    return text + ("  (update skipped)" if data.get("skipped") else "")


def _phases(phases: Mapping[str, float]) -> str:
    """The phases that took time, in order."""
    spent = [f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005]
    return f" ({', '.join(spent)})" if spent else ""

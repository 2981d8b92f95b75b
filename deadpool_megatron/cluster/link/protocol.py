"""Messages of agents and members -> inputs of the state machine. Pure; raises for malformed ones.

KeyError, TypeError and ValueError mean that the message is not one of ours: the caller refuses it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deadpool_megatron.cluster.journal.journal import MOST_NUMBER
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind, not_finite
from deadpool_megatron.layout.records import BadPart, Inventory, RoleLayout
from deadpool_megatron.wire.forms import read

Message = Mapping[str, Any]
SeatKey = tuple[int, int, int]
NONE_KNOWN: Mapping[int, RoleLayout] = {}
_SHOWN_FRAMES = 4
# Numbers that results are made of; a coordinator drops those that it has already.
NUMBERS = frozenset({Kind.STEP, Kind.EVALUATION, Kind.STATE_HASH})
# What decisions go by comes as a report of its own, of which an event is written as well.
PROGRESS = NUMBERS | {Kind.GATE_WAIT, Kind.COMMITTED, Kind.EXPOSED, Kind.STACK}

_OF_MEMBERS: Mapping[str, type[inputs.Input]] = {
    "hello": inputs.MemberHello,
    "warm": inputs.MemberWarm,
    "registered": inputs.MemberRegistered,
    "fault": inputs.MemberFault,
    "restored": inputs.Restored,
    "restore-failed": inputs.NotRestored,
    "audit-failed": inputs.AuditFailed,
    "not-finite": inputs.NotFinite,
    "paused": inputs.Paused,
    "pause-refused": inputs.PauseRefused,
    "phase": inputs.PhaseReported,
    "done": inputs.MemberDone,
}


def join(message: Message) -> inputs.NodeJoined:
    """An agent's first message."""
    joined: inputs.NodeJoined = read(inputs.NodeJoined, message)
    if not 0 <= joined.node <= MOST_NUMBER:  # the journal could not name it once it is lost
        raise ValueError(f"a node has a number between 0 and {MOST_NUMBER}, not {joined.node}")
    found = joined.found
    return joined if found is None else replace(joined, found=replace(found, node=joined.node))


def from_agent(
    node: int, message: Message, layouts: Mapping[int, RoleLayout] = NONE_KNOWN
) -> inputs.Input | None:
    """A report of an agent about its node; None when the machine has no use for it.

    ``layouts``: of the roles, as far as they are known already.
    """
    found: inputs.Input | None = None
    match message["t"]:
        case "inventory":
            inventory = _inventory(message["inventory"], layouts)
            if inventory.node != node:
                raise ValueError(f"inventory of node {inventory.node}")
            return inputs.NodeInventory(inventory)
        case "given-up":
            return inputs.NodeLost(node, str(message["why"]))
        case "member-lost":
            name = message.get("signal")
            number = None if name is None else signal_number(str(name))
            last_line = message.get("cause", "")
            found = _read(inputs.MemberLost, node, message, signal=number, last_line=last_line)
        case "member-suspected":
            found = _read(inputs.MemberSuspected, node, message)
        case "facts":
            found = _read(inputs.FactsReported, node, message)
        case "dumped":
            bad = frozenset(BadPart.from_list(node, one) for one in message.get("damaged", ()))
            found = replace(_read(inputs.Dumped, node, {**message, "damaged": ()}), damaged=bad)
        case "member":
            found = _from_member(seat_of(node, message), message["m"])
    return found


def _read(kind: Any, node: int, message: Message, **more: Any) -> Any:
    return read(kind, {**message, "node": node, **more})


def _inventory(values: Message, known: Mapping[int, RoleLayout]) -> Inventory:
    """With the layouts that are known already, where the hash is equal: after a loss all nodes send
    theirs at the same moment."""
    layouts = []
    for one in values["layouts"]:
        same = known.get(one["role"])
        is_same = same is not None and same.layout_hash == one["layout_hash"]
        layouts.append(same if same is not None and is_same else RoleLayout.from_dict(one))
    return replace(Inventory.from_dict({**values, "layouts": ()}), layouts=tuple(layouts))


def report_of(event: Event) -> dict[str, Any]:
    """The message that tells of an event: of progress, or one for people alone."""
    return {"t": "progress" if event.kind in PROGRESS else "event", "event": event.to_dict()}


def from_progress(report: Event) -> inputs.Input | None:
    """Return what reported progress tells the machine, if anything."""
    if report.kind is Kind.STEP and report.iteration is not None:
        return _step(report, report.iteration)
    if report.kind is Kind.STACK:
        return _stack(report)
    if report.kind is Kind.EXPOSED:
        seconds = float(report.data["seconds"])
        return inputs.PhaseReported(report.epoch, "reprotect", seconds, exposed=seconds)
    return None


def _stack(event: Event) -> inputs.Input:
    frames = [str(frame) for frame in event.data.get("frames", ())]
    where = " < ".join(frames[:_SHOWN_FRAMES]) or str(event.data.get("missing", ""))
    return inputs.StackReported(f"stack of role {event.role} on node {event.node}: {where}")


def _step(event: Event, iteration: int) -> inputs.Input:
    found = not_finite(event.data)
    if found is None:
        return inputs.StepReported(event.epoch, iteration)
    return inputs.NotFinite(event.epoch, event.node, event.role, iteration, *found)


def signal_number(name: str) -> int:
    """``SIGKILL`` -> 9; ``signal 40`` (no name) -> 40."""
    if name.startswith("SIG"):
        return int(signal.Signals[name])
    return int(name.split()[-1])


def event_of_member(m: Message, node: int, role: int | None) -> Event | None:
    """Return what a member's message says to people and results, besides the machine."""
    if m["t"] == "done":
        data = {"sha256": str(m["state_hash"]), "samples": m["samples"], **m.get("extra", {})}
        return Event(Kind.MEMBER_DONE, int(m["epoch"]), node, int(m["role"]), data=data)
    if m["t"] == "phase":
        data = {"seconds": float(m["seconds"])}
        return Event(Kind.PHASE, int(m["epoch"]), node, role, phase=str(m["phase"]), data=data)
    return None


def seat_of(node: int, message: Message) -> SeatKey:
    """The place of the member that an agent's report is about."""
    return node, int(message["slot"]), int(message["incarnation"])


def _from_member(seat: SeatKey, m: Message) -> inputs.Input | None:
    kind = _OF_MEMBERS.get(m["t"])
    if kind is None:
        return None
    node, slot, incarnation = seat
    values = {**m, "slot": slot, "incarnation": incarnation}
    if kind is inputs.MemberFault:
        values["text"] = f"{m.get('operation', '')} in group {m.get('group', '')}: {m['text']}"
    found: inputs.Input = _read(kind, node, values)
    return found

"""Messages of agents and members -> inputs of the state machine. Pure; raises if malformed.

KeyError, TypeError and ValueError mean that the message is malformed: the caller refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from deadpool_megatron.cluster.journal.journal import MAX_NUMBER
from deadpool_megatron.cluster.machine import inputs
from deadpool_megatron.events import Event, Kind, not_finite
from deadpool_megatron.layout.records import BadPart, Inventory, RoleLayout
from deadpool_megatron.wire.forms import read

Message = Mapping[str, Any]
SeatKey = tuple[int, int, int]
Read = TypeVar("Read")
NONE_KNOWN: Mapping[int, RoleLayout] = {}
_SHOWN_FRAMES = 4
# Events with the numbers of results; a coordinator drops duplicates.
NUMBERS = frozenset({Kind.STEP, Kind.EVALUATION, Kind.STATE_HASH})
# Events of these kinds are sent as reports of progress, from which decisions may follow. Events of
# other kinds are only written.
PROGRESS = NUMBERS | {Kind.GATE_WAIT, Kind.COMMITTED, Kind.EXPOSED, Kind.STACK}

# Fields of inputs that have another name in a message.
_KEYS = {"local_rank": "slot", "subject": "what"}
_OF_AGENTS: Mapping[str, type[inputs.Input]] = {
    "member-lost": inputs.MemberLost,
    "member-suspected": inputs.MemberSuspected,
    "facts": inputs.FactsReported,
}
OF_MEMBERS: Mapping[str, type[inputs.Input]] = {
    "hello": inputs.MemberHello,
    "warm": inputs.MemberWarm,
    "registered": inputs.MemberRegistered,
    "fault": inputs.MemberFault,
    "raised": inputs.MemberRaised,
    "restored": inputs.Restored,
    "restore-failed": inputs.NotRestored,
    "size-failed": inputs.SizeFailed,
    "audit-failed": inputs.AuditFailed,
    "not-finite": inputs.NotFinite,
    "paused": inputs.Paused,
    "pause-refused": inputs.PauseRefused,
    "phase": inputs.PhaseReported,
    "done": inputs.MemberDone,
}


def join(message: Message) -> inputs.NodeJoined:
    """Return the input for an agent's first message."""
    event: inputs.NodeJoined = read(inputs.NodeJoined, message)
    if not 0 <= event.node <= MAX_NUMBER:  # a note in the journal could not name the node
        raise ValueError(f"a node has a number between 0 and {MAX_NUMBER}, not {event.node}")
    inventory = event.found
    if inventory is not None:
        return replace(event, found=replace(inventory, node=event.node))
    return event


def from_agent(
    node: int, message: Message, layouts: Mapping[int, RoleLayout] = NONE_KNOWN
) -> inputs.Input | None:
    """Return the input for an agent's report about its node; None when the machine needs none.

    ``layouts``: the layouts of the roles, as far as they are known already.
    """
    match message["t"]:
        case "inventory":
            inventory = _inventory(message["inventory"], layouts)
            if inventory.node != node:
                raise ValueError(f"inventory of node {inventory.node}")
            return inputs.NodeInventory(inventory)
        case "given-up":
            return inputs.NodeLost(node, str(message["why"]))
        case "dumped":
            bad = frozenset(BadPart.from_list(node, part) for part in message.get("damaged", ()))
            return replace(_read(inputs.Dumped, node, {**message, "damaged": ()}), damaged=bad)
        case "member":
            return _from_member(seat_of(node, message), message["m"])
    kind = _OF_AGENTS.get(message["t"])
    return None if kind is None else _read(kind, node, message)


def _read(kind: type[Read], node: int, message: Message) -> Read:
    renamed = {name: message[key] for name, key in _KEYS.items() if key in message}
    event: Read = read(kind, {**message, **renamed, "node": node})
    return event


def _inventory(values: Message, known: Mapping[int, RoleLayout]) -> Inventory:
    """Return an inventory that shares the known layouts with equal hash. This saves work after a
    loss, when all nodes send their inventories at the same moment."""
    layouts = []
    for layout in values["layouts"]:
        same = known.get(layout["role"])
        if same is None or same.layout_hash != layout["layout_hash"]:
            same = RoleLayout.from_dict(layout)
        layouts.append(same)
    return replace(Inventory.from_dict({**values, "layouts": ()}), layouts=tuple(layouts))


def report_of(event: Event) -> dict[str, Any]:
    """Return the message that reports an event: as progress, or as an event that only users
    read."""
    return {"t": "progress" if event.kind in PROGRESS else "event", "event": event.to_dict()}


def from_progress(report: Event) -> inputs.Input | None:
    """Return the machine's input from reported progress, if any."""
    if report.kind is Kind.STEP and report.iteration is not None:
        if (number := not_finite(report.data)) is None:
            return inputs.StepReported(report.epoch, report.iteration)
        place = report.epoch, report.node, report.role, report.iteration
        return inputs.NotFinite(*place, *number)
    if report.kind is Kind.STACK:
        frames = [str(frame) for frame in report.data.get("frames", ())]
        where = " < ".join(frames[:_SHOWN_FRAMES]) or str(report.data.get("missing", ""))
        return inputs.StackReported(f"stack of role {report.role} on node {report.node}: {where}")
    if report.kind is Kind.EXPOSED:
        seconds = float(report.data["seconds"])
        return inputs.PhaseReported(report.epoch, "reprotect", seconds, exposed=seconds)
    return None


def event_of_member(m: Message, node: int, role: int | None) -> Event | None:
    """Return the event to write for a member's message, if any. It is for users and for the results
    of a run; the machine gets the message itself as an input."""
    if m["t"] == "done":
        data = {"sha256": str(m["state_hash"]), "samples": m["samples"], **m.get("extra", {})}
        return Event(Kind.MEMBER_DONE, int(m["epoch"]), node, int(m["role"]), data=data)
    if m["t"] == "phase":
        data = {"seconds": float(m["seconds"])}
        return Event(Kind.PHASE, int(m["epoch"]), node, role, phase=str(m["phase"]), data=data)
    return None


def seat_of(node: int, message: Message) -> SeatKey:
    """Return the seat of the member that is the subject of an agent's report."""
    return node, int(message["slot"]), int(message["incarnation"])


def _from_member(seat: SeatKey, m: Message) -> inputs.Input | None:
    kind = OF_MEMBERS.get(m["t"])
    if kind is None:
        return None
    node, local_rank, incarnation = seat
    values = {**m, "slot": local_rank, "incarnation": incarnation}
    if kind is inputs.MemberFault:
        values["text"] = f"{m.get('operation', '')} in group {m.get('group', '')}: {m['text']}"
    return _read(kind, node, values)

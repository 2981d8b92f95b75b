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
from deadpool_megatron.layout.records import BadPart, Generation, Inventory, RoleLayout
from deadpool_megatron.preflight.judge import HostFacts

Message = Mapping[str, Any]
SeatKey = tuple[int, int, int]
_SHOWN_FRAMES = 4
# Numbers that results are made of; a coordinator drops those that it has already.
NUMBERS = frozenset({Kind.STEP, Kind.EVALUATION, Kind.STATE_HASH})
# What decisions go by comes as a report of its own, of which an event is written as well.
PROGRESS = NUMBERS | {Kind.GATE_WAIT, Kind.COMMITTED, Kind.EXPOSED, Kind.STACK}


def join(message: Message) -> inputs.NodeJoined:
    """An agent's first message."""
    node, found = int(message["node"]), message.get("found")
    if not 0 <= node <= MOST_NUMBER:  # the journal could not name it once it is lost
        raise ValueError(f"a node has a number between 0 and {MOST_NUMBER}, not {node}")
    return inputs.NodeJoined(
        node=node,
        host=str(message["host"]),
        vault_port=int(message["vault_port"]),
        domain=str(message["domain"]),
        members={int(slot): int(number) for slot, number in message["members"].items()},
        incarnations={int(s): int(i) for s, i in message.get("incarnations", {}).items()},
        epoch=int(message.get("epoch", 0)),
        closed=int(message.get("closed", 0)),
        restored={int(slot): int(e) for slot, e in message.get("restored", {}).items()},
        found=None if found is None else replace(Inventory.from_dict(found), node=node),
        memory_bytes=int(message.get("memory_bytes", 0)),
        returns=bool(message.get("returns", False)),
        facts=None if message.get("facts") is None else HostFacts.from_dict(message["facts"]),
    )


def from_agent(
    node: int, message: Message, layouts: Mapping[int, RoleLayout] | None = None
) -> inputs.Input | None:
    """A report of an agent about its node; None when the machine has no use for it.

    ``layouts``: of the roles, as far as they are known already.
    """
    kind = message["t"]
    if kind == "inventory":
        inventory = Inventory.from_dict(message["inventory"], layouts)
        if inventory.node != node:
            raise ValueError(f"inventory of node {inventory.node}")
        return inputs.NodeInventory(inventory)
    if kind == "given-up":
        return inputs.NodeLost(node, str(message["why"]))
    if kind == "member-lost":
        name = message.get("signal")
        code = message.get("exit_code")
        return inputs.MemberLost(
            *seat_of(node, message),
            exit_code=None if code is None else int(code),
            signal=None if name is None else signal_number(str(name)),
            last_line=str(message.get("cause", "")),
            ordered=bool(message.get("ordered", False)),
        )
    if kind == "member-suspected":
        return inputs.MemberSuspected(
            *seat_of(node, message),
            cause=str(message["cause"]),
            silent_seconds=float(message["silent_seconds"]),
        )
    if kind == "facts":
        return inputs.FactsTold(node, HostFacts.from_dict(message["facts"]))
    if kind == "dumped":
        generation = Generation.from_list(message["generation"])
        error, boundary = str(message["error"]), str(message["boundary"])
        # An older agent does not say it.
        bad = frozenset(BadPart.from_list(node, one) for one in message.get("damaged", ()))
        return inputs.Dumped(node, generation, error, boundary, bad)
    if kind == "member":
        return _from_member(seat_of(node, message), message["m"])
    return None


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
        return inputs.Exposed(report.epoch, float(report.data["seconds"]))
    return None


def _stack(event: Event) -> inputs.Input:
    frames = [str(frame) for frame in event.data.get("frames", ())]
    where = " < ".join(frames[:_SHOWN_FRAMES]) or str(event.data.get("missing", ""))
    return inputs.StackTaken(f"stack of role {event.role} on node {event.node}: {where}")


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
    match m["t"]:
        case "hello":
            return inputs.MemberHello(*seat, pid=int(m["pid"]))
        case "warm":
            return inputs.MemberWarm(*seat)
        case "registered":
            return inputs.MemberRegistered(*seat, layout=RoleLayout.from_dict(m["layout"]))
        case "fault":
            text = f"{m.get('operation', '')} in group {m.get('group', '')}: {m['text']}"
            return inputs.MemberFault(*seat, int(m["epoch"]), text)
        case "restored":
            generation = Generation.from_list(m["generation"])
            return inputs.Restored(*seat, int(m["epoch"]), generation)
        case "restore-failed":
            return inputs.RestoreFailed(*seat, int(m["epoch"]), str(m["part"]), str(m["text"]))
        case "audit-failed":
            iteration, roles = int(m["iteration"]), tuple(int(role) for role in m["roles"])
            certain, what = bool(m["certain"]), str(m["what"])
            return inputs.AuditFailed(*seat, int(m["epoch"]), iteration, roles, certain, what)
        case "not-finite":
            found, role = (str(m["number"]), str(m["value"])), int(m["role"])
            return inputs.NotFinite(int(m["epoch"]), seat[0], role, int(m["iteration"]), *found)
        case "paused":
            return inputs.Paused(*seat, int(m["epoch"]), int(m["iteration"]))
        case "pause-refused":
            return inputs.PauseRefused(*seat, int(m["epoch"]), int(m["iteration"]))
        case "phase":
            return inputs.PhaseReported(int(m["epoch"]), str(m["phase"]), float(m["seconds"]))
        case "done":
            how = str(m.get("early", "")), str(m.get("unsaved", ""))
            return inputs.MemberDone(*seat, int(m["epoch"]), *how)
    return None

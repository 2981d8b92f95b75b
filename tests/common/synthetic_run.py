"""A made-up run: the files that a real one leaves."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.events import Event, EventLog, Kind, to_line
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.observe.story import Story

WORLD_SIZE = 8
PHASES = {
    "detect": 0.012,
    "close": 0.081,
    "decide": 0.004,
    "adopt": 0.065,
    "rebuild": 0.212,
    "restore": 0.094,
    "reprotect": 0.150,
    "replay": 0.431,
}
NUMBERS = (Kind.STEP, Kind.EVALUATION, Kind.STATE_HASH)
NOTHING_WAITS: dict[str, Any] = {
    "waiting": 0,
    "dropped": 0,
    "trouble": "",
    "why": "",
    "seconds": 0.0,
    "unwritten": [],
}
MEMBER_PHASES = ("close", "adopt", "rebuild", "restore")


def loss_at(iteration: int) -> float:
    return 6.2 * 0.95**iteration + 0.02 * (iteration % 3)


def step(iteration: int, shift: float = 0.0) -> dict[str, Any]:
    return {
        "loss": (loss_at(iteration) + shift).hex(),
        "grad_norm": (1.0 / iteration).hex(),
        "learning_rate": (1e-3 * iteration).hex(),
        "skipped": False,
        "samples": 8 * iteration,
    }


def events_of(iterations: int, fault_at: int | None, shift: float, began: float) -> Iterator[Event]:
    """All events in order; wall clock starts at ``began`` and a step lasts 0.4 s."""
    now = began

    def event(kind: Kind, epoch: int = 0, data: Any = None, **where: int) -> Event:
        return Event(kind, epoch, data=data or {}, wall_seconds=now, **where)  # type: ignore[arg-type]

    yield event(Kind.RUN_STARTED, data={"roles": WORLD_SIZE, "nodes": 4, "spares": 1})
    for node in range(5):
        now += 0.2
        yield event(Kind.NODE_JOINED, data={"spare": node == 4, "host": "h"}, node=node)
    now += 2.0
    for k in range(1, iterations + 1):
        if k == fault_at:
            yield from recovery_events(k, now + 0.2)
            now += 0.2 + sum(PHASES.values()) - PHASES["reprotect"]
        else:
            now += 0.4
        is_after = fault_at is not None and k >= fault_at
        values = step(k, shift if is_after else 0.0)
        yield event(Kind.STEP, 1 + is_after, values, role=6, iteration=k)
        if k == 3:
            yield event(Kind.GATE_WAIT, 1, {"seconds": 0.04, "over": True}, role=2, iteration=3)
    yield event(Kind.EVALUATION, 1, {"loss": (2.5).hex()}, role=6, iteration=iterations)
    yield event(Kind.STATE_HASH, 1, {"sha256": "a" * 64}, role=0, iteration=5)
    yield event(Kind.RUN_ENDED, 1, {"exit_status": 0})


def events_with_fault() -> list[Event]:
    return list(events_of(10, 6, 0.0, began=1000.0))


def story_of(*found: Event, story: Story | None = None) -> Story:
    story = story or Story()
    for event in found:
        story.take(event)
    return story


def recovery_events(iteration: int, killed: float) -> Iterator[Event]:
    ends, now = {}, killed
    for phase, seconds in PHASES.items():
        if phase != "reprotect":
            now += seconds
        ends[phase] = now

    def event(kind: Kind, epoch: int, phase: str, data: dict[str, Any], node: Any = None) -> Event:
        return Event(kind, epoch, node, data=data, wall_seconds=ends[phase])

    cause = {"cause": "node 0: connection closed", "kind": FailureKind.NODE_LOST}
    yield event(Kind.NODE_LOST, 1, "detect", cause, node=0)
    yield event(Kind.EPOCH_CLOSED, 1, "detect", {**cause, "culprits": [0]}, node=0)
    yield event(Kind.EPOCH_DECIDED, 2, "decide", {"generation": [1, iteration - 1]})
    for phase in MEMBER_PHASES:
        for role in range(WORLD_SIZE if phase != "adopt" else 2):
            data = {"seconds": PHASES[phase] - 0.001 * role}
            end = ends[phase] - 0.0005 * role
            yield Event(Kind.PHASE, 2, role // 2 or 4, role, None, phase, data, end)
    opened = {name: PHASES[name] for name in ("adopt", "rebuild", "restore")}
    yield event(Kind.EPOCH_OPENED, 2, "restore", {"phases": opened, "spares": []})
    yield event(Kind.RECOVERED, 2, "replay", recovery_facts(iteration))


def recovery_facts(iteration: int) -> dict[str, Any]:
    return {
        "cause": "node 0: connection closed",
        "kind": FailureKind.NODE_LOST,
        "generation": [1, iteration - 1],
        "boundary": "step",
        "phases": PHASES,
        "seconds": sum(PHASES.values()) - PHASES["reprotect"],
        "steps_recomputed": 1,
        "exposed_seconds": 0.247,
        "seats_changed": {"0": [[0, 0, 0], [4, 0, 0]], "1": [[0, 1, 0], [4, 1, 0]]},
    }


def final_of(iterations: int, fault_at: int | None, shift: float) -> dict[str, Any]:
    def sha256(role: int) -> str:
        return hashlib.sha256(f"{role} {iterations} {shift}".encode()).hexdigest()

    entries = {"rng.python": "a1", "rng.numpy": "b2", "counters": "c3"}
    facts = {"samples": 8 * iterations, "entries": entries}
    roles = {str(r): {"sha256": sha256(r), **copy.deepcopy(facts)} for r in range(WORLD_SIZE)}
    head = {"exit_status": 0, "reason": "", "run_id": "5a5a5a5a", "world_size": WORLD_SIZE}
    recoveries = [] if fault_at is None else [{"epoch": 2, **recovery_facts(fault_at)}]
    return {**head, "iterations": iterations, "roles": roles, "recoveries": recoveries}


def write_run(
    directory: Path,
    *,
    iterations: int = 10,
    fault_at: int | None = None,
    shift: float = 0.0,
    change: Callable[[dict[str, Any]], None] = lambda final: None,
) -> Path:
    """Leave in ``directory`` what a finished run leaves; ``change`` edits final.json first, and
    under the key ``numbers`` -> kind -> iteration the data of the events with numbers.
    """
    directory.mkdir(parents=True)
    (directory / "run.json").write_text("{}")
    events = list(events_of(iterations, fault_at, shift, began=1000.0))
    final = final_of(iterations, fault_at, shift)
    numbers: dict[str, dict[int | None, dict[str, Any]]] = {kind: {} for kind in NUMBERS}
    for event in events:
        if event.kind in NUMBERS:
            numbers[event.kind][event.iteration] = dict(event.data)
    final["numbers"] = numbers
    change(final)
    del final["numbers"]
    log = EventLog(directory / "events.jsonl")
    for event in events:
        if event.kind not in NUMBERS:
            log.append(to_line(event))
        elif event.iteration in numbers[event.kind]:
            log.append(to_line(replace(event, data=numbers[event.kind][event.iteration])))
    log.close()
    (directory / "final.json").write_text(json.dumps(final))
    return directory


def status_of(nodes: int, roles: int, now: float = 0.0) -> dict[str, Any]:
    """The answer of the coordinator of a run that trains, with two spares, at that time."""
    per_node = roles // nodes
    seats = {str(r): [r // per_node, r % per_node, 0] for r in range(roles)}
    return {
        "phase": "running",
        "now": now,
        "step_seconds_ago": None,
        "events": dict(NOTHING_WAITS),
        "iteration": 0,
        "refusals": 0,
        "diverged": False,
        "waiting_for": "",
        "rpo": {"most_lost": 1, "most_lost_seconds": None, "wanted": ""},
        "export": {"now": {}, "last": {}},
        "failing": {},
        "model_replicas": [],
        "spares": [nodes, nodes + 1],
        "slow": {},
        "fewer_copies": [3],
        "epoch": 1,
        "protection": "buddy, 1 copy",
        "coordinator": {"term": 1, "host": "10.0.0.1", "port": 4100, "node": 0},
        "requests": [{"number": 1, "token": "t", "verb": "drain", "what": {"node": 1}, "why": ""}],
        "roles": {
            role: {"seat": seat, "section": "step", "iteration": 7, "waiting": None}
            for role, seat in seats.items()
        },
        "nodes": {
            str(node): {
                "host": f"b{node}",
                "spare": node >= nodes,
                "use": "spare" if node >= nodes else "training",
                "standing": "good",
                "reasons": [],
                "restarts": 0,
                "vault": {"bytes": 10**9},
            }
            for node in range(nodes + 2)
        },
    }

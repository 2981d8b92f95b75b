"""A made-up run: the files that a real one leaves, and a program that writes them like one.

As a program it takes the place of ``deadpool run`` in tests of what watches a run. Environment:
``SYNTHETIC_STEP_SECONDS`` (default 0.01) and ``SYNTHETIC_TROUBLE``: ``diverge`` (other numbers
after the fault), ``fail`` (exit status 1 with a last line) or ``hang`` (no more events).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.failures import FailureKind
from deadpool_megatron.events import Event, EventLog, Kind, to_line

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


def events_of(iterations: int, strike: int | None, shift: float, began: float) -> Iterator[Event]:
    """All events in order; wall clock starts at ``began`` and a step lasts 0.4 s."""
    now = began
    yield Event(
        Kind.RUN_STARTED,
        data={"roles": WORLD_SIZE, "nodes": 4, "spares": 1, "command": ["-m", "x"]},
        wall_seconds=now,
    )
    for node in range(5):
        now += 0.2
        yield Event(
            Kind.NODE_JOINED, node=node, data={"spare": node == 4, "host": "h"}, wall_seconds=now
        )
    now += 2.0
    for iteration in range(1, iterations + 1):
        if iteration == strike:
            yield from recovery_events(iteration, now + 0.2)
            now += 0.2 + sum(PHASES.values()) - PHASES["reprotect"]
        else:
            now += 0.4
        moved = shift if strike is not None and iteration >= strike else 0.0
        yield Event(
            Kind.STEP,
            epoch=1 if strike is None or iteration < strike else 2,
            role=6,
            iteration=iteration,
            data=step(iteration, moved),
            wall_seconds=now,
        )
        if iteration == 3:
            values = {"seconds": 0.04, "over": True}
            yield Event(Kind.GATE_WAIT, epoch=1, role=2, iteration=3, data=values, wall_seconds=now)
    loss = {"loss": (2.5).hex()}
    yield Event(Kind.EVALUATION, 1, role=6, iteration=iterations, data=loss, wall_seconds=now)
    sha256 = {"sha256": "a" * 64}
    yield Event(Kind.STATE_HASH, 1, role=0, iteration=5, data=sha256, wall_seconds=now)
    yield Event(Kind.RUN_ENDED, epoch=1, data={"exit_status": 0}, wall_seconds=now)


def recovery_events(iteration: int, killed: float) -> Iterator[Event]:
    ends, now = {}, killed
    for phase, seconds in PHASES.items():
        if phase != "reprotect":
            now += seconds
        ends[phase] = now
    yield Event(
        Kind.NODE_LOST,
        epoch=1,
        node=0,
        data={"cause": "connection of its agent closed"},
        wall_seconds=ends["detect"],
    )
    yield Event(
        Kind.EPOCH_CLOSED,
        epoch=1,
        data={
            "cause": "node 0: connection closed",
            "kind": FailureKind.NODE_LOST,
            "culprits": [0],
        },
        wall_seconds=ends["detect"],
    )
    decided = {"generation": [1, iteration - 1], "segment": "step", "seconds": 0.004}
    yield Event(Kind.EPOCH_DECIDED, epoch=2, data=decided, wall_seconds=ends["decide"])
    for number, phase in enumerate(MEMBER_PHASES):
        for role in range(WORLD_SIZE):
            if phase == "adopt" and role > 1:
                continue
            late = 0.002 * ((role * 7 + number) % 5)
            yield Event(
                Kind.PHASE,
                epoch=2,
                node=role // 2 or 4,
                role=role,
                phase=phase,
                data={"seconds": PHASES[phase] - late},
                wall_seconds=ends[phase] - late / 2,
            )
    opened = {name: PHASES[name] for name in ("adopt", "rebuild", "restore")}
    yield Event(Kind.EPOCH_OPENED, epoch=2, data={"phases": opened}, wall_seconds=ends["restore"])
    yield Event(
        Kind.RECOVERED, epoch=2, data=recovery_facts(iteration), wall_seconds=ends["replay"]
    )


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


def final_of(iterations: int, strike: int | None, shift: float) -> dict[str, Any]:
    roles = {
        str(role): {
            "sha256": hashlib.sha256(f"{role} {iterations} {shift}".encode()).hexdigest(),
            "samples": 8 * iterations,
        }
        for role in range(WORLD_SIZE)
    }
    recoveries = [] if strike is None else [{"epoch": 2, **recovery_facts(strike)}]
    return {
        "exit_status": 0,
        "reason": "",
        "run_id": "5a5a5a5a",
        "world_size": WORLD_SIZE,
        "iterations": iterations,
        "roles": roles,
        "recoveries": recoveries,
    }


def write_run(
    directory: Path,
    *,
    iterations: int = 10,
    strike: int | None = None,
    shift: float = 0.0,
    change: Callable[[dict[str, Any]], None] = lambda final: None,
) -> Path:
    """Leave in ``directory`` what a finished run leaves; ``change`` edits final.json first, and
    under the key ``numbers`` -> kind -> iteration the data of the events with numbers.
    """
    directory.mkdir(parents=True)
    (directory / "run.json").write_text("{}")
    events = list(events_of(iterations, strike, shift, began=1000.0))
    final = final_of(iterations, strike, shift)
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


def main(argv: list[str]) -> int:
    directory = Path(argv[argv.index("--run-dir") + 1])
    iterations = int(argv[argv.index("--train-iters") + 1])
    trouble = os.environ.get("SYNTHETIC_TROUBLE", "")
    scale = float(os.environ.get("SYNTHETIC_STEP_SECONDS", "0.01")) / 0.4
    plan_name = os.environ.get("DEADPOOL_FAULTS")
    strike, marker = None, None
    if plan_name:
        (fault,) = json.loads(Path(plan_name).read_text())
        strike = fault["match"]["iteration"]
        marker = Path(plan_name + ".fired") / fault["id"]
        marker.parent.mkdir()
    shift = 1e-9 if trouble == "diverge" and strike is not None else 0.0
    directory.mkdir(parents=True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    (directory / "visible.json").write_text(json.dumps(visible))
    log = EventLog(directory / "events.jsonl")
    began = time.time()
    for event in events_of(iterations, strike, shift, began):
        due = began + (event.wall_seconds - began) * scale
        if trouble and event.kind is Kind.STEP and event.iteration == 3:
            if trouble == "fail":
                print("the last thing it said", flush=True)
                return 1
            if trouble == "hang":
                signal.sigtimedwait({signal.SIGTERM}, 60)
                (directory / "interrupted").touch()
                return 130
        if event.kind is Kind.NODE_LOST and marker is not None:
            struck_at = due - PHASES["detect"] * scale
            time.sleep(max(0.0, struck_at - time.time()))
            # By the clock of the events, however late this process is; seen with its time or not.
            aside = marker.with_suffix(".aside")
            aside.touch()
            os.utime(aside, (struck_at, struck_at))
            aside.rename(marker)
        time.sleep(max(0.0, due - time.time()))
        values = {**event.to_dict(), "wall_seconds": due}
        log.append(to_line(Event.from_dict(values)))
    (directory / "final.json").write_text(json.dumps(final_of(iterations, strike, shift)))
    return 0


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    sys.exit(main(sys.argv[1:]))

"""Named points where a test makes a process die, stop or misbehave at an exact moment.

Without a plan a point costs the test of a module global (:data:`ACTIVE`). The variable
``DEADPOOL_FAULTS`` has the path of a plan, a JSON file with a list of faults, which have these
keys:

``id``       unique name of the fault; it fires once in the whole run, in the first process that
             reaches it
``point``    the argument of :func:`hit`
``match``    object: context keys (role, node, iteration, epoch, section, op, group, ...) -> value
``nth``      fire at the n-th matching hit of a process (default: 1)
``after``    id of another fault; hits count only after that fault has fired (default: always)
``action``   ``signal`` (default), ``raise`` (:func:`hit` raises a RuntimeError), or ``mark``:
             :func:`hit` returns the fault, and its caller acts on it (flips a byte, returns junk)
``target``   for ``signal``: ``self`` (default), ``node`` (all processes of the node), ``members``,
             ``vault`` or ``agent``
``nodes``    for ``signal`` with another target than ``self``: node ids (default: the node of the
process) ``signal``   KILL (default), STOP, SEGV, TERM ``resume_after_seconds``  for STOP: send
SIGCONT after this time, from a detached helper process

Thread-safe. Nothing here sleeps in the caller.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_megatron import UserError

ENVIRONMENT_NAME = "DEADPOOL_FAULTS"


class FaultPlanError(UserError, ValueError):
    """The fault plan cannot be read; the message names the file and the entry."""


@dataclass(frozen=True)
class Fault:
    """A planned fault; see the module text for the keys."""

    id: str
    point: str
    match: Mapping[str, object] = field(default_factory=dict)
    nth: int = 1
    after: str = ""
    action: str = "signal"
    target: str = "self"
    nodes: tuple[int, ...] = ()
    signal: str = "KILL"
    resume_after_seconds: float | None = None


ACTIVE: bool = False
_faults: list[Fault] = []
_fired_directory = Path()
_hits: dict[str, int] = {}
_context: dict[str, object] = {}
_lock = threading.Lock()


def load(path: Path | None = None) -> None:
    """Read the plan at ``path``, or that of the environment. Without a plan no point fires.

    Raises FaultPlanError for a file that is not a list of objects with known keys.
    """
    global ACTIVE, _faults, _fired_directory
    name = str(path) if path is not None else os.environ.get(ENVIRONMENT_NAME, "")
    _hits.clear()
    if not name:
        ACTIVE, _faults = False, []
        return
    try:
        entries = json.loads(Path(name).read_text())
        _faults = [Fault(**{**entry, "nodes": tuple(entry.get("nodes", ()))}) for entry in entries]
    except (OSError, ValueError, TypeError) as error:
        raise FaultPlanError(f"fault plan {name}: {error}") from error
    _fired_directory = Path(name + ".fired")
    _fired_directory.mkdir(exist_ok=True)
    ACTIVE = bool(_faults)


def is_planned() -> bool:
    """Return whether the environment has a plan, which may be empty."""
    return bool(os.environ.get(ENVIRONMENT_NAME))


def set_context(**values: object) -> None:
    """Add facts about this process (role, node, iteration, run_dir, ...) that faults may match."""
    _context.update(values)


def hit(point: str, **details: object) -> Fault | None:
    """Report that the named point was reached, and fire the first fault that matches, if any.

    Return the fault if its action is ``mark``, else None. Raises RuntimeError if its action is
    ``raise``.
    """
    if not ACTIVE:
        return None
    facts = {**_context, **details}
    for fault in _faults:
        if fault.point != point or any(facts.get(k) != v for k, v in fault.match.items()):
            continue
        if fault.after and not (_fired_directory / fault.after).exists():
            continue
        with _lock:
            _hits[fault.id] = _hits.get(fault.id, 0) + 1
            is_due = _hits[fault.id] == fault.nth
        if not is_due or not _claim(fault, facts):
            continue
        if fault.action == "mark":
            return fault
        if fault.action == "raise":
            raise RuntimeError(f"raised by fault {fault.id}")
        _send(fault)
        return None
    return None


def fired(path: Path) -> set[str]:
    """Return the identifiers of the faults of plan ``path`` that have fired so far."""
    directory = Path(str(path) + ".fired")
    names = (entry.name for entry in directory.iterdir()) if directory.is_dir() else ()
    return {name for name in names if not name.startswith(".")}


def _claim(fault: Fault, facts: Mapping[str, object]) -> bool:
    """Return whether this process may fire the fault, as it is the process of the run that creates
    the marker file. The file appears with its content, for readers."""
    values = {k: v for k, v in facts.items() if isinstance(v, str | int | float | bool)}
    temporary = _fired_directory / f".{fault.id}.{os.getpid()}"
    temporary.write_text(json.dumps({"pid": os.getpid(), **values}))
    try:
        os.link(temporary, _fired_directory / fault.id)
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _send(fault: Fault) -> None:
    """Send the fault's signal to its targets."""
    number = signal.Signals[f"SIG{fault.signal}"]
    agents, others = _targets(fault)
    if fault.resume_after_seconds is not None:
        _resume_later(agents + others, fault.resume_after_seconds)
    own_pid = os.getpid()
    pids = agents + others
    if number == signal.SIGKILL:
        # All must seem to die at once: stop the agents first, so that no agent sees its processes
        # die, and kill them last, so that no process outlives its agent.
        for pid in agents:
            if pid != own_pid:
                _signal(pid, signal.SIGSTOP)
        pids = others + agents
    for pid in sorted(pids, key=lambda pid: pid == own_pid):  # this process last
        _signal(pid, number)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _targets(fault: Fault) -> tuple[list[int], list[int]]:
    """Return the pids of the target processes of a fault: agents, and others."""
    if fault.target == "self":
        return [], [os.getpid()]
    nodes = fault.nodes or (int(str(_context["node"])),)
    run_directory = Path(str(_context["run_dir"]))
    agents: list[int] = []
    others: list[int] = []
    for node in nodes:
        listing = json.loads((run_directory / "nodes" / f"{node}.json").read_text())
        if fault.target in ("agent", "node"):
            agents.append(int(listing["agent"]))
        if fault.target in ("vault", "node"):
            others.append(int(listing["vault"]))
        if fault.target in ("members", "node"):
            others += [int(pid) for pid in listing["members"].values()]
    return agents, others


def _resume_later(pids: list[int], seconds: float) -> None:
    program = (
        "import os,sys,time,signal\n"
        "time.sleep(float(sys.argv[1]))\n"
        "for pid in map(int, sys.argv[2:]):\n"
        "    try: os.kill(pid, signal.SIGCONT)\n"
        "    except ProcessLookupError: pass\n"
    )
    command = [sys.executable, "-I", "-c", program, str(seconds), *map(str, pids)]
    silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    subprocess.Popen(command, start_new_session=True, **silent)


def maybe_corrupt_gradients(parameters: Iterable[Any], point: str, **details: object) -> None:
    """Make the gradients of the parameters NaN if a fault marks ``point``."""
    if hit(point, **details) is not None:
        for parameter in parameters:
            if hasattr(parameter, "main_grad"):
                parameter.main_grad.fill_(math.nan)


def maybe_corrupted(chunk: memoryview, point: str, **details: object) -> memoryview:
    """Return the bytes, or a copy with a wrong first byte if a fault marks ``point``."""
    if hit(point, **details) is None:
        return chunk
    content = bytearray(chunk)
    content[0] ^= 0xFF
    return memoryview(content)

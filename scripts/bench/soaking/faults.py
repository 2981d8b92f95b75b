"""Every kind of fault of a soak: real signals, real bytes, a real full disk.

A fault is a function on the living run. It returns a text of its effect, and raises :class:`NotNow`
without a possible target (no spare for a drain, for example).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from deadpool_megatron.vault.shm.segment import Segment, SlotState

# Shorter than the fence, so that no node may be given up for it.
_SHORT_FREEZE_SECONDS = 2.0
# Longer than the limits for frozen processes and silent nodes.
_LONG_FREEZE_SECONDS = 12.0
_CUT_SECONDS = 3.0
_FULL_SECONDS = 8.0
_COMMAND_SECONDS = 90.0
_STRIKE_SECONDS = 60.0
# Faults at a named point of the first process there; the plan has this many of each.
_PLANNED: Mapping[str, Mapping[str, object]] = {
    "nan-gradient": {"point": "optimizer.before", "action": "mark"},
    "long-save": {
        "point": "save.begin",
        "signal": "STOP",
        "resume_after_seconds": _SHORT_FREEZE_SECONDS,
    },
}
_MAX_PLANNED = 60


class NotNow(Exception):
    """The fault has nothing to strike at this moment."""


@dataclass
class Target:
    """A living run. ``seats``: role -> (node, slot) of the newest record. ``isolated``: the soak
    has a network and mounts of its own, so it may cut and fill. ``is_seen``: set by a fault that
    has seen its own effect, where the run need not report an event. ``over_at``: when a signal of
    the fault was sent last, on the wall clock; 0 of a fault that ends as its function returns.
    """

    run: RunDirectory
    run_id: str
    random: random.Random
    isolated: bool
    seats: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    is_seen: bool = False
    over_at: float = 0.0

    @property
    def plan(self) -> Path:
        """The plan of faults at named points, which strike once they are released."""
        return self.run.path.with_suffix(".faults")

    @property
    def slow_fsync(self) -> Path:
        """The file that makes fsync slow while it exists."""
        return self.run.path.with_suffix(".slow")

    def processes(self, node: int, *parts: str, slot: int | None = None) -> list[int]:
        """Return the processes of these parts of a node: agent, vault, members (or that of a slot).
        Raises NotNow unless all are alive."""
        try:
            listing = read_json(self.run.node(node))
        except (OSError, ValueError) as error:
            raise NotNow(f"no listing of node {node}: {error}") from error
        members = listing["members"]
        pids = []
        for part in parts:
            own = members.values() if slot is None else [members[str(slot)]]
            pids += map(int, own if part == "members" else [listing[part]])
        for pid in pids:
            if not posix.is_alive(pid, listing["started"].get(str(pid))):
                raise NotNow(f"process {pid} is gone")
        return pids

    def coordinator(self) -> int:
        """Return the process that coordinates. Raises NotNow."""
        try:
            return int(read_json(self.run.coordinator)["pid"])
        except (OSError, ValueError, KeyError) as error:
            raise NotNow("there is no coordinator") from error

    def send(self, number: signal.Signals, *pids: int) -> None:
        """Send a signal."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        self.over_at = time.time()

    def stop(self, pid: int, seconds: float) -> None:
        """Stop a process for some time."""
        self.send(signal.SIGSTOP, pid)
        time.sleep(seconds)
        self.send(signal.SIGCONT, pid)

    def seat(self) -> tuple[int, int, int]:
        """Return role, node and slot of a role that has a seat."""
        if not self.seats:
            raise NotNow("no role has a seat yet")
        role = self.random.choice(sorted(self.seats))
        return role, *self.seats[role]

    def node(self) -> int:
        """Return a node that has roles."""
        return self.seat()[1]

    def member(self) -> tuple[str, int]:
        """Return the process of a role, in words and by its number."""
        role, node, slot = self.seat()
        (pid,) = self.processes(node, "members", slot=slot)
        return f"process of role {role} on node {node}", pid

    def deadpool(self, command: str, *arguments: str) -> None:
        """Run a command of the user. Raises NotNow when it is refused."""
        done = subprocess.run(
            [sys.executable, "-m", "deadpool_megatron", command, str(self.run.path), *arguments],
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
        )
        if done.returncode:
            raise NotNow((done.stderr or done.stdout).strip()[-200:])


Strike = Callable[[Target], str]


def _killed(name: str, *parts: str) -> Strike:
    """Return the fault that kills these parts of a node that has roles."""

    def strike(target: Target) -> str:
        number = target.node()
        target.send(signal.SIGKILL, *target.processes(number, *parts))
        return f"{name} {number} killed"

    return strike


def process(target: Target) -> str:
    """Kill one training process."""
    effect, pid = target.member()
    target.send(signal.SIGKILL, pid)
    return f"{effect} killed"


def coordinator(target: Target) -> str:
    """Kill the coordinator."""
    target.send(signal.SIGKILL, target.coordinator())
    return "coordinator killed"


def coordinator_and_process(target: Target) -> str:
    """Kill a training process, and the coordinator before it can have decided."""
    effect = process(target)
    return f"{effect}, and the {coordinator(target)}"


def coordinator_frozen(target: Target) -> str:
    """Stop the coordinator for long enough that another takes over, then let it continue."""
    target.stop(target.coordinator(), _LONG_FREEZE_SECONDS)
    return f"coordinator stopped for {_LONG_FREEZE_SECONDS:g} s"


def process_frozen(target: Target) -> str:
    """Stop one training process for good; the watchdog has to find it."""
    effect, pid = target.member()
    target.send(signal.SIGSTOP, pid)
    return f"{effect} stopped"


def agent_frozen(target: Target) -> str:
    """Stop an agent for less than the fence."""
    (pid,) = target.processes(number := target.node(), "agent")
    target.stop(pid, _SHORT_FREEZE_SECONDS)
    target.is_seen = posix.is_alive(pid)
    return f"agent of node {number} stopped for {_SHORT_FREEZE_SECONDS:g} s"


def cut(target: Target) -> str:
    """Drop every packet of an agent's present connections for some seconds."""
    if not target.isolated:
        raise NotNow("needs a network namespace")
    (pid,) = target.processes(number := target.node(), "agent")
    shown = subprocess.run(["ss", "-Htnp"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[3] for line in shown.splitlines() if f"pid={pid}," in line]
    ports = [address.rpartition(":")[2] for address in own]
    if not ports:
        raise NotNow(f"agent of node {number} has no connection")
    these = "{ " + ", ".join(ports) + " }"
    rules = f"""
        table inet soak {{
          chain in {{ type filter hook input priority 0;
            tcp sport {these} drop; tcp dport {these} drop; }}
        }}"""
    subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)
    target.is_seen = True  # those were its connections
    try:
        time.sleep(_CUT_SECONDS)
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "soak"], check=True)
    return f"connections of node {number}'s agent cut for {_CUT_SECONDS:g} s"


def damaged_bytes(target: Target) -> str:
    """Flip bytes in a role's own slots, then kill its process, which has to restore."""
    role, number, slot = target.seat()
    (pid,) = target.processes(number, "members", slot=slot)
    files = sorted(target.run.segments(target.run_id, number).glob(f"own-{role}-*.seg"))
    if not files:
        raise NotNow(f"role {role} has no slots on node {number}")
    # Stopped first, and only sealed slots: bytes without a seal would be sealed with the damage.
    target.send(signal.SIGSTOP, pid)
    segment = Segment.open(files[-1], writable=False)
    for _ in range(1000):
        if all(segment.state(n) is not SlotState.FILLED for n in range(segment.slots)):
            break
        time.sleep(0.01)
    with open(files[-1], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for _ in range(64):
            # After headers and descriptions, which have checks of their own.
            memory[target.random.randrange(len(memory) // 4, len(memory))] ^= 0xFF
    target.send(signal.SIGKILL, pid)
    return f"64 bytes of role {role}'s slots on node {number} flipped, its process killed"


@contextlib.contextmanager
def _filled(target: Target) -> Iterator[None]:
    if not target.isolated:
        raise NotNow("needs a mount namespace")
    filler = target.run.path.parent / "filler"
    try:
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:  # until there is no space left
                file.write(bytes(1 << 16))
        yield
        target.is_seen = target.is_seen or shutil.disk_usage(target.run.path).free == 0
        time.sleep(_FULL_SECONDS)
    finally:
        filler.unlink(missing_ok=True)
        target.over_at = 0.0


def full_disk(target: Target) -> str:
    """Fill the file system of the run directory for some seconds."""
    with _filled(target):
        return f"run directory full for {_FULL_SECONDS:g} s"


def full_disk_and_process(target: Target) -> str:
    """Kill a training process while the run directory is full: decisions have to wait."""
    with _filled(target):
        return f"{process(target)} while the run directory was full for {_FULL_SECONDS:g} s"


def drain(target: Target) -> str:
    """Ask for a node to be drained."""
    number = target.node()
    target.deadpool("drain", "--node", str(number))
    return f"node {number} drained"


def protect(target: Target) -> str:
    """Ask for another scheme of protection."""
    scheme = target.random.choice(["buddy", "parity"])
    target.deadpool("protect", "--scheme", scheme)
    return f"protection by {scheme} asked for"


def persist(target: Target) -> str:
    """Ask for a checkpoint in the background."""
    target.deadpool("persist")
    return "checkpoint in the background asked for"


def planned() -> list[dict[str, object]]:
    """Return the plan of a struck run."""
    return [
        {"id": f"{kind}-{number}", "after": f"release-{kind}-{number}", **fault}
        for kind, fault in _PLANNED.items()
        for number in range(_MAX_PLANNED)
    ]


def _released(kind: str) -> Strike:
    """Return the fault that lets the next planned fault of this kind strike, and waits for it."""

    def strike(target: Target) -> str:
        fired = Path(f"{target.plan}.fired")
        number = len(list(fired.glob(f"release-{kind}-*")))
        if number == _MAX_PLANNED:
            raise NotNow("none is left in the plan")
        (fired / f"release-{kind}-{number}").touch()
        limit = time.monotonic() + _STRIKE_SECONDS
        while not target.is_seen and time.monotonic() < limit:
            time.sleep(0.05)
            target.is_seen = (fired / f"{kind}-{number}").exists()
        target.over_at = time.time() + float(str(_PLANNED[kind].get("resume_after_seconds", 0)))
        return f"{kind} {number} released" + ("" if target.is_seen else ", which has not struck")

    return strike


def slow_fsync(target: Target) -> str:
    """Have each fsync of the run take long for some seconds."""
    target.slow_fsync.touch()
    time.sleep(_FULL_SECONDS)
    target.slow_fsync.unlink()
    seen = target.slow_fsync.with_suffix(".slow.seen")
    target.is_seen = seen.exists()
    seen.unlink(missing_ok=True)
    return f"fsync was slow for {_FULL_SECONDS:g} s"


def scheduler_notice(target: Target) -> str:
    """Send SIGUSR1 to all processes of a node, as a scheduler does."""
    number = target.node()
    agent, *others = target.processes(number, "agent", "vault", "members")
    target.send(signal.SIGUSR1, agent, *others)
    time.sleep(1.0)
    target.is_seen = posix.is_alive(agent)
    return f"SIGUSR1 to all processes of node {number}"


def _by_name(*strikes: Strike) -> dict[str, Strike]:
    return {strike.__name__.replace("_", "-"): strike for strike in strikes}


#: each ends a process: the first new iteration comes after a recovery
DEATHS: Mapping[str, Strike] = {
    "node": _killed("node", "agent", "vault", "members"),
    "vault": _killed("vault of node", "vault"),
    "agent": _killed("agent of node", "agent"),
    **_by_name(process, coordinator, coordinator_and_process),
    **_by_name(damaged_bytes, full_disk_and_process),
}
KINDS: Mapping[str, Strike] = {
    **DEATHS,
    **{kind: _released(kind) for kind in _PLANNED},
    **_by_name(coordinator_frozen, process_frozen, agent_frozen, cut, full_disk),
    **_by_name(drain, protect, persist, slow_fsync, scheduler_notice),
}


def segments_bytes(run_id: str) -> int:
    """Return the memory that the slots of a run take on this host."""
    return directory_bytes(segment_root(run_id))


def directory_bytes(path: Path) -> int:
    """Return the disk space of a directory."""
    total = 0
    for found in path.rglob("*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            total += found.stat().st_blocks * 512 if found.is_file() else 0
    return total

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
from typing import Any

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
    has a network and a mount namespace of its own, so it may cut and fill. ``is_seen``: set by a
    fault that has seen its own effect, where the run need not report an event.
    """

    run: RunDirectory
    run_id: str
    random: random.Random
    isolated: bool
    seats: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    is_seen: bool = False

    @property
    def plan(self) -> Path:
        """The plan of faults at named points, which strike once they are released."""
        return self.run.path.with_suffix(".faults")

    @property
    def slow_fsync(self) -> Path:
        """The file that makes fsync slow while it exists."""
        return self.run.path.with_suffix(".slow")

    def listing(self, node: int) -> dict[str, Any]:
        """Return the processes of a node. Raises NotNow when they cannot be read."""
        try:
            return read_json(self.run.node(node))
        except (OSError, ValueError) as error:
            raise NotNow(f"no listing of node {node}: {error}") from error

    def some_seat(self) -> tuple[int, int, int]:
        """Return role, node and slot of a role that has a seat."""
        if not self.seats:
            raise NotNow("no role has a seat yet")
        role = self.random.choice(sorted(self.seats))
        return role, *self.seats[role]

    def some_node(self) -> int:
        """Return a node that has roles."""
        return self.some_seat()[1]


def _send(pid: int, number: signal.Signals, started: Mapping[str, int] | None = None) -> None:
    ticks = None if started is None else started.get(str(pid))
    if not posix.is_alive(pid, None if ticks is None else int(ticks)):
        raise NotNow(f"process {pid} is gone")
    os.kill(pid, number)


def node(target: Target) -> str:
    """Kill all processes of a node, the agent first."""
    number = target.some_node()
    _deadpool(target, "kill", "--node", str(number))
    return f"node {number} killed"


def _to_a_member(target: Target, number: signal.Signals) -> str:
    role, node, slot = target.some_seat()
    listing = target.listing(node)
    _send(int(listing["members"][str(slot)]), number, listing["started"])
    return f"process of role {role} on node {node}"


def _kill(target: Target, part: str) -> str:
    number = target.some_node()
    listing = target.listing(number)
    _send(int(listing[part]), signal.SIGKILL, listing["started"])
    return f"{part} of node {number} killed"


def process(target: Target) -> str:
    """Kill one training process."""
    return f"{_to_a_member(target, signal.SIGKILL)} killed"


def vault(target: Target) -> str:
    """Kill the vault of a node that has roles."""
    return _kill(target, "vault")


def agent(target: Target) -> str:
    """Kill the agent of a node that has roles."""
    return _kill(target, "agent")


def _coordinator_pid(target: Target) -> int:
    try:
        return int(read_json(target.run.coordinator)["pid"])
    except (OSError, ValueError, KeyError) as error:
        raise NotNow("there is no coordinator") from error


def coordinator(target: Target) -> str:
    """Kill the coordinator."""
    _send(_coordinator_pid(target), signal.SIGKILL)
    return "coordinator killed"


def coordinator_and_process(target: Target) -> str:
    """Kill a training process, and the coordinator before it can have decided."""
    effect = process(target)
    _send(_coordinator_pid(target), signal.SIGKILL)
    return f"{effect}, and the coordinator"


def coordinator_frozen(target: Target) -> str:
    """Stop the coordinator for long enough that another takes over, then let it continue."""
    pid = _coordinator_pid(target)
    _send(pid, signal.SIGSTOP)
    time.sleep(_LONG_FREEZE_SECONDS)
    _send(pid, signal.SIGCONT)
    return f"coordinator stopped for {_LONG_FREEZE_SECONDS:g} s"


def process_frozen(target: Target) -> str:
    """Stop one training process for good; the watchdog has to find it."""
    return f"{_to_a_member(target, signal.SIGSTOP)} stopped"


def agent_frozen(target: Target) -> str:
    """Stop an agent for less than the fence."""
    number = target.some_node()
    listing = target.listing(number)
    _send(int(listing["agent"]), signal.SIGSTOP, listing["started"])
    time.sleep(_SHORT_FREEZE_SECONDS)
    target.is_seen = Path(f"/proc/{listing['agent']}/stat").read_text().split(") ")[1][0] == "T"
    _send(int(listing["agent"]), signal.SIGCONT, listing["started"])
    return f"agent of node {number} stopped for {_SHORT_FREEZE_SECONDS:g} s"


def cut(target: Target) -> str:
    """Drop every packet of an agent's present connections for some seconds."""
    if not target.isolated:
        raise NotNow("needs a network namespace")
    number = target.some_node()
    pid = int(target.listing(number)["agent"])
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
    role, number, slot = target.some_seat()
    listing = target.listing(number)
    pid = int(listing["members"][str(slot)])
    files = sorted(target.run.segments(target.run_id, number).glob(f"own-{role}-*.seg"))
    if not files:
        raise NotNow(f"role {role} has no slots on node {number}")
    # Stopped first, and only sealed slots: bytes without a seal would be sealed with the damage.
    _send(pid, signal.SIGSTOP, listing["started"])
    segment = Segment.open(files[-1], writable=False)
    for _ in range(1000):
        if all(segment.state(n) is not SlotState.FILLED for n in range(segment.slots)):
            break
        time.sleep(0.01)
    with open(files[-1], "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for _ in range(64):
            # After headers and descriptions, which have checks of their own.
            memory[target.random.randrange(len(memory) // 4, len(memory))] ^= 0xFF
    _send(pid, signal.SIGKILL, listing["started"])
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
    finally:
        filler.unlink(missing_ok=True)


def full_disk(target: Target) -> str:
    """Fill the file system of the run directory for some seconds."""
    with _filled(target):
        target.is_seen = shutil.disk_usage(target.run.path).free == 0
        time.sleep(_FULL_SECONDS)
    return f"run directory full for {_FULL_SECONDS:g} s"


def full_disk_and_process(target: Target) -> str:
    """Kill a training process while the run directory is full: decisions have to wait."""
    with _filled(target):
        effect = process(target)
        time.sleep(_FULL_SECONDS)
    return f"{effect} while the run directory was full for {_FULL_SECONDS:g} s"


def drain(target: Target) -> str:
    """Ask for a node to be drained."""
    number = target.some_node()
    _deadpool(target, "drain", "--node", str(number))
    return f"node {number} drained"


def protect(target: Target) -> str:
    """Ask for another scheme of protection."""
    scheme = target.random.choice(["buddy", "parity"])
    _deadpool(target, "protect", "--scheme", scheme)
    return f"protection by {scheme} asked for"


def persist(target: Target) -> str:
    """Ask for a checkpoint in the background."""
    _deadpool(target, "persist")
    return "checkpoint in the background asked for"


def planned() -> list[dict[str, object]]:
    """Return the plan of a struck run."""
    return [
        {"id": f"{kind}-{number}", "after": f"release-{kind}-{number}", **fault}
        for kind, fault in _PLANNED.items()
        for number in range(_MAX_PLANNED)
    ]


def _release(target: Target, kind: str) -> str:
    """Let the next planned fault of this kind strike, and wait until it has."""
    fired = Path(f"{target.plan}.fired")
    number = len(list(fired.glob(f"release-{kind}-*")))
    if number == _MAX_PLANNED:
        raise NotNow("none is left in the plan")
    (fired / f"release-{kind}-{number}").touch()
    limit = time.monotonic() + _STRIKE_SECONDS
    while not target.is_seen and time.monotonic() < limit:
        time.sleep(0.05)
        target.is_seen = (fired / f"{kind}-{number}").exists()
    return f"{kind} {number} released" + ("" if target.is_seen else ", which has not struck")


def nan_gradient(target: Target) -> str:
    """Make the gradients of one role NaN, once."""
    return _release(target, "nan-gradient")


def long_save(target: Target) -> str:
    """Stop the first process of the next save for some seconds."""
    return _release(target, "long-save")


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
    number = target.some_node()
    listing = target.listing(number)
    for pid in (listing["agent"], listing["vault"], *listing["members"].values()):
        _send(int(pid), signal.SIGUSR1, listing["started"])
    time.sleep(1.0)
    target.is_seen = posix.is_alive(int(listing["agent"]))
    return f"SIGUSR1 to all processes of node {number}"


def _deadpool(target: Target, command: str, *arguments: str) -> None:
    """Run a command of the user. Raises NotNow when it is refused."""
    done = subprocess.run(
        [sys.executable, "-m", "deadpool_megatron", command, str(target.run.path), *arguments],
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
    )
    if done.returncode:
        raise NotNow((done.stderr or done.stdout).strip()[-200:])


KINDS: Mapping[str, Callable[[Target], str]] = {
    fault.__name__.replace("_", "-"): fault
    for fault in (
        *(node, process, vault, agent, coordinator, coordinator_and_process),
        *(coordinator_frozen, process_frozen, agent_frozen, cut, damaged_bytes),
        *(full_disk, full_disk_and_process, drain, protect, persist),
        *(nan_gradient, long_save, slow_fsync, scheduler_notice),
    )
}


def segments_bytes(run_id: str) -> int:
    """Return the memory that the slots of a run take on this host."""
    root = segment_root(run_id)
    return sum(_allocated(path) for path in root.rglob("*") if path.is_file())


def directory_bytes(path: Path) -> int:
    """Return the disk space of a run directory."""
    return sum(_allocated(found) for found in path.rglob("*") if found.is_file())


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0  # gone meanwhile

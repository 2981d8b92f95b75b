"""Diagnostics for a hung job; no decision depends on them.

Before a member is killed, it is asked for its stacks. It answers by writing the Python stacks of
all its threads to its log, which its agent reads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.agent.members import Member
from deadpool_megatron.cluster.link.protocol import report_of
from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.logs import read
from deadpool_megatron.events import Event, Kind
from deadpool_megatron.layout.records import EpochRecord, Seat

_ANSWER_SECONDS = 0.5
_POLL_SECONDS = 0.02
_MAX_STACK_BYTES = 1 << 18
_MAX_FRAMES = 24
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
Report = Callable[[Mapping[str, Any]], None]


class StackReporter:
    """A reporter of stacks, which asks a member for them and then kills it.

    It runs in the agent's loop. ``record()`` returns the record of the newest epoch, ``report``
    sends a message to the coordinator.
    """

    def __init__(self, node: int, record: Callable[[], EpochRecord | None], report: Report) -> None:
        self._node = node
        self._record = record
        self._report = report
        self._pending: dict[Member, asyncio.Task[None]] = {}

    def kill(self, member: Member, cause: str) -> None:
        """Ask for stacks, report them, and kill the member, at most half a second from now."""
        if member not in self._pending and not member.ended.is_set():
            self._pending[member] = asyncio.create_task(self._take(member, cause))

    def kill_by_order(self, message: Mapping[str, Any], member: Member | None) -> None:
        """Carry out the coordinator's order to kill ``member``; None if the member has ended."""
        if member is None:
            return
        cause = str(message.get("cause", "killed by order of the coordinator"))
        if message.get("hung"):
            self.kill(member, cause)
        elif member not in self._pending:
            member.kill(cause)

    async def _take(self, member: Member, cause: str) -> None:
        try:
            self._report_stacks(member, await get_stacks(member.pid, member.log, _ANSWER_SECONDS))
        finally:
            member.kill(cause)
            del self._pending[member]

    def _report_stacks(self, member: Member, stacks: Stacks) -> None:
        record, role = self._record(), None
        if record is not None:
            seat = Seat(self._node, member.local_rank, member.incarnation)
            role = next((r for r, other in record.seats.items() if other == seat), None)
        data = {
            "local_rank": member.local_rank,
            "incarnation": member.incarnation,
            "frames": list(stacks.frames),
            "threads": stacks.threads,
            "missing": stacks.missing,
            "log": member.log.name,
        }
        epoch = 0 if record is None else record.epoch
        event = Event(Kind.STACK, epoch, self._node, role, data=data)
        self._report(report_of(event))


@dataclass(frozen=True)
class Stacks:
    """Stacks of a process. ``frames`` of the main thread, innermost first, as ``function
    (file:line)``; ``threads`` counts all threads. ``missing``: the reason why there are
    no stacks, else empty.
    """

    frames: tuple[str, ...] = ()
    threads: int = 0
    missing: str = ""


def read_stacks(text: str) -> Stacks:
    """Parse the output of ``faulthandler``, which lists the main thread last. Pure."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            file = "/".join(Path(frame["file"]).parts[-2:])
            threads[-1].append(f"{frame['function']} ({file}:{frame['line']})")
    if not threads:
        return Stacks(missing="it wrote no stacks")
    return Stacks(tuple(threads[-1][:_MAX_FRAMES]), len(threads))


async def get_stacks(pid: int, log: Path, limit_seconds: float) -> Stacks:
    """Ask a process for its stacks; return them, or the reason why they are missing at the limit.

    ``log`` is the file to which the process writes, in the memory of this host. The signal is sent
    before anything is awaited, as the next message to the process could change its stacks.
    """
    previous = ""
    try:
        async with asyncio.timeout(limit_seconds):
            start = log.stat().st_size if log.exists() else 0
            if missing := _obstacle(pid):
                return Stacks(missing=missing)
            posix.kill(pid, posix.ASK_SIGNAL)
            while True:
                await asyncio.sleep(_POLL_SECONDS)
                text = read(log, start, _MAX_STACK_BYTES)
                if text == previous and "Current thread" in text:
                    break
                previous = text
    except TimeoutError:
        if not previous:
            return Stacks(missing=f"it wrote no stacks within {limit_seconds:g} s")
    return read_stacks(previous)


def _obstacle(pid: int) -> str:
    """Return why a process cannot answer; empty if it can.

    The signal would end a process that has no handler for it.
    """
    state = posix.state_and_cpu_ticks(pid)
    if state is None or state[0] in "ZX":
        return "the process has ended"
    if state[0] in "Tt":
        return "the process is stopped and cannot answer"
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return "the process has ended"
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    if not int(caught.split()[1], 16) & (1 << (posix.ASK_SIGNAL - 1)):
        return "the process does not answer yet: it has just started"
    return ""

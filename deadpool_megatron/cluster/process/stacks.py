"""The place where a process that does not move stands: the Python stacks of all its threads.

A member answers :data:`ASK` by writing them to its log (``faulthandler``, in C, so that it needs
neither the interpreter lock nor a main thread that runs). Its agent asks, and reads the log.
"""

from __future__ import annotations

import asyncio
import faulthandler
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.process.file_worker import read

ASK = signal.SIGUSR2
_LOOK_SECONDS = 0.02
_MOST_BYTES = 1 << 18
_MOST_FRAMES = 24

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


def answer_asks() -> None:
    """Make this process write its stacks to standard error when asked, or when it crashes."""
    faulthandler.enable(all_threads=False)
    faulthandler.register(ASK, all_threads=True)


@dataclass(frozen=True)
class Stacks:
    """``frames`` of the main thread, innermost first, as ``function (file:line)``; ``threads``: how
    many there were. ``missing``: why there are none, else empty.
    """

    frames: tuple[str, ...] = ()
    threads: int = 0
    missing: str = ""


def read_stacks(text: str) -> Stacks:
    """Return what ``faulthandler`` wrote. Pure. The main thread is the last of its listing."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _THREAD.match(line):
            threads.append([])
        elif threads and (frame := _FRAME.match(line)):
            file = "/".join(Path(frame["file"]).parts[-2:])
            threads[-1].append(f"{frame['function']} ({file}:{frame['line']})")
    if not threads:
        return Stacks(missing="it wrote no stacks")
    return Stacks(tuple(threads[-1][:_MOST_FRAMES]), len(threads))


async def ask(pid: int, log: Path, limit_seconds: float) -> Stacks:
    """Ask a process for its stacks; returns them, or why they are missing after the limit.

    ``log``: what the process writes to, in the memory of this host. The signal goes out at once, so
    that what the process is told next does not change the answer.
    """
    before = ""
    try:
        async with asyncio.timeout(limit_seconds):
            start = log.stat().st_size if log.exists() else 0
            if missing := _why_it_cannot(pid):
                return Stacks(missing=missing)
            posix.kill(pid, ASK)
            while True:
                await asyncio.sleep(_LOOK_SECONDS)
                text = read(log, start, _MOST_BYTES)
                if text == before and "Current thread" in text:
                    break
                before = text
    except TimeoutError:
        if not before:
            return Stacks(missing=f"it wrote no stacks within {limit_seconds:g} s")
    return read_stacks(before)


def _why_it_cannot(pid: int) -> str:
    """Empty for a process that can answer. To ask one that has no handler yet would end it."""
    found = posix.state_and_cpu_ticks(pid)
    if found is None or found[0] in "ZX":
        return "the process has ended"
    if found[0] in "Tt":
        return "the process is stopped and cannot answer"
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return "the process has ended"
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    if not int(caught.split()[1], 16) & (1 << (ASK - 1)):
        return "the process does not answer yet: it has just started"
    return ""

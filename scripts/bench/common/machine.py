"""Facts about the machine, observation of marked processes, and the JSON file of a bench."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from common.termination import marked_processes
from deadpool_megatron import __version__
from deadpool_megatron.cluster.process import posix

ROOT = Path(__file__).parents[3]
_TICKS = os.sysconf("SC_CLK_TCK")
# Threads of training in a member, by the names of process and thread: all others are protection's.
_TRAINING = re.compile(r"dp-nNsN\S*: (main|pt_|gloo)|pt_data_worker")


def machine_facts() -> dict[str, Any]:
    """Return everything about machine, versions and command that a figure depends on."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "commit": _git("rev-parse", "HEAD"),
        "changed_files": len(_git("status", "--porcelain").splitlines()),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _first("/proc/cpuinfo", "model name"),
        "memory_kb": int(_first("/proc/meminfo", "MemTotal").split()[0]),
        "load_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {
            name: metadata.version(name) for name in ("torch", "megatron-core", "numpy", "xxhash")
        },
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip()


def _first(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "0 unknown"


def cpu_seconds_of(pid: int) -> float:
    """Return user and system time so far of a process, 0 if it is gone."""
    return (posix.state_and_cpu_ticks(pid) or ("", 0))[1] / _TICKS


def threads_of(process: Path) -> Counter[str]:
    """Return user and system time so far of the living threads of a process, by the names of
    process and thread without numbers. The kernel has the names of some threads only.
    """
    found: Counter[str] = Counter()
    name = _name(process)
    for task in (process / "task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            thread = "main" if task.name == process.name else _name(task)
            thread = "others" if thread == name else thread
            # Nanoseconds on a processor.
            found[f"{name}: {thread}"] += int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def thread_seconds(mark: str) -> Counter[str]:
    """Return :func:`threads_of` all marked processes, without what has ended meanwhile."""
    found: Counter[str] = Counter()
    for pid in marked_processes(mark):
        with suppress(OSError):
            found += threads_of(Path(f"/proc/{pid}"))
    return found


def own_seconds(threads: Counter[str]) -> float:
    """Return the seconds of the threads that protection adds; 0 in a run without protection."""
    if not any(name.startswith("dp-") for name in threads):
        return 0.0
    return sum(seconds for name, seconds in threads.items() if not _TRAINING.match(name))


def _name(directory: Path) -> str:
    return re.sub(r"\d+", "N", (directory / "comm").read_text().strip())


def memory_bytes(mark: str) -> int:
    """Return the proportional set size of all marked processes: shared pages count once."""
    total = 0
    for pid in marked_processes(mark):
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def write_facts(path: Path | None, facts: dict[str, Any]) -> None:
    """Write to ``path``, or to standard output; paths in the checkout become relative to it."""
    text = json.dumps(facts, indent=1, default=str).replace(f"{ROOT}/", "") + "\n"
    if path is None:
        sys.stdout.write(text)
    else:
        path.write_text(text)
        print(f"written to {path}", file=sys.stderr)

"""What a part is given, and what it has found so far: one JSON file, whole at any moment."""

from __future__ import annotations

import functools
import json
import platform
import subprocess
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from proof.device import SIZES, Device, Size

ROOT = Path(__file__).parents[3]
#: written by pack.sh into the tree without history
_COMMIT_FILE = ROOT / "PROOF_COMMIT"
_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine", "apex", "nvidia-nccl-cu13")


@dataclass
class Task:
    """One part. ``problems`` say why it failed; ``findings`` are answers, good or bad, that are no
    fault of the kit. ``until`` is the time on the monotonic clock at which it is ended."""

    part: str
    device: Device
    folder: Path
    until: float
    checkout: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    finished: bool = False
    began: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> Size:
        """How much of each thing is done on this device."""
        return SIZES[self.device]

    @property
    def is_on_gpu(self) -> bool:
        """False in a rehearsal."""
        return self.device is Device.CUDA

    @property
    def left_seconds(self) -> float:
        """Until the part is ended."""
        return self.until - time.monotonic()

    def expect(self, holds: bool, problem: str) -> None:
        """Note the problem unless it holds."""
        if not holds:
            self.problems.append(problem)

    def save(self) -> None:
        """Leave what is known by now."""
        values = {
            "part": self.part,
            "device": self.device,
            "commit": commit(),
            "finished": self.finished,
            "problems": self.problems,
            "findings": self.findings,
            "seconds": round(time.monotonic() - self.began, 1),
            "versions": versions(),
            "facts": self.facts,
        }
        write_json(self.folder / f"{self.part}.json", values)


def first_line(error: BaseException) -> str:
    """Its kind and the beginning of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def write_json(path: Path, values: object) -> None:
    """All of it or nothing."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(values, indent=1, default=str) + "\n")
    unfinished.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """What is there; empty for nothing."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values


@functools.cache
def commit() -> str:
    """The commit, and whether there are changes that are not in it; else "unknown"."""
    if _COMMIT_FILE.exists():
        return _COMMIT_FILE.read_text().strip()
    try:
        ask = functools.partial(subprocess.check_output, cwd=ROOT, text=True)
        head = ask(["git", "rev-parse", "HEAD"]).strip()
        changed = ask(["git", "status", "--porcelain", "--untracked-files=all", ":!*.tgz"])
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


@functools.cache
def versions() -> dict[str, Any]:
    """Of all that takes part; the part ``smoke`` asks torch and the driver for theirs."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    # Of two the one that is found first is the one that is imported.
    several = reversed([*metadata.distributions()])
    installed = {dist.name.lower().replace("_", "-"): dist.version for dist in several if dist.name}
    return found | {name: installed.get(name, "not installed") for name in _PACKAGES}

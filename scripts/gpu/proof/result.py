"""The task of a part with its results so far: a JSON file that is complete at any moment."""

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
    """One part. ``problems`` are the reasons of a failure; ``findings`` are answers, good or bad,
    that are no fault of the kit. ``until``: time on the monotonic clock at which it is ended."""

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
        """The amounts for this device."""
        return SIZES[self.device]

    @property
    def is_on_gpu(self) -> bool:
        """False in a rehearsal."""
        return self.device is Device.CUDA

    @property
    def left_seconds(self) -> float:
        """The time until the part is ended."""
        return self.until - time.monotonic()

    def expect(self, holds: bool, problem: str) -> None:
        """Note the problem unless it holds."""
        if not holds:
            self.problems.append(problem)

    def save(self) -> None:
        """Write the results so far."""
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
    """Return the type of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def write_json(path: Path, values: object) -> None:
    """Replace the file atomically."""
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(values, indent=1, default=str) + "\n")
    unfinished.rename(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the values of a file; empty if it cannot be read."""
    try:
        values: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values


@functools.cache
def commit() -> str:
    """Return the commit, and whether the tree has other changes; "unknown" without git."""
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
    """Return the versions of packages; the part ``smoke`` adds those of torch and the driver."""
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    # If a package is installed twice, the first is imported; reversed, it overwrites the other.
    several = reversed([*metadata.distributions()])
    installed = {dist.name.lower().replace("_", "-"): dist.version for dist in several if dist.name}
    return found | {name: installed.get(name, "not installed") for name in _PACKAGES}

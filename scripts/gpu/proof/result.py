"""What a part found: one JSON file, with everything that its figures depend on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
_KNOWN = "DEADPOOL_PROOF_VERSIONS"
_PACKAGES = ("torch", "megatron-core", "numpy", "transformer-engine", "apex", "nvidia-nccl-cu13")


@dataclass
class Findings:
    """Grows while a part runs. ``problems``: why it failed; none of them: it passed, unless
    ``not_run`` says why there was nothing to run."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    not_run: str = ""

    def expect(self, holds: bool, problem: str) -> None:
        """Note the problem unless it holds."""
        if not holds:
            self.problems.append(problem)


@dataclass(frozen=True)
class Result:
    """One part, done. ``commit`` names the tree, changes that are not committed included."""

    part: str
    device: str
    commit: str
    passed: bool
    problems: list[str]
    seconds: float
    command: str
    time: str
    versions: dict[str, Any]
    facts: dict[str, Any]
    not_run: str = ""

    def write(self, path: Path) -> None:
        """All of it or nothing."""
        unfinished = path.with_suffix(".part")
        unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n")
        unfinished.rename(path)


def make_result(part: str, device: str, found: Findings, seconds: float) -> Result:
    """Put what was found beside what it depends on."""
    return Result(
        part=part,
        device=device,
        commit=commit(),
        passed=not found.problems and not found.not_run,
        problems=found.problems,
        seconds=round(seconds, 1),
        command=shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        versions=versions(),
        facts=found.facts,
        not_run=found.not_run,
    )


def read_result(path: Path) -> Result | None:
    """What is there; None for nothing, or for what is no result."""
    try:
        return Result(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def commit() -> str:
    """The commit, and whether there are changes that are not in it; else "unknown"."""
    if told := os.environ.get("DEADPOOL_PROOF_COMMIT"):
        return told  # a copy of the tree without its history
    try:
        head = _output("git", "rev-parse", "HEAD")
        changed = _output("git", "status", "--porcelain")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head} with changes" if changed else head


def versions() -> dict[str, Any]:
    """Of all that takes part; torch is asked in another process, so that this one holds no GPU.

    Asked once: the processes of the parts inherit the answer.
    """
    if _KNOWN not in os.environ:
        os.environ[_KNOWN] = json.dumps(_ask_versions())
    known: dict[str, Any] = json.loads(os.environ[_KNOWN])
    return known


def _ask_versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    found["cores"] = len(os.sched_getaffinity(0))
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    program = (
        "import json, torch; on = torch.cuda.is_available(); print(json.dumps({"
        "'cuda': torch.version.cuda,"
        "'nccl': '.'.join(map(str, torch.cuda.nccl.version())) if on else None,"
        "'gpus': [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]}))"
    )
    try:
        found |= json.loads(_output(sys.executable, "-c", program).splitlines()[-1])
        query = ("--query-gpu=driver_version", "--format=csv,noheader")
        found["driver"] = _output("nvidia-smi", *query).splitlines()[0]
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        found.setdefault("driver", None)
    return found


def _output(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()

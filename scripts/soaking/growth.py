"""What grows while a run lives on: samples of its processes and files, and a verdict on them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A process counts once it has had time to reach its working size.
_WARM_SECONDS = 60.0
# What a part may grow in an hour beyond its working size before it counts as a leak.
LIMITS: Mapping[str, float] = {"rss_mb": 24.0, "descriptors": 12.0, "threads": 6.0}


@dataclass(frozen=True)
class Sample:
    """One look at one process. ``part``: coordinator, agent, vault, member."""

    seconds: float
    part: str
    pid: int
    rss_mb: float
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Files:
    """One look at what lies in memory and on disk."""

    seconds: float
    iteration: int
    segments_mb: float
    directory_mb: float


def sample(seconds: float, part: str, pid: int) -> Sample | None:
    """Returns a look at a process, None when it is gone."""
    base = Path(f"/proc/{pid}")
    try:
        pages = int((base / "statm").read_text().split()[1])
        descriptors = len(list((base / "fd").iterdir()))
        threads = len(list((base / "task").iterdir()))
    except (OSError, IndexError):
        return None
    return Sample(seconds, part, pid, pages * _PAGE_BYTES / 1e6, descriptors, threads)


def slope_per_hour(points: Sequence[tuple[float, float]]) -> float:
    """Returns the slope of a least-squares line through (seconds, value), per hour."""
    count = len(points)
    mean_x = sum(x for x, _ in points) / count
    mean_y = sum(y for _, y in points) / count
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return 0.0
    return 3600.0 * sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def judge(samples: Iterable[Sample], least_seconds: float) -> dict[str, Any]:
    """Returns for each part the steepest growth per hour of its processes that lived for
    ``least_seconds`` after they were warm, and ``flat``: whether all are within LIMITS.
    """
    lives: dict[tuple[str, int], list[Sample]] = {}
    for one in samples:
        lives.setdefault((one.part, one.pid), []).append(one)
    parts: dict[str, dict[str, float]] = {}
    flat = True
    for (part, _), found in lives.items():
        warm = [one for one in found if one.seconds >= found[0].seconds + _WARM_SECONDS]
        if len(warm) < 3 or warm[-1].seconds - warm[0].seconds < least_seconds:
            continue
        known = parts.setdefault(part, {"lives": 0, **dict.fromkeys(LIMITS, 0.0)})
        known["lives"] += 1
        for name, limit in LIMITS.items():
            points = [(one.seconds, float(getattr(one, name))) for one in warm]
            hours = (warm[-1].seconds - warm[0].seconds) / 3600.0
            # A short life makes a steep line of one page: what it really gained counts.
            gained = slope_per_hour(points) * min(1.0, hours)
            known[name] = max(known[name], gained)
            flat = flat and gained <= limit
    return {"parts": parts, "limits_per_hour": dict(LIMITS), "flat": flat}


def files_verdict(files: Sequence[Files]) -> dict[str, Any]:
    """Returns bytes of the run directory per iteration, and the most of shared memory."""
    if len(files) < 2 or files[-1].iteration <= files[0].iteration:
        return {}
    first, last = files[len(files) // 3], files[-1]
    steps = max(1, last.iteration - first.iteration)
    return {
        "directory_bytes_per_iteration": (last.directory_mb - first.directory_mb) * 1e6 / steps,
        "segments_mb_most": max(one.segments_mb for one in files),
    }


def as_dicts(found: Iterable[Sample | Files]) -> list[dict[str, Any]]:
    """Returns JSON objects."""
    return [asdict(one) for one in found]

"""Growth of a long run: samples of its processes and files, and a verdict on them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# A process counts once it has had time to reach its working size.
_WARM_SECONDS = 60.0
# The growth of a part in an hour, beyond its working size, that counts as a leak.
LIMITS: Mapping[str, float] = {"rss_mb": 24.0, "descriptors": 12.0, "threads": 6.0}
# The permitted growth of shared memory in an hour, and of the run directory with each iteration:
# of six roles about 3,900 bytes of events and hashes are usual, 12,300 with faults (a checkpoint, a
# dump).
FILE_LIMITS: Mapping[str, float] = {
    "segments_mb_gained": 4.0,
    "directory_bytes_per_usual_iteration": 6000.0,
    "directory_bytes_per_iteration": 18000.0,
}
# In less a single checkpoint is a steep line.
_MIN_SECONDS = 120.0
# More than this between two looks is a change of the working size: a spare has got a role (four
# more threads of its vault), a vault another plan. A leak comes little by little.
_STEPS: Mapping[str, float] = {"rss_mb": 4.0, "descriptors": 3.0, "threads": 3.0}
# A process that was not seen for longer has ended, and another process has its number.
_GONE_SECONDS = 60.0
_SHOWN_SECONDS = 60.0
_LOOKS = 120


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


def lives(samples: Iterable[Sample]) -> list[list[Sample]]:
    """Returns what was seen of each process, in order."""
    newest: dict[tuple[str, int], list[Sample]] = {}
    found: list[list[Sample]] = []
    for sample in samples:
        life = newest.get((sample.part, sample.pid))
        if life is None or sample.seconds - life[-1].seconds > _GONE_SECONDS:
            life = newest[sample.part, sample.pid] = []
            found.append(life)
        life.append(sample)
    return found


def gained_per_hour(life: Sequence[Sample], name: str) -> float:
    """Returns what a process has gained in the longest stretch without a change of its working
    size; by the hour, if that lasted for longer.

    The median of the slopes between looks (Theil and Sen) is not moved by a few that stand out;
    of a minute the least counts, as what is opened for a while is closed again. The flatter half
    counts, because a leak shows in both halves, and a slow start only in the first.
    """
    seen = [(sample.seconds, float(getattr(sample, name))) for sample in life]
    floor = [
        (seconds, min(v for _, v in seen[max(0, i - 6) : i + 1]))
        for i, (seconds, _) in enumerate(seen)
    ]
    stretch, longest = floor[:1], floor[:1]
    for before, after in pairwise(floor):
        stretch = [*stretch, after] if abs(after[1] - before[1]) <= _STEPS[name] else [after]
        longest = max(longest, stretch, key=len)
    # A short life makes a steep line of a single page, so its real gain counts.
    middle = len(longest) // 2
    slope = min(_slope(longest[: middle + 1]), _slope(longest[middle:]))
    return slope * min(3600.0, longest[-1][0] - longest[0][0])


def _slope(looks: Sequence[tuple[float, float]]) -> float:
    few = looks[:: len(looks) // _LOOKS + 1]
    slopes = [(y - v) / (x - u) for (u, v), (x, y) in combinations(few, 2) if x > u]
    return median(slopes) if slopes else 0.0


def judge(samples: Iterable[Sample], min_seconds: float) -> dict[str, Any]:
    """Return for each part the largest gain of a process in an hour, among those that lived for
    ``min_seconds`` after they were warm; ``flat``: whether all are within LIMITS; and all samples
    of each process that is not, for a diagnosis.
    """
    parts: dict[str, dict[str, float]] = {}
    grown: list[Sample] = []
    for found in lives(samples):
        warm = [sample for sample in found if sample.seconds >= found[0].seconds + _WARM_SECONDS]
        if len(warm) < 3 or warm[-1].seconds - warm[0].seconds < min_seconds:
            continue
        known = parts.setdefault(found[0].part, {"lives": 0, **dict.fromkeys(LIMITS, 0.0)})
        known["lives"] += 1
        gained = {name: gained_per_hour(warm, name) for name in LIMITS}
        for name, value in gained.items():
            known[name] = max(known[name], value)
        if any(gained[name] > limit for name, limit in LIMITS.items()):
            grown += found
    limits = dict(LIMITS)
    return {"parts": parts, "limits_per_hour": limits, "flat": not grown, "grown": as_dicts(grown)}


def files_verdict(files: Sequence[Files]) -> dict[str, Any]:
    """Return for a round the growth of its run directory with each iteration, mean and median;
    that of its shared memory in an hour, or in its own time, if that was shorter, and the maximum
    of it; ``flat``: whether all are within FILE_LIMITS, or the round was too short for a verdict.
    Empty without two samples at different iterations.

    Occasional checkpoints do not move the median between samples. Of shared memory the median is
    that of the slopes: a vault that allocates in advance is no growth.
    """
    if len(files) < 2 or files[-1].iteration <= files[0].iteration:
        return {}
    later = files[len(files) // 3 :]  # with all processes at their working size
    steps = later[-1].iteration - later[0].iteration
    usual = [
        (after.directory_mb - before.directory_mb) * 1e6 / (after.iteration - before.iteration)
        for before, after in pairwise(later)
        if after.iteration > before.iteration
    ]
    grown = (later[-1].directory_mb - later[0].directory_mb) * 1e6
    held = [(sample.seconds, sample.segments_mb) for sample in later]
    found = {
        "directory_bytes_per_iteration": grown / max(1, steps),
        "directory_bytes_per_usual_iteration": median(usual) if usual else 0.0,
        "segments_mb_gained": _slope(held) * min(3600.0, held[-1][0] - held[0][0]),
        "segments_mb_most": max(sample.segments_mb for sample in files),
    }
    is_short = held[-1][0] - held[0][0] < _MIN_SECONDS
    flat = is_short or all(found[name] <= limit for name, limit in FILE_LIMITS.items())
    return {**found, "limits": dict(FILE_LIMITS), "flat": flat}


def as_dicts(found: Iterable[Sample | Files]) -> list[dict[str, Any]]:
    """Returns JSON objects, with tenths."""
    return [
        {name: round(v, 1) if isinstance(v, float) else v for name, v in asdict(sample).items()}
        for sample in found
    ]


def thinned(samples: Iterable[Sample]) -> list[Sample]:
    """Return a sample per minute of each process, and its last sample."""
    kept: list[Sample] = []
    for life in lives(samples):
        at = life[0].seconds
        for sample in life:
            if sample.seconds >= at or sample is life[-1]:
                kept.append(sample)
                at = sample.seconds + _SHOWN_SECONDS
    return sorted(kept, key=lambda sample: sample.seconds)

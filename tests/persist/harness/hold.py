"""Waits of a training process before some iterations: an export takes seconds, iterations of a tiny
model take none, and the run must not be over before."""

import time
from dataclasses import dataclass, field
from pathlib import Path

_PATIENCE_SECONDS = 90.0
_DAWDLE_SECONDS = 1.0


@dataclass(frozen=True)
class Waits:
    """Iteration -> what has to be there before it: for good, and for a second at most."""

    firm: dict[int, Path] = field(default_factory=dict)
    brief: dict[int, Path] = field(default_factory=dict)


def waits_of(text: str) -> Waits:
    """Read ``ITERATION=PATTERN[,...]``: wait before it until a file of that pattern exists.

    ``FIRST-LAST=PATTERN``: before each of them, for a second at most. An export that has not begun
    takes one of the *next* iterations, so that a stopped process would wait for itself.
    """
    found = Waits()
    for wait in filter(None, text.split(",")):
        iterations, pattern = wait.split("=")
        first, _, last = iterations.partition("-")
        waits = found.brief if last else found.firm
        waits.update(dict.fromkeys(range(int(first), int(last or first) + 1), Path(pattern)))
    return found


def hold(waits: Waits, iteration: int) -> None:
    """Wait before an iteration, if it has a wait."""
    _await(waits.brief.get(iteration), _DAWDLE_SECONDS)
    pattern = waits.firm.get(iteration)
    assert _await(pattern, _PATIENCE_SECONDS), f"nothing came to {pattern}"


def _await(pattern: Path | None, seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while pattern is not None and not list(pattern.parent.glob(pattern.name)):
        if time.monotonic() >= limit:
            return False
        time.sleep(0.02)
    return True

"""What the page of a run shows, as JSON values: from its events, and what its coordinator says.

Pure. What is for the eye alone (colours, places) is in ``page.html``.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.cli.show.narration import describe_cause, describe_loss, tell
from deadpool_megatron.cli.show.progress import Progress
from deadpool_megatron.cli.show.run_result import PHASES
from deadpool_megatron.cli.show.story import Interruption, Story
from deadpool_megatron.events import DAMAGE, Event

_SHOWN_LINES = 200
_SHOWN_RECOVERIES = 50
# The curve of the loss has so many points at most, whatever the length of the run.
_POINTS = 400
# The pace of training is that of so many steps; of a long run all of them take long to look at.
_RECENT_STEPS = 50


class PageState:
    """Feed it with events in their order. Not thread-safe."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._story = Story()
        self._progress = Progress(self._story.account)
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=_SHOWN_LINES)

    def add(self, event: Event) -> None:
        """Take in one event. Raises LookupError, TypeError, ValueError or AttributeError for a
        damaged one.
        """
        self._story.add(event)
        self._progress.add(event)
        line = tell(event)
        if line is not None and not line.passes:
            self._lines.append((event.wall_seconds, line.text, line.style))

    def to_dict(self, status: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
        """Return everything. ``status``: as of ``deadpool status --json``, None if nobody answers;
        ``now``: wall clock in seconds."""
        story = self._story
        ended = story.ended
        pace = story.step_seconds(_RECENT_STEPS)
        # Where nobody answers, nobody knows what nodes do since the newest event.
        until = None if status is None else now
        return {
            "run": self._run_id,
            "now": now,
            "ended": None if ended is None else dict(ended.data),
            "iteration": story.last_iteration,
            "progress": self._progress.to_dict(),
            "epoch": story.epoch,
            "step_seconds": statistics.median(pace) if pace else None,
            "goodput": story.account.goodput(until),
            "node_seconds": {
                use.value: seconds
                for use, seconds in story.account.seconds(until).items()
                if seconds > 0
            },
            "loss": self._losses(),
            "recoveries": [_recovery(failure) for failure in story.failures[-_SHOWN_RECOVERIES:]],
            "recovery_count": len(story.failures),
            "phases": dict(PHASES),
            "lines": [list(line) for line in self._lines],
            "status": _status(status),
        }

    def _losses(self) -> list[tuple[int, float | None]]:
        """None for what is not finite: JSON has no such numbers."""
        steps = self._story.steps
        every = max(1, -(-len(steps) // _POINTS))
        found: list[tuple[int, float | None]] = []
        for at in [*range(0, len(steps), every), *([len(steps) - 1] if len(steps) else [])]:
            timed = steps[at]
            if timed.step.loss is not None:
                loss = float.fromhex(timed.step.loss)
                found.append((timed.step.iteration, loss if math.isfinite(loss) else None))
        return found


def _recovery(failure: Interruption) -> dict[str, Any]:
    recovery = failure.recovery
    return {
        "number": failure.number,
        "at": failure.began,
        "cause": describe_cause({"kind": failure.kind, "cause": failure.cause}),
        "planned": failure.planned,
        "after_iteration": failure.last_iteration,
        "losses": [describe_loss(loss) for loss in failure.losses],
        "phases": {} if recovery is None else dict(recovery.phases),
        "seconds": None if recovery is None else recovery.seconds,
        "recomputed": None if recovery is None else recovery.steps_recomputed,
        "exposed_seconds": failure.exposure,
    }


def _status(status: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if status is None:
        return None
    try:
        return _known_status(status)
    except DAMAGE:  # of a coordinator of another version
        return None


def _known_status(status: Mapping[str, Any]) -> dict[str, Any]:
    aside = {str(node) for node in status["aside"]}
    fewer = set(status["fewer_copies"])
    return {
        "phase": status["phase"],
        "waiting_for": status["waiting_for"],
        "protection": status["protection"],
        "rpo": status["rpo"]["most_lost"],
        "coordinator": status["coordinator"],
        "failing": status["failing"],
        "requests": [
            {key: one[key] for key in ("number", "verb", "stage", "why") if key in one}
            for one in status["requests"]
        ],
        "roles": {
            role: {
                "node": known["seat"][0],
                "section": known["section"],
                "iteration": known["iteration"],
                "waits": bool(known["waiting"]),
                "exposed": int(role) in fewer,
            }
            for role, known in status["roles"].items()
        },
        "nodes": {
            node: {
                "host": known["host"],
                "state": "aside" if node in aside else "spare" if known["spare"] else "training",
                "standing": known["standing"],
                "reasons": list(known["reasons"]),
                "restarts": known["restarts"],
                "bytes": known["vault"].get("bytes"),
                "slow": node in status["slow"],
            }
            for node, known in status["nodes"].items()
        },
    }

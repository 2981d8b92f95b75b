"""The state of a run's page, as its program (``page.js``) takes it: a view of the story, the lines
told so far, and what the coordinator says. What is for the eye alone (colours, places) is there.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from deadpool_megatron.events import Event
from deadpool_megatron.observe.narration import describe_cause, describe_loss, tell
from deadpool_megatron.observe.story import PHASES, RECENT_STEPS, Interruption, Story, decimal

_SHOWN_LINES = 200
_SHOWN_RECOVERIES = 50
# The curve of the loss has so many points at most, whatever the length of the run.
_POINTS = 400
# Of what the coordinator says.
_DRAWN = frozenset(
    {"phase", "waiting_for", "failing", "rpo", "roles", "nodes", "aside", "slow", "fewer_copies"}
)


class Page:
    """Feed it with events in their order. Not thread-safe."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._story = run_id, Story()
        self._lines: deque[tuple[float, str, str]] = deque(maxlen=_SHOWN_LINES)

    def take(self, event: Event) -> None:
        """Take in one event; a damaged one raises one of :data:`events.DAMAGE`."""
        self._story.take(event)
        line = tell(event)
        if line is not None and not line.passes:
            self._lines.append((event.wall_seconds, line.text, line.style))

    def to_dict(self, status: Mapping[str, Any] | None, now: float) -> dict[str, Any]:
        """Return everything. ``status``: as of ``deadpool status --json``, None if nobody answers;
        ``now``: wall clock in seconds."""
        story = self._story
        pace = story.step_seconds(RECENT_STEPS)
        # Where nobody answers, nobody knows what nodes do since the newest event.
        until = None if status is None else now
        if status is not None and not status.keys() >= _DRAWN:
            status = None  # of a coordinator of another version
        uses = {use.value: spent for use, spent in story.account.uses(until).items() if spent > 0}
        return {
            "run": self._run_id,
            "now": now,
            "ended": None if story.ended is None else dict(story.ended.data),
            "iteration": story.last_iteration,
            "progress": story.progress(),
            "epoch": story.epoch,
            "step_seconds": statistics.median(pace) if pace else None,
            "goodput": story.account.goodput(until),
            "node_seconds": uses,
            "loss": self._losses(),
            "recoveries": [_recovery(failure) for failure in story.failures[-_SHOWN_RECOVERIES:]],
            "recovery_count": len(story.failures),
            "phases": dict(PHASES),
            "lines": [list(line) for line in self._lines],
            "status": {name: status[name] for name in _DRAWN} if status is not None else None,
        }

    def _losses(self) -> list[tuple[int, float | None]]:
        """None for what is not finite: JSON has no such numbers."""
        steps, found = self._story.steps, list[tuple[int, float | None]]()
        every = max(1, -(-len(steps) // _POINTS))
        for at in [*range(0, len(steps), every), *([len(steps) - 1] if len(steps) else [])]:
            loss = decimal(steps[at].loss)
            if loss is not None:
                found.append((steps[at].iteration, loss if math.isfinite(loss) else None))
        return found


def _recovery(failure: Interruption) -> dict[str, Any]:
    return {
        "number": failure.number,
        "at": failure.began,
        "cause": describe_cause({"kind": failure.kind, "cause": failure.cause}),
        "planned": failure.planned,
        "after_iteration": failure.last_iteration,
        "losses": [describe_loss(loss) for loss in failure.losses],
        "phases": dict(failure.phases),
        "seconds": failure.seconds,
        "recomputed": failure.steps_recomputed,
        "exposed_seconds": failure.exposed_seconds,
    }

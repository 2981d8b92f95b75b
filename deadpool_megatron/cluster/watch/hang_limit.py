"""How long nothing may move before that is a hang: a small multiple of the steps of this run. Pure.

The limit that a user sets must hold for every model, so it is minutes; a run that has been seen for
some steps tells much sooner that something is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping

from deadpool_megatron.cluster.watch.hang import STEP, RoleStatus
from deadpool_megatron.settings import Settings

# With the time between two looks, a hang is found within three of the longest steps.
_STEPS = 2.5
# Busy storage, or a collection of garbage, is no hang of a run whose steps are fast.
_LEAST_SECONDS = 20.0
_STEPS_BEFORE_TRUST = 5


class HangLimit:
    """Learns from each look at all roles; not thread-safe. A new coordinator learns anew.

    Of several steps between two looks none took longer than what lies between the looks.
    """

    def __init__(self, settings: Settings) -> None:
        """``hang_seconds`` is the limit that is never exceeded, and holds until enough is known."""
        self._hang_seconds = settings.hang_seconds
        # A lost node is no hang, and a wait at the gate is told before it could be one.
        early = max(settings.node_silence_seconds, settings.gate_report_seconds)
        self._least_seconds = max(_LEAST_SECONDS, 2 * early)
        self._longest = 0.0
        self._seen = 0
        self._iteration = -1
        self._since: float | None = None

    @property
    def seconds(self) -> float:
        """The limit in force."""
        if self._seen < _STEPS_BEFORE_TRUST:
            return self._hang_seconds
        return min(self._hang_seconds, max(self._least_seconds, _STEPS * self._longest))

    def look(self, statuses: Mapping[int, RoleStatus], now: float) -> None:
        """Take what all roles do at the time ``now``. A step in which a role was seen in another
        section (evaluation, a save, the gate) tells nothing; nor does the one it began with.
        """
        iteration = max((status.iteration for status in statuses.values()), default=-1)
        usual = all(status.section == STEP for status in statuses.values())
        if not usual or iteration < self._iteration:
            self._since = None
        elif iteration > self._iteration:
            if self._since is not None:
                self._longest = max(self._longest, now - self._since)
                self._seen += iteration - self._iteration
            self._since = now
        self._iteration = iteration

    def was_reached(self, still_seconds: float) -> None:
        """A hang was found after so long. Where it was none, but something slow, as storage can be,
        the next one is given more than twice the time.
        """
        self._longest = max(self._longest, still_seconds)
        self._since = None

    def forget_step(self) -> None:
        """What comes next does not begin where a step does: another epoch."""
        self._since = None

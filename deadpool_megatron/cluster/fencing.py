"""When a node that may be cut off must stop its members: the agent's half of fencing by time.

The coordinator gives the roles of a silent node away after ``node_silence_seconds`` (G) since it
last heard from it, and only if its own sign of life was in the journal all that time. The agent
ends its members ``fence_seconds`` (F) after it *sent* the newest beat that was acknowledged, which
is no later than the moment at which the coordinator heard it. With P the time between two looks
into the journal, D the time to kill the members and r the bound on the ratio of two clocks' rates:
(F + P + D) r < G. Nothing is assumed about the network, nor that two clocks show the same time.

A coordinator that shows no sign of life gives nothing away, so while the journal can be read and
the sign stands still, training goes on. After such a gap the coordinator (the old one, or one that
took over) counts every silence anew; see :class:`~deadpool_megatron.cluster.leadership.Rhythm`.
"""

from __future__ import annotations

from deadpool_megatron.cluster.leadership import Rhythm


class Fence:
    """Pure of I/O and clocks; times are monotonic seconds of this host. Not thread-safe."""

    def __init__(self, fence_seconds: float, rhythm: Rhythm) -> None:
        self._limit = fence_seconds
        self._rhythm = rhythm
        self._contact: float | None = None
        self._mark: tuple[int, str] | None = None
        self._changed_at = 0.0
        self._looked_at = 0.0

    def heard(self, sent_at: float) -> None:
        """The coordinator acknowledged a beat (or a join) that was sent at ``sent_at``."""
        if self._contact is None or sent_at > self._contact:
            self._contact = sent_at

    def looked(self, term: int, beat: str, at: float) -> None:
        """The journal was read, beginning at ``at``."""
        self._looked_at = at
        if self._mark != (term, beat):
            self._mark = (term, beat)
            self._changed_at = at
        elif at - self._changed_at >= self._rhythm.stall and self._contact is not None:
            self._contact = max(self._contact, at)

    def silent_seconds(self, now: float) -> float:
        """How long nothing has proved that this node still counts; 0 before the first contact."""
        return 0.0 if self._contact is None else now - self._contact

    def verdict(self, now: float) -> str:
        """Why the members must be stopped now; empty while they may go on."""
        silent = self.silent_seconds(now)
        if silent <= self._limit:
            return ""
        if now - self._looked_at > 2 * self._rhythm.stall:
            return f"cut off: no coordinator and no journal for {silent:.1f} s"
        return f"cut off: the coordinator lives, but was not reached for {silent:.1f} s"

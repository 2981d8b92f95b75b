"""The fence of a node that may be cut off: when it must stop its members."""

from __future__ import annotations

import math

from deadpool_megatron.cluster.journal.terms import HeartbeatTiming, ReturnLimits
from deadpool_megatron.settings import Settings


class Fence:
    """The moment by which a node that may be cut off must stop its members: the agent's half of
    fencing by time. It uses no I/O and no clocks; times are monotonic seconds of this host.

    The coordinator reassigns the roles of a silent node ``node_silence_seconds`` (G) after its last
    message, and only if the coordinator's own heartbeat was in the journal all that time. The
    agent ends its members ``fence_seconds`` (F) after it *sent* the newest beat that was
    acknowledged, which is no later than the moment at which the coordinator received it. With P the
    time between two reads of the journal, D the time to kill the members and r the bound on the
    ratio of two clocks' rates: (F + P + D) r < G. This assumes nothing about the network, and no
    agreement between the times of two clocks.

    A coordinator without a heartbeat reassigns nothing. So while the journal can be read and the
    heartbeat does not change, training continues. After such a gap the coordinator restarts every
    silence timer; see :class:`~deadpool_megatron.cluster.journal.terms.HeartbeatTiming`. But a
    successor may claim its term right after such a read. So the read counts for a shorter time than
    an acknowledgement; see :class:`~deadpool_megatron.cluster.journal.terms.ReturnLimits`.

    A coordinator that acknowledges beats while its heartbeat does not change may have a successor.
    Then the node relies on what it reads itself. Only a node that has read nothing for longer than
    a standby pauses counts such an acknowledgement, for the same time as a read.
    """

    def __init__(self, settings: Settings, agents: int) -> None:
        self._limit = settings.fence_seconds
        self._short_limit = ReturnLimits.of(settings, agents).used
        self._rhythm = HeartbeatTiming.of(settings)
        self._contact = self._short_contact = self._looked_at = -math.inf
        self._term = 0  # the newest that has acknowledged anything
        self._mark = (0, "")
        self._changed_at = 0.0

    def record_contact(self, sent_at: float, term: int, has_heartbeat: bool) -> None:
        """Record that a term's coordinator acknowledged a beat or join sent at ``sent_at``.
        ``has_heartbeat``: its heartbeat was in the journal at that time."""
        if term < max(self._term, self._mark[0]):
            return
        if has_heartbeat or not self._term:
            self._contact = max(self._contact, sent_at)
        elif sent_at - self._looked_at > self._rhythm.unread:
            self._short_contact = max(self._short_contact, sent_at)
        self._term = term

    def record_read(self, term: int, beat: str, at: float) -> None:
        """Record a read of the journal that began at ``at``."""
        self._looked_at = at
        if self._mark != (term, beat):
            self._mark = (term, beat)
            self._changed_at = at
        elif at - self._changed_at >= self._rhythm.stall:
            self._short_contact = max(self._short_contact, at)

    def verdict(self, now: float) -> str:
        """Return why the members must be stopped now; empty while they may continue, and before the
        first contact."""
        until = max(self._contact + self._limit, self._short_contact + self._short_limit)
        if not self._term or now <= until:
            return ""
        silent = now - max(self._contact, self._short_contact)
        if now - self._looked_at > 2 * self._rhythm.stall:
            return f"cut off: no coordinator and no journal for {silent:.1f} s"
        return f"cut off: the coordinator lives, but was not reached for {silent:.1f} s"

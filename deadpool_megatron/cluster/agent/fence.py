"""The fence of a node that may be cut off: when it must stop its members."""

from __future__ import annotations

from deadpool_megatron.cluster.journal.terms import HeartbeatTiming
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
    silence timer; see :class:`~deadpool_megatron.cluster.journal.terms.HeartbeatTiming`. A
    coordinator that takes over gives every node ``rejoin_seconds`` from its claim, of which the
    node allows itself the fraction F / G.
    """

    def __init__(self, settings: Settings) -> None:
        self._limit = settings.fence_seconds
        share = settings.fence_seconds / settings.node_silence_seconds
        self._rejoin_limit = settings.rejoin_seconds * share
        self._rhythm = HeartbeatTiming.of(settings)
        self._contact: float | None = None
        self._contact_term = 0
        self._mark: tuple[int, str] | None = None
        self._term_at = 0.0
        self._changed_at = 0.0
        self._looked_at = 0.0

    def record_contact(self, sent_at: float, term: int) -> None:
        """Record that a term's coordinator acknowledged a beat or join sent at ``sent_at``."""
        if term >= self._contact_term:
            newest = self._contact if term == self._contact_term else None
            self._contact_term = term
            self._contact = sent_at if newest is None else max(newest, sent_at)

    def record_read(self, term: int, beat: str, at: float) -> None:
        """Record a read of the journal that began at ``at``."""
        before, self._looked_at = self._looked_at, at
        if self._mark is None:
            self._term_at = at if self._contact is None else self._contact
        elif term > self._mark[0]:
            # The term was claimed after the previous read: long ago, if the journal was out of
            # reach since then.
            self._term_at = before
        if self._mark != (term, beat):
            self._mark = (term, beat)
            self._changed_at = at
        elif at - self._changed_at >= self._rhythm.stall and self._contact is not None:
            self._contact = max(self._contact, at)

    def silent_seconds(self, now: float) -> float:
        """Return the seconds since the last proof that the coordinator relies on this node; 0
        before the first contact."""
        if self._contact is None:
            return 0.0
        return now - (self._term_at if self._is_awaited() else self._contact)

    def _is_awaited(self) -> bool:
        """Return whether a coordinator that this node has not reached yet has taken over."""
        return self._mark is not None and self._mark[0] > self._contact_term

    def verdict(self, now: float) -> str:
        """Return why the members must be stopped now; empty while they may continue."""
        silent = self.silent_seconds(now)
        if silent <= (self._rejoin_limit if self._is_awaited() else self._limit):
            return ""
        if now - self._looked_at > 2 * self._rhythm.stall:
            return f"cut off: no coordinator and no journal for {silent:.1f} s"
        return f"cut off: the coordinator lives, but was not reached for {silent:.1f} s"

"""Fencing by time: a node has stopped its members before its roles are given away, always."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings, strategies as st

from deadpool_megatron.cluster.agent.fence import Fence
from deadpool_megatron.cluster.journal.terms import HeartbeatTiming
from deadpool_megatron.settings import Settings

# Round numbers for the tests by hand; what holds always is tried with the defaults as well.
SETTINGS = Settings(
    fence_seconds=6.0, node_silence_seconds=8.0, takeover_seconds=3.0, rejoin_seconds=12.0
)
DEFAULTS = Settings()
TICK = 0.1
KILL_SECONDS = 0.5
INTERVALS = st.lists(
    st.tuples(st.floats(0, 60), st.floats(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=4,
)


def test_fence_fits_the_default_settings():
    rhythm = HeartbeatTiming.of(SETTINGS)
    assert (rhythm.beat, rhythm.gap, rhythm.stall) == (0.5, 1.0, 2.0)
    for chosen in (SETTINGS, DEFAULTS):
        # As docs/control-plane.md has it: a second to kill, clocks that differ by a twentieth.
        stopped = (chosen.fence_seconds + HeartbeatTiming.of(chosen).beat + 1.0) * 1.05
        assert stopped <= chosen.node_silence_seconds
    assert DEFAULTS.node_silence_seconds + TICK < 5.0, "a powered-off host is noticed in 5 s"


def test_fence_ignores_a_dead_coordinator():
    fence = Fence(SETTINGS)
    fence.record_contact(0.0, 1)
    for half_second in range(400):
        fence.record_read(1, "1 9", half_second / 2)
        assert fence.verdict(half_second / 2) == ""
    # The next one moves: from here on it has to be reached, in its longer time.
    for half_second in range(400, 418):  # 9 of 12 seconds, from the look before on
        fence.record_read(2, f"2 {half_second}", half_second / 2)
        assert fence.verdict(half_second / 2) == ""
    fence.record_read(2, "2 418", 209.0)
    assert "the coordinator lives" in fence.verdict(209.0)
    fence.record_contact(208.9, 1)
    assert fence.verdict(209.0)  # the old coordinator's word counts no more
    fence.record_contact(209.0, 2)
    assert fence.verdict(215.0) == ""
    assert fence.verdict(215.1)


class World:
    """A node and a coordinator with one clock, in steps of ``TICK`` seconds."""

    def __init__(
        self,
        cut: Sequence[tuple[float, float]],
        stopped: Sequence[tuple[float, float]],
        unwritable: Sequence[tuple[float, float]],
        unreadable: Sequence[tuple[float, float]],
        taken_over_at: float = math.inf,
        settings: Settings = SETTINGS,
    ) -> None:
        self.settings, self.rhythm = settings, HeartbeatTiming.of(settings)
        self.cut, self.stopped = cut, stopped
        self.unwritable, self.unreadable = unwritable, unreadable
        self.taken_over_at = taken_over_at
        self.term = 1
        self.fence = Fence(settings)
        self.fence.record_contact(0.0, 1)
        self.journal = 0
        self.written_at = self.last_seen = self.ticked_at = 0.0
        self.inbox: list[tuple[float, bool]] = []
        self.joined = True
        self.fenced_at: float | None = None

    def during(self, intervals: Sequence[tuple[float, float]], now: float) -> bool:
        return any(begin <= now < end for begin, end in intervals)

    def run(self, seconds: float) -> None:
        for step in range(int(seconds / TICK)):
            now = step * TICK
            self.node(step, now)
            if self.term == 1 and now >= self.taken_over_at:
                self.take_over(now)
            if not self.during(self.stopped, now):
                self.coordinator(step, now)

    def take_over(self, now: float) -> None:
        """Another coordinator claims the next term; the first one is never heard again."""
        self.term = 2
        self.joined = False
        self.journal += 1
        self.inbox.clear()
        self.ticked_at = self.written_at = now
        self.last_seen = now + self.settings.rejoin_seconds - self.settings.node_silence_seconds

    def node(self, step: int, now: float) -> None:
        if self.fenced_at is not None:
            return
        if not self.during(self.cut, now):
            self.inbox.append((now, self.joined))
        looks = max(1, int(self.rhythm.beat / TICK + 0.01))
        if step % looks == 0 and not self.during(self.unreadable, now):
            self.fence.record_read(self.term, str(self.journal), now)
        if self.fence.verdict(now):
            self.fenced_at = now

    def coordinator(self, step: int, now: float) -> None:
        if now - self.ticked_at > 3 * self.settings.beat_interval_seconds:
            self.last_seen = max(self.last_seen, now)
        self.ticked_at = now
        for sent_at, is_beat in self.inbox:
            # Who has sent a beat has had the welcome; who joined may never have heard of it.
            credit = self.settings.rejoin_seconds - self.settings.node_silence_seconds
            self.last_seen = now if is_beat else now + credit
            if not self.during(self.cut, now):
                self.fence.record_contact(sent_at, self.term)
                self.joined = True
        self.inbox.clear()
        if now - self.written_at >= self.rhythm.beat and not self.during(self.unwritable, now):
            self.journal += 1
            if now - self.written_at > self.rhythm.gap:
                self.last_seen = max(self.last_seen, now)
            self.written_at = now
        fresh = now - self.written_at <= self.rhythm.gap
        if fresh and now - self.last_seen > self.settings.node_silence_seconds:
            assert self.fenced_at is not None, f"given away at {now} while the node goes on"
            assert self.fenced_at + KILL_SECONDS <= now


@pytest.mark.slow
# Seen: the new term was found 4.5 s after its claim, and counted from there.
@example(
    cut=[(0.05, 10.42)],
    stopped=[],
    unwritable=[],
    unreadable=[(0.025, 4.08), (6.34, 10.89)],
    taken_over_at=0.0,
)
@settings(max_examples=100)
@given(INTERVALS, INTERVALS, INTERVALS, INTERVALS, st.floats(0, 80))
def test_fence_stops_a_node_before_its_roles_are_reassigned(
    cut, stopped, unwritable, unreadable, taken_over_at
):
    for chosen in (SETTINGS, DEFAULTS):
        World(cut, stopped, unwritable, unreadable, settings=chosen).run(100.0)
        World(cut, stopped, unwritable, unreadable, taken_over_at, chosen).run(120.0)


@given(st.floats(0, 4.9), st.floats(1, 20))
def test_fence_tolerates_a_short_cut(seconds, begin):
    world = World([(begin, begin + seconds)], [], [], [])
    world.run(60.0)
    assert world.fenced_at is None

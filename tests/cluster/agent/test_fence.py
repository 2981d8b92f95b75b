"""Fencing by time: a node has stopped its members before its roles are given away, always."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache

import pytest
from hypothesis import example, given, settings, strategies as st

from deadpool_megatron.cluster.agent.fence import Fence
from deadpool_megatron.cluster.journal.terms import HeartbeatTiming
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.settings import Settings
from tests.cluster.machine.bootstrapping.test_takeover import rejoin
from tests.cluster.machine.rig import Rig

# Round numbers for the tests by hand; what holds always is tried with the defaults as well.
SETTINGS = Settings(
    fence_seconds=6.0, node_silence_seconds=8.0, takeover_seconds=3.0, rejoin_seconds=12.0
)
DEFAULTS = Settings()
TICK = 0.1
KILL_SECONDS = 0.8
# A coordinator whose successor has begun learns of that from other agents, if not from the journal.
NEWS_SECONDS = 0.3
Intervals = Sequence[tuple[float, float]]
INTERVALS = st.lists(
    st.tuples(st.floats(0, 60), st.floats(0, 30)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=4,
)
RATES = st.sampled_from([0.976, 1.0, 1.024])  # two clocks differ by a twentieth at most


def test_limits_of_the_fence_fit_each_other():
    rhythm = HeartbeatTiming.of(SETTINGS)
    assert (rhythm.beat, rhythm.gap, rhythm.stall) == (0.5, 1.0, 2.0)
    for chosen in (SETTINGS, DEFAULTS):
        # As docs/control-plane.md has it: a second to kill, clocks that differ by a twentieth.
        rest = HeartbeatTiming.of(chosen).beat + 1.0
        assert (chosen.fence_seconds + rest) * 1.05 <= chosen.node_silence_seconds
        used = chosen.rejoin_seconds * chosen.fence_seconds / chosen.node_silence_seconds
        assert (used + rest) * 1.05 <= chosen.rejoin_seconds
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


@dataclass
class Faults:
    """Faults of a run. ``cut``: nothing passes between the node and the coordinators of these
    terms; ``stopped``, ``journal_lost``: so are these coordinators. ``unread``: the node reads
    nothing. ``claims``: when standbys try to take over. ``off_at``: when the node's host ends.
    ``refuses``: connections to the node are refused. ``rates``: of the clocks of both sides."""

    cut: dict[int, Intervals] = field(default_factory=dict)
    stopped: dict[int, Intervals] = field(default_factory=dict)
    journal_lost: dict[int, Intervals] = field(default_factory=dict)
    unread: Intervals = ()
    claims: Sequence[float] = ()
    off_at: float = math.inf
    refuses: bool = False
    rates: tuple[float, float] = (1.0, 1.0)


FAULTS = st.builds(
    Faults,
    cut=st.fixed_dictionaries(dict.fromkeys((1, 2, 3), INTERVALS)),
    stopped=st.fixed_dictionaries(dict.fromkeys((1, 2, 3), INTERVALS)),
    journal_lost=st.fixed_dictionaries(dict.fromkeys((1, 2, 3), INTERVALS)),
    unread=INTERVALS,
    claims=st.lists(st.floats(0, 80), max_size=2).map(sorted),
    rates=st.tuples(RATES, RATES),
)


def during(intervals: Intervals, now: float) -> bool:
    return any(begin <= now < end for begin, end in intervals)


@cache
def run_of_two(chosen: Settings) -> Rig:
    """Node 0 is the one in question."""
    return Rig(2, 1, **asdict(chosen)).run()


class Coordinator:
    """A coordinator as node 0 of its run sees it. Times are those of its clock."""

    def __init__(self, world: "World", term: int, now: float) -> None:
        self.world, self.term, self.rhythm = world, term, world.rhythm
        self.written_at = self.ticked_at = now
        self.last_seen: float | None = now if term == 1 else None  # of the node, once it is there
        self.inbox: list[tuple[float, bool]] = []
        self.count = 0
        if term > 1:
            old = run_of_two(world.settings)
            old.now = now
            self.rig = old.successor()
            rejoin(self.rig, old, 1, 2)

    def restart_counts(self, now: float) -> None:
        if self.last_seen is not None:
            self.last_seen = max(self.last_seen, now)

    def act(self, now: float, *, reads_journal: bool) -> bool:
        """Return whether the roles of the node are given away."""
        if self.term > 1:
            self.rig.now = now
        if now - self.ticked_at > 3 * self.world.settings.beat_interval_seconds:
            self.restart_counts(now)
        self.ticked_at = now
        if reads_journal and now - self.written_at >= self.rhythm.beat:
            self.count += 1
            self.world.sign = f"{self.term} {self.count}"
            self.world.signed_at = self.world.now
            if now - self.written_at > self.rhythm.gap:
                self.restart_counts(now)
            self.written_at = now
        is_fresh = now - self.written_at <= self.rhythm.gap
        for sent_at, is_beat in self.inbox:
            self.take(sent_at, is_beat, now)
        self.inbox.clear()
        if self.last_seen is not None:
            return is_fresh and now - self.last_seen > self.world.settings.node_silence_seconds
        if self.world.faults.refuses:
            self.rig.feed(ev.AgentEnded(0))
        self.rig.tick(0.0)
        return 0 in self.rig.state.fleet.removed

    def take(self, sent_at: float, is_beat: bool, now: float) -> None:
        """Take a beat or join, and answer."""
        if not is_beat and self.term > 1 and self.last_seen is None:
            rejoin(self.rig, run_of_two(self.world.settings), 0)
        # A node that has sent a beat has had the welcome; one that joined may not know of it.
        chosen = self.world.settings
        credit = chosen.rejoin_seconds - chosen.node_silence_seconds
        self.last_seen = now if is_beat else now + credit
        if not self.world.is_cut(self.term):
            self.world.fence.record_contact(sent_at, self.term)
            self.world.session = self.term
            self.world.acknowledged_at = sent_at


class World:
    """A node, its journal and successive coordinators, in steps of ``TICK`` seconds."""

    def __init__(self, faults: Faults, chosen: Settings = SETTINGS) -> None:
        self.faults, self.settings, self.rhythm = faults, chosen, HeartbeatTiming.of(chosen)
        self.node_rate, self.other_rate = faults.rates
        self.now = self.signed_at = 0.0
        self.sign, self.session, self.known = "1 0", 1, 1
        self.fence = Fence(chosen)
        self.fence.record_read(1, self.sign, 0.0)
        self.fence.record_contact(0.0, 1)
        self.looked_at = self.acknowledged_at = 0.0
        self.coordinators = [Coordinator(self, 1, 0.0)]
        self.claims, self.claimed_at = list(faults.claims), math.inf
        # Without the journal and such news a node cannot tell an old coordinator from the newest.
        self.news_seconds = NEWS_SECONDS if faults.unread else math.inf
        self.fenced_at: float | None = None
        self.lost_at: float | None = None

    def is_cut(self, term: int) -> bool:
        return during(self.faults.cut.get(term, ()), self.now) or self.now >= self.faults.off_at

    def run(self, seconds: float) -> "World":
        for step in range(int(seconds / TICK)):
            self.now = step * TICK
            if self.fenced_at is None and self.now < self.faults.off_at:
                self.act_as_node(self.now * self.node_rate)
            self.consider_claim()
            for coordinator in list(self.coordinators):
                stopped = self.faults.stopped.get(coordinator.term, ())
                if not during(stopped, self.now):
                    self.act_as_coordinator(coordinator)
        return self

    def act_as_node(self, now: float) -> None:
        for coordinator in self.coordinators:
            is_session = coordinator.term == self.session
            if (is_session or coordinator.term == self.known) and not self.is_cut(coordinator.term):
                coordinator.inbox.append((now, is_session))
        is_silent = now - self.acknowledged_at > self.settings.fence_seconds / 6
        is_in_touch = not is_silent and self.known == self.session
        if now - self.looked_at >= (8 if is_in_touch else 1) * self.rhythm.beat:
            self.looked_at = now
            if not during(self.faults.unread, self.now):
                self.known = self.coordinators[-1].term
                self.fence.record_read(self.known, self.sign, now)
        if self.fence.verdict(now):
            self.fenced_at = self.now

    def consider_claim(self) -> None:
        """A standby, which may have seen the last sign at once, is first in the order."""
        still = (self.now - self.signed_at) * self.other_rate
        if self.claims and self.now >= self.claims[0] and still >= self.rhythm.gap:
            self.claims.pop(0)
            term = self.coordinators[-1].term + 1
            self.sign, self.signed_at, self.claimed_at = f"{term} 0", self.now, self.now
            self.coordinators.append(Coordinator(self, term, self.now * self.other_rate))

    def act_as_coordinator(self, coordinator: Coordinator) -> None:
        reads = not during(self.faults.journal_lost.get(coordinator.term, ()), self.now)
        if coordinator is not self.coordinators[-1] and (
            reads or self.now > self.claimed_at + self.news_seconds
        ):
            self.coordinators.remove(coordinator)
        elif coordinator.act(self.now * self.other_rate, reads_journal=reads) and not self.lost_at:
            self.lost_at = self.now
            if self.now >= self.faults.off_at or self.faults.refuses:
                return
            assert self.fenced_at is not None, f"given away at {self.now} while the node goes on"
            assert self.fenced_at + KILL_SECONDS <= self.now


@pytest.mark.slow
# Seen: the new term was found 4.5 s after its claim, and counted from there.
@example(
    Faults(
        cut={1: [(0.05, 10.42)], 2: [(0.05, 10.42)]},
        unread=[(0.025, 4.08), (6.34, 10.89)],
        claims=[0.0],
    )
)
# The journal is lost just before a claim, which the node does not see.
@example(
    Faults(
        cut={1: [(5.0, 99.0)], 2: [(5.0, 99.0)]},
        stopped={1: [(5.0, 99.0)]},
        unread=[(14.0, 99.0)],
        claims=[14.1],
    )
)
# The successor is held up right after its claim; it goes on before anybody takes over from it.
@example(
    Faults(
        cut={1: [(5.0, 99.0)], 2: [(5.0, 99.0)]},
        stopped={1: [(5.0, 99.0)], 2: [(8.0, 20.0)]},
        claims=[7.9],
    )
)
@settings(max_examples=200, deadline=None)
@given(FAULTS)
def test_fence_stops_a_node_before_its_roles_are_reassigned(faults):
    for chosen in (SETTINGS, DEFAULTS):
        World(faults, chosen).run(100.0)


@given(st.floats(0, 4.9), st.floats(1, 20))
def test_fence_tolerates_a_short_cut(seconds, begin):
    world = World(Faults(cut={1: [(begin, begin + seconds)]})).run(60.0)
    assert world.fenced_at is None


LOST = 10.0  # when the first coordinator ends
ENDED = {1: [(LOST, 100.0)]}


@pytest.mark.parametrize(("waited", "until"), [(1.2, 9.0), (2.6, 10.4), (2.6, 0.0)])
def test_node_that_is_reached_again_in_time_is_not_lost(waited, until):
    """It was cut off when the coordinator ended, which somebody noticed after ``waited``."""
    faults = Faults({1: [(LOST, 100.0)], 2: [(LOST, LOST + until)]}, ENDED, claims=[LOST + waited])
    world = World(faults, DEFAULTS).run(60.0)
    assert (world.fenced_at, world.lost_at, world.session) == (None, None, 2)


@pytest.mark.parametrize("is_off", [True, False])
@pytest.mark.parametrize("waited", [1.2, 2.6])
def test_silent_node_that_stays_away_is_lost_after_a_takeover(waited, *, is_off):
    off_at = LOST if is_off else math.inf
    cut = {term: [(LOST, 100.0)] for term in (1, 2)}
    world = World(Faults(cut, ENDED, claims=[LOST + waited], off_at=off_at), DEFAULTS).run(60.0)
    assert world.lost_at == pytest.approx(LOST + waited + DEFAULTS.rejoin_seconds, abs=0.3)


@pytest.mark.parametrize("is_off", [True, False])
def test_refused_connections_end_the_wait_for_a_node(is_off):
    """If a firewall refuses for a node that lives, that node ends its members nevertheless."""
    off_at = LOST if is_off else math.inf
    cut = {term: [(LOST, 100.0)] for term in (1, 2)}
    faults = Faults(cut, ENDED, claims=[LOST + 1.2], off_at=off_at, refuses=True)
    world = World(faults, DEFAULTS).run(60.0)
    assert world.lost_at == pytest.approx(LOST + 1.2, abs=0.11)
    if not is_off:
        assert world.fenced_at <= LOST + 1.2 + DEFAULTS.rejoin_seconds - KILL_SECONDS


def test_node_waits_for_the_third_coordinator_if_the_second_dies_as_well():
    stopped = {1: [(LOST, 100.0)], 2: [(LOST + 2.7, 100.0)]}
    world = World(Faults(stopped=stopped, claims=[LOST + 2.6, LOST + 7.0]), DEFAULTS).run(60.0)
    assert (world.fenced_at, world.lost_at, world.session) == (None, None, 3)

"""Any order of deaths, messages, journal delays and orders: the rules of the design hold.

The checks themselves are in machine_world: rule 2 (what all committed can be produced), rule 3
(what was promised is there), rule 5 (nothing stale changes anything), and that epochs rise, records
are one per epoch, seats are live, and every wait has a deadline.
"""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.layout.schemes import plan_of_kind
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.preflight.health import Health
from tests.cluster.machine.stale import feed_stale
from tests.cluster.machine.world import World

INDEX = st.integers(0, 1_000)
FIT = HostFacts("host")
SICK = replace(FIT, health=Health.OUT, health_text="row remapping failed")


class Cluster(RuleBasedStateMachine):
    """Rules pick what happens next; numbers are taken modulo what there is."""

    world: World

    @initialize(
        nodes=st.integers(2, 3),
        spares=st.integers(0, 2),
        nproc=st.integers(1, 2),
        replicas=st.integers(1, 2),
        parity_group=st.sampled_from([0, 0, 2, 3]),
        started=st.booleans(),
    )
    def begin(
        self, nodes: int, spares: int, nproc: int, replicas: int, parity_group: int, started: bool
    ) -> None:
        self.world = World(nodes, spares, nproc, replicas, parity_group)
        if started:
            self.world.settle()
            assert self.world.state.phase is Phase.RUNNING
            self.world.train()

    def node(self, index: int) -> int | None:
        nodes = sorted(self.world.nodes)
        return nodes[index % len(nodes)] if nodes else None

    @rule()
    def settle(self) -> None:
        self.world.settle()

    @rule(times=st.integers(1, 2))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            self.world.settle()
            self.world.train()

    @rule(turns=st.lists(INDEX, min_size=5, max_size=30))
    def shuffle(self, turns: list[int]) -> None:
        """Messages, journal and restores in an order of hypothesis' choice."""
        for turn in turns:
            node = self.node(turn // 4)
            if turn % 4 == 0 and node is not None:
                self.world.hear(node)
            elif turn % 4 == 1 and node is not None:
                self.world.obey(node)
            elif turn % 4 == 2:
                self.world.restore(turn // 4 % self.world.config.world_size)
            else:
                self.world.hear_last_words()
                self.world.write_journal()

    @rule(times=st.integers(1, 3))
    def train(self, times: int) -> None:
        for _ in range(times):
            self.world.train()

    @rule()
    def enter(self) -> None:
        self.world.enter()

    @rule(index=INDEX)
    def complete(self, index: int) -> None:
        self.world.complete(index % self.world.config.world_size)

    @rule(index=INDEX)
    def ship(self, index: int) -> None:
        self.world.ship(index % self.world.config.world_size)

    @rule(index=INDEX)
    def restore(self, index: int) -> None:
        self.world.restore(index % self.world.config.world_size)

    @rule(index=INDEX, times=st.integers(1, 4))
    def obey(self, index: int, times: int) -> None:
        for _ in range(times):
            node = self.node(index)
            if node is not None:
                self.world.obey(node)

    @rule(index=INDEX, times=st.integers(1, 4))
    def hear(self, index: int, times: int) -> None:
        for _ in range(times):
            node = self.node(index)
            if node is not None:
                self.world.hear(node)

    @rule()
    def hear_last_words(self) -> None:
        self.world.hear_last_words()

    @rule()
    def write_journal(self) -> None:
        self.world.write_journal()

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.6, 0.6, 5.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(index=INDEX)
    def lose_node(self, index: int) -> None:
        # Mostly as many as the copies allow, sometimes more.
        node = self.node(index)
        allowed = self.world.losses_since_protected < self.world.tolerance
        if node is not None and (allowed or index % 8 == 0):
            self.world.lose(node)

    @rule(
        index=INDEX,
        phase=st.sampled_from(
            [Phase.CLOSING, Phase.DECIDING, Phase.DECIDING, Phase.OPENING, Phase.PAUSING]
        ),
    )
    def strike(self, index: int, phase: Phase) -> None:
        """A first failure (or drain) leads to the phase, a second one hits there at once."""
        if phase is Phase.PAUSING:
            self.drain(index)
        else:
            self.end_member(index, index)
        self.world.settle(until=phase)
        node = self.node(index // 7)
        if index % 2:
            self.lose_node(index // 7)
        else:
            self.end_member(index // 7, index // 7)
        for _ in range(6):
            self.world.hear_last_words()
            if node in self.world.nodes:
                self.world.hear(node)

    @rule(
        index=INDEX,
        phase=st.sampled_from(
            [Phase.CLOSING, Phase.DECIDING, Phase.OPENING, Phase.PAUSING, Phase.WAITING_SPARE]
        ),
        landed=st.booleans(),
        received=st.sampled_from([0, 1, 10]),
    )
    def strike_coordinator(self, index: int, phase: Phase, landed: bool, received: int) -> None:
        """A failure (or drain) leads to the phase, and there the coordinator dies."""
        if phase is Phase.PAUSING:
            self.drain(index)
        elif phase is Phase.WAITING_SPARE:
            self.lose_node(index)
        else:
            self.end_member(index, index)
        self.world.settle(until=phase)
        self.world.restart_coordinator(landed=landed, received=received)

    @rule(index=INDEX, slot=INDEX)
    def end_member(self, index: int, slot: int) -> None:
        node = self.node(index)
        members = sorted(self.world.nodes[node].members) if node is not None else []
        if members and node is not None:
            self.world.end_member(node, members[slot % len(members)])

    @rule(index=INDEX)
    def suspect_member(self, index: int) -> None:
        places = sorted(self.world.state.fleet.members)
        if places:
            node, slot = places[index % len(places)]
            member = self.world.state.fleet.members[node, slot]
            self.world.feed(ev.MemberSuspected(node, slot, member.incarnation, "frozen"))

    @precondition(lambda self: self.world.next_node < 16)
    @rule()
    def join_spare(self) -> None:
        self.world.join(self.world.next_node)
        self.world.next_node += 1

    @rule(index=INDEX)
    def drain(self, index: int) -> None:
        node = self.node(index)
        if node is not None:
            self.world.feed(ev.DrainRequested(node))

    @rule(every=st.integers(1, 3), scheme=st.sampled_from(["buddy", "parity"]))
    def change_plan(self, every: int, scheme: str) -> None:
        plan = plan_of_kind(scheme, self.world.config.settings, every, 2)
        self.world.feed(ev.ProtectionRequested(plan, "a test"))

    @rule(path=st.sampled_from(["", "/exports/iter_0000001"]))
    def end_export(self, path: str) -> None:
        self.world.end_export(path)

    @rule(index=INDEX)
    def want_dump(self, index: int) -> None:
        if index % 8 == 0:  # it ends the example
            self.world.feed(ev.DumpRequested("time is over"))

    @rule(
        index=INDEX,
        landed=st.booleans(),
        received=st.sampled_from([0, 0, 1, 2, 10]),
        come_back=st.booleans(),
    )
    def restart_coordinator(self, index: int, landed: bool, received: int, come_back: bool) -> None:
        if index % 4:
            return  # often enough
        self.world.restart_coordinator(landed=landed, received=received)
        if come_back:
            self.world.settle()
            self.world.tick(self.world.config.settings.rejoin_seconds)

    @rule()
    def take_over_quietly(self) -> None:
        self.world.take_over_quietly()

    @rule(index=INDEX, other=INDEX)
    def see_nan(self, index: int, other: int) -> None:
        """Often another failure closes the epoch before it is told."""
        if index % 4 == 0:
            self.world.see_nan(index // 4 % self.world.config.world_size)
            if other % 2:
                self.end_member(other // 2, other // 2)

    @rule(index=INDEX, sick=st.booleans())
    def tell_facts(self, index: int, sick: bool) -> None:
        node = self.node(index)
        if node is not None:
            self.world.feed(ev.FactsReported(node, SICK if sick else FIT))

    @rule(index=INDEX)
    def forget_fault(self, index: int) -> None:
        if index % 4 == 0:
            self.world.forget_fault(index // 4 % self.world.config.world_size)

    @rule()
    def stale(self) -> None:
        feed_stale(self.world)

    @invariant()
    def waits_name_what_they_wait_for(self) -> None:
        state = self.world.state
        assert bool(state.waiting_for()) == (state.phase_state.deadline is not None)

    def teardown(self) -> None:
        """Nobody answers any more: time alone must end every wait."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(100):
            if world.state.phase in (Phase.RUNNING, Phase.ENDED):
                break
            world.tick(400.0)
        assert world.state.phase in (Phase.RUNNING, Phase.ENDED)
        assert world.state.phase is Phase.ENDED or world.state.final is None


Cluster.TestCase.settings = settings(
    max_examples=settings().max_examples * 5 // 2,
    stateful_step_count=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCluster = Cluster.TestCase


def test_who_alone_has_the_first_iteration_and_cannot_write_it_keeps_it():
    """Found by the machine above: no step was reported yet, but one is committed."""
    cluster = Cluster()
    cluster.begin(nodes=2, spares=1, nproc=1, replicas=2, parity_group=0, started=True)
    cluster.lose_node(index=0)
    cluster.lose_node(index=0)
    cluster.restart_coordinator(index=0, landed=False, received=0, come_back=True)
    cluster.settle()
    cluster.teardown()
    finish = cluster.world.finished
    assert finish is not None
    assert finish.keeps_slots
    assert "nothing was saved; the dump of nodes [2] could not be written (" in finish.reason


def test_no_plan_moves_a_role_to_a_quarantined_node():
    """Each epoch is held against it by the world; a failure may."""
    world = World(nodes=2, spares=1, nproc=1, replicas=1)
    world.settle()
    for node in (1, 0):
        world.feed(ev.DrainRequested(node))
        for _ in range(4):
            world.train()
            world.settle()
    seats = world.state.record.seats if world.state.record else {}
    assert {seat.node for seat in seats.values()} == {0, 2}
    world.lose(0)
    for _ in range(4):
        world.settle()
        world.train()
    assert world.state.seats.nodes == {1, 2}


@pytest.mark.parametrize("lost", [None, 0, 2])
def test_a_run_without_spares_exports_what_it_has_dumped(lost):
    """One more node may be lost while the checkpoint is made; the end comes with its end."""
    world = World(nodes=3, spares=0, nproc=2, replicas=1)
    world.settle()
    for _ in range(3):
        world.train()
    world.lose(1)
    world.settle()
    world.tick(world.config.settings.spare_timeout_seconds)
    world.settle()
    assert world.exporting == world.common
    if lost is not None:
        world.lose(lost)
        world.settle()
        assert world.finished is None
    feed_stale(world)
    world.end_export("/exports/iter_0000003" if lost is None else "")
    assert world.finished is not None
    assert world.finished.exit_status == 75
    assert ("--load" in world.finished.reason) is (lost is None)

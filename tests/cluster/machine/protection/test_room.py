"""``mixed`` and memory: a plan that fits, from the start on, or one line why there is none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_megatron.cluster.machine import actions as act
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.chosen_plan import scene_of
from deadpool_megatron.cluster.machine.state import State
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.schemes import ProtectionPlan, plan_of_kind
from deadpool_megatron.layout.sizing import GROUP_SIZES, memory_needs
from tests.cluster.machine import rig as rig_module
from tests.cluster.machine.rig import MEGA, Phase, Rig, g, killed, large


@pytest.fixture(autouse=True)
def large_layouts() -> Iterator[None]:
    with mock.patch.object(rig_module, "layout", large):
        yield


class Room(Rig):
    """A rig whose nodes say how much memory they have; by node in ``memory``, else ``usual``."""

    def __init__(self, **more: object) -> None:
        super().__init__(**more)  # type: ignore[arg-type]
        self.usual = 0
        self.memory: dict[int, int] = {}

    def join(self, *nodes: int) -> None:
        self.feed(
            *(
                ev.NodeJoined(
                    n, "host", 1000 + n, f"node{n}", memory_bytes=self.memory.get(n, self.usual)
                )
                for n in nodes
            )
        )

    def begin(self) -> Room:
        """Until the first epoch runs, with as many records as it takes."""
        self.gather()
        for _ in range(3):
            if self.state.phase is Phase.DECIDING:
                self.opened()
                self.closed()
        return self

    def again(self, iteration: int) -> None:
        """All that are left promise a generation; what is decided opens, or all is over."""
        self.closed(g(iteration, self.record.epoch))
        if self.state.phase is Phase.DECIDING:
            self.opened()


def room(usual: int, **more: object) -> Room:
    rig = Room(**{"protection": "mixed", "nproc": 4, **more})  # type: ignore[arg-type]
    rig.usual = usual
    return rig


def needs(state: State, plan: ProtectionPlan, rig: Room) -> int:
    scene = scene_of(state, rig.settings)
    assert scene is not None
    return max(memory_needs(plan, scene).values())


def sizes(nodes: int = 6, spares: int = 0, replicas: int = 1) -> tuple[int, int]:
    """Memory of the fullest of these nodes with copies, and with the sparest plan."""
    rig = Room(nodes=nodes, spares=spares, nproc=4, replicas=replicas).run()
    groups = [size for size in GROUP_SIZES if size + replicas <= nodes + spares]
    plans = [plan_of_kind("parity", rig.settings, 1, size) for size in groups]
    found = [needs(rig.state, plan, rig) for plan in (ProtectionPlan(), *plans)]
    return found[0], min(found)


def test_what_fits_stays() -> None:
    copies, _ = sizes()
    rig = room(copies + 6 * MEGA, nodes=6, spares=0).begin()
    assert (rig.record.epoch, rig.record.protection) == (1, ProtectionPlan())


def test_room_is_left_for_roles_that_a_spare_takes_over() -> None:
    """Small groups fit, but not beside the slots of the roles; where no plan leaves that much, that
    counts for less than the safer plan."""
    rig = Room(nodes=6, spares=1, nproc=4, replicas=2).run()
    scene = scene_of(rig.state, rig.settings)
    assert scene is not None
    small = plan_of_kind("parity", rig.settings, 1, GROUP_SIZES[0])
    wanted = max(memory_needs(small, replace(scene, roomy=True)).values())
    assert (
        max(memory_needs(small, scene).values()) < wanted < needs(rig.state, ProtectionPlan(), rig)
    )
    rig = room(wanted, nodes=6, spares=1, replicas=2).begin()
    assert rig.record.protection == small
    rig = room(wanted - 1, nodes=6, spares=1, replicas=2).begin()
    assert rig.record.protection == plan_of_kind("parity", rig.settings, 1, GROUP_SIZES[1])
    (why,) = [
        action.data["why"]
        for action in rig.log
        if isinstance(action, act.EmitEvent) and action.kind is Kind.PROTECTION
    ]
    assert "with room to take over the roles of another node" in why
    few, _ = sizes(2, 1, 2)
    assert room(few, nodes=2, spares=1, replicas=2).begin().record.protection == ProtectionPlan()


def test_nothing_fits_ends_the_start_with_one_line() -> None:
    rig = room(2 * MEGA, nodes=4, spares=0).begin()
    (end,) = [action for action in rig.log if isinstance(action, act.Finish)]
    assert end.exit_status == 2
    assert "no scheme fits, parity(3) needs least: node 0 would need" in end.reason
    assert end.reason.endswith("raise --deadpool-memory-gb or add nodes")


def without_its_spare() -> Room:
    """Four nodes and a spare with memory for the sparest plan, which need the spare for it; then it
    is lost."""
    _, least = sizes(4, 1)
    assert least < sizes(4, 0)[1]
    rig = room(least, nodes=4, spares=1).begin()
    assert rig.state.phase is Phase.RUNNING
    rig.lose(4, g(5, rig.record.epoch))
    return rig


def test_where_lost_nodes_make_memory_tight_a_node_that_joins_ends_the_wait() -> None:
    """No other plan is looked for, though copies are asked for."""
    rig = without_its_spare()
    chosen = rig.record.protection
    assert rig.state.phase is Phase.WAITING_SPARE
    assert "a node to join" in rig.emitted(Kind.WAITING_FOR_SPARE)[-1].data["text"]
    rig.join(5)
    assert rig.state.phase is Phase.DECIDING
    rig.opened()
    assert rig.record.protection == chosen
    assert needs(rig.state, rig.record.protection, rig) <= rig.usual


def test_where_nobody_joins_the_state_is_saved() -> None:
    rig = without_its_spare()
    rig.tick(rig.settings.spare_timeout_seconds + 1)
    assert rig.state.phase is Phase.DUMPING


@settings(max_examples=60)
@given(
    nodes=st.integers(3, 7),
    spares=st.integers(0, 3),
    nproc=st.integers(1, 2),
    replicas=st.integers(1, 2),
    limit=st.integers(2, 40),
    poor=st.sets(st.integers(0, 9), max_size=2),
    lost=st.lists(st.integers(0, 9), max_size=4),
)
def test_no_epoch_runs_with_a_plan_that_does_not_fit(
    nodes: int,
    spares: int,
    nproc: int,
    replicas: int,
    limit: int,
    poor: set[int],
    lost: list[int],
) -> None:
    """Whoever is lost, and whoever takes over the roles."""
    with mock.patch.object(rig_module, "layout", large):
        rig = room(limit * MEGA, nodes=nodes, spares=spares, nproc=nproc, replicas=replicas)
        rig.memory = dict.fromkeys(poor, (limit - 2) * MEGA)
        rig.begin()
        for iteration, node in enumerate(lost, 5):
            check(rig)
            if rig.state.phase is Phase.RUNNING and node in rig.state.fleet.nodes:
                rig.warm(*range(nodes, nodes + spares))
                rig.steps(iteration)
                rig.feed(ev.NodeLost(node, "gone"))
                if rig.state.phase is Phase.CLOSING:
                    rig.again(iteration)
        check(rig)


def check(rig: Room) -> None:
    if rig.state.phase is not Phase.RUNNING:
        if rig.state.record is None or not rig.state.lineage.ever_ran:
            (end,) = [action for action in rig.log if isinstance(action, act.Finish)]
            assert end.exit_status == 2
        return
    scene = scene_of(rig.state, rig.settings)
    assert scene is not None
    needed = memory_needs(rig.record.protection, scene)
    for node, known in rig.state.fleet.nodes.items():
        assert needed[node] <= known.memory_bytes


def test_a_coordinator_that_took_over_knows_from_the_slots_what_fits() -> None:
    """Nobody has registered with it, and a spare that held copies is lost."""
    rig = room(100 * MEGA, nodes=4, spares=1).begin()
    rig.alter("memory", layouts={})
    rig.alter_nodes(memory_bytes=2 * MEGA)
    rig.feed(killed(rig, 0))
    rig.hello(0)
    rig.closed(g(3))
    assert rig.state.phase is Phase.WAITING_SPARE
    assert "buddy: node 0 would need" in rig.emitted(Kind.WAITING_FOR_SPARE)[-1].data["text"]

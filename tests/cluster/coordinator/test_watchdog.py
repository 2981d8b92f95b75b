"""From beats to verdicts about slow nodes; from events to requests for other plans, and the RPO."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.files import is_bad
from deadpool_megatron.cluster.coordinator.watchdog import Watchdog
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.machine.chosen_plan import budgets_of, memory_refusal, scene_of
from deadpool_megatron.cluster.machine.membership import exposed_roles
from deadpool_megatron.cluster.watch.windows import WINDOW_ITERATIONS, WINDOWS
from deadpool_megatron.events import Event, Kind, to_line
from deadpool_megatron.layout.schemes import ProtectionPlan, plan_of_kind
from tests.cluster.machine import rig as rig_module
from tests.cluster.machine.rig import Rig
from tests.common.event_schema import check_event

SLOW = 2
# For four roles with their slots and parity blocks, not for copies.
MEGA = 1 << 20
TIGHT = 15 * MEGA


class Job:
    """Roles whose beats are made up; each look sees a window more. Node 2 is 1.5 times slower."""

    def __init__(self, *, evict: str = "on", spares: int = 0) -> None:
        self.rig = Rig(nodes=4, spares=spares, evict_slow=evict).run()
        self._agents = {n: SimpleNamespace(beats={}) for n in range(8)}
        peers: Any = SimpleNamespace(agents=self._agents)
        self._watchdog = Watchdog(self.rig.settings, peers)
        self._now = 0.0
        self._windows = 0

    def look(self) -> tuple[list[Event], list[ev.Input]]:
        self._windows += 1
        self._now += 1.0
        done = self._windows * WINDOW_ITERATIONS
        for role in self.rig.record.seats:
            node, slot, incarnation = self.rig.seat(role)
            own = [done, done * (0.15 if node == SLOW else 0.1)]
            beat = {"section": "step", "iteration": done, "progress": done, "own": own}
            self._agents[node].beats[slot] = {"incarnation": incarnation, **beat}
        return self._watchdog.at_progress(self.rig.state, 1, self._now)

    def until_told(self) -> tuple[list[Event], list[ev.Input]]:
        for _ in range(WINDOWS):
            assert self.look() == ([], [])
        return self.look()


def kinds(events: list[Event]) -> list[Kind]:
    return [event.kind for event in events]


def test_a_slow_node_is_put_aside_for_the_next_run_too() -> None:
    """With the factor as it is by default."""
    events, found = Job(spares=1).until_told()
    assert kinds(events) == [Kind.SLOW_NODE, Kind.NODE_ASIDE]
    assert [is_bad(event) for event in events] == [False, True]
    assert found == [ev.DrainRequested(SLOW)]
    aside = events[1]
    assert aside.data["kind"] == "slow-node"
    assert "0.150 s of its own per iteration, its peers 0.100 s" in aside.data["cause"]
    check_event(json.loads(to_line(aside)))


def test_it_waits_for_a_spare_and_is_moved_once() -> None:
    job = Job()
    events, found = job.until_told()
    assert (kinds(events), found) == ([Kind.SLOW_NODE], [])
    assert job.look() == ([], [])
    job.rig.join(4)
    events, found = job.look()
    assert (kinds(events), found) == ([Kind.NODE_ASIDE], [ev.DrainRequested(SLOW)])
    job.rig.feed(*found)
    assert job.look() == ([], [])


@pytest.mark.parametrize("evict", ["off", "on"])
def test_without_a_good_spare_or_without_the_setting_it_stays(evict: str) -> None:
    job = Job(evict=evict, spares=int(evict == "off"))
    if evict == "on":
        job.rig.join(4)
        job.rig.alter("fleet", deprioritized=frozenset({4}))
    events, found = job.until_told()
    assert (kinds(events), found) == ([Kind.SLOW_NODE], [])


@pytest.fixture(autouse=True)
def large_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards beside which all the rest is small."""
    monkeypatch.setattr(rig_module, "main_bytes", MEGA)


def watchdog_of(rig: Rig) -> Watchdog:
    peers: Any = SimpleNamespace(agents={})
    return Watchdog(rig.settings, peers)


def train(watch: Watchdog, count: int, wait: float = 0.0, ship: float = 0.0) -> None:
    """Iterations of 1 s in epoch 1, each with a wait for the copies of the one before."""
    for iteration in range(1, count + 1):
        waited = {"seconds": wait, "over": True, "lineage": 1}
        fit = {"ship_seconds": ship, "window_seconds": 1.0}
        watch.note(Event(Kind.GATE_WAIT, 1, role=0, iteration=iteration, data=waited), 0.0)
        watch.note(Event(Kind.COMMITTED, 1, role=0, iteration=iteration, data=fit), 0.0)
        watch.note(Event(Kind.STEP, 1, iteration=iteration), float(iteration))


def test_waits_at_the_gate_lead_to_a_thinner_cadence() -> None:
    rig = Rig().run()
    watch = watchdog_of(rig)
    train(watch, 60, wait=0.5)
    (request,) = watch.at_protection(rig.state)
    assert isinstance(request, ev.ProtectionRequested)
    assert request.plan == replace(ProtectionPlan(), every=3)
    assert "waited 50% of the time for copies" in request.why
    rig.feed(request)
    assert rig.state.protection.plan.every == 3
    assert watch.at_protection(rig.state) == [], "another plan is on its way"


@pytest.mark.parametrize("settings", [{"cadence": "1"}, {"protection": "recompute"}])
def test_a_fixed_cadence_stays(settings: dict[str, str]) -> None:
    rig = Rig(**settings).run()
    watch = watchdog_of(rig)
    train(watch, 60, wait=0.5)
    assert watch.at_protection(rig.state) == []


def test_the_rpo_in_iterations_and_seconds() -> None:
    rig = Rig().run()
    watch = watchdog_of(rig)
    assert watch.describe(rig.state)["rpo"]["most_lost_seconds"] is None
    train(watch, 30)
    found = watch.describe(rig.state)["rpo"]
    assert (found["plan"], found["wanted"], found["survives"]) == ("buddy", "", 1)
    assert (found["most_lost"], found["most_lost_seconds"]) == (1, pytest.approx(1.0))
    rig.feed(ev.ProtectionRequested(replace(ProtectionPlan(), every=4), "a test"))
    assert watch.describe(rig.state)["rpo"]["wanted"] == "buddy; every 4 iterations"


def test_there_is_no_rpo_while_copies_are_missing() -> None:
    rig = Rig(spares=0).run()
    rig.feed(ev.NodeLost(1, "a test"))
    assert exposed_roles(rig.state) == {0, 1}
    assert watchdog_of(rig).describe(rig.state)["rpo"]["most_lost"] is None


def test_a_plan_for_which_there_is_no_memory_is_refused() -> None:
    rig = Rig(nodes=6, nproc=4).run()
    assert scene_of(rig.state, rig.settings) is not None
    assert budgets_of(rig.state) == {}
    parity = plan_of_kind("parity", rig.settings, 1, 4)
    assert memory_refusal(parity, rig.state, rig.settings) == ""
    rig.alter_nodes(memory_bytes=9 * MEGA)
    why = memory_refusal(parity, rig.state, rig.settings)
    assert "MB of memory for generations and has 9.44 MB" in why
    rig.feed(ev.ProtectionRequested(parity, "a test"))
    assert rig.emitted(Kind.REFUSED)
    rig.alter_nodes(memory_bytes=TIGHT)
    assert memory_refusal(parity, rig.state, rig.settings) == ""


def test_nothing_is_reckoned_before_all_have_registered() -> None:
    rig = Rig().opening()
    assert scene_of(rig.state, rig.settings) is None
    rig.alter_nodes(memory_bytes=1)
    assert memory_refusal(ProtectionPlan(), rig.state, rig.settings) == ""

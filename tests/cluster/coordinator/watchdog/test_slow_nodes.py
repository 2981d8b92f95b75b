"""From beats to verdicts about slow nodes, and to their roles on a spare."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deadpool_megatron.cluster.coordinator.reporting.bad_nodes import is_bad
from deadpool_megatron.cluster.coordinator.watchdog.watchdog import Watchdog
from deadpool_megatron.cluster.machine import inputs as ev
from deadpool_megatron.cluster.watch.slowness import WINDOW_ITERATIONS, WINDOWS
from deadpool_megatron.events import Event, Kind, to_line
from tests.cluster.machine.rig import Rig
from tests.common.event_schema import check_event

SLOW = 2


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
        fleet = replace(job.rig.state.fleet, avoid=frozenset({4}))
        job.rig.state = job.rig.state._replace(fleet=fleet)
    events, found = job.until_told()
    assert (kinds(events), found) == ([Kind.SLOW_NODE], [])

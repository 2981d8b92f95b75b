"""Whole lives of small runs, line by line: all orders and events of the machine, and the
status that a user sees at the end.

Expected are the files in lives/. A change that is meant changes them as well: with
``DEADPOOL_TEST_WRITE=1`` in the environment these tests write them again, and the difference is
read like that of any other file.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deadpool_megatron.cluster.coordinator.commands import describe
from deadpool_megatron.cluster.coordinator.progress import ReportedProgress
from deadpool_megatron.cluster.journal.user_requests import Request, Verb
from deadpool_megatron.cluster.link.peers import Peers
from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.cluster.machine.chosen_plan import memory_refusal
from deadpool_megatron.cluster.machine.state import Phase
from deadpool_megatron.failures import FailureKind
from deadpool_megatron.layout.records import EpochRecord
from deadpool_megatron.layout.schemes import plan_of_kind
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.preflight.health import Health
from tests.cluster.machine.rig import plain
from tests.common import lives
from tests.simulated.clock import Clock
from tests.simulated.late import OF_EPOCH
from tests.simulated.world import Shape, World

LIVES = Path(__file__).parent / "lives"


class RecordedWorld(World):
    """A world that writes down what the machine does, with the time."""

    inspects = False

    def __init__(self, *shape: Any) -> None:
        self.lines: list[str] = []
        self.known: list[EpochRecord] = []
        super().__init__(Shape(*shape).config(), Clock("", 0.0))

    def feed(self, event: ev.Input) -> list[act.Action]:
        self.clock.now += 0.01
        actions = super().feed(event)
        if actions:
            self.lines.append(f"{self.clock.now:.2f} {type(event).__name__}")
        self.known += [action.record for action in actions if isinstance(action, act.WriteRecord)]
        for action in actions:
            values = plain(action)
            record = getattr(action, "record", None)
            if record is not None and not isinstance(action, act.WriteRecord):
                assert record in self.known  # it was shown when it was written
                values["record"] = record.epoch
            text = json.dumps(values, sort_keys=True, default=str)
            self.lines.append(f"    {type(action).__name__} {text}")
        return actions

    def show(self) -> None:
        """Write down what a user is shown."""
        peers = cast(Peers, SimpleNamespace(agents={}, refusals={}))
        shown = describe(self.state, peers, ReportedProgress())
        self.lines.append(json.dumps(plain(shown), sort_keys=True, default=str))

    def train_on(self, times: int) -> None:
        for _ in range(times):
            self.settle()
            self.train()


def nodes_and_processes_are_lost() -> RecordedWorld:
    """A node, a process, two nodes at once, a process in the recovery; drained, come again."""
    world = RecordedWorld(3, 3, 2, 1)
    world.train_on(3)
    world.lose(1)
    world.train_on(2)
    world.end_member(0, 0)
    world.nodes[0].reports.arrive()
    world.end_member(2, 1)
    world.train_on(2)
    world.feed(ev.DrainRequested(2))
    world.train_on(3)
    world.show()
    world.join()
    world.train_on(1)
    world.feed(ev.MemberSuspected(0, 1, 0, "frozen"))
    world.lose(0)
    world.lose(3)
    world.train_on(2)
    world.show()
    world.feed(ev.DumpRequested("time is over"))
    world.train_on(3)
    world.end_export("/exports/iter_0000008")
    world.show()
    return world


def plans_change_and_coordinators() -> RecordedWorld:
    """Blocks instead of copies, a coordinator lost in each phase, numbers that are not finite."""
    world = RecordedWorld(3, 2, 1, 1)
    world.train_on(2)
    plan = plan_of_kind("parity", 1, 3)
    world.feed(ev.ProtectionRequested(plan, "a user"))
    world.train_on(3)
    world.show()
    world.take_over_quietly()
    world.lose(0)
    world.lost[0].reports.arrive()
    world.restart_coordinator(landed=True, received=1)
    world.settle()
    world.tick(world.config.settings.rejoin_seconds)
    world.train_on(2)
    world.see_nan(1)
    world.train_on(3)
    world.feed(ev.ProtectionRequested(replace(plan, every=2), "a user"))
    world.train_on(3)
    sick = replace(HostFacts("host"), health=Health.OUT, health_text="row remapping failed")
    world.feed(ev.FactsReported(2, sick))
    world.train_on(3)
    world.show()
    world.feed(ev.UserStop("enough", keeps=True))
    world.train_on(1)
    world.show()
    return world


def each_kind_of_report_comes_once() -> RecordedWorld:
    """Of each role in turn, in an epoch in which all train."""
    world = RecordedWorld(2, 2, 2, 1)
    world.train_on(2)
    for number, (kind, make) in enumerate(OF_EPOCH.items()):
        record = world.state.record
        if record is None or world.finished is not None or kind is ev.NodeInventory:
            continue
        seat = record.seats[number % world.config.world_size]
        world.feed(make((*seat.to_list(), record.epoch), record.restore.generation))
        for _ in range(3):
            world.settle()
            world.tick(20.0)
            world.train_on(1)
        if number % 3 == 0:
            world.show()
    return world


def the_program_ends() -> RecordedWorld:
    """With an exception that repeats, after its last iteration, and once without being asked."""
    world = RecordedWorld(2, 1, 1, 1)
    world.train_on(3)
    for _ in range(4):
        record = world.state.record
        if record is None or world.finished is not None:
            break
        seat = record.seats[1]
        world.feed(ev.MemberRaised(*seat.to_list(), record.epoch, "ValueError: too large"))
        world.nodes[seat.node].members.pop(seat.local_rank, None)
        world.feed(ev.MemberLost(*seat.to_list(), exit_code=1))
        world.train_on(2)
        world.tick(1.0)
    world.show()
    return world


def users_ask() -> RecordedWorld:
    """For a node's roles elsewhere, another plan, checkpoints and the end; and a new coordinator
    finds what was asked."""
    world = RecordedWorld(2, 2, 1, 1)
    world.train_on(2)
    plan = plan_of_kind("parity", 1, 2).to_dict()
    asked = [
        Request(1, "a", Verb.PERSIST, {"directory": "/exports"}),
        Request(2, "b", Verb.DRAIN, {"node": 1}),
        Request(3, "c", Verb.PROTECT, {"plan": plan, "words": "parity"}),
        Request(4, "d", Verb.DRAIN, {"node": 7}),
        Request(5, "e", Verb.PERSIST, {"directory": "/elsewhere"}),
    ]
    for request in asked:
        world.feed(ev.RequestMade(request))
        world.train_on(2)
        world.show()
    world.feed(ev.Exported(1, 3, "/exports/iter_0000003"))
    world.feed(ev.Exported(5, 4, "", "No space left on device"))
    requests = world.state.requests
    world.restart_coordinator(landed=True, received=10)
    world.feed(ev.RequestsFound((*requests, Request(6, "f", Verb.DRAIN, {"node": 0}))))
    world.train_on(2)
    world.tick(world.config.settings.rejoin_seconds)
    world.train_on(3)
    world.show()
    content = {"dump": True, "keeps": False, "reason": "maintenance", "ends": None}
    world.feed(ev.RequestMade(Request(7, "g", Verb.STOP, content)))
    world.feed(ev.DumpRequested("maintenance"))
    world.train_on(3)
    world.end_export("")
    world.show()
    return world


def checkpoints_are_fallen_back_to() -> RecordedWorld:
    """Owner and buddy are lost twice. The newest of three checkpoints is gone, another has an
    update of a loss that was not finite; then no journal takes a record."""
    world = RecordedWorld(2, 4, 1, 1)
    world.train_on(3)
    for iteration in (1, 2, 3):
        world.feed(ev.DurableValid(iteration, f"/saves/iter_{iteration}"))
    for gone in ({"/saves/iter_3"}, set()):
        seated = {seat.node for seat in world.state.seats.values()}
        for node in sorted(seated):
            world.lose(node)
        world.settle()
        world.feed(ev.CheckpointsFound(frozenset(gone)))
        world.train_on(3)
        world.show()
        world.feed(ev.DurableValid(5, "/saves/iter_5"))
        world.see_nan(0)
        world.train_on(2)
    world.feed(ev.Diverged("the loss of iteration 4 is another one than before"))
    world.end_member(max(world.nodes), 0)
    world.settle(until=Phase.DECIDING)
    world.feed(ev.JournalFailed(world.state.epoch + 1, "No space left on device"))
    world.train_on(2)
    world.show()
    return world


def sizes_change() -> RecordedWorld:
    """Of three replicas two are lost, one after the other; a process that is lost changes no size.
    Growth to three fails twice, so that two replicas train to the end."""
    world = RecordedWorld(3, 0, 1, 1, 0, True)
    world.train_on(3)
    for _ in range(2):
        world.feed(ev.DurableValid(world.state.reached, f"/saves/{world.epoch}"))
        world.lose(max(world.nodes))
        world.settle()
        world.feed(ev.CheckpointsFound(frozenset()))
        world.tick(60.0)
        world.settle()
        world.train_on(2)
        world.show()
    world.end_member(0, 0)
    world.train_on(2)
    world.join()
    world.join()
    world.refusals = 6
    for _ in range(12):
        world.tick(20.0)
        world.train_on(2)
        world.feed(ev.CheckpointsFound(frozenset()))
    world.show()
    for seat in world.state.seats.values():
        world.feed(ev.MemberDone(*seat.to_list(), world.epoch))
    return world


def memories_differ() -> RecordedWorld:
    """Nodes have memory for all, for their own role, or for neither; then plans are requested
    that need more, less, and another cadence."""
    world = RecordedWorld(3, 3, 1, 1)
    budgets = {0: 1 << 20, 1: 20_000, 2: 15_000, 3: 1 << 20, 4: 9_000, 5: 1 << 20}
    for node, memory_bytes in budgets.items():
        world.nodes[node].memory_bytes = memory_bytes
        world.nodes[node].reports.reset(world.nodes[node].join())
    world.train_on(3)
    world.show()
    settings = world.config.settings
    for kind, every in (("parity", 1), ("buddy", 1), ("buddy", 2), ("local", 1), ("parity", 2)):
        plan = plan_of_kind(kind, every, 3)
        refusal = memory_refusal(plan, world.state, settings)
        world.lines.append(f"{kind} every {every}: {refusal!r}")
        world.feed(ev.ProtectionRequested(plan, "a measurement"))
        world.train_on(3)
    world.show()
    for node in (0, 3):
        world.lose(node)
        world.train_on(3)
    world.show()
    return world


def time_alone_ends_waits() -> RecordedWorld:
    """Nodes fall silent in each phase; no node joins any more."""
    world = RecordedWorld(2, 1, 1, 1)
    world.train_on(2)
    for node in (0, 1):
        world.feed(ev.NodeLost(node, "no beat", 3.0, FailureKind.NODE_FROZEN))
        world.nodes.pop(node, None)
        for _ in range(40):
            world.settle()
            world.tick(1.0)
    for _ in range(30):
        world.settle()
        world.tick(60.0)
    world.show()
    return world


@pytest.mark.parametrize(
    "live",
    [
        nodes_and_processes_are_lost,
        plans_change_and_coordinators,
        each_kind_of_report_comes_once,
        the_program_ends,
        users_ask,
        memories_differ,
        sizes_change,
        checkpoints_are_fallen_back_to,
        time_alone_ends_waits,
    ],
)
def test_life_is_as_recorded(live):
    lives.hold(LIVES / f"{live.__name__}.txt", live().lines)

"""Which nodes get roles: judged before the first epoch, at a later join, and while they wait."""

import dataclasses
from typing import Any

import pytest

from deadpool_megatron.cluster.machine import actions as act, inputs as ev
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.records import Holding, Inventory
from deadpool_megatron.preflight.eligibility import Eligibility, HostFacts
from deadpool_megatron.preflight.health import Health
from tests.cluster.machine.rig import STEP, Phase, Rig, g, layout, nodes_of

GOOD = HostFacts(
    "host",
    versions={"torch": "2.13.0"},
    shm_bytes=10**12,
    shm_free_bytes=10**12,
    memory_bytes=10**12,
)
OTHER = dataclasses.replace(GOOD, versions={"torch": "2.12.0"})
FEW_FILES = dataclasses.replace(GOOD, open_files=256)


def joined(node: int, facts: HostFacts | None = GOOD, **more: Any) -> ev.NodeJoined:
    return ev.NodeJoined(node, f"a{node}", 1000 + node, f"node{node}", facts=facts, **more)


def come(rig: Rig, **facts: HostFacts) -> None:
    """All nodes join and start their members; ``facts`` (n0, n1, ...) differ from the default."""
    total = rig.config.nodes + rig.config.spares
    rig.feed(*(joined(node, facts.get(f"n{node}", GOOD)) for node in range(total)))
    actions = rig.last
    rig.hello(*range(total))
    rig.last = [*actions, *rig.last]


def standing(rig: Rig, node: int) -> Eligibility:
    return rig.state.fleet.nodes[node].judged.eligibility


def check_only(rig: Rig) -> Rig:
    rig.config = dataclasses.replace(rig.config, check_only=True)
    rig.machine.config = rig.config
    return rig


def test_missing_health_command_is_reported_and_its_node_counts_as_good():
    rig = Rig(nodes=2, spares=1)
    come(rig, n1=dataclasses.replace(GOOD, health_text="not asked: sh: /no: not found"))
    assert nodes_of(rig.pending) == {0: 0, 1: 1}
    (warning,) = [log for log in rig.emitted(Kind.LOG) if log.data["level"] == "warning"]
    assert "/no: not found" in str(warning.data["text"])


def test_weak_node_is_the_last_spare():
    rig = Rig(nodes=2, spares=2)
    come(rig, n0=FEW_FILES, n2=FEW_FILES)
    assert nodes_of(rig.pending) == {0: 3, 1: 1}
    rig.journal()
    assert rig.state.fleet.deprioritized == {0, 2}
    assert standing(rig, 0) is Eligibility.WEAK


def test_too_few_fit_nodes_end_the_run_at_once():
    rig = Rig(nodes=2, spares=0)
    come(rig, n1=OTHER)
    finish = rig.of(act.Finish)[0]
    assert finish.exit_status == 75, "another job may have other nodes"
    assert finish.reason.startswith("not enough nodes: 1 are good, --nodes is 2 (node 1: ")


def test_nodes_without_facts_or_check_are_not_judged():
    rig = Rig(nodes=2, spares=0, check="off")
    come(rig, n1=OTHER)
    assert nodes_of(rig.pending) == {0: 0, 1: 1}
    silent = Rig(nodes=2, spares=0)
    silent.gather()
    assert nodes_of(silent.pending) == {0: 0, 1: 1}


# Later.


def test_node_that_joins_later_is_compared_with_the_run():
    rig = Rig(nodes=2, spares=0)
    come(rig)
    rig.opened()
    rig.feed(joined(5, OTHER))
    assert (rig.only(act.DropNode).node, rig.only(act.DropNode).excluded) == (5, True)
    assert not rig.of(act.StartMembers)
    rig.feed(joined(6, FEW_FILES))
    assert 6 in rig.state.fleet.deprioritized
    assert rig.of(act.StartMembers)
    rig.feed(joined(7))
    assert not rig.emitted(Kind.NODE_JUDGED)


def test_spare_that_becomes_unfit_is_excluded_before_it_gets_a_role():
    rig = Rig(nodes=2, spares=2)
    come(rig)
    rig.opened()
    rig.warm(2, 3)
    down = dataclasses.replace(GOOD, interface="ib0", interface_up=False)
    rig.feed(ev.FactsReported(2, down))
    assert rig.only(act.DropNode).node == 2
    assert [e.data["kind"] for e in rig.emitted(Kind.NODE_LOST)] == ["excluded"]
    rig.lose(1, g(0))
    assert nodes_of(rig.pending) == {0: 0, 1: 3}


def test_host_of_a_spare_with_other_software_is_not_to_blame():
    rig = Rig(nodes=2, spares=1)
    come(rig)
    rig.opened()
    rig.feed(ev.FactsReported(2, OTHER))
    assert (rig.only(act.DropNode).node, rig.only(act.DropNode).excluded) == (2, True)
    assert [e.data["kind"] for e in rig.emitted(Kind.NODE_LOST)] == ["other-program"]


def test_weak_node_gives_its_roles_to_a_good_spare():
    """It repeats its report each minute, and its roles do not move back."""
    worse = dataclasses.replace(GOOD, health=Health.SPARE_ONLY, health_text="hot")
    rig = Rig(nodes=2, spares=1)
    come(rig)
    rig.opened()
    rig.warm(2)
    rig.feed(ev.FactsReported(2, worse), ev.FactsReported(1, worse))
    assert [e.node for e in rig.emitted(Kind.NODE_JUDGED)] == [2, 1]
    rig.feed(ev.FactsReported(1, worse))
    assert not rig.emitted(Kind.NODE_JUDGED), "reported once"
    assert not rig.emitted(Kind.NODE_QUARANTINED)
    assert (rig.state.phase, rig.state.fleet.drains) == (Phase.RUNNING, frozenset())
    rig.feed(ev.FactsReported(2, GOOD), ev.FactsReported(1, worse))
    assert (rig.state.phase, rig.state.fleet.drains) == (Phase.PAUSING, {1})
    rig.feed(*(ev.Paused(*rig.seat(role), 1, 2) for role in (0, 1)))
    rig.closed(g(2))
    rig.journal()
    assert nodes_of(rig.record) == {0: 0, 1: 2}
    rig.restored()
    rig.feed(ev.FactsReported(1, GOOD), ev.FactsReported(2, worse))
    assert (rig.state.phase, rig.state.fleet.drains) == (Phase.RUNNING, frozenset())


def test_node_of_unknown_health_keeps_its_roles():
    """Its health command did not end, which is no evidence about the node."""
    unknown = dataclasses.replace(GOOD, health=Health.UNKNOWN, health_text="no answer within 60 s")
    rig = Rig(nodes=2, spares=1)
    come(rig)
    rig.opened()
    rig.warm(2)
    rig.feed(ev.FactsReported(1, unknown))
    assert [e.node for e in rig.emitted(Kind.NODE_JUDGED)] == [1]
    assert (rig.state.phase, rig.state.fleet.drains) == (Phase.RUNNING, frozenset())


def test_takeover_restores_the_common_facts():
    rig = Rig(nodes=2, spares=0)
    come(rig)
    rig.journal()
    record = rig.record
    rig.take_over(record)
    members = {"members": {0: 0}, "incarnations": {0: 0}, "epoch": 1, "restored": {0: 1}}
    rig.feed(*(joined(node, **members) for node in (0, 1)))
    assert rig.state.phase is Phase.RUNNING
    rig.feed(joined(5, OTHER))
    assert rig.only(act.DropNode).excluded


# Only to know.


@pytest.mark.parametrize("enough", [True, False])
def test_check_ends_with_its_verdict_and_starts_nothing(enough):
    rig = check_only(Rig(nodes=2, spares=1))
    rig.feed(joined(0), joined(1, GOOD if enough else OTHER))
    rig.tick(rig.settings.connect_seconds)
    assert rig.state.phase is Phase.BOOTSTRAPPING, "spares are judged, too: they are waited for"
    rig.tick(rig.settings.start_seconds)
    assert not rig.of(act.StartMembers, rig.log)
    assert rig.only(act.Finish).exit_status == (0 if enough else 1)
    judged = {e.node: e.data["standing"] for e in rig.emitted(Kind.NODE_JUDGED)}
    assert judged == {0: "good", 1: "good" if enough else "excluded", 2: "excluded"}


SICK = dataclasses.replace(GOOD, health=Health.OUT, health_text="row remapping failed")


def test_unfit_node_that_returns_gives_its_memory_but_gets_no_role():
    """Its device may be why its agent ended. It gets no role where another node can have it."""
    rig = Rig(nodes=2, spares=1, protection="local")
    come(rig)
    rig.opened()
    rig.state.fleet.nodes[1].returns = True
    rig.lose(1, g(7), reason="connection closed")
    assert rig.state.phase is Phase.WAITING_SPARE
    held = Inventory(3, 0, (Holding(1, g(7), STEP),), (layout(1, 2),))
    rig.feed(joined(3, SICK, found=held))
    assert not rig.of(act.DropNode)
    assert rig.pending.restore.generation == g(7)
    assert nodes_of(rig.pending) == {0: 0, 1: 2}

"""The commit rule as a function of the record and of what is sealed and acknowledged."""

from __future__ import annotations

from dataclasses import replace

from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan, Scheme
from deadpool_megatron.vault.core.commit import Ledger
from tests.vault.harness import make_layout, record_of

G = Generation(1, 4)
SHARD = ["shard", "tail", "extras@step"]


def record(
    nodes: int, roles: int, replicas: int = 1, fewer: frozenset[int] = frozenset()
) -> EpochRecord:
    return record_of(1, range(roles), nodes, replicas=replicas, fewer_copies=fewer)


def acknowledge(ledger: Ledger, layout: RoleLayout, names: list[str]) -> None:
    for node in ledger.buddies(layout):
        ledger.acknowledge(layout.role, G, node, names)


def test_committed_when_sealed_here_and_at_the_buddy() -> None:
    ledger, layout = Ledger(record(3, 3)), make_layout(0)
    (buddy,) = ledger.buddies(layout)
    assert buddy != 0
    assert ledger.missing(layout, G, SHARD, buddy) == SHARD
    assert ledger.missing(layout, G, SHARD, 3 - buddy) == []
    acknowledge(ledger, layout, SHARD[:2])
    assert ledger.boundary(layout, G, SHARD) is None
    acknowledge(ledger, layout, SHARD[2:])
    assert ledger.boundary(layout, G, SHARD) == "step"
    assert ledger.boundary(layout, G, SHARD[1:]) is None  # not sealed here
    assert ledger.boundary(layout, Generation(1, 5), SHARD) is None


def test_boundaries_commit_in_order() -> None:
    ledger, layout = Ledger(record(2, 2)), make_layout(0)
    sealed = [*SHARD, "extras@evaluation", "extras@save"]
    acknowledge(ledger, layout, [*SHARD, "extras@save"])
    assert ledger.boundary(layout, G, sealed) == "step"
    # An iteration that saves without evaluating has no extras of an evaluation.
    assert ledger.boundary(layout, G, [*SHARD, "extras@save"]) == "save"
    acknowledge(ledger, layout, ["extras@evaluation"])
    assert ledger.boundary(layout, G, sealed) == "save"


def test_every_replica_is_owed() -> None:
    ledger, layout = Ledger(record(3, 3, replicas=2)), make_layout(0)
    assert set(ledger.buddies(layout)) == {1, 2}
    ledger.acknowledge(0, G, 1, SHARD)
    assert ledger.boundary(layout, G, SHARD) is None
    ledger.acknowledge(0, G, 2, SHARD)
    assert ledger.boundary(layout, G, SHARD) == "step"


def test_too_few_nodes_hold_the_gate_until_the_record_releases_it() -> None:
    layout = make_layout(0)
    assert Ledger(record(2, 2, replicas=2)).exposed(layout), "one of two"
    closed = Ledger(record(1, 1))
    assert closed.exposed(layout)
    assert closed.boundary(layout, G, SHARD) is None
    released = Ledger(record(1, 1, fewer=frozenset({0})))
    assert released.released(layout)
    assert released.boundary(layout, G, SHARD) == "step"
    some = Ledger(record(2, 2, replicas=2, fewer=frozenset({0})))
    assert some.boundary(layout, G, SHARD) is None  # the one buddy that lives is owed its copy
    acknowledge(some, layout, SHARD)
    assert some.boundary(layout, G, SHARD) == "step"
    assert not Ledger(record(2, 2, fewer=frozenset({0}))).released(layout)


def test_covered_parts_are_not_shipped() -> None:
    ledger, layout = Ledger(record(2, 2)), make_layout(0, replicas=(0, 1))
    (buddy,) = ledger.buddies(layout)
    assert ledger.missing(layout, G, SHARD, buddy) == ["extras@step"]
    ledger.acknowledge(0, G, buddy, ["extras@step"])
    assert ledger.boundary(layout, G, SHARD) == "step"


def planned(base: EpochRecord, scheme: Scheme) -> EpochRecord:
    return replace(base, protection=ProtectionPlan(scheme))


def test_parity_owes_shards_to_the_holders_and_extras_to_buddies() -> None:
    layout = make_layout(0)
    ledger = Ledger(planned(record(4, 3), Scheme(Kind.PARITY, group=3)))
    ((block, holder),) = ledger.holders(0).items()
    assert holder == 3
    (buddy,) = ledger.buddies(layout)
    assert buddy != 0
    everything = ["shard", "tail", "extras@step"]
    assert ledger.missing(layout, G, everything, holder, coded=True) == ["shard", "tail"]
    assert ledger.missing(layout, G, everything, buddy) == ["extras@step"]
    assert ledger.missing(layout, G, everything, buddy, coded=True) == []
    ledger.acknowledge(0, G, buddy, ["extras@step"])
    assert ledger.boundary(layout, G, everything) is None
    ledger.acknowledge(0, G, holder, ["shard", "tail"])
    assert ledger.boundary(layout, G, everything) == "step"
    assert ledger.keeps(replace(layout, role=block), 3)
    assert not ledger.keeps(replace(layout, role=block), 2)
    assert not ledger.keeps(replace(layout, role=block + 1), 3)


def test_parity_of_two_blocks_waits_for_both() -> None:
    layout = make_layout(0)
    base = record(4, 2, replicas=2)
    ledger = Ledger(planned(base, Scheme(Kind.PARITY, group=2)))
    holders = ledger.holders(0).values()
    assert set(holders) == {2, 3}
    for node in ledger.buddies(layout):
        ledger.acknowledge(0, G, node, ["extras@step"])
    for node in holders:
        assert ledger.boundary(layout, G, SHARD) is None
        ledger.acknowledge(0, G, node, ["shard", "tail"])
    assert ledger.boundary(layout, G, SHARD) == "step"


def test_parity_without_a_holder_waits_for_a_release() -> None:
    layout = make_layout(0)
    scheme = Scheme(Kind.PARITY, group=2)
    assert Ledger(planned(record(1, 1), scheme)).exposed(layout)
    released = Ledger(planned(record(1, 1, fewer=frozenset({0})), scheme))
    assert released.released(layout)
    assert released.boundary(layout, G, SHARD) == "step"


def test_local_owes_nothing_to_anybody() -> None:
    layout = make_layout(0)
    ledger = Ledger(planned(record(3, 3, replicas=0), Scheme(Kind.LOCAL)))
    assert not ledger.exposed(layout)
    assert not any(ledger.owed(layout).values())
    assert ledger.boundary(layout, G, SHARD) == "step"
    assert not ledger.keeps(layout, 1)


def test_kept_twice_the_own_node_is_owed_whatever_peers_hold() -> None:
    layout = make_layout(0, replicas=(0, 1, 2))
    ledger = Ledger(planned(record(3, 3, replicas=0), Scheme(Kind.LOCAL_TWICE)))
    assert not ledger.exposed(layout)
    assert set(ledger.owed(layout).values()) == {(0,)}
    assert (ledger.keeps(layout, 0), ledger.keeps(layout, 1)) == (True, False)
    assert ledger.missing(layout, G, SHARD, 0) == SHARD
    assert ledger.boundary(layout, G, SHARD) is None
    acknowledge(ledger, layout, SHARD)
    assert ledger.boundary(layout, G, SHARD) == "step"

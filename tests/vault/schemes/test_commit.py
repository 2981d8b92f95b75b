"""The commit rule as a function of the record and of what is sealed and acknowledged."""

from dataclasses import replace

from deadpool_megatron.layout.records import EpochRecord, Generation, RoleLayout
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers
from deadpool_megatron.vault.commit_ledger import Acknowledgements
from deadpool_megatron.vault.copies import Target
from deadpool_megatron.vault.schemes.registry import scheme_of
from tests.vault.harness import make_layout, record_of

G = Generation(1, 4)
SHARD = ["shard", "tail", "extras@step"]


def record(
    nodes: int, roles: int, replicas: int = 1, fewer: frozenset[int] = frozenset()
) -> EpochRecord:
    return record_of(1, range(roles), nodes, replicas=replicas, fewer_copies=fewer)


def ledger_of(record: EpochRecord) -> Acknowledgements:
    return Acknowledgements(scheme_of(record, None))


def targets(ledger: Acknowledgements, layout: RoleLayout) -> tuple[list[Target], list[Target]]:
    """Buddies, and holders of parity blocks."""
    found = [*ledger.scheme.owed(layout).names]
    buddies = [one for one in found if one.block is None]
    return buddies, [one for one in found if one not in buddies]


def is_exposed(ledger: Acknowledgements, layout: RoleLayout) -> bool:
    return ledger.scheme.owed(layout).is_short


def acknowledge(ledger: Acknowledgements, layout: RoleLayout, names: list[str]) -> None:
    for target in targets(ledger, layout)[0]:
        ledger.add(layout.role, G, target.node, names)


def test_committed_when_sealed_here_and_at_the_buddy():
    ledger, layout = ledger_of(record(3, 3)), make_layout(0)
    ((buddy,), _) = targets(ledger, layout)
    assert buddy.node != 0
    assert ledger.missing(layout, G, SHARD, buddy) == SHARD
    assert ledger.missing(layout, G, SHARD, Target(3 - buddy.node)) == []
    acknowledge(ledger, layout, SHARD[:2])
    assert ledger.boundary(layout, G, SHARD) is None
    acknowledge(ledger, layout, SHARD[2:])
    assert ledger.boundary(layout, G, SHARD) == "step"
    assert ledger.boundary(layout, G, SHARD[1:]) is None  # not sealed here
    assert ledger.boundary(layout, Generation(1, 5), SHARD) is None


def test_boundaries_commit_in_order():
    ledger, layout = ledger_of(record(2, 2)), make_layout(0)
    sealed = [*SHARD, "extras@evaluation", "extras@save"]
    acknowledge(ledger, layout, [*SHARD, "extras@save"])
    assert ledger.boundary(layout, G, sealed) == "step"
    # An iteration that saves without evaluating has no extras of an evaluation.
    assert ledger.boundary(layout, G, [*SHARD, "extras@save"]) == "save"
    acknowledge(ledger, layout, ["extras@evaluation"])
    assert ledger.boundary(layout, G, sealed) == "save"


def test_too_few_nodes_hold_the_gate_until_the_record_releases_it():
    layout = make_layout(0)
    assert is_exposed(ledger_of(record(2, 2, replicas=2)), layout), "one of two"
    closed = ledger_of(record(1, 1))
    assert is_exposed(closed, layout)
    assert closed.boundary(layout, G, SHARD) is None
    released = ledger_of(record(1, 1, fewer=frozenset({0})))
    assert released.released(layout)
    assert released.boundary(layout, G, SHARD) == "step"
    some = ledger_of(record(2, 2, replicas=2, fewer=frozenset({0})))
    assert some.boundary(layout, G, SHARD) is None  # the one buddy that lives is owed its copy
    acknowledge(some, layout, SHARD)
    assert some.boundary(layout, G, SHARD) == "step"
    assert not ledger_of(record(2, 2, fewer=frozenset({0}))).released(layout)


def test_covered_parts_are_not_shipped():
    ledger, layout = ledger_of(record(2, 2)), make_layout(0, replicas=(0, 1))
    ((buddy,), _) = targets(ledger, layout)
    assert ledger.missing(layout, G, SHARD, buddy) == ["extras@step"]
    acknowledge(ledger, layout, ["extras@step"])
    assert ledger.boundary(layout, G, SHARD) == "step"


def planned(base: EpochRecord, scheme: SchemeNumbers) -> EpochRecord:
    return replace(base, protection=ProtectionPlan(scheme))


def test_parity_without_a_holder_waits_for_a_release():
    layout = make_layout(0)
    scheme = SchemeNumbers(SchemeKind.PARITY, group=2)
    assert is_exposed(ledger_of(planned(record(1, 1), scheme)), layout)
    released = ledger_of(planned(record(1, 1, fewer=frozenset({0})), scheme))
    assert released.released(layout)
    assert released.boundary(layout, G, SHARD) == "step"


def test_local_owes_nothing_to_anybody():
    layout = make_layout(0)
    ledger = ledger_of(planned(record(3, 3, replicas=0), SchemeNumbers(SchemeKind.LOCAL)))
    assert not is_exposed(ledger, layout)
    assert not ledger.scheme.owed(layout).names
    assert ledger.boundary(layout, G, SHARD) == "step"
    assert not ledger.scheme.keeps(layout, 1)


def test_kept_twice_the_own_node_is_owed_whatever_peers_hold():
    layout = make_layout(0, replicas=(0, 1, 2))
    ledger = ledger_of(planned(record(3, 3, replicas=0), SchemeNumbers(SchemeKind.LOCAL_TWICE)))
    assert not is_exposed(ledger, layout)
    assert targets(ledger, layout) == ([Target(0)], [])
    assert {*SHARD} <= {*ledger.scheme.keeps(layout, 0)}
    assert not ledger.scheme.keeps(layout, 1)
    assert ledger.missing(layout, G, SHARD, Target(0)) == SHARD
    assert ledger.boundary(layout, G, SHARD) is None
    acknowledge(ledger, layout, SHARD)
    assert ledger.boundary(layout, G, SHARD) == "step"

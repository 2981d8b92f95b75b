"""Groups of parity: who shares blocks with whom, and where the blocks are, as properties."""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from deadpool_megatron.layout import parity_groups as parity, placement, records
from deadpool_megatron.layout.schemes import ProtectionPlan, SchemeKind, SchemeNumbers


def plan(size: int) -> ProtectionPlan:
    return ProtectionPlan(SchemeNumbers(SchemeKind.PARITY, group=size))


def record(
    domains: list[str],
    spares: int,
    nproc: int,
    size: int,
    parities: int,
    nodes: dict[int, int] | None = None,
) -> records.EpochRecord:
    """``nodes``: place -> number of the node that sits there, if another."""
    training = len(domains) - spares
    at = nodes or {}
    seats = {
        place * nproc + slot: records.Seat(at.get(place, place), slot, 0)
        for place in range(training)
        for slot in range(nproc)
    }
    seated = {seat.node for seat in seats.values()}
    gone = set(range(training)) - seated
    return records.EpochRecord(
        epoch=1,
        seats=seats,
        nodes={
            node: records.NodeAddress("h", 1, domain, node not in seated)
            for node, domain in enumerate(domains)
            if node not in gone
        },
        restore=records.Restore("initial", records.Generation(1, 0)),
        replicas=parities,
        protection=plan(size),
    )


@st.composite
def clusters(draw: st.DrawFn) -> tuple[records.EpochRecord, int]:
    training = draw(st.integers(1, 12))
    spares = draw(st.integers(0, 3))
    racks = draw(st.integers(1, training + spares))
    domains = [f"rack{draw(st.integers(0, racks - 1))}" for _ in range(training + spares)]
    size, parities = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    return record(domains, spares, draw(st.integers(1, 3)), size, parities), size


@settings(max_examples=150)
@given(clusters())
def test_groups_of_any_cluster(drawn):
    """Each role once, distinct nodes, holders outside; m lost nodes leave k of k+m blocks."""
    record, size = drawn
    groups, m = parity.ParityPlacement.of_record(record).groups, record.replicas
    assert sorted(r for group in groups for r in group.roles) == sorted(record.seats)
    live = len(record.nodes)
    short = placement.missing_copies(
        {role: seat.node for role, seat in record.seats.items()},
        {node: address.domain for node, address in record.nodes.items()},
        [node for node, address in record.nodes.items() if address.spare],
        m,
    )
    for group in groups:
        nodes = [record.seats[role].node for role in group.roles]
        everywhere = [*nodes, *group.holders]
        assert len(set(everywhere)) == len(everywhere)
        assert len(group.roles) <= max(1, min(size, live - m))
        # Fewer blocks than wanted: exactly the roles that a record lists as short of copies.
        assert len(group.holders) == min(m, live - 1)
        assert (len(group.holders) < m) == bool(short.intersection(group.roles))
        assert len(group.blocks) == len(group.holders)
        for lost in itertools.combinations(record.nodes, len(group.holders)):
            assert sum(node not in lost for node in everywhere) >= len(nodes)
    lengths = {len({record.seats[r].node for r in group.roles}) for group in groups}
    assert max(lengths) - min(lengths) <= 1
    assert len({block for group in groups for block in group.blocks}) == len(groups) * min(
        m, live - 1
    )


@settings(max_examples=150)
@given(clusters())
def test_no_domain_twice_where_that_can_be(drawn):
    record, _ = drawn
    groups = parity.ParityPlacement.of_record(record).groups
    domain = {node: address.domain for node, address in record.nodes.items()}
    seated = {seat.node for seat in record.seats.values()}
    sizes = Counter(domain[node] for node in seated)
    composed = {tuple(sorted(record.seats[r].node for r in group.roles)) for group in groups}
    shared = sum(len(nodes) - len({domain[n] for n in nodes}) for nodes in composed)
    assert shared == sum(max(0, count - len(composed)) for count in sizes.values())
    load = Counter(holder for group in groups for holder in group.holders)
    most = 4 * load.total() / len(domain)
    for group in groups:
        used = {domain[record.seats[role].node] for role in group.roles}
        for holder in group.holders:
            others = [node for node in domain if domain[node] not in used]
            assert domain[holder] not in used or all(load[node] >= most for node in others)
            used.add(domain[holder])


def test_exchange_of_two_nodes_moves_no_other():
    """Node i is in group i modulo their number. So few blocks are computed anew when a node that
    takes over is in a rack of the group."""
    domains = [f"rack{node}" for node in range(12)]
    domains[4] = domains[1]
    groups = parity.ParityPlacement.of_record(record(domains, 0, 1, 4, 1)).groups
    assert sorted(len(group.roles) for group in groups) == [4, 4, 4]
    moved = {role for group in groups for role in group.roles if role % 3 != group.roles[1] % 3}
    assert len(moved) == 2
    assert moved & {1, 4}


@pytest.mark.parametrize(("size", "parities"), [(4, 1), (4, 2), (8, 1), (3, 3)])
@pytest.mark.parametrize("rack", [1, 4])
def test_memory_is_even(size, parities, rack):
    """No node keeps more than one block above a quarter more than its share."""
    found = record([f"rack{node // rack}" for node in range(70)], 6, 4, size, parities)
    groups = parity.ParityPlacement.of_record(found).groups
    load = Counter(holder for group in groups for holder in group.holders)
    share = load.total() / 70
    assert max(load.values()) <= 1.25 * share + 1
    assert len(load) > 0.8 * min(70, load.total())


def test_one_node_in_a_rack_of_its_own_does_not_hold_everything():
    found = record(["all"] * 63 + ["own"], 0, 4, 4, 1)
    groups = parity.ParityPlacement.of_record(found).groups
    load = Counter(holder for group in groups for holder in group.holders)
    assert max(load, key=load.__getitem__) == 63
    assert load[63] == 4 * load.total() / 64


@pytest.mark.parametrize("parities", [1, 2])
def test_a_spare_that_takes_over_takes_the_place(parities):
    """Other groups stay as they are, and nearly all of their blocks stay where they are."""
    domains = [f"rack{node}" for node in range(40)]
    before = parity.ParityPlacement.of_record(record(domains, 4, 2, 4, parities)).groups
    later = record(domains, 4, 2, 4, parities, nodes={7: 37})
    after = parity.ParityPlacement.of_record(later).groups
    assert [group.roles for group in before] == [group.roles for group in after]
    assert [group.blocks for group in before] == [group.blocks for group in after]
    moved = [
        (b, a)
        for old, new in zip(before, after, strict=True)
        for b, a in zip(old.holders, new.holders, strict=True)
        if b != a
    ]
    held = sum(b in (7, 37) for b, _ in moved)
    assert len(moved) - held <= 4 * parities


def test_numbers_of_parity_roles():
    number = parity.parity_role((1, 5, 9), 2, 0)
    assert records.PARITY_BASE <= number < 1 << 52
    assert records.is_parity_role(number)
    assert not records.is_parity_role(40_000)
    others = {
        number,
        parity.parity_role((1, 5, 9), 2, 1),
        parity.parity_role((1, 5, 9), 3, 0),
        parity.parity_role((1, 5), 2, 0),
        parity.parity_role((15, 9), 2, 0),
    }
    assert len(others) == 5


def a_layout(role: int, sizes: dict[str, int], slots: int = 2) -> records.RoleLayout:
    parts = [records.PartInfo(name, nbytes, (role,)) for name, nbytes in sizes.items()]
    extras = records.PartInfo("extras@step", 4096, (role,))
    return records.RoleLayout(role, (*parts, extras), (role,), slots, f"hash-{role}-{sizes}")


def test_layout_of_a_parity_role():
    layouts = {
        3: a_layout(3, {"shard0": 100, "shard1": 50}),
        7: a_layout(7, {"shard0": 300}, slots=3),
    }
    group = parity.ParityGroup(
        (3, 7), (parity.parity_role((3, 7), 2, 0), parity.parity_role((3, 7), 2, 1)), (1, 2)
    )
    found = parity.parity_layout(layouts, group, 1, 2)
    assert found.role == group.blocks[1]
    assert {part.name: part.nbytes for part in found.parts[:2]} == {"shard0": 300, "shard1": 50}
    assert found.shard_parts == ("shard0", "shard1", parity.INPUTS)
    assert (found.peers, found.slots) == ((3, 7), 3)
    assert parity.parity_numbers(found) == (1, 2)
    assert parity.parity_layout(layouts, group, 0, 2).layout_hash != found.layout_hash
    other = {**layouts, 7: replace(layouts[7], layout_hash="of another model")}
    assert parity.parity_layout(other, group, 1, 2).layout_hash != found.layout_hash
    with pytest.raises(ValueError, match="role 3 is no parity block"):
        parity.parity_numbers(layouts[3])
    # What is said of the contributions fits, whatever the sizes and checksums are.
    largest = (1 << 63) - 1, (1 << 64) - 1
    whole = {role: dict.fromkeys(("shard0", "shard1"), largest) for role in (3, 7)}
    members = parity.BlockInputs((3, 7), 1, 2, whole)
    assert len(members.encode()) <= found.parts[-1].nbytes
    assert parity.BlockInputs.decode(members.encode()) == members


def test_a_large_cluster_is_decided_at_once():
    """32,768 roles on 4,096 nodes in racks: every vault does this at each epoch."""
    found = record([f"rack{node // 16}" for node in range(4160)], 64, 8, 4, 2)
    groups = parity.ParityPlacement.of_record(found).groups
    assert len(groups) == 8192

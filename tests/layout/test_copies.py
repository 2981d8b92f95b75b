"""Placement of copies: examples that say what is wanted, properties that must always hold."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given, strategies as st

from deadpool_megatron.layout import placement as placements
from deadpool_megatron.layout.records import NodeAddress, Seat, nodes_of


def own_domains(nodes: range | list[int]) -> dict[int, str]:
    return {node: f"node{node}" for node in nodes}


def choose_buddies(
    role: int,
    peers: Sequence[int],
    seats: Mapping[int, int],
    domains: Mapping[int, str],
    spares: Collection[int],
    replicas: int,
) -> tuple[int, ...]:
    return placements.CopyPlacement(seats, domains, spares, replicas).buddies(role, tuple(peers))


def test_another_domain_is_worth_more_than_a_peer():
    seats = {0: 0, 1: 1, 2: 2}
    domains = {0: "a", 1: "a", 2: "b"}
    assert choose_buddies(0, (0, 1), seats, domains, (), 1) == (2,)
    assert choose_buddies(0, (0, 1), seats, domains, (), 2) == (2, 1)
    domains = {0: "a", 1: "b", 2: "b", 3: "c"}
    assert set(choose_buddies(0, (0, 1, 2), seats, domains, {3}, 2)) & {1, 2} != {1, 2}


def test_a_dead_node_is_never_chosen():
    seats = {0: 0, 1: 1}
    assert choose_buddies(0, (0, 1), seats, {0: "a", 2: "c"}, {2}, 1) == (2,)
    assert choose_buddies(0, (0, 1), seats, {0: "a"}, (), 1) == ()
    assert placements.missing_copies(seats, {0: "a", 1: "b"}, (), 2) == {0, 1}
    assert placements.missing_copies(seats, {0: "a", 1: "b", 2: "c"}, {2}, 2) == frozenset()


def test_covered_counts_domains_not_roles():
    seats = {0: 0, 1: 0, 2: 1, 3: 2}
    assert not placements.is_covered((0, 1), 0, seats, own_domains(range(3)), 1)
    assert placements.is_covered((0, 1, 2), 0, seats, own_domains(range(3)), 1)
    assert not placements.is_covered((0, 1, 2), 0, seats, {0: "a", 1: "a", 2: "b"}, 1)
    assert not placements.is_covered((0, 2), 0, seats, {0: "a", 2: "b"}, 1)  # node 1 is dead
    assert not placements.is_covered((0,), 0, seats, own_domains(range(3)), 1)


def test_spares_of_a_record_hold_copies():
    """Nodes without a role that are no spares do not: they are about to leave."""
    seats = {0: Seat(0, 0, 0), 1: Seat(0, 1, 0)}
    nodes = {node: NodeAddress(f"host{node}", 1, f"host{node}", node == 2) for node in range(3)}
    placement = placements.CopyPlacement(*nodes_of(seats, nodes), 2)
    assert placement.buddies(0, (0, 1)) == (2,)
    assert nodes_of(seats, nodes) == ({0: 0, 1: 0}, {n: f"host{n}" for n in nodes}, [2])


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, int], dict[int, str], set[int], list[int], int]:
    nodes = draw(st.integers(1, 6))
    per_node = draw(st.integers(1, 3))
    spares = set(range(nodes, nodes + draw(st.integers(0, 3))))
    names = draw(st.permutations(range(nodes + len(spares))))
    seats = {role: names[role // per_node] for role in range(nodes * per_node)}
    domain_count = draw(st.integers(1, 10))
    domains = {node: f"d{draw(st.integers(0, domain_count - 1))}" for node in names}
    stride = draw(st.sampled_from([1, per_node]))
    peers = list(range(0, nodes * per_node, stride))
    return seats, domains, {names[spare] for spare in spares}, peers, draw(st.integers(1, 3))


@given(clusters())
def test_never_the_own_node_and_as_many_nodes_and_domains_as_there_are(case) -> None:  # type: ignore[no-untyped-def]
    seats, domains, spares, peers, replicas = case
    for role in seats:
        chosen = choose_buddies(role, peers, seats, domains, spares, replicas)
        assert seats[role] not in chosen
        assert len(set(chosen)) == len(chosen) == min(replicas, len(domains) - 1)
        got = {domains[node] for node in chosen} - {domains[seats[role]]}
        assert len(got) == min(replicas, len(set(domains.values())) - 1)


@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_copies_spread_evenly(nodes, per_node, replicas, inner):
    """Groups across nodes and groups inside a node both load every node with the same."""
    replicas = min(replicas, nodes - 1)
    seats = {role: role // per_node for role in range(nodes * per_node)}
    load: Counter[int] = Counter()
    for role, node in seats.items():
        across = range(role % per_node, nodes * per_node, per_node)
        peers = [r for r in seats if seats[r] == node] if inner else list(across)
        load.update(choose_buddies(role, peers, seats, own_domains(range(nodes)), (), replicas))
    assert set(load.values()) == {per_node * replicas}


@given(clusters())
def test_a_spare_takes_the_place_of_the_node_it_replaces(case) -> None:  # type: ignore[no-untyped-def]
    seats, _, spares, peers, replicas = case
    if not spares:
        return
    spare, dead = min(spares), seats[0]
    domains = own_domains(sorted({*seats.values(), *spares} - spares | {spare}))
    after_domains = own_domains(sorted(set(domains) - {dead}))
    after_seats = {role: spare if node == dead else node for role, node in seats.items()}
    for role, node in after_seats.items():
        if node == spare:
            continue
        before = choose_buddies(role, peers, seats, domains, (), replicas)
        after = choose_buddies(role, peers, after_seats, after_domains, (), replicas)
        assert after == tuple(spare if n == dead else n for n in before)


def test_domains_file():
    table = placements.parse_domains("# racks\n0 rack-a\n1 rack-a # same\n\nhost7 rack-b\n")
    assert placements.domain_of(table, 1) == "rack-a"
    assert placements.domain_of(table, 2, "host7") == "rack-b"
    assert placements.domain_of(table, 3, "host9") == "node3"
    assert placements.domain_of(table, 4, "host7.cluster.example") == "rack-b"


@pytest.mark.parametrize("text", ["0\n", "0 a b\n", "0 a\n0 b\n"])
def test_malformed_domains_file_names_the_line(text):
    with pytest.raises(placements.DomainsError, match=r"line [12]"):
        placements.parse_domains(text)

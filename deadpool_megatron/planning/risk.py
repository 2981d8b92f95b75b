"""The chance that some state is lost with several nodes, counted over the real placement.

A *holder set* is the set of nodes that hold a part of some role: its own node and its buddies, or
the nodes of the roles whose bytes are equal. State is lost when a whole holder set is lost.

For k nodes lost together, each choice of k among all n being as likely as another, P = B / C(n, k),
where B counts the choices that contain a holder set, exactly, without trying them all. With one
copy, holder sets are pairs, m of them, and form a graph:

    B(2) = m
    B(3) = m·(n - 2) - sum over nodes of C(degree, 2) + triangles

because a triple with two pairs was counted twice, and one with three pairs three times. To B(3)
come the holder sets of three nodes that contain no pair. A holder set of one node makes every
choice with that node bad; such nodes are taken out first.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from deadpool_megatron.planning.roles import Placement

HolderSets = frozenset[frozenset[int]]


def holder_sets(placement: Placement) -> HolderSets:
    """All of them, each once, without those that contain another one."""
    nodes = {role.role: role for role in placement.roles}
    found: set[frozenset[int]] = set()
    for role in placement.roles:
        # The extras of a role are always shipped, and nobody else has them.
        found.add(frozenset((role.node, *role.buddies)))
        for part in role.parts:
            holders: set[int] = set()
            for same in part.replicas:
                copies = () if part.covered else nodes[same].buddies
                holders.update((nodes[same].node, *copies))
            if not part.coded:
                found.add(frozenset(holders))
    for group in placement.groups:
        # One more than the parity blocks, of all nodes that hold a block of either kind.
        holders = {*group.holders, *(nodes[number].node for number in group.roles)}
        losses = itertools.combinations(sorted(holders), len(group.holders) + 1)
        found.update(map(frozenset, losses))
    return minimal(found)


def minimal(sets: Iterable[frozenset[int]]) -> HolderSets:
    """Without the sets that contain another one: their loss is a loss already."""
    kept: set[frozenset[int]] = set()
    by_node: dict[int, list[frozenset[int]]] = defaultdict(list)
    for _, equal in itertools.groupby(sorted(set(sets), key=len), key=len):
        # None of them contains another one.
        new = [one for one in equal if not any(s <= one for node in one for s in by_node[node])]
        kept.update(new)
        for one in new:
            for node in one:
                by_node[node].append(one)
    return frozenset(kept)


def loss_probability(sets: HolderSets, nodes: int, lost: int) -> float:
    """P that some state is lost with ``lost`` (1 to 3) of ``nodes`` nodes; exact."""
    if lost > nodes:
        return 1.0 if sets else 0.0
    return bad_choices(sets, nodes, lost) / math.comb(nodes, lost)


def bad_choices(sets: HolderSets, nodes: int, lost: int) -> int:
    """Choices of ``lost`` (1 to 3) nodes that contain a holder set; the sets are minimal."""
    alone = sum(1 for one in sets if len(one) == 1)
    rest = nodes - alone
    bad = math.comb(nodes, lost) - math.comb(rest, lost)
    pairs = [one for one in sets if len(one) == 2]
    if lost == 2:
        return bad + len(pairs)
    if lost == 3:
        triples = sum(1 for one in sets if len(one) == 3)
        return bad + _triples_with_a_pair(pairs, rest) + triples
    return bad


def _triples_with_a_pair(pairs: list[frozenset[int]], nodes: int) -> int:
    neighbours: dict[int, set[int]] = defaultdict(set)
    for pair in pairs:
        one, other = pair
        neighbours[one].add(other)
        neighbours[other].add(one)
    paths = sum(math.comb(len(found), 2) for found in neighbours.values())
    corners = sum(len(neighbours[a] & neighbours[b]) for a, b in map(tuple, pairs))
    return len(pairs) * (nodes - 2) - paths + corners // 3


def fatal_domains(sets: HolderSets, domains: Mapping[int, str]) -> tuple[str, ...]:
    """Failure domains whose loss as a whole loses state."""
    inside: Counter[str] = Counter()
    for one in sets:
        names = {domains[node] for node in one}
        if len(names) == 1:
            inside.update(names)
    return tuple(sorted(inside))


def losses_per_hour(sets: HolderSets, node_mtbf_hours: float, exposure_hours: float) -> float:
    """Expected losses of state: sum over holder sets of s · r · (1 - exp(-r·T))^(s-1).

    With r = 1 / MTBF and s nodes in the set: one of them fails last, at rate r, and each of the
    others has failed within the exposure T before that. Sets that overlap are counted for
    themselves, so this is never too low.
    """
    rate = 1.0 / node_mtbf_hours
    recent = -math.expm1(-rate * exposure_hours)
    sizes = Counter(len(one) for one in sets)
    return sum(count * size * rate * recent ** (size - 1) for size, count in sizes.items())

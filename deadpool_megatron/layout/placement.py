"""Which nodes hold the copies of a role's unique state. Pure and deterministic.

Every vault and the coordinator compute the same answer from the same epoch record, so no placement
is ever sent. That copies belong on data-parallel peers is an idea of DeepSpeed-style buddy
checkpoints (Gemini, REFT); skipping bytes that peers hold anyway is DeadPool's asymmetric backup.
"""

from __future__ import annotations

import bisect
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction


def choose_buddies(
    role: int,
    peers: Sequence[int],
    seats: Mapping[int, int],
    domains: Mapping[int, str],
    spares: Collection[int],
    replicas: int,
) -> tuple[int, ...]:
    """The nodes that hold copies of ``role``, best first; fewer than ``replicas`` if too few live.

    ``seats`` maps role -> node, ``domains`` maps each *live* node -> failure domain; nodes without
    a domain are never chosen. Order of preference: nodes of data-parallel ``peers`` in cyclic
    order, other training nodes likewise in the order of their lowest role, spares in an order drawn
    from (role, node). Choice j of r begins j/(r+1) of the way round from the own place, and takes
    the first node in a new failure domain; where there is none, any other node. The loss of a node
    that was not chosen changes nothing, and a spare that takes over a node's roles takes over its
    place in the order.

    Not from the next place: where neighbours share a rack, all of its nodes would choose the first
    one of the next rack. From further away each finds another node; and with one copy, nodes hold
    each other's, which makes fewer pairs whose loss is fatal than a ring does.
    """
    own_node = seats.get(role, -1)
    used = {domains[own_node]} if own_node in domains else set()
    chosen: list[int] = []

    def candidates(number: int) -> list[int]:
        ordered = _preference(role, peers, seats, spares, Fraction(number, replicas + 1))
        return [n for n in ordered if n != own_node and n in domains and n not in chosen]

    for number in range(1, replicas + 1):
        found = next((node for node in candidates(number) if domains[node] not in used), None)
        if found is not None:
            chosen.append(found)
            used.add(domains[found])
    return tuple(chosen + candidates(1)[: max(0, replicas - len(chosen))])


def is_covered(
    replicas_of_part: Sequence[int],
    role: int,
    seats: Mapping[int, int],
    domains: Mapping[int, str],
    replicas: int,
) -> bool:
    """True when nothing of a part must be shipped: peers seal the same bytes far enough apart.

    That is so when the roles in ``replicas_of_part`` (PartInfo.replicas) and ``role`` itself sit on
    live nodes in at least ``replicas + 1`` distinct failure domains.
    """
    nodes = {seats[r] for r in {*replicas_of_part, role} if r in seats}
    return len({domains[node] for node in nodes if node in domains}) > replicas


def missing_copies(
    seats: Mapping[int, int],
    domains: Mapping[int, str],
    spares: Collection[int],
    replicas: int,
) -> frozenset[int]:
    """Roles for which too few live nodes are left: the value of EpochRecord.fewer_copies.

    How many buddies there are does not depend on which nodes are preferred, so no layout is needed.
    """
    return frozenset(
        role
        for role in seats
        if len(choose_buddies(role, (role,), seats, domains, spares, replicas)) < replicas
    )


def _preference(
    role: int,
    peers: Sequence[int],
    seats: Mapping[int, int],
    spares: Collection[int],
    way_round: Fraction,
) -> list[int]:
    """All nodes, each once, most wanted first (the own node and dead ones included)."""
    first_role: dict[int, int] = {}
    for seated in sorted(seats):
        first_role.setdefault(seats[seated], seated)
    own_place = first_role[seats[role]] if role in seats else role
    peer_nodes = [seats[peer] for peer in _cyclic(peers, role, way_round) if peer in seats]
    training = [seats[place] for place in _cyclic(first_role.values(), own_place, way_round)]
    idle = sorted(set(spares) - set(first_role), key=lambda node: (_draw(role, node), node))
    return list(dict.fromkeys([*peer_nodes, *training, *idle]))


def _cyclic(values: Iterable[int], own: int, way_round: Fraction) -> list[int]:
    """All values in cyclic order, beginning so far round (0 to 1) from ``own``."""
    ordered = sorted(set(values))
    begin = bisect.bisect_left(ordered, own) + int(len(ordered) * way_round)
    return [ordered[(begin + step) % len(ordered)] for step in range(len(ordered))]


def _draw(role: int, node: int) -> int:
    """Rendezvous hashing: each role ranks spares its own way, whatever other spares exist."""
    return zlib.crc32(f"{role}:{node}".encode())

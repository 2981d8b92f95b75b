"""Which nodes hold the copies of a role's unique state. Pure and deterministic.

Every vault and the coordinator compute the same answer from the same epoch record, so no placement
is ever sent. That copies belong on data-parallel peers is an idea of DeepSpeed-style buddy
checkpoints (Gemini, REFT); skipping bytes that peers hold anyway is DeadPool's asymmetric backup.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence


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
    a domain are never chosen. Order of preference: nodes of data-parallel ``peers`` in cyclic order
    from the own place in the group, other training nodes in cyclic order of their lowest role,
    spares in an order drawn from (role, node). Each choice takes a new failure domain while there
    is one, then any other node. The loss of a node that was not chosen changes nothing, and a spare
    that takes over a node's roles takes over its place in the order.
    """
    own_node = seats.get(role, -1)
    ordered = [
        node
        for node in _preference(role, peers, seats, spares)
        if node != own_node and node in domains
    ]
    used = {domains[own_node]} if own_node in domains else set()
    chosen: list[int] = []
    for node in ordered:
        if len(chosen) < replicas and domains[node] not in used:
            chosen.append(node)
            used.add(domains[node])
    rest = [node for node in ordered if node not in chosen]
    return tuple(chosen + rest[: max(0, replicas - len(chosen))])


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
    role: int, peers: Sequence[int], seats: Mapping[int, int], spares: Collection[int]
) -> list[int]:
    """All nodes, each once, most wanted first (the own node and dead ones included)."""
    first_role: dict[int, int] = {}
    for seated in sorted(seats):
        first_role.setdefault(seats[seated], seated)
    own_place = first_role[seats[role]] if role in seats else role
    peer_nodes = [seats[peer] for peer in _cyclic(peers, role) if peer in seats]
    training = [seats[place] for place in _cyclic(first_role.values(), own_place)]
    idle = sorted(set(spares) - set(first_role), key=lambda node: (_draw(role, node), node))
    return list(dict.fromkeys([*peer_nodes, *training, *idle]))


def _cyclic(values: Iterable[int], start: int) -> list[int]:
    """Values in ascending order, those above ``start`` first, ``start`` itself last."""
    return sorted(set(values), key=lambda value: (value <= start, value))


def _draw(role: int, node: int) -> int:
    """Rendezvous hashing: each role ranks spares its own way, whatever other spares exist."""
    return zlib.crc32(f"{role}:{node}".encode())

"""The nodes that hold the copies of a role's unique state, and failure domains. Pure.

Every vault and the coordinator compute the same answer from the same epoch record, so no placement
is ever sent. That copies belong on data-parallel peers is an idea of DeepSpeed-style buddy
checkpoints (Gemini, REFT); skipping bytes that peers hold anyway is DeadPool's asymmetric backup.

Nodes of one failure domain are lost together. The user's domains file has lines ``NODE DOMAIN``:
NODE is a node id or a host name, DOMAIN any word (a rack, a power feed). Empty lines and text after
``#`` are skipped. A node that the file does not name is a domain of its own.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction

from deadpool_megatron import UserError
from deadpool_megatron.layout.records import EpochRecord, nodes_of


class CopyPlacement:
    """The nodes that hold copies, for one set of seats and live nodes.

    ``seats`` maps role -> node, ``domains`` maps each *live* node -> failure domain; nodes without
    a domain are never chosen. Not thread-safe: it remembers the order of each group of peers.
    """

    def __init__(
        self,
        seats: Mapping[int, int],
        domains: Mapping[int, str],
        spares: Collection[int],
        replicas: int,
    ) -> None:
        self._seats = seats
        self._domains = domains
        self._replicas = replicas
        self._starts = [Fraction(number, replicas + 1) for number in range(replicas + 1)]
        first_role: dict[int, int] = {}
        for role in sorted(seats):
            first_role.setdefault(seats[role], role)
        self._first_role = first_role
        self._first_roles = sorted(first_role.values())
        self._idle = set(spares) - set(first_role)
        eligible = [node for node in (*first_role, *self._idle) if node in domains]
        self._live_domains = {domains[node] for node in eligible}
        self._peers: dict[Sequence[int], list[int]] = {}

    @staticmethod
    def of_record(record: EpochRecord) -> CopyPlacement:
        """Return the placement for a record."""
        return CopyPlacement(*nodes_of(record.seats, record.nodes), record.replicas)

    def buddies(self, role: int, peers: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes that hold copies of ``role``, best first; fewer if too few are live.

        Order of preference: nodes of data-parallel ``peers`` in cyclic order, other training nodes
        likewise in the order of their lowest role, spares in an order drawn from (role, node).
        Copy j of r is searched from j/(r+1) of the way round the circle, counted from the role's
        own place. It is put on the first node in a new failure domain; if there is none, on any
        other node. The loss of a node that was not chosen changes nothing, and a spare that takes
        over a node's roles takes over its place in the order.

        If the search began at the next place, all nodes of a rack would choose the first node of
        the next rack; from further away, they choose different nodes. With one copy, two nodes hold
        each other's copies, so the loss of fewer pairs is fatal than with a ring.
        """
        own_node = self._seats.get(role, -1)
        used_domains = {self._domains[own_node]} if own_node in self._domains else set()
        chosen: list[int] = []

        def candidates(number: int) -> Iterator[int]:
            for node in self._preference(role, peers, self._starts[number]):
                if node != own_node and node in self._domains and node not in chosen:
                    yield node

        for number in range(1, self._replicas + 1):
            if self._live_domains <= used_domains:
                break
            nodes = (node for node in candidates(number) if self._domains[node] not in used_domains)
            found = next(nodes, None)
            if found is not None:
                chosen.append(found)
                used_domains.add(self._domains[found])
        while len(chosen) < self._replicas and (other := next(candidates(1), None)) is not None:
            chosen.append(other)
        return tuple(chosen)

    def _preference(self, role: int, peers: Sequence[int], start: Fraction) -> Iterator[int]:
        """Yield all nodes, the best first. The role's own node and dead nodes are among them, and
        a node may be repeated."""
        if peers not in self._peers:
            self._peers[peers] = sorted(set(peers))
        for peer in _cyclic(self._peers[peers], role, start):
            if peer in self._seats:
                yield self._seats[peer]
        own_place = self._first_role[self._seats[role]] if role in self._seats else role
        for place in _cyclic(self._first_roles, own_place, start):
            yield self._seats[place]
        yield from sorted(self._idle, key=lambda node: (_draw(role, node), node))


def is_covered(
    replicas_of_part: Sequence[int],
    role: int,
    seats: Mapping[int, int],
    domains: Mapping[int, str],
    replicas: int,
) -> bool:
    """Return whether peers in enough failure domains seal a part, so that it is not copied.

    The roles in ``replicas_of_part`` (PartInfo.replicas) and ``role`` itself must sit on live nodes
    in at least ``replicas + 1`` distinct failure domains.
    """
    nodes = {seats[r] for r in {*replicas_of_part, role} if r in seats}
    return len({domains[node] for node in nodes if node in domains}) > replicas


def missing_copies(
    seats: Mapping[int, int], domains: Mapping[int, str], spares: Collection[int], replicas: int
) -> frozenset[int]:
    """Return the roles with too few live nodes for their copies: EpochRecord.fewer_copies.

    The order of preference does not change the number of buddies, so counting live nodes suffices.
    """
    live = {node for node in (*seats.values(), *spares) if node in domains}
    return frozenset(role for role, node in seats.items() if len(live) - (node in live) < replicas)


class DomainsError(UserError, ValueError):
    """A domains file with a malformed line, which the message names."""


def parse_domains(text: str) -> dict[str, str]:
    """Return NODE -> DOMAIN of the text of a domains file. Raises DomainsError."""
    table: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.partition("#")[0].split()
        if not entry:
            continue
        if len(entry) != 2:
            raise DomainsError(f"domains file, line {number}: expected 'NODE DOMAIN', got {line!r}")
        node, domain = entry
        if table.setdefault(node, domain) != domain:
            raise DomainsError(
                f"domains file, line {number}: node {node} is in {table[node]} and in {domain}"
            )
    return table


def domain_of(table: Mapping[str, str], node: int, host: str = "") -> str:
    """Return the failure domain of a node: that of its id, of its host name, or its own.

    A host may report its full name where the file has the short name.
    """
    named = (table.get(name) for name in (str(node), host, host.partition(".")[0]))
    return next((domain for domain in named if domain), f"node{node}")


def _cyclic(ordered: Sequence[int], own: int, start: Fraction) -> Iterator[int]:
    """Yield ``ordered`` (ascending) in cyclic order. ``start``: where to begin, as a fraction of
    the circle counted from ``own``."""
    begin = bisect.bisect_left(ordered, own)
    begin += len(ordered) * start.numerator // start.denominator
    for step in range(len(ordered)):
        yield ordered[(begin + step) % len(ordered)]


def _draw(role: int, node: int) -> int:
    """Return the rank of a spare for a role. By rendezvous hashing, each role has its own order of
    spares, which other spares do not change.

    A CRC would not do: it is linear, so the roles would have few different orders.
    """
    digest = hashlib.blake2b(f"{role}:{node}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")

"""The nodes and the members on them: who is here, who is lost, who shall have no role.

Immutable, with what every message asks of them. A whole scan of 32,768 members per message would be
quadratic; so members that are killed, starting or not warm yet are counted as they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum

from immutables import Map

from deadpool_megatron.cluster.machine.state.persistent import PersistentSet, without
from deadpool_megatron.preflight.facts import HostFacts
from deadpool_megatron.preflight.judge import Judgement

Place = tuple[int, int]  # (node, local slot)


class MemberStatus(StrEnum):
    """Life of a member process; a lost one is replaced at once by its next incarnation."""

    STARTING = "starting"
    RUNNING = "running"
    WARM = "warm"
    KILLED = "killed"  # told to die, not reaped yet


@dataclass(frozen=True)
class MemberState:
    """``since``: when it was started, told to be warm, or killed (seconds)."""

    incarnation: int
    status: MemberStatus
    since: float


@dataclass(frozen=True)
class NodeState:
    """A connected node. ``restarts``: how often a process had to be replaced on it.

    ``restarted_at`` and ``crashed_at``: when, within the last ``node_crash_window_seconds``;
    crashes are those that ended an epoch. ``host_errors``: in the whole run. ``memory_bytes``:
    for generations, 0 when it is not known. ``facts``: what it has said about its host last, None
    for nothing; ``judged``: what it is good for. ``returns``: see :class:`.inputs.NodeJoined`.
    """

    host: str
    vault_port: int
    domain: str
    memory_bytes: int = 0
    returns: bool = False
    restarts: int = 0
    restarted_at: tuple[float, ...] = ()
    crashed_at: tuple[float, ...] = ()
    host_errors: int = 0
    facts: HostFacts | None = None
    judged: Judgement = field(default_factory=Judgement)

    @property
    def host_name(self) -> str:
        """Of its machine, as far as it is known: nodes that come later from there have the same."""
        return self.host if self.facts is None else self.facts.hostname


@dataclass(frozen=True)
class MemberTable(Mapping[Place, MemberState]):
    """Place -> member. A change returns a new roster and costs O(log n). Thread-safe.

    ``killed``: told to die and not reaped. ``starting``: did not say hello yet. ``building``: these
    and the others that are neither warm nor killed.
    """

    by_node: Map[int, Map[int, MemberState]] = field(default_factory=Map)
    killed: PersistentSet[Place] = field(default_factory=PersistentSet)
    starting: PersistentSet[Place] = field(default_factory=PersistentSet)
    building: PersistentSet[Place] = field(default_factory=PersistentSet)

    def __getitem__(self, place: Place) -> MemberState:
        return self.by_node[place[0]][place[1]]

    def __iter__(self) -> Iterator[Place]:
        return ((node, slot) for node, slots in self.by_node.items() for slot in slots)

    def __len__(self) -> int:
        return sum(len(slots) for slots in self.by_node.values())

    def with_member(self, place: Place, member: MemberState) -> MemberTable:
        """This roster with ``member`` at ``place``, in the stead of who was there."""
        node, slot = place
        slots = self.by_node.get(node)
        before = None if slots is None else slots.get(slot)
        status = None if before is None else before.status
        changed = replace(
            self,
            by_node=self.by_node.set(node, (Map() if slots is None else slots).set(slot, member)),
        )
        return changed if status is member.status else changed._counted(place, member.status)

    def with_warm(self, places: Iterable[Place], since: float) -> MemberTable:
        """All of these are warm now; one pass, for the opening of an epoch."""
        warm = set(places)
        nodes = {node for node, _ in warm}
        with self.by_node.mutate() as by_node:
            for node in nodes:
                by_node[node] = Map(
                    (
                        slot,
                        MemberState(member.incarnation, MemberStatus.WARM, since)
                        if (node, slot) in warm
                        else member,
                    )
                    for slot, member in by_node[node].items()
                )
            found = by_node.finish()
        return MemberTable(
            found,
            PersistentSet(self.killed - warm),
            PersistentSet(self.starting - warm),
            PersistentSet(self.building - warm),
        )

    def without_member(self, place: Place) -> MemberTable:
        """This roster without the member at ``place``."""
        by_node = self.by_node.set(place[0], self.by_node[place[0]].delete(place[1]))
        return replace(self._counted(place, None), by_node=by_node)

    def without_node(self, node: int) -> MemberTable:
        """This roster without the members of a node."""
        changed = self
        for slot in self.by_node.get(node, ()):
            changed = changed._counted((node, slot), None)
        return replace(changed, by_node=without(self.by_node, node))

    def _counted(self, place: Place, status: MemberStatus | None) -> MemberTable:
        def put(kept: PersistentSet[Place], wanted: bool) -> PersistentSet[Place]:
            return kept.with_item(place) if wanted else kept.without(place)

        starting = status is MemberStatus.STARTING
        return replace(
            self,
            killed=put(self.killed, status is MemberStatus.KILLED),
            starting=put(self.starting, starting),
            building=put(self.building, starting or status is MemberStatus.RUNNING),
        )


@dataclass(frozen=True)
class Fleet:
    """``nodes``: connected ones. ``gone``: those given up, with the cause. ``drains``: nodes whose
    roles are to move as soon as a spare can take them, and as long as there are such those that
    have moved: no spares for the others; ``leaving``: nodes that have no role in the
    next record; ``avoid``: nodes that get a role last; ``wrong``: those found to compute or hold
    wrong numbers, or to have a broken device, which get none any more; ``wrong_hosts``: those all
    of whose nodes were found so, from where none gets any. ``returning``: nodes whose agents ended
    in this recovery, and may come back.
    """

    nodes: Map[int, NodeState] = field(default_factory=Map)
    gone: Map[int, str] = field(default_factory=Map)
    members: MemberTable = field(default_factory=MemberTable)
    drains: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    avoid: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    wrong_hosts: frozenset[str] = frozenset()
    returning: frozenset[int] = frozenset()

    @property
    def aside(self) -> frozenset[int]:
        """Nodes that are no good spares."""
        return self.avoid | self.wrong

    def absent(self, wished: Iterable[int]) -> list[int]:
        """Returns nodes that neither are here nor will ever come, ascending."""
        return sorted(node for node in wished if node not in self.nodes and node not in self.gone)

    def with_node(self, node: int, known: NodeState) -> Fleet:
        """Returns the fleet with what is known of a node now."""
        return replace(self, nodes=self.nodes.set(node, known))

    def with_member(self, place: Place, member: MemberState) -> Fleet:
        """Returns the fleet with ``member`` at ``place``."""
        return replace(self, members=self.members.with_member(place, member))

    def without_node(self, node: int) -> Fleet:
        """Returns the fleet without a node and its members."""
        return replace(
            self,
            nodes=without(self.nodes, node),
            members=self.members.without_node(node),
            drains=self.drains - {node},
        )

    def given_up(self, nodes: Iterable[int], cause: str) -> Fleet:
        """Returns the fleet in which nobody waits for these nodes any more."""
        return replace(self, gone=self.gone.update(dict.fromkeys(nodes, cause)))

    def draining(self, node: int) -> Fleet:
        """Returns the fleet with the wish that the node has no role."""
        return replace(self, drains=self.drains | {node})

    def found_wrong(self, node: int, host: str) -> Fleet:
        """Returns the fleet in which the node has no role any more, and nobody from ``host``, which
        is empty where others are on its host."""
        hosts = {host} if host else set[str]()
        return replace(self, wrong=self.wrong | {node}, wrong_hosts=self.wrong_hosts | hosts)

    def moved(self, seated: Set[int]) -> Fleet:
        """Returns the fleet after a record in which only the ``seated`` nodes have roles."""
        return replace(
            self,
            drains=frozenset() if self.drains.isdisjoint(seated) else self.drains,
            avoid=self.avoid | self.leaving,
            leaving=frozenset(),
            returning=frozenset(),
        )

"""The nodes and the members on them: who is here, who is lost, who shall have no role."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from immutables import Map

from deadpool_megatron.cluster.machine.state.persistent import without
from deadpool_megatron.cluster.machine.state.roster import MemberState, NodeState, Place, Roster


@dataclass(frozen=True)
class Fleet:
    """``nodes``: connected ones. ``gone``: those given up, with the cause. ``drains``: nodes whose
    roles are to move as soon as a spare can take them; ``leaving``: nodes that have no role in the
    next record; ``avoid``: nodes that get a role last. ``returning``: nodes whose agents ended in
    this recovery, and may come back.
    """

    nodes: Map[int, NodeState] = field(default_factory=Map)
    gone: Map[int, str] = field(default_factory=Map)
    members: Roster = field(default_factory=Roster)
    drains: frozenset[int] = frozenset()
    leaving: frozenset[int] = frozenset()
    avoid: frozenset[int] = frozenset()
    returning: frozenset[int] = frozenset()

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

    def moved(self) -> Fleet:
        """Returns the fleet after a record in which the leaving nodes have no role."""
        return replace(
            self,
            drains=self.drains - self.leaving,
            avoid=self.avoid | self.leaving,
            leaving=frozenset(),
            returning=frozenset(),
        )

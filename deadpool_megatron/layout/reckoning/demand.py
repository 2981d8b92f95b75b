"""What memory a plan of protection asks of each node.

Pure. Reckoned with the code that places copies and parity blocks in a run, from the layouts that
members have registered. Memory is that of the files in /dev/shm, headers and all; buffers of
processes are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from deadpool_megatron.layout.places.copies import CopyPlacement, is_covered
from deadpool_megatron.layout.reckoning.footprint import (
    block_bytes,
    chain_bytes,
    copy_bytes,
    own_bytes,
)
from deadpool_megatron.layout.records import PartInfo, RoleLayout
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan


@dataclass(frozen=True)
class Scene:
    """Who sits where. ``seats``: role -> node; ``domains``: of each live node, spares too;
    ``survived``: lost nodes that any plan has to bear which does not stay on the own node (r).
    ``roomy``: memory counts with what a node needs while it takes over the roles of another one.
    """

    layouts: Mapping[int, RoleLayout]
    seats: Mapping[int, int]
    domains: Mapping[int, str]
    spares: Collection[int]
    survived: int
    roomy: bool = False


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of one node: ``own`` slots of the roles that train there; ``kept`` beside them (second
    copies, copies for others, parity blocks)."""

    own: int
    kept: int


def memory_by_use(plan: ProtectionPlan, scene: Scene) -> dict[int, NodeMemory]:
    """Returns what each node has its memory for, while nobody takes over from another one."""
    reckoning = _reckoned(plan, scene)
    own = reckoning.own
    return {node: NodeMemory(own[node], all - own[node]) for node, all in reckoning.memory.items()}


def memory_needs(plan: ProtectionPlan, scene: Scene) -> dict[int, int]:
    """Returns node -> bytes of all slots: own, copies, parity blocks."""
    reckoning = _reckoned(plan, scene)
    if not scene.roomy:
        return dict(reckoning.memory)
    return reckoning.with_room(_reckoned(plan, _after_a_swap(scene)).most_kept())


def _reckoned(plan: ProtectionPlan, scene: Scene) -> _Reckoning:
    survived = 0 if plan.kind.is_local else scene.survived
    reckoning = _Reckoning(plan, scene, survived)
    for role, layout in scene.layouts.items():
        if role in scene.seats:
            reckoning.add_role(role, layout)
    reckoning.add_parity()
    return reckoning


def _after_a_swap(scene: Scene) -> Scene:
    """A spare has taken over the roles of a node, if there is one: fewer nodes keep as much."""
    if not scene.spares or not scene.seats:
        return scene
    lost, spare = min(scene.seats.values()), min(scene.spares)
    return replace(
        scene,
        seats={role: spare if node == lost else node for role, node in scene.seats.items()},
        domains={node: domain for node, domain in scene.domains.items() if node != lost},
        spares=[node for node in scene.spares if node != spare],
    )


class _Reckoning:
    def __init__(self, plan: ProtectionPlan, scene: Scene, survived: int) -> None:
        self._plan = plan
        self._scene = scene
        self._survived = survived
        self._copies = CopyPlacement(scene.seats, scene.domains, scene.spares, survived)
        self._parity = None
        if plan.kind is Kind.PARITY:
            from deadpool_megatron.layout.places.parity import ParityPlacement

            self._parity = ParityPlacement(
                scene.seats, scene.domains, scene.spares, plan, scene.survived
            )
        self.memory = Counter(dict.fromkeys(scene.domains, 0))
        self.own = Counter[int]()

    def add_role(self, role: int, layout: RoleLayout) -> None:
        """The own slots, their second copies, and the copies that other nodes hold."""
        node = self._scene.seats[role]
        own = own_bytes(layout)
        self.memory[node] += own
        self.own[node] += own
        if self._plan.kind is Kind.LOCAL_TWICE:
            self.memory[node] += copy_bytes(layout, [part.nbytes for part in layout.parts])
        shards = set(layout.shard_parts)
        copied = [
            part for part in layout.parts if part.name in shards and self._is_copied(role, part)
        ]
        if self._plan.kind is Kind.RECOMPUTE:
            names = [part.name for part in copied]
            kept = chain_bytes(layout, names, self._plan.scheme.full_every)
        else:
            others = [part.nbytes for part in layout.parts if part.name not in shards]
            kept = copy_bytes(layout, [*(part.nbytes for part in copied), *others])
        for buddy in self._copies.buddies(role, layout.peers):
            self.memory[buddy] += kept

    def _is_copied(self, role: int, part: PartInfo) -> bool:
        return not (self._is_coded(role, part) or self._is_covered(role, part))

    def _is_coded(self, role: int, part: PartInfo) -> bool:
        return self._parity is not None and not self._is_covered(role, part)

    def _is_covered(self, role: int, part: PartInfo) -> bool:
        scene = self._scene
        return is_covered(part.replicas, role, scene.seats, scene.domains, self._survived)

    def add_parity(self) -> None:
        """The blocks of each group: as long as its longest part."""
        groups = () if self._parity is None else self._parity.groups
        for group in groups:
            longest: dict[str, int] = {}
            for role in group.roles:
                layout = self._scene.layouts.get(role)
                if layout is None:
                    continue
                for part in layout.parts:
                    if part.name in layout.shard_parts and self._is_coded(role, part):
                        longest[part.name] = max(part.nbytes, longest.get(part.name, 0))
            if longest:
                slots = max(self._scene.layouts[r].slots for r in group.roles)
                for holder in group.holders:
                    self.memory[holder] += block_bytes(slots, len(group.roles), longest)

    def most_kept(self) -> int:
        """Bytes that the fullest training node has beside its own slots."""
        own = self.own
        return max((self.memory[node] - own[node] for node in own), default=0)

    def with_room(self, kept: int) -> dict[int, int]:
        """What a spare has kept stays in one generation beside the slots of the roles that it takes
        over, until that has new places, of which the spare, which keeps as much as ``kept`` bytes
        then, may be one.
        """
        own = self.own
        slots = max((layout.slots for layout in self._scene.layouts.values()), default=1)
        most = max(own.values(), default=0)
        return {
            node: nbytes if node in own else max(nbytes, most + (nbytes + kept) // slots)
            for node, nbytes in self.memory.items()
        }

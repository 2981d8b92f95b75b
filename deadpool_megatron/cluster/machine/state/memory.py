"""Contents of the memory of the nodes, as far as they have said."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from immutables import Map

from deadpool_megatron.cluster.machine.state.persistent import without
from deadpool_megatron.layout.inventories import usual_layouts
from deadpool_megatron.layout.records import Inventory, RoleLayout


@dataclass(frozen=True)
class Memory:
    """``promised``: inventories of the last close. ``found``: what lay in memory of nodes that no
    record names yet. ``layouts``: how roles lay out their state; ``inherited``: roles of which that
    is known from memory alone.
    """

    promised: Map[int, Inventory] = field(default_factory=Map)
    found: Map[int, Inventory] = field(default_factory=Map)
    layouts: Map[int, RoleLayout] = field(default_factory=Map)
    inherited: frozenset[int] = frozenset()

    @property
    def held(self) -> Map[int, Inventory]:
        """Inventories of live nodes: as promised at the close, else as found before they joined."""
        return self.found.update(self.promised)

    @property
    def has_computed(self) -> bool:
        """Return whether a generation is held that an iteration has made."""
        found = (holding for one in self.held.values() for holding in one.holdings)
        return any(holding.generation.iteration > 0 for holding in found)

    def with_promise(self, inventory: Inventory) -> Memory:
        """Returns the memory with what a node has promised."""
        return replace(self, promised=self.promised.set(inventory.node, inventory))

    def with_found(self, node: int, inventory: Inventory) -> Memory:
        """Returns the memory with what lay on a node before it joined."""
        return replace(self, found=self.found.set(node, inventory))

    def with_layout(self, layout: RoleLayout) -> Memory:
        """Returns the memory with the layout that a role's own member has told."""
        layouts = self.layouts.set(layout.role, layout)
        return Memory(self.promised, self.found, layouts, self.inherited)

    def without_node(self, node: int) -> Memory:
        """Returns the memory without what a node held."""
        promised, found = without(self.promised, node), without(self.found, node)
        return replace(self, promised=promised, found=found)

    def with_inherited(self, world_size: int) -> Memory:
        """Returns the memory with the layouts that the slots tell of roles whose members have not
        told this coordinator yet how they lay out their state."""
        unknown = {role for role in range(world_size) if role not in self.layouts}
        if not unknown:
            return self
        found = usual_layouts(unknown, self.held.values())
        return replace(
            self, layouts=self.layouts.update(found), inherited=self.inherited | found.keys()
        )

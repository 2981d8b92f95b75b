"""Bytes in the memory and on the network of each node, and the duration of a commit.

    copy        shard of a role / pcie_gb_s                  each GPU has a link of its own
    checksum    shard of a role / checksum_gb_s              a thread per role; with local-twice
                                                              the second copy is hashed as well
    ship        the larger of bytes out and bytes in of a node / (nic · nic_fraction)
    paced ship  the same bytes / (nic · link_share), or, if shorter, 0.7 of the time that the window
                leaves after copy and checksum; never shorter than ship. It applies while training
                uses the network all the time; in the gaps of training, copies are as fast as ship
    commit      copy + checksum + paced ship                 in sequence, as in the vault
    window      forward and backward + (cadence · (1 + max_lag) - 1) · step
                                                              from an update to its commit gate

A node's links also have to carry a generation per ``cadence`` steps, whatever the lag: ship may not
be longer. The copy may never be longer than forward and backward, because the fence before the next
update waits for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_megatron.layout.memory_needs import Topology, memory_by_use
from deadpool_megatron.layout.parity_groups import ParityGroup, ParityPlacement
from deadpool_megatron.layout.placement import CopyPlacement, is_covered
from deadpool_megatron.layout.schemes import losses_survived
from deadpool_megatron.planning import shards
from deadpool_megatron.planning.sections import Plan
from deadpool_megatron.settings import SchemeKind

GIGA = 1e9
# As in the vault's pace: the share of the time from the seal to the gate in which copies finish.
_PACED_SHARE = 0.7


@dataclass(frozen=True)
class PlannedRole:
    """The bytes of a role's generation without extras: all bytes, and the bytes that are sent to
    each buddy, or with parity to each holder of a block."""

    shard_bytes: int
    sent_bytes: int
    buddies: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """All roles, and the nodes that a run chooses for their copies."""

    topology: Topology
    roles: Mapping[int, PlannedRole]
    groups: tuple[ParityGroup, ...]

    @property
    def shared_domain_count(self) -> int:
        """Return the number of copies without a failure domain of their own."""
        missing = 0
        for number, role in self.roles.items():
            holders = (self.topology.seats[number], *role.buddies)
            missing += len(holders) - len({self.topology.domains[node] for node in holders})
        return missing


def place(plan: Plan) -> Placement:
    """Return the placement of all roles and of their copies."""
    topology, survived = shards.topology_of(plan), losses_survived(shards.settings_of(plan))
    seats, domains = topology.seats, topology.domains
    copies = CopyPlacement(seats, domains, topology.spares, survived)
    roles = {}
    for role, layout in topology.layouts.items():
        parts = [part for part in layout.parts if part.name in layout.shard_parts]
        sent = sum(
            part.nbytes
            for part in parts
            if not is_covered(part.replicas, role, seats, domains, survived)
        )
        roles[role] = PlannedRole(
            shard_bytes=sum(part.nbytes for part in parts),
            sent_bytes=sent,
            buddies=copies.buddies(role, layout.peers),
        )
    if not plan.protection.scheme.combines_roles:
        return Placement(topology, roles, ())
    chosen = shards.protection_plan(plan)
    parity = ParityPlacement(seats, domains, topology.spares, chosen, survived)
    return Placement(topology, roles, parity.groups)


@dataclass(frozen=True)
class NodeLoad:
    """Bytes of one node: the unique state of its roles, memory, and traffic per generation.

    ``own_slots_bytes``: slots of the node's roles; ``copies_bytes``: copies and parity blocks."""

    unique_bytes: int
    own_slots_bytes: int
    copies_bytes: int
    out_bytes_per_step: int
    in_bytes_per_step: int

    @property
    def memory_bytes(self) -> int:
        """Return the shared memory for slots of every kind."""
        return self.own_slots_bytes + self.copies_bytes


def node_loads(plan: Plan, placement: Placement) -> dict[int, NodeLoad]:
    """Return the load of each node for a protected generation. The load of a spare is the copies
    that it keeps; a spare creates slots of its own only if memory is left."""
    extras, seats = plan.protection.extras_bytes_per_role, placement.topology.seats
    unique, out, into = (Counter[int]() for _ in range(3))
    for number, role in placement.roles.items():
        unique[seats[number]] += role.shard_bytes + extras
        copied_bytes = extras + (0 if plan.protection.scheme.combines_roles else role.sent_bytes)
        for buddy in role.buddies:
            out[seats[number]] += copied_bytes
            into[buddy] += copied_bytes
    for group in placement.groups:
        for holder in group.holders:
            for number in group.roles:
                out[seats[number]] += placement.roles[number].sent_bytes
                into[holder] += placement.roles[number].sent_bytes
    memory = memory_by_use(shards.protection_plan(plan), placement.topology)
    return {
        node: NodeLoad(unique[node], *memory[node], out[node], into[node])
        for node in placement.topology.domains
    }


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, of one commit for the slowest node, and between two commits (cycle)."""

    step_seconds: float
    forward_backward_seconds: float
    window_seconds: float
    copy_seconds: float
    checksum_seconds: float
    ship_seconds: float
    paced_ship_seconds: float
    cycle_seconds: float

    @property
    def commit_seconds(self) -> float:
        """Return the time from the update until the generation is committed, with paced copies."""
        return self.copy_seconds + self.checksum_seconds + self.paced_ship_seconds

    @property
    def min_commit_seconds(self) -> float:
        """Return the commit time while a gate waits: copies then use all bandwidth that training
        leaves."""
        return self.copy_seconds + self.checksum_seconds + self.ship_seconds

    @property
    def stall_seconds(self) -> float:
        """Return for how long every step would wait at fence or gate; 0 in a plan that holds."""
        return max(
            0.0,
            self.min_commit_seconds - self.window_seconds,
            self.copy_seconds - self.forward_backward_seconds,
            self.ship_seconds - self.cycle_seconds,
        )


def timing(plan: Plan, placement: Placement, loads: dict[int, NodeLoad], step: float) -> Timing:
    """Return the timing of the slowest role and the busiest node; ``step`` in seconds."""
    cluster = plan.cluster
    shard = max(role.shard_bytes for role in placement.roles.values())
    forward_backward = step * cluster.forward_backward_fraction
    link = cluster.nic_gb_s * GIGA
    # Links work in both directions at once.
    nbytes = max(max(load.out_bytes_per_step, load.in_bytes_per_step) for load in loads.values())
    more_steps = plan.protection.cadence * (1 + plan.protection.max_lag) - 1
    window = forward_backward + more_steps * step
    copy = shard / (cluster.pcie_gb_s * GIGA)
    passes = 2 if plan.protection.scheme is SchemeKind.LOCAL_TWICE else 1
    checksum = passes * shard / (cluster.checksum_gb_s * GIGA)
    ship = nbytes / (link * cluster.nic_fraction)
    at_share = nbytes / (link * plan.protection.link_share)
    paced_ship = max(ship, min(at_share, _PACED_SHARE * (window - copy - checksum)))
    return Timing(
        step_seconds=step,
        forward_backward_seconds=forward_backward,
        window_seconds=window,
        copy_seconds=copy,
        checksum_seconds=checksum,
        ship_seconds=ship,
        paced_ship_seconds=paced_ship,
        cycle_seconds=plan.protection.cadence * step,
    )

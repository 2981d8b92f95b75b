"""Bytes in memory and on the wires of each node, and the time that a commit takes.

    copy        shard of a role / pcie                       each GPU has a link of its own
    checksum    shard of a role / checksum                   a thread per role; with local-twice
                                                              the second copy is hashed as well
    ship        the larger of bytes out and bytes in of a node / (nics · nic · nic_fraction)
    paced ship  the same bytes / (nics · nic · link_share), or 0.7 of what copy and checksum
                leave of the window where that is shorter; never shorter than ship. It is what
                they take while training sends all the time; in its gaps they are as fast as ship
    commit      copy + checksum + paced ship                 one after another, as the vault does it
    window      forward and backward + (cadence · (1 + max_lag) - 1) · step
                                                              from an update to the gate that asks

A node's links also have to carry a generation per ``cadence`` steps, whatever the lag: ship may not
be longer than those. With ``recompute`` what is looked at are generations that travel whole. The
copy may never be longer than forward and backward, because the fence before the
next update waits for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deadpool_megatron.layout.sizing import memory_by_use
from deadpool_megatron.planning.keys import Plan
from deadpool_megatron.planning.layouts import (
    GRADIENT_BYTES,
    protection_plan,
    scene_of,
    step_bytes,
)
from deadpool_megatron.planning.roles import Placement

GIGA = 1e9
# vault/core/pace.py: of the time from the seal to the gate, the part in which copies are over.
_PACED_SHARE = 0.7


@dataclass(frozen=True)
class NodeLoad:
    """Bytes of one node."""

    unique_bytes: int
    own_slots_bytes: int
    copies_bytes: int
    out_bytes_per_step: int
    in_bytes_per_step: int

    @property
    def memory_bytes(self) -> int:
        """Shared memory for slots of every kind."""
        return self.own_slots_bytes + self.copies_bytes

    @property
    def ship_bytes(self) -> int:
        """Return what the node's links are busy with: they work in both directions at once."""
        return max(self.out_bytes_per_step, self.in_bytes_per_step)


def node_loads(plan: Plan, placement: Placement) -> dict[int, NodeLoad]:
    """Of every node, for a generation that is protected (with recompute: whole). Of spares it is
    what they hold as buddies; the slots that they make while they wait are made where there is room
    for them."""
    extras = plan.protection.extras_bytes_per_role
    unique, out, into = (Counter[int]() for _ in range(3))
    for role in placement.roles:
        unique[role.node] += role.shard_bytes + extras
        for buddy in role.buddies:
            shipped = role.shipped_bytes + extras
            out[role.node] += shipped
            into[buddy] += shipped
    by_role = {role.role: role for role in placement.roles}
    for group in placement.groups:
        for holder in group.holders:
            for role in (by_role[number] for number in group.roles):
                out[role.node] += role.coded_bytes
                into[holder] += role.coded_bytes
    memory = memory_by_use(protection_plan(plan), scene_of(plan, placement))
    return {
        node: NodeLoad(unique[node], memory[node].own, memory[node].kept, out[node], into[node])
        for node in range(placement.nodes)
    }


def mean_share(plan: Plan) -> float:
    """Return what is sent in a step on average, as a share of what a whole generation takes."""
    protection = plan.protection
    if protection.scheme != "recompute":
        return 1.0 / protection.cadence
    step = GRADIENT_BYTES / plan.model.state_bytes_per_parameter
    return (1.0 + (protection.full_every - 1) * step) / protection.full_every


@dataclass(frozen=True)
class Timing:
    """Seconds of one step, of one commit for the slowest node, and between two commits."""

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
        """From the update until the generation is committed, at the pace of copies."""
        return self.copy_seconds + self.checksum_seconds + self.paced_ship_seconds

    @property
    def least_commit_seconds(self) -> float:
        """The same while a gate waits: then copies take all that training leaves of the links."""
        return self.copy_seconds + self.checksum_seconds + self.ship_seconds

    @property
    def stall_seconds(self) -> float:
        """For which every step would wait at fence or gate; 0 in a plan that holds."""
        return max(
            0.0,
            self.least_commit_seconds - self.window_seconds,
            self.copy_seconds - self.forward_backward_seconds,
            self.ship_seconds - self.cycle_seconds,
        )

    @property
    def hidden_fraction(self) -> float:
        """Share of the commit that training does not wait for."""
        return max(0.0, 1.0 - self.stall_seconds / self.commit_seconds)


def timing(plan: Plan, placement: Placement, loads: dict[int, NodeLoad], step: float) -> Timing:
    """Of the slowest role and the busiest node; ``step`` in seconds."""
    cluster = plan.cluster
    shard = max(role.shard_bytes for role in placement.roles)
    forward_backward = step * cluster.forward_backward_fraction
    link = network_bytes_per_second(plan)
    shipped = max(load.ship_bytes for load in loads.values())
    more_steps = plan.protection.cadence * (1 + plan.protection.max_lag) - 1
    window = forward_backward + more_steps * step
    copy = shard / (cluster.pcie_gb_s * GIGA)
    passes = 2 if plan.protection.scheme == "local-twice" else 1
    checksum = passes * shard / (cluster.checksum_gb_s * GIGA)
    ship = shipped / (link * cluster.nic_fraction)
    at_share = shipped / (link * plan.protection.link_share)
    paced = max(ship, min(at_share, _PACED_SHARE * (window - copy - checksum)))
    return Timing(
        step_seconds=step,
        forward_backward_seconds=forward_backward,
        window_seconds=window,
        copy_seconds=copy,
        checksum_seconds=checksum,
        ship_seconds=ship,
        paced_ship_seconds=paced,
        cycle_seconds=plan.protection.cadence * step,
    )


def network_bytes_per_second(plan: Plan) -> float:
    """Of a node in one direction, while nothing else is sent."""
    return plan.cluster.nics * plan.cluster.nic_gb_s * GIGA


def fetch_seconds(plan: Plan, placement: Placement, loads: dict[int, NodeLoad]) -> float:
    """Return what a spare needs at least for the shards of the largest node: network, then PCIe.

    A shard that is decoded takes one block of each other role of its group; one that is recomputed
    takes a whole copy and at most all steps since then. Where no other node has one, a process that
    is started again reads it from its own node.
    """
    shard = max(role.shard_bytes for role in placement.roles)
    if not plan.protection.survived:
        return shard / (plan.cluster.pcie_gb_s * GIGA)
    node = max(load.unique_bytes for load in loads.values())
    if placement.groups:
        node *= max(len(group.roles) for group in placement.groups)
    node += (plan.protection.full_every - 1) * step_bytes(plan, node)
    return node / network_bytes_per_second(plan) + shard / (plan.cluster.pcie_gb_s * GIGA)


def reprotect_seconds(plan: Plan, loads: dict[int, NodeLoad]) -> float:
    """For sending the copies of the fullest node once more, to the spare in its place."""
    return max(load.in_bytes_per_step for load in loads.values()) / network_bytes_per_second(plan)

"""Bytes in memory and on the wires of each node, and the time that a commit takes.

    copy        shard of a role / pcie                       each GPU has a link of its own
    checksum    shard of a role / checksum                   a thread per role
    ship        the larger of bytes out and bytes in of a node / (nics · nic · nic_fraction)
    commit      copy + checksum + ship                       one after another, as the vault does it
    window      forward and backward + max_lag · step        from an update to the gate that asks

A node's links also have to carry one generation per step, whatever the lag: ship may not be longer
than the step. The copy may never be longer than forward and backward, because the fence before the
next update waits for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from deadpool_megatron.layout.records import BOUNDARIES
from deadpool_megatron.planning.keys import Plan
from deadpool_megatron.planning.roles import Placement

GIGA = 1e9
# hooks/protection.py gives extras this much room to grow, in each boundary's part of a slot.
_EXTRAS_GROWTH = 1.5
_EXTRAS_PAGES = 64 << 10


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
        """What the node's links are busy with: they work in both directions at once."""
        return max(self.out_bytes_per_step, self.in_bytes_per_step)


def node_loads(plan: Plan, placement: Placement) -> dict[int, NodeLoad]:
    """Of every node; spares hold nothing unless they are buddies."""
    extras = plan.protection.extras_bytes_per_role
    room = len(BOUNDARIES) * (int(extras * _EXTRAS_GROWTH) + _EXTRAS_PAGES)
    slots = placement.slots
    unique, own, copies, out, into = (Counter[int]() for _ in range(5))
    for role in placement.roles:
        unique[role.node] += role.shard_bytes + extras
        own[role.node] += slots * (role.shard_bytes + room)
        for buddy in role.buddies:
            copies[buddy] += slots * (role.shipped_bytes + room)
            out[role.node] += role.shipped_bytes + extras
            into[buddy] += role.shipped_bytes + extras
    return {
        node: NodeLoad(unique[node], own[node], copies[node], out[node], into[node])
        for node in range(placement.nodes)
    }


@dataclass(frozen=True)
class Timing:
    """Seconds of one step and of one commit, for the slowest node."""

    step_seconds: float
    forward_backward_seconds: float
    window_seconds: float
    copy_seconds: float
    checksum_seconds: float
    ship_seconds: float

    @property
    def commit_seconds(self) -> float:
        """From the update until the generation is committed."""
        return self.copy_seconds + self.checksum_seconds + self.ship_seconds

    @property
    def stall_seconds(self) -> float:
        """For which every step would wait at fence or gate; 0 in a plan that holds."""
        return max(
            0.0,
            self.commit_seconds - self.window_seconds,
            self.copy_seconds - self.forward_backward_seconds,
            self.ship_seconds - self.step_seconds,
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
    rate = network_bytes_per_second(plan) * cluster.nic_fraction
    return Timing(
        step_seconds=step,
        forward_backward_seconds=forward_backward,
        window_seconds=forward_backward + plan.protection.max_lag * step,
        copy_seconds=shard / (cluster.pcie_gb_s * GIGA),
        checksum_seconds=shard / (cluster.checksum_gb_s * GIGA),
        ship_seconds=max(load.ship_bytes for load in loads.values()) / rate,
    )


def network_bytes_per_second(plan: Plan) -> float:
    """Of a node in one direction, while nothing else is sent."""
    return plan.cluster.nics * plan.cluster.nic_gb_s * GIGA


def fetch_seconds(plan: Plan, placement: Placement, loads: dict[int, NodeLoad]) -> float:
    """What a spare needs at least for the shards of the largest node: network, then PCIe."""
    shard = max(role.shard_bytes for role in placement.roles)
    node = max(load.unique_bytes for load in loads.values())
    return node / network_bytes_per_second(plan) + shard / (plan.cluster.pcie_gb_s * GIGA)


def reprotect_seconds(plan: Plan, loads: dict[int, NodeLoad]) -> float:
    """For sending the copies of the fullest node once more, to the spare in its place."""
    return max(load.in_bytes_per_step for load in loads.values()) / network_bytes_per_second(plan)

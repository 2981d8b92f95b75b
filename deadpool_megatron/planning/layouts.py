"""The layouts that the members of a planned run will register, for whoever reckons with these."""

from __future__ import annotations

import math

from deadpool_megatron.layout.part_kinds import BOUNDARIES, extras_part
from deadpool_megatron.layout.records import PartInfo, RoleLayout
from deadpool_megatron.layout.replaying import step_parts
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan, Scheme
from deadpool_megatron.layout.sizing import Scene, extras_room_bytes
from deadpool_megatron.planning.keys import Plan
from deadpool_megatron.planning.roles import Placement, PlannedRole, data_parallel_peers

# Of a parameter, as an update uses it: fp32.
GRADIENT_BYTES = 4.0
# Plain values of the parameter groups, as a member rounds them up (hooks/capture/recompute.py).
_UPDATE_BYTES = 64 << 10


def protection_plan(plan: Plan) -> ProtectionPlan:
    """The plan of protection that the run begins with."""
    chosen = plan.protection
    kind = Kind(chosen.scheme)
    group = chosen.parity_group if kind is Kind.PARITY else 0
    full_every = chosen.full_every if kind is Kind.RECOMPUTE else 1
    return ProtectionPlan(Scheme(kind, group, full_every), chosen.cadence)


def scene_of(plan: Plan, placement: Placement) -> Scene:
    """Return who sits where, with which layout."""
    nodes, trains = placement.nodes, plan.cluster.nodes
    return Scene(
        layouts={role.role: _layout(plan, placement, role) for role in placement.roles},
        seats={role.role: role.node for role in placement.roles},
        domains=placement.domains,
        spares=range(trains, nodes),
        survived=plan.protection.replicas,
    )


def step_bytes(plan: Plan, shard_bytes: int) -> int:
    """Return what recomputes the update of a shard: fp32 gradients; 0 for other schemes."""
    if plan.protection.scheme != "recompute":
        return 0
    return math.ceil(shard_bytes * GRADIENT_BYTES / plan.model.state_bytes_per_parameter)


def _layout(plan: Plan, placement: Placement, role: PlannedRole) -> RoleLayout:
    chosen = plan.protection
    shards = [
        PartInfo(f"shard{number}", part.nbytes, part.replicas)
        for number, part in enumerate(role.parts)
    ]
    steps = []
    if chosen.scheme == "recompute":
        gradients = {
            shard.name: PartInfo(shard.name, step_bytes(plan, shard.nbytes), shard.replicas)
            for shard in shards
        }
        steps = step_parts(gradients, _UPDATE_BYTES, role.role)
    room = extras_room_bytes(chosen.extras_bytes_per_role, int(chosen.extras_room_mb * 1e6))
    extras = [PartInfo(extras_part(boundary), room, (role.role,)) for boundary in BOUNDARIES]
    peers = data_parallel_peers(role.role, plan.parallel)
    return RoleLayout(role.role, (*shards, *steps, *extras), peers, placement.slots, "")

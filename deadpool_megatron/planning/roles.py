"""Every role of the plan, with its bytes and the nodes that the real rules choose.

Roles sit and are grouped as Megatron numbers them (order tp-cp-ep-dp-pp); buddies and what need not
be shipped come from ``layout.placement``, the code that runs in each vault.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from deadpool_megatron.layout.parity_groups import ParityGroup, ParityPlacement
from deadpool_megatron.layout.placement import (
    CopyPlacement,
    DomainsError,
    domain_of,
    is_covered,
    parse_domains,
)
from deadpool_megatron.layout.schemes import Kind, ProtectionPlan, Scheme
from deadpool_megatron.planning.keys import Cluster, Parallel, Plan, PlanError
from deadpool_megatron.planning.model import StageParameters, stage_parameters


@dataclass(frozen=True)
class PlannedPart:
    """One inner optimizer's shard of one role; ``replicas`` as in PartInfo.

    ``covered``: peers hold the same bytes far enough apart; ``coded``: in parity blocks.
    """

    nbytes: int
    replicas: tuple[int, ...]
    covered: bool
    coded: bool = False


@dataclass(frozen=True)
class PlannedRole:
    """A role on its node, and the nodes that hold its copies."""

    role: int
    node: int
    parts: tuple[PlannedPart, ...]
    buddies: tuple[int, ...]

    @property
    def shard_bytes(self) -> int:
        """Bytes of optimizer state in one generation, extras not included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def shipped_bytes(self) -> int:
        """Those that go to each buddy in each step."""
        return sum(part.nbytes for part in self.parts if not part.covered and not part.coded)

    @property
    def coded_bytes(self) -> int:
        """Those that go to each holder of a parity block in each step."""
        return sum(part.nbytes for part in self.parts if part.coded)


@dataclass(frozen=True)
class Placement:
    """All roles, and the failure domain of each node, spares included."""

    roles: tuple[PlannedRole, ...]
    domains: Mapping[int, str]
    nodes: int
    slots: int
    groups: tuple[ParityGroup, ...] = ()

    @property
    def same_domain(self) -> int:
        """Copies that found no failure domain of their own."""
        return sum(
            len(role.buddies) + 1 - len({self.domains[node] for node in (role.node, *role.buddies)})
            for role in self.roles
        )


def place(plan: Plan) -> Placement:
    """Seat all roles and choose the nodes of all copies. Raises PlanError (domains file)."""
    parallel, cluster, replicas = plan.parallel, plan.cluster, plan.protection.survived
    coded = plan.protection.scheme == "parity"
    world = parallel.tp * parallel.cp * parallel.pp * parallel.dp
    seats = {role: role // cluster.gpus_per_node for role in range(world)}
    domains = node_domains(cluster, plan.domains_text)
    spares = range(cluster.nodes, cluster.nodes + cluster.spares)
    copies = CopyPlacement(seats, domains, spares, replicas)
    stages = stage_parameters(plan.model, parallel)
    roles = []
    for role in range(world):
        peers = data_parallel_peers(role, parallel)
        parts = tuple(
            PlannedPart(nbytes, same, covered, coded and not covered)
            for nbytes, same, covered in (
                (nbytes, same, is_covered(same, role, seats, domains, replicas))
                for nbytes, same in _parts(role, plan, stages[role // (world // parallel.pp)])
            )
        )
        roles.append(PlannedRole(role, seats[role], parts, copies.buddies(role, peers)))
    one = parallel.distributed_optimizer and parallel.optimizer_instances == 1
    slots = (2 if one or world == 1 else 3) + plan.protection.max_lag
    groups = _groups(plan, seats, domains, spares) if coded else ()
    return Placement(tuple(roles), domains, cluster.nodes + cluster.spares, slots, groups)


def _groups(
    plan: Plan, seats: Mapping[int, int], domains: Mapping[int, str], spares: Collection[int]
) -> tuple[ParityGroup, ...]:
    protection = plan.protection
    scheme = Scheme(Kind.PARITY, group=protection.parity_group)
    placement = ParityPlacement(seats, domains, spares, ProtectionPlan(scheme), protection.replicas)
    return placement.groups


def node_domains(cluster: Cluster, domains_text: str) -> dict[int, str]:
    """Failure domain of each node: by the file, by racks of equal size, or each its own.

    Spares are dealt out to the racks one after another.
    """
    nodes = range(cluster.nodes + cluster.spares)
    if cluster.racks is None:
        try:
            table = parse_domains(domains_text)
        except DomainsError as error:
            raise PlanError(f"cluster.domains_file: {error}") from error
        host = next((name for name in table if not name.isdecimal()), None)
        if host is not None and any(str(node) not in table for node in nodes):
            raise PlanError(
                f"cluster.domains_file: a plan knows no hosts, and {host} is one: name its nodes by"
                f" their numbers, 0 to {nodes[-1]}"
            )
        return {node: domain_of(table, node) for node in nodes}
    return {node: f"rack{_rack(node, cluster, cluster.racks)}" for node in nodes}


def _rack(node: int, cluster: Cluster, racks: int) -> int:
    if node >= cluster.nodes:
        return (node - cluster.nodes) % racks
    if cluster.node_order == "across-racks":
        return node % racks
    return node * racks // cluster.nodes


def data_parallel_peers(role: int, parallel: Parallel) -> tuple[int, ...]:
    """Megatron's data-parallel group with context parallelism; the role itself included."""
    size = parallel.cp * parallel.dp
    start = role // (parallel.tp * size) * parallel.tp * size + role % parallel.tp
    return tuple(range(start, start + parallel.tp * size, parallel.tp))


def expert_data_parallel_peers(role: int, parallel: Parallel) -> tuple[int, ...]:
    """Megatron's expert data-parallel group; the role itself included."""
    stage = parallel.tp * parallel.cp * parallel.dp
    stride = (parallel.etp or parallel.tp) * parallel.ep
    start = role // stage * stage + role % stage % stride
    return tuple(range(start, role // stage * stage + stage, stride))


def _parts(role: int, plan: Plan, stage: StageParameters) -> list[tuple[int, tuple[int, ...]]]:
    """Bytes and roles with equal bytes, for the dense and the expert optimizer."""
    groups = [(stage.dense, data_parallel_peers(role, plan.parallel))]
    if stage.expert:
        groups.append((stage.expert, expert_data_parallel_peers(role, plan.parallel)))
    parts = []
    for parameters, group in groups:
        nbytes = parameters * plan.model.state_bytes_per_parameter
        if not plan.parallel.distributed_optimizer:
            parts.append((math.ceil(nbytes), group))
            continue
        # An instance is a run of neighbours in the group; equal places hold equal bytes.
        shards = len(group) // plan.parallel.optimizer_instances
        place = group.index(role) % shards
        parts.append((math.ceil(nbytes / shards), group[place::shards]))
    return parts

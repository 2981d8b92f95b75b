"""A job as far as its recoveries depend on it, and the seconds of their phases. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deadpool_megatron.layout.schemes import losses_survived
from deadpool_megatron.planning import shards
from deadpool_megatron.planning.assessment import Assessment
from deadpool_megatron.planning.traffic import GIGA, Placement
from deadpool_megatron.simulation.hazards import (
    HANG,
    HOUR,
    NODE,
    PROCESS,
    WRONG,
    Hazards,
    SimulationError,
    constants,
)

_SPARE_TIMEOUT, _SETTLE = 300.0, 300.0  # spare_timeout_seconds, settle_seconds


@dataclass(frozen=True)
class Job:
    """A job, its cluster and the constants in use (by name, see constants.toml).

    ``sizes``: possible numbers of model replicas, the full number last. ``commit_seconds``: from an
    update until its copies are complete. ``node_bytes``: unique state of a node. ``partners``: the
    number of nodes whose loss, soon after that of a node, loses state if one loss is survived.
    """

    nodes: int
    spares: int
    gpus_per_node: int
    sizes: Sequence[int]
    step_seconds: float
    commit_seconds: float
    node_bytes: float
    nic_gb_s: float
    checksum_gb_s: float
    pcie_gb_s: float
    reprotect_seconds: float
    partners: float
    survived: int
    failure_hours: float
    repair_hours: float
    domains: tuple[int, ...]
    values: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(assessment: Assessment, sizes: Sequence[int], assumed: Mapping[str, float]) -> Job:
        """Return the job of a plan that holds. ``assumed``: constants with other values. Raises
        SimulationError for an unknown constant."""
        known, cluster = constants(), assessment.plan.cluster
        if unknown := assumed.keys() - known.keys():
            raise SimulationError(f"--assume {min(unknown)}: there are {', '.join(known)}")
        names = sorted(set((domains := assessment.placement.topology.domains).values()))
        return Job(
            nodes=cluster.nodes,
            spares=cluster.spares,
            gpus_per_node=cluster.gpus_per_node,
            sizes=tuple(sizes),
            step_seconds=assessment.timing.step_seconds,
            commit_seconds=assessment.timing.commit_seconds,
            node_bytes=assessment.busiest("unique_bytes")[1],
            nic_gb_s=cluster.nic_gb_s,
            checksum_gb_s=cluster.checksum_gb_s,
            pcie_gb_s=cluster.pcie_gb_s,
            reprotect_seconds=assessment.timing.paced_ship_seconds,
            partners=_partners(assessment.placement),
            survived=losses_survived(shards.settings_of(assessment.plan)),
            failure_hours=cluster.failure_hours,
            repair_hours=cluster.repair_hours,
            domains=tuple(names.index(domains[node]) for node in sorted(domains)),
            values={name: entry.value for name, entry in known.items()} | dict(assumed),
        )

    def resized(self, nodes: int, spares: int) -> Job:
        """Return the job on another number of nodes, which grows with it: a node has as many bytes,
        and a step takes as long. Any number of replicas from half on is possible."""
        full = max(1, nodes * self.sizes[-1] // self.nodes)
        rack = max(1, self.nodes // len(set(self.domains)))
        domains = tuple(node // rack for node in range(nodes + spares))
        sizes = range((full + 1) // 2, full + 1)
        return replace(self, nodes=nodes, spares=spares, sizes=tuple(sizes), domains=domains)

    def assuming(self, **values: float) -> Job:
        """Return the job with other values of constants."""
        return replace(self, values={**self.values, **values})

    def hazards(self, per_1000_node_days: float) -> Hazards:
        """Return the laws of failure at a rate; 0: the rate of the plan."""
        rate = per_1000_node_days / 1000 or 24 / self.failure_hours
        names = ("shape", "lemon_share", "lemon_factor", "domain_share")
        laws = {name: self.values[name] for name in names}
        return Hazards(rate, self.repair_hours, domains=self.domains, **laws)

    @property
    def machines(self) -> int:
        """Return the number of nodes with spares."""
        return self.nodes + self.spares

    @property
    def replica_nodes(self) -> int:
        """Return the nodes of a model replica."""
        return self.nodes // self.sizes[-1]

    # Seconds.

    def rebuild(self, nodes: float) -> float:
        """Connect all communicators."""
        known = (self.values["rebuild_16k"], self.values["rebuild_98k"])
        grown = _power_law(nodes * self.gpus_per_node, (16_384, 98_304), known)
        return self.values["rebuild"] + grown

    @property
    def decide(self) -> float:
        """Return the seconds from a detected loss until all agents know the record."""
        known = (self.values["decide_64"], self.values["decide_4096"])
        return _power_law(self.nodes, (64, 4096), known)

    @property
    def restore(self) -> float:
        """Return the seconds of fetching, checking and loading the state of a lost node."""
        shard = self.node_bytes / self.gpus_per_node / GIGA
        return self.node_bytes / GIGA / self.nic_gb_s + shard / self.checksum_gb_s + self.copy

    @property
    def copy(self) -> float:
        """Return the seconds of copying the state of each device to host memory, or back."""
        return self.node_bytes / self.gpus_per_node / GIGA / self.pcie_gb_s

    @property
    def save(self) -> float:
        """Return the seconds of writing a checkpoint to shared storage, or of loading it."""
        return self.node_bytes / GIGA / self.values["storage_gb_s"]

    def detect(self, sign: str) -> float:
        """Return the seconds until a failure is known."""
        hang = min(self.values["hang_limit"], max(20.0, 2.5 * self.step_seconds))
        return {NODE: self.values["silence"], HANG: hang}.get(sign, 0.0)

    @property
    def opening(self) -> float:
        """Return the seconds from the decision until a warm member trains."""
        return self.rebuild(self.nodes) + self.restore + self.values["sync"]

    def swap(self, sign: str) -> float:
        """Return the seconds of a hot swap, or of a restart in place."""
        adopt = {NODE: self.values["build"], WRONG: 0.0}.get(sign, self.values["start"])
        return self.detect(sign) + self.values["close"] + self.decide + adopt + self.opening

    @property
    def others_stall(self) -> float:
        """Return for how long other replicas stand still when one leaves (FT-HSDP)."""
        gpus = self.nodes * self.gpus_per_node
        return self.values["others_stall"] + self.values["others_98k"] * gpus / 98_304

    @property
    def change(self) -> float:
        """Return the seconds of a change of size: all members build, and two old parts are fetched
        for each new part."""
        fixed = self.values["close"] + self.decide + self.values["build"]
        return fixed + self.opening + self.restore

    @property
    def elastic_wait(self) -> float:
        """Return how long a run waits for a spare before it shrinks (--deadpool-elastic-wait)."""
        return 2 * self.change

    @property
    def spare_timeout(self) -> float:
        """Return how long a run of one size waits for a spare before it ends with a dump."""
        return _SPARE_TIMEOUT

    @property
    def settle(self) -> float:
        """Return how long a larger size has to fit before the run grows."""
        return _SETTLE

    @property
    def pair_loss_mtbf(self) -> float:
        """Return the mean seconds between losses of state, if one loss is survived."""
        per_second = 1 / (self.failure_hours * HOUR)
        exposed = self.swap(NODE) + self.reprotect_seconds
        pairs = self.nodes * per_second * self.partners * per_second * exposed
        return 1 / pairs if pairs else math.inf


def best_interval(cost: float, mtbf: float) -> float:
    """Return Daly's interval between checkpoints that cost ``cost`` seconds each (FGCS 2006, his
    higher-order estimate); Young's is its first term."""
    if cost >= 2 * mtbf:
        return mtbf
    ratio = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


def useful_fraction(interval: float, cost: float, stall: float, mtbf: float) -> float:
    """Return the share of useful time with exponential failures, also during saves and stalls, and
    with a spare for each (Daly's exact expression)."""
    exponent = (interval + cost) / mtbf
    return interval / (mtbf * math.exp(stall / mtbf) * math.expm1(exponent)) if mtbf else 0.0


def _power_law(at: float, places: tuple[float, float], values: tuple[float, float]) -> float:
    if not all(values):
        return max(values)
    exponent = math.log(values[1] / values[0]) / math.log(places[1] / places[0])
    return float(values[0] * (at / places[0]) ** exponent)


def _partners(placement: Placement) -> float:
    """Return the mean number of nodes with which a node shares all copies of some state."""
    seats, shared = placement.topology.seats, defaultdict[int, set[int]](set)
    sets = [{seats[number], *role.buddies} for number, role in placement.roles.items()]
    if placement.groups:
        sets = [{*group.holders, *(seats[r] for r in group.roles)} for group in placement.groups]
    for nodes in sets:
        for node in nodes:
            shared[node] |= nodes - {node}
    return sum(map(len, shared.values())) / max(1, len(shared))


SIGNS = (NODE, PROCESS, HANG, WRONG)

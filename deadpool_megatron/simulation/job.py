"""A job as far as its recoveries depend on it, and the seconds of their phases. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from deadpool_megatron.layout.schemes import losses_survived
from deadpool_megatron.planning import shards
from deadpool_megatron.planning.assessment import Assessment
from deadpool_megatron.planning.sections import Plan
from deadpool_megatron.planning.traffic import GIGA, Placement, Timing
from deadpool_megatron.simulation import hazards
from deadpool_megatron.simulation.hazards import HANG, NODE, PROCESS, WRONG

SIGNS = (NODE, PROCESS, HANG, WRONG)
#: spare_timeout_seconds and settle_seconds of a run
SPARE_TIMEOUT, SETTLE = 300.0, 300.0


@dataclass(frozen=True)
class Job:
    """A job on ``nodes`` nodes and ``spares``. ``sizes``: possible numbers of model replicas, the
    full number last. ``node_bytes``: unique state of a node. ``partners``: the number of nodes
    whose loss, soon after that of a node, loses state if one loss is survived; ``survived``: the
    losses that state survives. ``domains``: failure domain of each node. ``values``: the constants
    in use (constants.toml)."""

    plan: Plan
    timing: Timing
    node_bytes: float
    partners: float
    survived: int
    sizes: Sequence[int]
    nodes: int
    spares: int
    domains: tuple[int, ...]
    values: Mapping[str, float]

    @staticmethod
    def of(assessment: Assessment, sizes: Sequence[int], assumed: Mapping[str, float]) -> Job:
        """Return the job of a plan that holds. ``assumed``: constants with other values. Raises
        SimulationError for an unknown constant."""
        values = {name: entry[0] for name, entry in hazards.CONSTANTS.items()}
        if unknown := assumed.keys() - values.keys():
            text = f"--assume {min(unknown)}: there are {', '.join(values)}"
            raise hazards.SimulationError(text)
        plan, placement = assessment.plan, assessment.placement
        # Several replicas on a node leave together.
        share = max(1, sizes[-1] // plan.cluster.nodes)
        sizes = sorted({size // share for size in sizes})
        names = [name for _, name in sorted(placement.topology.domains.items())]
        domains = tuple(map(sorted(set(names)).index, names))
        node_bytes, cluster = assessment.busiest("unique_bytes")[1], plan.cluster
        survived = losses_survived(shards.settings_of(plan))
        shared = (_partners(placement), survived, sizes, cluster.nodes, cluster.spares, domains)
        return Job(plan, assessment.timing, node_bytes, *shared, {**values, **assumed})

    def resized(self, nodes: int, spares: int) -> Job:
        """Return the job on another number of nodes, which grows with it: a node has as many bytes,
        and a step takes as long. Any number of replicas from half on is possible."""
        full = max(1, nodes * self.sizes[-1] // self.nodes)
        rack = max(1, self.nodes // len(set(self.domains)))
        domains, sizes = (
            (n // rack for n in range(nodes + spares)),
            range((full + 1) // 2, full + 1),
        )
        return replace(self, nodes=nodes, spares=spares, sizes=sizes, domains=tuple(domains))

    def hazards(self, per_1000_node_days: float) -> hazards.Hazards:
        """Return the laws of failure at a rate; 0: the rate of the plan."""
        rate = per_1000_node_days / 1000 or 24 / self.plan.cluster.failure_hours
        laws = ("shape", "lemon_share", "lemon_factor", "domain_share")
        values = {name: self.values[name] for name in laws}
        repair = self.plan.cluster.repair_hours
        return hazards.Hazards(rate, repair, domains=self.domains, **values)

    def assuming(self, name: str, value: float) -> Job:
        """Return the job with another value of a constant."""
        return replace(self, values={**self.values, name: value})

    @property
    def machines(self) -> int:
        """Return the number of nodes with spares."""
        return self.nodes + self.spares

    @property
    def gpus(self) -> int:
        """Return the number of GPUs that train."""
        return self.nodes * self.plan.cluster.gpus_per_node

    @property
    def replica_nodes(self) -> int:
        """Return the nodes of a model replica."""
        return self.nodes // self.sizes[-1]

    # Seconds.

    def rebuild(self, nodes: float) -> float:
        """Connect all communicators of ``nodes`` nodes."""
        v, gpus = self.values, nodes * self.plan.cluster.gpus_per_node
        published = (v["rebuild_16k"], v["rebuild_98k"])
        return v["rebuild"] + _power_law(gpus, (16_384, 98_304), published)

    @property
    def decide(self) -> float:
        """Return the seconds from a detected loss until all agents know the record."""
        v = self.values
        return _power_law(self.nodes, (64, 4096), (v["decide_64"], v["decide_4096"]))

    @property
    def copy(self) -> float:
        """Return the seconds of copying the state of each device to host memory, or back."""
        cluster = self.plan.cluster
        return self.node_bytes / cluster.gpus_per_node / GIGA / cluster.pcie_gb_s

    @property
    def restore(self) -> float:
        """Return the seconds of fetching, checking and loading the state of a lost node."""
        cluster, giga = self.plan.cluster, self.node_bytes / GIGA
        checked = giga / cluster.gpus_per_node / cluster.checksum_gb_s
        return giga / cluster.nic_gb_s + checked + self.copy

    @property
    def save(self) -> float:
        """Return the seconds of writing a checkpoint to shared storage, or of loading it."""
        return self.node_bytes / GIGA / self.values["storage_gb_s"]

    def detect(self, sign: str) -> float:
        """Return the seconds until a failure is known."""
        hang = min(self.values["hang_limit"], max(20.0, 2.5 * self.timing.step_seconds))
        return {NODE: self.values["silence"], HANG: hang}.get(sign, 0.0)

    @property
    def opening(self) -> float:
        """Return the seconds from the decision until a warm member trains."""
        return self.rebuild(self.nodes) + self.restore + self.values["sync"]

    def swap(self, sign: str) -> float:
        """Return the seconds of a hot swap, or of a restart in place."""
        v = self.values
        adopt = {NODE: v["build"], WRONG: 0.0}.get(sign, v["start"])
        return self.detect(sign) + v["close"] + self.decide + adopt + self.opening

    @property
    def change(self) -> float:
        """Return the seconds of a change of size: all members build, and two old parts are fetched
        for each new part."""
        return self.swap(NODE) - self.detect(NODE) + self.restore

    @property
    def pair_loss_mtbf(self) -> float:
        """Return the mean seconds between losses of state, if one loss is survived."""
        mtbf = self.plan.cluster.failure_hours * hazards.HOUR
        exposed = self.swap(NODE) + self.timing.paced_ship_seconds
        return mtbf**2 / (self.nodes * self.partners * exposed)


def best_interval(cost: float, mtbf: float) -> float:
    """Return Daly's interval between checkpoints that cost ``cost`` seconds each (FGCS 2006, his
    higher-order estimate); Young's is its first term."""
    ratio = cost / (2 * mtbf)
    best = math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost
    return best if ratio < 1 else mtbf


def useful_fraction(interval: float, cost: float, stall: float, mtbf: float) -> float:
    """Return the share of useful time with exponential failures, also during saves and stalls, and
    with a spare for each (Daly's exact expression)."""
    return interval / (mtbf * math.exp(stall / mtbf) * math.expm1((interval + cost) / mtbf))


def _power_law(at: float, places: tuple[float, float], values: tuple[float, float]) -> float:
    """Return the value at ``at`` of the power law through two points; constant if a value is 0."""
    exponent = 0.0
    if all(values):
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

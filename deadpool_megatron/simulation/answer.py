"""Runs of all policies on the same traces, and what follows from them. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

from deadpool_megatron.simulation.hazards import DAY, HOUR, KINDS, Trace
from deadpool_megatron.simulation.job import Job
from deadpool_megatron.simulation.run import Outcome, Policy, policies, simulate

#: runs a policy on a trace
Runner = Callable[[Job, Policy, Trace, str], Outcome]
_GPUS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_SWEPT = {
    "rebuild": (1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 80.0, 120.0),
    "overhead": (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.09),
    "start": (10.0, 30.0, 60.0, 120.0, 300.0),
    "restart": (300.0, 600.0, 900.0, 1200.0),
    "storage_gb_s": (0.1, 0.3, 1.0, 3.4),
}


def traces(job: Job, rate: float, days: float, seeds: Sequence[str]) -> list[Trace]:
    """Draw a trace for each seed; ``rate``: failures of a node in 1,000 days, 0: of the plan."""
    return [job.hazards(rate).trace(seed, job.machines, days) for seed in seeds]


def compare(
    job: Job, found: Sequence[Trace], rate: float, run: Runner = simulate
) -> dict[str, Any]:
    """Return the answers for each policy: means over the traces with 95 % intervals."""
    rows = {}
    for policy in policies(job, job.hazards(rate).per_node_day / DAY):
        runs = [run(job, policy, trace, str(n)) for n, trace in enumerate(found)]
        ettr = [each.ettr for each in runs]
        rows[policy.name] = {
            "ettr": fmean(ettr),
            "ettr_interval": 1.96 * stdev(ettr) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0,
            "goodput": fmean(ettr) * job.nodes / job.machines,
            "recovery_seconds": _quantiles([x for each in runs for x in each.recoveries]),
            "lost_seconds": _quantiles([x for each in runs for x in each.lost]),
            "interruptions": fmean(len(each.recoveries) for each in runs),
            "waited_share": fmean(each.waited / each.seconds for each in runs),
            "reduced_share": fmean(each.reduced / each.seconds for each in runs),
            "nodes_in_repair": fmean(each.absent for each in runs),
            "save_interval_seconds": policy.interval,
            "ends": dict(sum((each.ends for each in runs), Counter())),
        }
    return rows


def curves(job: Job, rate: float, days: float, seeds: Sequence[str]) -> dict[str, Any]:
    """Return ETTR of each policy over GPUs, and over each constant that is swept; goodput over
    spares; and the chance that no state is lost."""
    found = traces(job, rate, days, seeds)
    swept = {
        name: {value: _ettr(job.assuming(name, value), found, rate) for value in values}
        for name, values in _SWEPT.items()
    }
    sizes, survival = {}, {}
    for gpus in _GPUS:
        nodes = gpus * job.nodes // job.gpus
        larger = job.resized(nodes, max(2, math.ceil(nodes * job.spares / job.nodes)))
        few = seeds[: max(1, len(seeds) * job.gpus // gpus)]
        sizes[gpus] = _ettr(larger, traces(larger, rate, days, few), rate)
        survival[gpus] = {d: math.exp(-d * DAY / larger.pair_loss_mtbf) for d in (30, 100, 365)}
    spares = {}
    for number in range(6):
        other = job.resized(job.nodes, number)
        share = other.nodes / other.machines
        rows = _ettr(other, traces(other, rate, days, seeds), rate)
        spares[number] = {name: value * share for name, value in rows.items()}
    return {"gpus": sizes, "spares": spares, "survival": survival, **swept}


def break_even(job: Job) -> tuple[float, float]:
    """Return the overhead of protection, and the mean seconds between failures of the run, at which
    a hot swap is worth as much as a restart within the job: closed forms."""
    mtbf = job.plan.cluster.failure_hours * HOUR / job.nodes

    def gain(seconds: float) -> float:
        ways = {p.name: p for p in policies(job, 1 / seconds / job.nodes)}
        hot, other = (_expected(ways[name], seconds) for name in ("hot swap", "in-job restart"))
        return hot * (1 + job.values["overhead"]) / other - 1

    low, high = 60.0, 1e9
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > job.values["overhead"] else (low, middle)
    return gain(mtbf), low


def _expected(policy: Policy, mtbf: float) -> float:
    """Return the share of useful time to first order in the rate of failures."""
    lost = policy.interval / 2 + policy.delay
    stalls = fmean(policy.stalls[sign] for count, sign in KINDS.values() for _ in range(count))
    return policy.speed / (1 + (stalls + lost) / mtbf)


def _ettr(job: Job, found: Sequence[Trace], rate: float) -> dict[str, float]:
    return {name: row["ettr"] for name, row in compare(job, found, rate).items()}


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return the usual quantiles; of none, none."""
    ordered = sorted(values)
    places = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: ordered[math.ceil(at * last)] for name, at in places.items()} if ordered else {}

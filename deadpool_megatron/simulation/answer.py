"""Runs of all policies on the same traces, and answers from them. Pure."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

from deadpool_megatron.simulation.hazards import DAY, HOUR, KINDS, Trace
from deadpool_megatron.simulation.job import Job
from deadpool_megatron.simulation.run import Outcome, Policy, policies, simulate

Rows = dict[str, dict[str, Any]]
Play = Callable[[Job, Policy, Trace, str], Outcome]
_GPUS = (512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
_SWEPT: dict[str, tuple[float, ...]] = {
    "rebuild": (1, 2, 5, 10, 20, 40, 80, 120),
    "overhead": (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.09),
    "start": (10, 30, 60, 120, 300),
    "storage_gb_s": (0.1, 0.3, 1, 3.4),
}
#: calls of ``progress`` in :func:`curves`
STEPS = sum(map(len, (*_SWEPT.values(), _SWEPT["rebuild"], _GPUS))) + 6


def traces(job: Job, rate: float, days: float, seeds: Sequence[str]) -> list[Trace]:
    """Draw a trace for each seed. ``rate``: failures of a node in 1,000 days; 0: the plan's."""
    return [job.hazards(rate).trace(seed, job.machines, days) for seed in seeds]


def compare(job: Job, found: Sequence[Trace], rate: float, play: Play = simulate) -> Rows:
    """Return the answers for each policy: means over the traces with 95 % intervals. ``play``: the
    model, the fast one or :func:`.exact.simulate`."""
    ways = policies(job, job.hazards(rate).per_node_day / DAY)
    return {
        way.name: _row(job, way, [play(job, way, t, str(n)) for n, t in enumerate(found)])
        for way in ways
    }


def _row(job: Job, policy: Policy, runs: list[Outcome]) -> dict[str, Any]:
    ettr, count = [each.ettr for each in runs], len(runs)
    return {
        "ettr": fmean(ettr),
        "ettr_interval": 1.96 * stdev(ettr) / math.sqrt(count) if count > 1 else 0.0,
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


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered, last = sorted(values), len(values) - 1
    places = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    return {name: ordered[math.ceil(at * last)] for name, at in places.items() if ordered}


def curves(
    job: Job, rate: float, days: float, seeds: Sequence[str], progress: Callable[[], None]
) -> dict[str, Any]:
    """Return ETTR of each policy over GPUs, over each constant that is swept, and over the rebuild
    of 16,384 GPUs; goodput over spares; and the chance that no state is lost."""

    def rows(job: Job, seeds: Sequence[str], field: str = "ettr") -> dict[str, float]:
        progress()
        found = compare(job, traces(job, rate, days, seeds), rate)
        return {name: row[field] for name, row in found.items()}

    result: dict[str, Any] = {
        name: {value: rows(job.assuming(name, value), seeds) for value in values}
        for name, values in _SWEPT.items()
    }
    large = job.resized(16_384 * job.nodes // job.gpus, 64).assuming("rebuild_16k", 0.0)
    values = _SWEPT["rebuild"]
    result["large"] = {value: rows(large.assuming("rebuild", value), seeds[:3]) for value in values}
    result |= {"gpus": {}, "survival": {}}
    for gpus in _GPUS:
        nodes = gpus * job.nodes // job.gpus
        larger = job.resized(nodes, max(2, math.ceil(nodes * job.spares / job.nodes)))
        result["gpus"][gpus] = rows(larger, seeds[: max(2, len(seeds) * job.gpus // gpus)])
        rest = {d: math.exp(-d * DAY / larger.pair_loss_mtbf) for d in (30, 100, 365)}
        result["survival"][gpus] = rest
    numbers = range(6)
    result["spares"] = {n: rows(job.resized(job.nodes, n), seeds, "goodput") for n in numbers}
    return result


def sentences(job: Job, rows: Rows, found: Sequence[Trace], rate: float) -> Iterator[str]:
    """Yield lines with the answer in words."""
    days, bare = found[0].seconds / DAY, replace(job, spares=0)
    hours = job.machines * job.gpus / job.nodes * 24 * days
    short = [
        each._replace(failures=tuple(f for f in each.failures if f.node < job.nodes))
        for each in found
    ]
    without = compare(bare, [each._replace(nodes=job.nodes) for each in short], rate)

    def worth(name: str, other: dict[str, Any]) -> str:
        return f"{(rows[name]['goodput'] - other['goodput']) * hours:+,.0f}"

    best, elastic = rows["the same, best cadence"], rows["hot swap, elastic"]
    cadence, overhead = (
        best["save_interval_seconds"] / job.timing.step_seconds,
        job.values["overhead"],
    )
    first = (
        f"In {days:.0f} days, in GPU-hours: hot swap {worth('hot swap', rows['restart, async'])}"
        f" over restarts from checkpoints, {worth('hot swap', rows['in-job restart'])} over"
        f" restarts in the job; elasticity {worth('hot swap, elastic', rows['hot swap'])};"
        f" {job.spares} spares {worth('hot swap', without['hot swap'])}, with elasticity"
        f" {worth('hot swap, elastic', without['hot swap, elastic'])}."
    )
    limit, mtbf = break_even(job)
    second = (
        f"Protecting each iteration is taken to cost {overhead:.1%}: against restarts in the job it"
        f" pays below {limit:.2%}, or if the run fails more often than each {mtbf / HOUR:,.1f} h."
        f" Protecting one iteration in {cadence:.0f} adds"
        f" {worth('the same, best cadence', elastic)}."
    )
    yield from [*textwrap.wrap(first, 100), *textwrap.wrap(second, 100)]


def break_even(job: Job) -> tuple[float, float]:
    """Return the overhead of protection, and the mean seconds between failures of the run, at which
    a hot swap is worth as much as a restart within the job: closed forms."""

    def gain(mtbf: float) -> float:
        ways = {p.name: _expected(p, mtbf) for p in policies(job, 1 / mtbf / job.nodes)}
        return ways["hot swap"] * (1 + overhead) / ways["in-job restart"] - 1

    overhead, low, high = job.values["overhead"], 60.0, 1e9
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if gain(middle) > overhead else (low, middle)
    return gain(job.plan.cluster.failure_hours * HOUR / job.nodes), low


def _expected(policy: Policy, mtbf: float) -> float:
    """Return the share of useful time to first order in the rate of failures."""
    lost = policy.interval / 2 + policy.delay
    stalls = fmean(policy.stalls[sign] for count, sign in KINDS.values() for _ in range(count))
    return policy.speed / (1 + (stalls + lost) / mtbf)

"""The coordinator's own machine beside the fast model, on the same failures.

    python -m tests.simulation.calibration 64 1024 4096    # recoveries of each kind, at these sizes
    python -m tests.simulation.calibration months 100 > docs/simulated/exact-64.jsonl

The first writes docs/simulated/calibration.jsonl, in which rows of other sizes stay.
"""

import json
import random
import sys
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.model_replicas import Workload
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.simulation import exact, run
from deadpool_megatron.simulation.hazards import DAY, HOUR, NODE, Failure, Trace
from deadpool_megatron.simulation.job import SIGNS, Job
from tests.simulation.jobs import ROOT

FILE = ROOT / "docs" / "simulated" / "calibration.jsonl"
#: nodes -> seeds
SEEDS = {64: range(8), 1024: range(2), 4096: range(1)}
MODELS = {"exact": exact.simulate, "fast": run.simulate}


def job_of(nodes: int) -> Job:
    """The 65B plan on more nodes, with a batch that grows with them."""
    factor = nodes // 64
    sizes = {"cluster.nodes": 64, "parallel.dp": 8, "cluster.racks": 8}
    sizes["cluster.tokens_per_step"] = 5505024
    overrides = [f"{name}={value * factor}" for name, value in sizes.items()]
    overrides.append(f"cluster.spares={max(2, factor)}")
    plan = read_plan(ROOT / "configs" / "65b.yaml", overrides)
    possible = Workload(plan.parallel.grid).possible(plan.parallel.dp, plan.cluster.gpus_per_node)
    return Job.of(assess(plan), possible, {})


def swaps(job: Job) -> dict[str, run.Policy]:
    """Both hot swaps that protect each step."""
    ways = {policy.name: policy for policy in run.policies(job, 1e-6)}
    return {name: ways[name] for name in ("hot swap", "hot swap, elastic")}


def trace_of(job: Job, seed: int) -> Trace:
    """A failure of each sign, hours apart; the lost node comes back on the next day."""
    draw, failures = random.Random(seed), []
    nodes = draw.sample(range(job.nodes), len(SIGNS))
    for number, sign in enumerate(SIGNS):
        at = (1 + number) * 2 * HOUR + draw.uniform(0, 600)
        away = DAY if sign == NODE else 0.0
        failures.append(Failure(at, nodes[number], sign, sign, at + away))
    return Trace(job.machines, 10 * HOUR, tuple(failures))


def recoveries(job: Job, model: str, seeds: range) -> dict[str, dict[str, float]]:
    """Mean seconds of a recovery from each sign, and of the training that it loses."""
    way = swaps(job)["hot swap"]
    runs = [MODELS[model](job, way, trace_of(job, seed), str(seed)) for seed in seeds]
    return {
        sign: {
            "recovery": round(fmean(each.recoveries[n] for each in runs), 2),
            "lost": round(fmean(each.lost[n] for each in runs), 2),
        }
        for n, sign in enumerate(SIGNS)
    }


def row_of(nodes: int) -> dict[str, Any]:
    job, seeds = job_of(nodes), SEEDS[nodes]
    return {"nodes": nodes, "seeds": len(seeds)} | {m: recoveries(job, m, seeds) for m in MODELS}


def months(count: int) -> Iterator[dict[str, Any]]:
    """Run both ways through months of the plan; yields a row for each seed and policy."""
    job = job_of(64)
    for seed in range(count):
        trace = job.hazards(0.0).trace(f"0 {seed}", job.machines, 30.0)
        for name, way in swaps(job).items():
            row: dict[str, Any] = {"seed": seed, "policy": name, "failures": len(trace.failures)}
            for model, play in MODELS.items():
                found = play(job, way, trace, str(seed))
                row[model] = {
                    "ettr": round(found.ettr, 6),
                    "interruptions": len(found.recoveries),
                    "waited": round(found.waited),
                    "reduced": round(found.reduced),
                    "lost": round(sum(found.lost), 1),
                    "ends": dict(found.ends),
                }
            yield row


def committed() -> list[dict[str, Any]]:
    """The rows of the file, by their number of nodes."""
    return [json.loads(line) for line in FILE.read_text().splitlines()]


def main(arguments: list[str]) -> None:
    if arguments[0] == "months":
        for row in months(int(arguments[1])):
            print(json.dumps(row), flush=True)
        return
    rows = {row["nodes"]: row for row in committed()}
    rows |= {int(each): row_of(int(each)) for each in arguments}
    FILE.write_text("".join(json.dumps(rows[nodes]) + "\n" for nodes in sorted(rows)))


if __name__ == "__main__":
    main(sys.argv[1:])

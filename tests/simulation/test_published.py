"""The model beside measurements of this repository and published figures: docs/planning.md has
the differences, which these tests hold where they are."""

import json
import statistics
from dataclasses import replace

import pytest

from deadpool_megatron.simulation.hazards import DAY, HOUR, RATES, Hazards
from deadpool_megatron.simulation.job import SIGNS
from deadpool_megatron.simulation.run import Policy, policies, simulate
from tests.simulation.jobs import ROOT, plan_65b

RESULTS = ROOT / "scripts" / "bench" / "results"
MINUTE = 60.0


def fixed(name, stall, interval, speed=1.0, **other):
    return Policy(name, speed, dict.fromkeys(SIGNS, stall), interval, 0.0, **other)


def mean_ettr(job, policy, hazards, days=30, seeds=3):
    traces = [hazards.trace(f"published {n}", job.machines, days) for n in range(seeds)]
    return statistics.fmean(simulate(job, policy, t, str(n)).ettr for n, t in enumerate(traces))


def quantile(values, share):
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))]


# Our own soak: kinds of faults, and what the loss of the coordinator's node adds.
ON_NODE = ("node", "agent")
REJOIN_SECONDS = 12.0  # rejoin_seconds


def predicted(half, other, nodes, rejoin_seconds):
    """Medians of the kinds in one half, for the faults of the other. One node in ``nodes`` also has
    the coordinator; agents were then awaited for rejoin_seconds before 0.7, which no fit gives."""
    medians = {
        kind: statistics.median(f["seconds"] for f in half if f["kind"] == kind)
        for kind in {f["kind"] for f in half}
    }
    weighed = []
    for fault in other:
        usual = medians.get(fault["kind"], statistics.median(medians.values()))
        late = [usual + rejoin_seconds] if fault["kind"] in ON_NODE else [usual]
        weighed += [usual] * (nodes - 1) + late
    return weighed


@pytest.mark.parametrize(
    ("name", "differences"),
    [
        ("soak-0.5", (0.25, 0.15, 0.35)),
        ("soak-sizes", (0.35, 0.45, 0.65)),
        ("soak", (0.1, 0.3, 0.1)),
    ],
)
def test_half_of_a_soak_predicts_the_other(name, differences):
    file = json.loads((RESULTS / f"{name}.json").read_text())
    faults = [f for f in file["struck"] if f.get("observed", True) and f["seconds"] is not None]
    half = file["seconds"] / 2
    first = [fault for fault in faults if fault["at_seconds"] < half]
    second = [fault for fault in faults if fault["at_seconds"] >= half]
    rejoin_seconds = 0.0 if name == "soak" else REJOIN_SECONDS
    weighed = predicted(first, second, 4, rejoin_seconds)
    measured = [fault["seconds"] for fault in second]
    for share, limit in zip((0.5, 0.95, 0.99), differences, strict=True):
        found, real = quantile(weighed, share), quantile(measured, share)
        print(f"{name} p{share:.0%}: {found:.2f} s, measured {real:.2f}: {found / real - 1:+.0%}")
        assert found / real - 1 == pytest.approx(0, abs=limit)


@pytest.mark.parametrize("name", ["peers-0.5-cpu", "peers-node-0.5-cpu"])
def test_one_round_of_the_other_systems_predicts_the_second(name):
    sizes = json.loads((RESULTS / f"{name}.json").read_text())["sizes"]["5M"]
    step, differences = sizes["undisturbed"]["step_seconds"]["mean"], {}
    for side, found in sizes["sides"].items():
        if found.get("costs"):
            stalls = [
                cost["seconds_to_new_step"] - (cost["steps_recomputed"] + 1) * step * ratio
                for cost, ratio in zip(found["costs"], found["ratio_of_each_round"], strict=True)
            ]
            last = found["costs"][1]
            again = (last["steps_recomputed"] + 1) * step * found["ratio_of_each_round"][0]
            differences[side] = (stalls[0] + again) / last["seconds_to_new_step"] - 1
            print(f"{name} {side}: {differences[side]:+.1%}")
    wide = {side for side, each in differences.items() if abs(each) > 0.1}
    assert wide <= {"nvrx-inprocess-10", "deadpool-node"}
    assert all(abs(each) < 0.2 for each in differences.values())


def test_llama_3_trained_above_90_percent():
    job = plan_65b().resized(2048, 32)
    hazards = job.hazards(RATES["llama-3"])
    assert DAY / hazards.per_node_day / 2048 / HOUR == pytest.approx(3.09, abs=0.01)
    rows = {p.name: p for p in policies(job, hazards.per_node_day / DAY)}
    found = {
        name: mean_ettr(job, rows[name], hazards)
        for name in ("restart, sync", "restart, async", "in-job restart", "hot swap")
    }
    print(found)
    assert found["restart, sync"] < 0.93 < found["restart, async"] < found["in-job restart"]


def test_ft_hsdp_from_44_to_80_percent():
    """A failure each 18 minutes; all stand still for 10, or the others for 3 of them. A replica
    is one of 12, and away for those 10 minutes."""
    job, hazards = plan_65b().resized(12_288, 200), Hazards(DAY / (18 * MINUTE) / 12_288, 0.5)
    job = replace(job, sizes=tuple(range(6, 13)))
    together = mean_ettr(job, fixed("all", 10 * MINUTE, 1.0), hazards, days=10)
    alone = mean_ettr(job, fixed("others", 3 * MINUTE, 1.0, offline=10 * MINUTE), hazards, days=10)
    print(f"together {together:.3f} (published 0.44), others continue {alone:.3f} (0.80)")
    # The published shares are those of failures that never meet: (18 - 10) / 18 and (18 - 3) / 18.
    assert together == pytest.approx(0.57, abs=0.02)
    assert alone == pytest.approx(0.80, abs=0.03)


@pytest.mark.parametrize(
    ("gpus", "cluster", "interval", "restart", "published"),
    [
        (2048, "rsc-1", 60 * MINUTE, 10 * MINUTE, "above 0.9"),
        (4096, "rsc-1", 60 * MINUTE, 10 * MINUTE, "above 0.9"),
        (100_000, "rsc-2", 2 * MINUTE, 2 * MINUTE, "0.9"),
    ],
)
def test_ettr_is_near_the_formula_of_2410_21680(gpus, cluster, interval, restart, published):
    nodes, rate = gpus // 8, RATES[cluster] / 1000
    job, hazards = plan_65b().resized(nodes, 64), Hazards(rate, 1.0)
    found = mean_ettr(job, fixed("job", restart, interval), hazards, seeds=6 if gpus < 9999 else 2)
    formula = 1 - nodes * rate / DAY * (restart + interval / 2)
    print(f"{gpus} GPUs: {found:.3f}, formula {formula:.3f}, published {published}")
    assert found == pytest.approx(formula, abs=0.02)


@pytest.mark.parametrize(("lemons", "expected"), [((0.0, 1.0), 0.570), ((0.15, 5.0), 0.421)])
def test_the_default_case_of_airesim(lemons, expected):
    """4,096 servers, 0.01 failures a day, 15 % fail five times as often until a repair cures them,
    20 minutes for each failure: its report says 0.625. Here nodes also fail during a recovery, and
    bad nodes are never cured."""
    job = plan_65b().resized(4096, 64)
    share, factor = lemons
    hazards = Hazards(0.01 * (1 + share * (factor - 1)), 2.0, 1.0, share, factor)
    found = mean_ettr(job, fixed("restart", 20 * MINUTE, 1.0), hazards, seeds=2)
    print(f"lemons {lemons}: {found:.3f}")
    assert found == pytest.approx(expected, abs=0.02)

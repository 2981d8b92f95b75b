"""A small job, and the plans of the repository, for tests of simulated runs."""

import functools
from pathlib import Path

from deadpool_megatron.planning.assessment import assess
from deadpool_megatron.planning.sections import read_plan
from deadpool_megatron.simulation.job import Job

ROOT = Path(__file__).parents[2]


@functools.cache
def plan_65b(*overrides: str) -> Job:
    plan = read_plan(ROOT / "configs" / "65b.yaml", overrides)
    return Job.of(assess(plan), (4, 5, 6, 7, 8), {})

"""Runs whose roles have numbers from a million on, held against a run with those from 0."""

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.layout.ranks import SIZE_STEP
from tests.faults.harness import jobs

SHIFTED = f"--deadpool-set first-role={SIZE_STEP}"


def shifted(plan):
    """Return the plan for roles with these numbers."""

    def shift(match):
        return {**match, "role": SIZE_STEP + match["role"]} if "role" in match else match

    return [{**fault, "match": shift(fault["match"])} for fault in plan]


def assert_equal_ranks(outcome, wanted, plan):
    """Assert that a run with shifted roles ended as the undisturbed run, rank by rank."""
    missing = {fault["id"] for fault in plan} - outcome.fired
    assert (outcome.status, missing) == (wanted.status, set()), outcome.story()
    assert set(map(int, outcome.final["roles"])) == {
        SIZE_STEP + int(role) for role in wanted.final["roles"]
    }
    found = read_result(outcome.directory)
    comparison = compare_results(read_result(wanted.directory), found)
    assert comparison.identical, "\n".join(map(str, comparison.differences))
    assert comparison.compared["hashes"] >= len(found.roles)
    jobs.assert_restored_state_was_hashed(outcome)

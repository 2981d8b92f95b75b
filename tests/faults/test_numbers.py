"""Roles whose numbers begin at a million, as those of a smaller size: nothing else may change."""

import pytest

from tests.faults import test_matrix as matrix
from tests.faults.harness import cells as harness, jobs
from tests.faults.harness.layouts import PP2_DP2
from tests.faults.harness.numbers import SHIFTED, assert_equal_ranks, shifted

pytestmark = [pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize("name", ["buddy", "parity"])
def test_chain_with_numbers_from_a_million_is_bit_identical(tmp_path, name):
    scheme = matrix.SCHEMES[name]
    array = harness.pairwise(PP2_DP2, harness.PHASES, scheme.shift)
    ((part, plan),) = harness.chains(array, len(array))
    plan, iterations = shifted(plan), harness.last_iteration(plan)
    wanted = jobs.reference(PP2_DP2, iterations, matrix.EVALUATION)
    outcome = jobs.run_job(
        tmp_path / "run",
        PP2_DP2,
        iterations,
        plan,
        flags=f"{matrix.EVALUATION} --save {tmp_path / 'saves'} --save-interval"
        f" {harness.SAVE_INTERVAL}",
        spares=2,
        refill=len(part),
        settings=f"--deadpool-protection {scheme.flags} {SHIFTED}",
    )
    assert_equal_ranks(outcome, wanted, plan)
    kinds = jobs.restart_kinds(outcome)
    assert kinds.count("memory") >= len(array), outcome.story()
    assert "durable" not in kinds, outcome.story()

"""Protection changes nothing: a protected run ends in the very bits of stock Megatron and gloo."""

import pytest

from tests.faults.harness import layouts
from tests.faults.harness.jobs import MODEL, reference
from tests.trainer.layouts import train
from tests.trainer.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
ITERATIONS = 12


@pytest.mark.parametrize("layout", [layouts.PP2_DP2], ids=lambda layout: layout.name)
def test_protected_run_equals_stock_run(layout):
    arguments = f"{MODEL} {layout.flags} --train-iters {ITERATIONS}"
    wanted = run_ranks(layout.roles, train, arguments)[0]  # no seam, no vaults, no hooks
    protected = reference(layout, ITERATIONS).final
    assert [step["loss"] for step in protected["steps"]] == [
        step["loss"] for step in wanted["steps"]
    ]
    assert [step["grad_norm"] for step in protected["steps"]] == [
        step["grad_norm"] for step in wanted["steps"]
    ]
    assert [protected["roles"][str(role)]["sha256"] for role in range(layout.roles)] == wanted[
        "hashes"
    ]

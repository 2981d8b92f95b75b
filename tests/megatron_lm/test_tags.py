"""Each supported tree but that of all other tests: equal to stock Megatron, and recoveries."""

from pathlib import Path

import pytest

from deadpool_megatron.cli.storage.verify import verify_checkpoint
from deadpool_megatron.vault.shm.slot_check import Verdict
from tests.faults.harness.jobs import restart_kinds, undisturbed
from tests.megatron_lm.harness.arguments import MOE
from tests.megatron_lm.harness.checkout import TAG, TREES, UNTAGGED, checkout
from tests.megatron_lm.harness.runs import BASE, dies, gpt, stock, strike

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, pytest.mark.full]


@pytest.mark.parametrize(
    ("tag", "more"), [*((tag, {}) for tag in TREES if tag != TAG), (UNTAGGED, MOE)]
)
def test_nodes_die_and_stock_megatron_computes_the_same(tag, more, tmp_path):
    tree = checkout(tag)
    if tree is None:
        pytest.skip(f"no checkout of {tag}")
    program = gpt(within=tree, **BASE, **more)
    steps = undisturbed(program).final["steps"]
    plain = stock(tmp_path / "stock", tree, **more)[-1]
    assert plain.losses == {str(step["iteration"]): step["loss"] for step in steps}
    assert plain.norms == {str(step["iteration"]): step["grad_norm"] for step in steps}
    plan = [
        dies("role 0 in its update", "optimizer.inside", 0, 4),
        dies("a role in the middle, in an evaluation", "evaluation.begin", 1, 8),
        dies("the last role in a save", "save.written", 3, 9),
    ]
    outcome = strike(tmp_path / "struck", program, plan)
    assert restart_kinds(outcome)[1:] == ["memory"] * len(plan)
    last = Path(outcome.of_kind("durable")[-1].data["path"])
    assert {one.verdict for one in verify_checkpoint(last, lambda _: None)} == {Verdict.GOOD}

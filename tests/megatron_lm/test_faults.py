"""Kills in protected runs of pretrain_gpt.py, at every place of its training, patched or not."""

import pytest

from tests.faults.harness.jobs import recomputed, restart_kinds, undisturbed
from tests.megatron_lm.harness.checkout import needs_megatron_lm
from tests.megatron_lm.harness.runs import BASE, dies, gpt, scalars, strike

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow, needs_megatron_lm]


@pytest.fixture(scope="module")
def struck(tmp_path_factory):
    """Twelve kills, in twelve iterations."""
    plan = [
        # Node 2 dies when the role that writes has written half of its line.
        dies("in-the-log", "comm", 3, 1, when_section="log", when_op="barrier", nodes=[2]),
        dies("forward", "forward", 0, 2, nth=2),
        dies("save-begin", "save.begin", 1, 3),
        dies("evaluation-begin", "evaluation.begin", 3, 4),
        dies("data", "data.next", 0, 5, nth=3),
        dies("save-written", "save.written", 2, 6),
        dies("updated", "optimizer.updated", 1, 7, target="self"),
        dies("evaluation-end", "evaluation.end", 3, 8),
        dies("log-begin", "log.begin", 3, 9),
        dies("update", "optimizer.inside", 2, 10),
        dies("log-end", "log.end", 3, 11),
        dies("role 0 in a save", "save.written", 0, 12),
    ]
    return strike(tmp_path_factory.mktemp("struck") / "run", gpt(**BASE), plan)


@pytest.mark.full
def test_in_the_iterations(struck):
    assert set(restart_kinds(struck)[1:]) == {"memory"}
    assert max(recomputed(struck)) <= 1


@pytest.mark.full
def test_tensorboard_has_each_point_once(struck):
    """The process that writes died before and after its line, and around two evaluations."""
    wanted = scalars(undisturbed(gpt(**BASE)))
    assert {"lm loss", "lm loss vs samples", "lm loss validation", "grad-norm"} <= set(wanted)
    assert [step for step, _ in wanted["lm loss"]] == list(range(1, 13))
    assert scalars(struck) == wanted


@pytest.mark.full(every_time=True)
def test_at_both_ends_in_a_patched_tree(tmp_path, patched):
    """The unpatched tree is the reference."""
    plan = [
        dies("while-groups-connect", "recovery.rebuild", 3, when_epoch=1),
        dies("before-the-first-generation", "recovery.verify", 0, when_epoch=2),
        dies("first-step", "forward", 2, 1, nth=2),
        dies("last-step", "optimizer.updated", 0, 12),
        dies("last-evaluation", "evaluation.end", 3, 12, when_section="evaluation"),
        dies("last-save", "save.begin", 1, 12),
        dies("validation", "evaluation.begin", 3, when_section="validation"),
        dies("test", "evaluation.end", 2, when_section="test", target="self"),
        dies("finish", "finish", 0),
    ]
    wanted = undisturbed(gpt(**BASE))
    strike(tmp_path / "run", gpt(within=patched, **BASE), plan, wanted)

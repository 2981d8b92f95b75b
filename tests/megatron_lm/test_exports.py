"""pretrain_gpt.py: an export beside the training holds what its own save_checkpoint() writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.harness.jobs import Outcome, Program, run_program
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import LOADS
from tests.megatron_lm.harness.ranks import RankParent
from tests.megatron_lm.harness.runs import PP2_DP2, held_tree, tree
from tests.persist.harness.checkpoints import differences

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.megatron_lm]
SEGMENTS: dict[str, object] = {"split": "90,5,5", "eval_interval": 4, "eval_iters": 1}
PLAIN: dict[str, object] = {"bf16": True, "pipeline_model_parallel_size": 2}


def saved_and_exported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, object]
) -> Outcome:
    """A run whose iteration 4 is saved by itself and exported; after an evaluation."""
    run = folder / "run"
    exported = run / "exports" / "iter_0000004"
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"7={exported}")
    flags = small(**layout, **SEGMENTS, save_interval=4, save="{run}/saves", train_iters=8)
    script = held_tree(folder / "tree")
    outcome = run_program(
        run,
        Program((str(script), *flags, "--deadpool"), 2, 2),
        settings="--deadpool-persist-interval 4",
    )
    assert outcome.status == 0, outcome.story()
    assert differences(run / "saves" / "iter_0000004", exported) == []
    return outcome


def test_an_export_is_what_megatron_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_and_exported(tmp_path, monkeypatch, PP2_DP2)


@LOADS
def test_stock_megatron_goes_on_from_an_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unpatched checkout, without --deadpool: of this package there are the stand-ins for a GPU
    and nothing else. With a distributed optimizer and PyTorch's own Adam Megatron cannot load what
    it has saved itself (hooks/checkpoints/loading.py); so there is none.
    """
    outcome = saved_and_exported(tmp_path, monkeypatch, PLAIN)
    parent = RankParent(tree(), tmp_path)
    went_on = []
    try:
        for folder in ("saves", "exports"):
            saves = outcome.directory / folder
            (saves / "latest_checkpointed_iteration.txt").write_text("4")
            flags = small(**PLAIN, **SEGMENTS, load=saves, train_iters=8)
            ranks = parent.train(4, flags, exact=False)
            went_on.append([(r.losses, r.norms, r.skipped, r.state) for r in ranks])
    finally:
        parent.close()
    assert went_on[0] == went_on[1], "from its own save and from the export"
    steps = {str(step["iteration"]): step["loss"] for step in outcome.final["steps"]}
    assert went_on[1][-1][0] == {number: steps[number] for number in ("5", "6", "7", "8")}

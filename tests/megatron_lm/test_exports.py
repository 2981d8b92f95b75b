"""pretrain_gpt.py: an export beside the training holds what its own save_checkpoint() writes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.faults.jobs import Program, run_program
from tests.megatron_lm.arguments import small
from tests.megatron_lm.ranks import RankParent, Trained
from tests.megatron_lm.runs import PP2_DP2, tree
from tests.persist.checkpoints import differences

pytestmark = [pytest.mark.slow, pytest.mark.megatron_lm]
ROOT = Path(__file__).parents[2]


def held_tree(directory: Path) -> Path:
    """The checkout, with a script that waits where it is told to."""
    directory.mkdir()
    for path in tree().iterdir():
        if path.name == "megatron" or path.suffix == ".py":
            (directory / path.name).symlink_to(path)
    script = directory / "pretrain_gpt.py"
    text = script.read_text()
    script.unlink()
    head = f"import sys\nsys.path.append({str(ROOT)!r})\nimport tests.persist.held_pretraining\n"
    script.write_text(head + text)
    return script


def resumed(folder: Path, saves: Path, segments: dict[str, object]) -> list[Trained]:
    """What the ranks of the unpatched checkout see that go on from iteration 4, without --deadpool
    and with no part of this package but the stand-ins for a GPU."""
    (saves / "latest_checkpointed_iteration.txt").write_text("4")
    flags = {**PP2_DP2, **segments, "save_interval": None, "load": saves, "train_iters": 8}
    parent = RankParent(tree(), Path(tempfile.mkdtemp(dir=folder)))
    try:
        return parent.train(4, small(**flags), exact=False)
    finally:
        parent.close()


def test_an_export_is_what_megatron_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    exported = run / "exports" / "iter_0000004"
    monkeypatch.setenv("DEADPOOL_TEST_HOLD", f"7={exported}")
    segments = {"split": "90,5,5", "eval_interval": 4, "eval_iters": 1, "save_interval": 4}
    flags = small(**PP2_DP2, **segments, save="{run}/saves", train_iters=8)
    script = held_tree(tmp_path / "tree")
    outcome = run_program(
        run,
        Program((str(script), *flags, "--deadpool"), 2, 2),
        settings="--deadpool-persist-interval 4",
    )
    assert outcome.status == 0, outcome.story()
    assert differences(run / "saves" / "iter_0000004", exported) == []
    went_on = [resumed(tmp_path, folder, segments) for folder in (run / "saves", run / "exports")]
    assert went_on[0] == went_on[1]
    steps = {str(step["iteration"]): step["loss"] for step in outcome.final["steps"]}
    assert went_on[1][-1].losses == {str(number): steps[str(number)] for number in range(5, 9)}

"""Whole runs that export beside their training: what comes out, and what a failure leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.jobs import MODEL, Outcome, Program, run_program
from tests.persist.checkpoints import differences
from tests.trainer.layouts import BF16, PP2, train
from tests.trainer.ranks import run_ranks

pytestmark = pytest.mark.slow
HELD_TRAINER = str(Path(__file__).with_name("held_trainer.py"))
DUE = "--eval-interval 4 --eval-iters 1 --save-interval 4"


def program(flags: str, iterations: int, held: int, pattern: str) -> Program:
    """Two nodes of two members; held before an iteration until something is there."""
    command = (HELD_TRAINER, str(held), pattern, *MODEL.split(), *PP2.split(), *BF16.split())
    length = ("--train-iters", str(iterations))
    return Program((*command, *length, *flags.split()), 2, 2)


def warnings(outcome: Outcome) -> list[str]:
    """What the run said of exports that came to nothing."""
    texts = [str(event.data["text"]) for event in outcome.of_kind("log")]
    return [text for text in texts if "in the background" in text]


def test_an_export_is_what_the_run_saved(text: str, tmp_path: Path) -> None:
    """Every fourth iteration is saved by the run and exported, after an evaluation."""
    saved, run = tmp_path / "saved", tmp_path / "run"
    flags = f"{text} {DUE} --save {saved}"
    job = program(flags, 10, 7, "{run}/exports/iter_0000004")
    settings = "--deadpool-persist-interval 4 --deadpool-persist-seconds 60"
    outcome = run_program(run, job, settings=settings)
    assert outcome.status == 0, outcome.story()
    exported = run / "exports" / "iter_0000004"
    assert exported.is_dir(), outcome.story()
    assert differences(saved / "iter_0000004", exported) == []
    assert (run / "exports" / "latest_checkpointed_iteration.txt").read_text() == "4"
    background = [e for e in outcome.of_kind("durable") if e.data.get("background")]
    assert [(e.iteration, e.data["path"]) for e in background] == [(4, str(exported))]

    # Without us: the same training on plain ranks goes on from it, to the same bits.
    loaded = f"{MODEL} {PP2} {BF16} {flags} --train-iters 10 --load {run / 'exports'}"
    hashes = run_ranks(4, train, loaded)[0]["hashes"]
    final = outcome.final["roles"]
    assert hashes == [final[str(role)]["sha256"] for role in range(4)], outcome.story()

"""Continuation of a run: from memory after all have died, the newest checkpoint, another plan."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory import cleanup, directory as run_files
from deadpool_megatron.cluster.run_directory.cleanup import end_processes
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from tests.faults.harness import jobs, layouts
from tests.faults.harness.layouts import WHOLE_NODES

pytestmark = [pytest.mark.slow, pytest.mark.full]
LAYOUT = layouts.PP2_DP2
ITERATIONS = 40
MEMBERS = jobs.fault(
    "all", "backward", when_role=1, when_iteration=3, target="members", nodes=[0, 2, 3, 1]
)
SUSPECTED_ITERATIONS = 20
PLANNED_ITERATIONS = 30
EVERY = 3
EVALUATION = "--eval-interval 4 --eval-iters 2"


def take_all_down(directory: Path) -> None:
    """SIGKILL the launcher; its processes end by themselves and keep the slots."""
    run = RunDirectory(directory)
    agent = int(next(iter(run.node_listings().values()))["agent"])
    launcher = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    left = cleanup.run_processes(run, run.read_run().run_id)
    posix.kill(launcher)
    assert not posix.wait_until_ended(left, 60)


def test_members_then_everything_then_another_model(tmp_path):
    """All members; then launcher and coordinator with all; then another model is refused, with the
    slots kept; then the same command continues."""
    directory = tmp_path / "run"

    def all_of_it() -> None:
        posix.kill(int(run_files.read_json(directory / "coordinator.json")["pid"]))
        take_all_down(directory)

    first = jobs.run_job(directory, LAYOUT, ITERATIONS, [MEMBERS], when_stepping=(7, all_of_it))
    assert first.status != 0
    assert not (directory / "final.json").exists()
    assert list(
        run_files.segment_root(RunDirectory(directory).read_run().run_id).glob("node*/own-*.seg")
    )
    # As many bytes in each tensor.
    wrong = jobs.run_program(directory, jobs.trainer(LAYOUT, ITERATIONS, "--num-attention-heads 8"))
    assert wrong.status == 2, wrong.story()
    assert "the state in memory is of another model" in wrong.output
    assert "num_attention_heads is 4 there and 8 here" in wrong.final["reason"]
    assert run_files.read_json(directory / "final.json")["slots_kept"]
    again = jobs.run_job(directory, LAYOUT, ITERATIONS, [])
    assert set(jobs.restart_kinds(again)[1:]) == {"memory"}, again.story()
    jobs.assert_unnoticed(again, jobs.reference(LAYOUT, ITERATIONS), [])
    assert "all" in first.fired
    assert "restarted: continues from generation" in again.output


def fallen_back(
    directory: Path, saves: Path, iteration: int, damage: Callable[[], None]
) -> tuple[jobs.Outcome, list[tuple[str, int]]]:
    """A run that keeps no copies loses a node after this iteration; nothing moves while its
    checkpoints are damaged before. Also what each epoch began with."""
    run = RunDirectory(directory)

    def strike() -> None:
        listing = run.node_listings()[0]
        for pid in listing["members"].values():
            os.kill(pid, signal.SIGSTOP)
        damage()
        end_processes([*map(int, listing["started"])])

    outcome = jobs.run_job(
        directory,
        WHOLE_NODES,
        SUSPECTED_ITERATIONS,
        flags=f"--save {saves} --save-interval 5",
        settings="--deadpool-protection local",
        spares=1,
        when_stepping=(iteration, strike),
    )
    jobs.assert_unnoticed(outcome, jobs.reference(WHOLE_NODES, SUSPECTED_ITERATIONS), [])
    restored = [event.data["generation"][1] for event in outcome.of_kind("epoch-decided")]
    return outcome, list(zip(jobs.restart_kinds(outcome), restored, strict=True))


def test_the_newest_is_cut_short_and_the_one_before_removed(tmp_path):
    saves = tmp_path / "saves"

    def damage() -> None:
        # Where a check of the checkpoint's identity does not look.
        for shard in sorted((saves / "iter_0000015").glob("*.distcp"))[4:]:
            os.truncate(shard, 1000)
        shutil.rmtree(saves / "iter_0000010")

    outcome, restored = fallen_back(tmp_path / "run", saves, 16, damage)
    assert restored == [("initial", 0), ("durable", 15), ("durable", 5)], outcome.story()
    output = jobs.logged(outcome)
    assert "iter_0000015 is not used any more" in output
    assert "iter_0000010 does not exist any more" in output
    # The checkpoint that replaced the damaged checkpoint is valid.
    paths = [event.data["path"] for event in outcome.of_kind("durable")]
    assert paths.count(str(saves / "iter_0000015")) == 2
    assert (
        len({shard.stat().st_size > 1000 for shard in (saves / "iter_0000015").glob("*.distcp")})
        == 1
    )


def test_a_run_that_was_moved_is_continued_and_not_the_one_that_has_its_name(tmp_path):
    place, moved = tmp_path / "run", tmp_path / "moved"
    constant = "--lr-decay-style constant"  # another length is another schedule else
    for seed in ("1", "2"):
        flags = f"--save {place}/saves --save-interval 2 --seed {seed} {constant}"
        done = jobs.run_job(place, WHOLE_NODES, 4, flags=flags)
        assert done.status == 0, done.story()
        if seed == "1":
            place.rename(moved)
    (tmp_path / "link").symlink_to(moved)
    resume = ("--resume", str(tmp_path / "link"))
    new = jobs.run_job(
        tmp_path / "new", WHOLE_NODES, 6, flags=f"--seed 1 {constant}", arguments=resume
    )
    assert f"continues from the checkpoint {moved}/saves/iter_0000004 of iteration 4" in new.output
    assert new.status == 0, new.story()


def test_another_checkpoint_has_the_name_of_the_newest(tmp_path):
    """As of another job with the same --save. It is left out, and then set aside."""
    saves = tmp_path / "saves"

    def replace() -> None:
        (saves / "iter_0000010").rename(saves / "own")
        (saves / "iter_0000005").rename(saves / "iter_0000010")
        shutil.copytree(saves / "iter_0000010", saves / "iter_0000005")

    outcome, restored = fallen_back(tmp_path / "run", saves, 11, replace)
    assert restored == [("initial", 0), ("durable", 5)], outcome.story()
    assert "iter_0000010 does not exist any more, or is not what was saved" in jobs.logged(outcome)
    # The checkpoint that was saved again has the name.
    assert run_files.fingerprint(saves / "iter_0000010") == run_files.fingerprint(saves / "own")
    assert len(list(saves.glob("iter_0000010.before-*"))) == 1


def test_a_plan_changes_and_nodes_die_and_the_coordinator_with_them(tmp_path):
    """Copies of every generation are replaced by parity of every third. The next coordinator finds
    the plan in the journal."""
    directory = tmp_path / "run"
    answers: list[subprocess.CompletedProcess[str]] = []

    def protect() -> None:
        command = [sys.executable, "-m", "deadpool_megatron", "protect", str(directory)]
        wish = [*command, "--scheme", "parity", "--group", "3", "--every", str(EVERY)]
        answers.append(subprocess.run(wish, capture_output=True, text=True, timeout=60))

    plan = [
        # The second of four micro-batches in the 11th iteration of the epoch.
        jobs.fault("node", "backward", when_role=0, when_epoch=2, nth=42, target="node"),
        jobs.fault("coordinator", "coordinator.journal", when_epoch=3),
        jobs.fault(
            "evaluation", "evaluation.microbatch", when_role=1, when_iteration=28, target="node"
        ),
    ]
    outcome = jobs.run_job(
        directory,
        LAYOUT,
        PLANNED_ITERATIONS,
        plan,
        flags=f"{EVALUATION} --save {tmp_path / 'saves'} --save-interval 5",
        spares=2,
        refill=2,
        when_stepping=(1, protect),
    )
    assert answers[0].returncode == 0, answers[0].stderr
    assert f"parity(3); every {EVERY} iterations" in answers[0].stdout
    jobs.assert_unnoticed(outcome, jobs.reference(LAYOUT, PLANNED_ITERATIONS, EVALUATION), plan)

    # The dead coordinator had the plan in no record: its successor announces it again.
    first, change, *again = outcome.of_kind("protection")
    assert {event.data["new"] for event in again} <= {change.data["new"]}
    assert first.data["new"] == change.data["old"] == "buddy"
    assert (change.epoch, change.data["every"], change.data["most_lost"]) == (2, EVERY, 5)
    assert "deadpool protect" in change.data["why"]
    planned, *failures = jobs.recomputed(outcome)
    assert planned == 0, "the pause was after a protected iteration"
    assert len(failures) == 2
    assert max(failures) <= change.data["most_lost"]
    records = [json.loads(p.read_text()) for p in sorted(directory.glob("journal/epoch-*"))]
    later = [record for record in records if record["epoch"] > 2]
    assert [record["protection"]["every"] for record in later] == [EVERY, EVERY]
    assert [record["restore"]["generation"][1] % EVERY for record in later] == [0, 0]
    # 28 is no multiple of 3: its evaluation was interrupted, and the iteration done again; from 24
    # when 27 was still under way.
    assert later[-1]["restore"]["generation"][1] in (24, 27)

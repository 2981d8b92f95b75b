"""Roles computed from what others hold, in whole runs: from parity blocks, or along a chain."""

import pytest

from deadpool_megatron.cluster.coordinator.files import DETAIL_VARIABLE
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, segment_root
from tests.faults.harness import jobs
from tests.faults.harness.jobs import Program, assert_unnoticed, fault, reference, run_job, strike
from tests.faults.harness.layouts import EXPERTS, PP2_DP2
from tests.faults.test_restart import take_all_down
from tests.persist.test_runs import HELD_TRAINER

pytestmark = [pytest.mark.slow, pytest.mark.full]
SETTINGS = "--deadpool-protection recompute --deadpool-set full-every=4"
# As in other tests of these layouts, so that they share an undisturbed run of each.
ITERATIONS = 12


def lost(role: int, iteration: int) -> dict[str, object]:
    """The node of a role dies in the update of an iteration, when all have committed the last."""
    where = {"when_role": role, "when_iteration": iteration}
    return fault(f"role{role}-at-{iteration}", "optimizer.inside", target="node", **where)


def test_nodes_lost_along_a_chain(tmp_path):
    """At 4: three steps after the first state. At 5: a step after that. At 9: a whole copy.
    At 11: two nodes, the second in the recovery from the first."""
    faults = [
        lost(0, 4),
        lost(3, 5),
        lost(1, 9),
        lost(2, 11),
        fault("buddy-at-restore", "recovery.restore", target="node", when_role=1, when_epoch=5),
    ]
    outcome = strike(
        tmp_path / "run", PP2_DP2, ITERATIONS, faults, spares=1, refill=9, settings=SETTINGS
    )
    assert set(jobs.restart_kinds(outcome)[1:]) == {"memory"}
    replays = [(e.iteration, e.data["steps"]) for e in outcome.of_kind("replayed")]
    assert replays[:2] == [(3, 3), (4, 1)]
    assert (10, 2) in replays
    assert all(event.data["matched"] for event in outcome.of_kind("replayed"))
    assert all(event.data["matched"] for event in outcome.of_kind("rehearsed"))


def test_several_optimizers(tmp_path):
    faults = [lost(1, 4)]
    outcome = strike(tmp_path / "run", EXPERTS, ITERATIONS, faults, spares=1, settings=SETTINGS)
    assert [event.data["steps"] for event in outcome.of_kind("replayed")] == [3]


def test_a_wrong_gradient_is_refused(tmp_path):
    """Damaged before its checksum was made: only the owner's checksum of the result shows it."""
    faults = [
        fault("damage", "step.captured", action="mark", when_role=1, when_iteration=2),
        lost(1, 4),
    ]
    saving = f"--save {tmp_path / 'checkpoints'} --save-interval 2"
    outcome = strike(
        *(tmp_path / "run", PP2_DP2, ITERATIONS, faults), spares=1, settings=SETTINGS, saving=saving
    )
    assert "is not what its owner had" in outcome.output
    assert jobs.restart_kinds(outcome)[-1] == "durable"


def test_a_rehearsal_that_fails_means_whole_copies(tmp_path):
    faults = [
        *(
            fault(f"differs{role}", "rehearsal", action="mark", when_role=role, when_iteration=1)
            for role in range(4)
        ),
        lost(1, 4),
    ]
    outcome = strike(tmp_path / "run", PP2_DP2, ITERATIONS, faults, spares=1, settings=SETTINGS)
    assert outcome.of_kind("replayed") == []
    assert outcome.output.count("whole copies instead of gradients") == 1, outcome.output


def test_without_a_spare_chains_are_dumped_and_the_next_run_goes_on(tmp_path):
    """The steps to the lost role's state are written, and recomputed when the run is resumed."""
    faults = [lost(1, 4)]
    waiting = f"{SETTINGS} --deadpool-spare-timeout 0.5"
    dumped = run_job(tmp_path / "run", PP2_DP2, ITERATIONS, faults, settings=waiting)
    assert dumped.status == 75, dumped.story()
    resume = ("--resume", str(tmp_path / "run"))
    resumed = run_job(
        tmp_path / "resumed", PP2_DP2, ITERATIONS, settings=SETTINGS, arguments=resume
    )
    assert resumed.status == 0, resumed.story()
    assert_unnoticed(resumed, reference(PP2_DP2, ITERATIONS), [])
    assert [event.data["steps"] for event in resumed.of_kind("replayed")] == [3]


def test_restart_recomputes_from_the_slots_in_memory(tmp_path, monkeypatch):
    """Everything dies with the launcher, and the memory of role 1 itself is gone: another run has
    the chain that its buddy's vault kept, and what the others held as bytes."""
    monkeypatch.setenv(DETAIL_VARIABLE, "all")
    directory = tmp_path / "run"
    command = jobs.trainer(PP2_DP2, ITERATIONS).command
    held = Program((HELD_TRAINER, f"8={tmp_path}/never", *command[2:]), 4)

    def end_it() -> None:
        jobs.await_event(
            directory, lambda e: e.kind == "committed" and (e.role, e.iteration) == (1, 7)
        )
        take_all_down(directory)

    jobs.run_program(directory, held, settings=SETTINGS, when_stepping=(7, end_it))
    slots = segment_root(RunDirectory(directory).read_run().run_id)
    (own,) = slots.glob("node*/own-1-*.seg")
    own.unlink()
    resume = ("--resume", str(directory))
    resumed = run_job(
        tmp_path / "resumed", PP2_DP2, ITERATIONS, settings=SETTINGS, arguments=resume
    )
    assert "generation 1:7 in the dump" in resumed.output, resumed.story()
    assert_unnoticed(resumed, reference(PP2_DP2, ITERATIONS), [])
    assert [event.data["steps"] for event in resumed.of_kind("replayed")] == [3]


def test_two_nodes_of_a_group_at_once_and_a_third_one_without_a_spare(tmp_path):
    """Four roles in one group with two parity blocks on the spares, which take over both roles;
    then groups are smaller, as there are fewer nodes. The last loss finds no spare: the rest of the
    group is in the files of the dump, and the next job computes the lost role from them.
    """
    plan = [
        fault("two", "backward", when_role=0, when_iteration=5, target="node", nodes=[0, 2]),
        fault("third", "optimizer.inside", when_role=1, when_iteration=9, target="node"),
    ]
    parity = "--deadpool-protection parity --deadpool-replicas 2 --deadpool-parity-group"
    dumped = run_job(
        tmp_path / "run",
        PP2_DP2,
        ITERATIONS,
        plan,
        spares=2,
        settings=f"{parity} 4 --deadpool-spare-timeout 1",
    )
    assert dumped.status == 75, dumped.story()
    assert {event.role for event in dumped.of_kind("decoded")} == {0, 2}
    assert max(jobs.recomputed(dumped)) <= 1
    resume = ("--resume", str(tmp_path / "run"))
    heads = "--num-attention-heads 8"  # as many bytes
    other = run_job(tmp_path / "other", PP2_DP2, ITERATIONS, flags=heads, arguments=resume)
    assert (other.status, other.of_kind("step")) == (2, []), other.story()
    assert "num_attention_heads is 4 there and 8 here" in other.final["reason"]
    resumed = run_job(
        tmp_path / "resumed",
        PP2_DP2,
        ITERATIONS,
        arguments=resume,
        settings=f"{parity} 2",  # there are no spares to hold blocks of four
    )
    assert {event.role for event in resumed.of_kind("decoded")} == {1}, resumed.story()
    assert_unnoticed(resumed, reference(PP2_DP2, ITERATIONS), [])
    assert resumed.final["steps"][0]["iteration"] > 6, "it did not start anew"

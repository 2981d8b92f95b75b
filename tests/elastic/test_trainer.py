"""The embedded trainer continues with fewer model replicas, and with all of them again."""

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cluster.run_directory.cleanup import end_processes
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Kind
from deadpool_megatron.layout.ranks import SIZE_STEP
from tests.common.programs import check_output
from tests.elastic.harness.runs import ELASTIC, compare, lengths, run_elastic, trainer_job
from tests.faults.harness import jobs
from tests.faults.harness.layouts import DISTRIBUTED, PIPELINE
from tests.faults.test_restart import take_all_down

pytestmark = pytest.mark.slow
FULL = pytest.mark.full
FIRST = jobs.dies("first", "backward", 2, 5)
# On a node that does not coordinate: during a takeover its replacement would join before the run
# could continue without it.
REPLACED = jobs.dies("first", "backward", 1, 5)
SMALL = SIZE_STEP  # the role of rank 0 where one model replica is missing


def test_a_lost_node_costs_a_replica(tmp_path):
    job = trainer_job(PIPELINE, replicas=3, iterations=12, nodes=3, members=2)
    outcome, sizes = run_elastic(tmp_path / "run", job, [FIRST])
    assert sizes == [3, 2], outcome.story()


@FULL
def test_growth_when_a_node_joins(tmp_path):
    job = trainer_job(PIPELINE, replicas=3, iterations=24, nodes=3, members=2, every=9)
    outcome, sizes = run_elastic(tmp_path / "run", job, [REPLACED], grows=True)
    assert sizes == [3, 2, 3], outcome.story()
    assert jobs.restart_kinds(outcome) == ["initial", "memory", "memory"]
    assert jobs.recomputed(outcome)[-1] == 0, "growth computes nothing again"


@FULL
def test_parts_of_a_lost_node_are_decoded_before_they_are_cut(tmp_path):
    job = trainer_job(DISTRIBUTED, replicas=4, iterations=24, nodes=4, every=99)
    parity = "--deadpool-protection parity"
    outcome, sizes = run_elastic(tmp_path / "run", job, [REPLACED], grows=True, settings=parity)
    assert sizes == [4, 3, 4], outcome.story()
    assert jobs.restart_kinds(outcome) == ["initial", "memory", "memory"]
    assert outcome.of_kind(Kind.DECODED), outcome.story()


# Role, epoch and target of the death; the numbers of model replicas; options.
CHANGES = {
    "shrink-node": (SMALL + 1, 2, "node", [4, 2], {}),
    "shrink-process": (SMALL + 1, 2, "self", [4, 3], {}),
    "growth-process": (1, 3, "self", [4, 3, 4], {"grows": True}),
    "growth-node": (1, 3, "node", [4, 3, 4], {"grows": True, "refill": 2}),
}


@FULL
@pytest.mark.parametrize("phase", ["adopt", "rebuild", "restore", "sync", "verify"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_death_in_each_phase_of_a_change(tmp_path, phase, change):
    role, epoch, target, wanted, options = CHANGES[change]
    job = trainer_job(DISTRIBUTED, replicas=4, iterations=24, nodes=4, every=9)
    second = jobs.dies("second", f"recovery.{phase}", role, when_epoch=epoch, target=target)
    first = REPLACED if options else FIRST
    outcome, sizes = run_elastic(tmp_path / "run", job, [first, second], **options)
    assert sizes == wanted, outcome.story()


# Faults besides the first, and the numbers of model replicas.
OTHERS = {
    "the coordinator's node": ([jobs.dies("second", "backward", SMALL, 8)], [4, 3, 2]),
    "the coordinator": ([jobs.fault("second", "coordinator.store", when_epoch=2, nth=2)], [4, 3]),
    "a process, in place": (
        [jobs.dies("second", "optimizer.updated", SMALL + 1, 8, target="self")],
        [4, 3],
    ),
    "all members": (
        [jobs.dies("second", "backward", SMALL + 1, 8, target="members", nodes=[0, 1, 3])],
        [4, 3],
    ),
}


@FULL
@pytest.mark.parametrize("other", OTHERS)
def test_another_failure_at_the_smaller_size(tmp_path, other):
    plan, wanted = OTHERS[other]
    job = trainer_job(DISTRIBUTED, replicas=4, iterations=12, nodes=4, every=9)
    outcome, sizes = run_elastic(tmp_path / "run", job, [FIRST, *plan])
    assert sizes == wanted, outcome.story()


@FULL
def test_a_second_loss_while_it_waits_costs_another_replica(tmp_path):
    job = trainer_job(DISTRIBUTED, replicas=4, iterations=12, nodes=4, every=9)

    def kill() -> None:
        jobs.await_event(tmp_path / "run", lambda event: event.kind == Kind.WAITING_FOR_SPARE)
        end_processes([*map(int, RunDirectory(tmp_path / "run").node_listings()[3]["started"])])

    options = {"settings": "--deadpool-elastic-wait 8", "when_stepping": (4, kill)}
    outcome, sizes = run_elastic(tmp_path / "run", job, [FIRST], **options)
    assert sizes == [4, 2], outcome.story()


@FULL
def test_all_processes_are_killed_at_the_smaller_size(tmp_path):
    directory, job = tmp_path / "run", trainer_job(DISTRIBUTED, 4, 24, nodes=4, every=9)
    strike = {"when_stepping": (8, lambda: take_all_down(directory)), "settings": ELASTIC}
    assert jobs.run_program(directory, job.program, [FIRST], **strike).status
    outcome, sizes = run_elastic(directory, job, [REPLACED], grows=True, refill=0)
    assert sizes == [4, 3, 4], outcome.story()


@FULL
def test_a_small_run_that_is_stopped_continues_at_full_size(tmp_path):
    """From a checkpoint: its dump is for as many roles as it had."""
    job = trainer_job(DISTRIBUTED, replicas=3, iterations=12, nodes=3, every=99)
    old, new = tmp_path / "old", tmp_path / "new"
    stop = ("-m", "deadpool_megatron", "stop", "--dump", old)
    options = {"settings": ELASTIC, "when_stepping": (7, lambda: check_output(*stop))}
    stopped = jobs.run_program(old, job.program, [FIRST], **options)
    assert stopped.status == 75, stopped.story()
    new.with_suffix(".grown").touch()
    outcome = jobs.run_program(new, job.program, arguments=("--resume", str(old)))
    assert "continues with 3 roles instead of 2 from the checkpoint" in outcome.output
    decided, last = stopped.of_kind(Kind.EPOCH_DECIDED), outcome.final["steps"][0]["iteration"] - 1
    *_, leg = job.legs([*lengths(decided, last, 3, 1), (3, 12)], tmp_path)
    compare(outcome, job, leg, 3, 12)


@FULL
def test_resume_with_fewer_nodes_trains_as_stock(tmp_path):
    flags = f"{PIPELINE} --lr-decay-style constant"  # another length is another schedule else
    before, after = (
        trainer_job(flags, replicas, iterations, nodes=replicas, members=2)
        for replicas, iterations in ((3, 4), (2, 8))
    )
    for name in ("old", "new"):
        (tmp_path / f"{name}.grown").touch()
    assert jobs.run_program(tmp_path / "old", before.program).status == 0
    resume = ("--resume", str(tmp_path / "old"))
    outcome = jobs.run_program(tmp_path / "new", after.program, arguments=resume)
    assert "continues with 4 roles instead of 6 from the checkpoint" in outcome.output
    first, second = after.legs([(6, 4), (4, 8)], tmp_path)
    assert [leg.steps[0]["iteration"] for leg in (first, second)] == [1, 5]
    compare(outcome, after, second, 4, 8)


@FULL
def test_dump_of_the_smaller_size_continues_as_stock(tmp_path):
    for name in ("old", "new"):
        (tmp_path / f"{name}.grown").touch()
    old, new = (trainer_job(DISTRIBUTED, count, 24, nodes=count, every=99) for count in (4, 3))
    stop = ("stop", "--dump", str(tmp_path / "old"))
    strike = {"when_stepping": (7, lambda: cli.main(stop)), "settings": ELASTIC}
    before = jobs.run_program(tmp_path / "old", old.program, [FIRST], **strike)
    assert before.status == 75, before.story()
    resume = {"arguments": ("--resume", str(tmp_path / "old")), "settings": ELASTIC}
    second = jobs.dies("second", "backward", SMALL + 1, 22)
    outcome = jobs.run_program(tmp_path / "new", new.program, [second], **resume)
    assert outcome.status == 0, outcome.story()
    runs = ((run.of_kind(Kind.EPOCH_DECIDED), run.final["iterations"]) for run in (before, outcome))
    first, ((_, last), end) = (lengths(*run, 4, 1) for run in runs)
    *_, third, fourth = old.legs([*first, (3, last), end], tmp_path)
    compare(outcome, old, third, 3, last)
    compare(outcome, old, fourth, *end)


@FULL
def test_resume_of_a_run_that_ended_in_a_change_continues_at_the_former_size(tmp_path):
    for name in ("old", "new"):
        (tmp_path / f"{name}.grown").touch()
    job = trainer_job(DISTRIBUTED, 4, 12, nodes=4, every=99)
    all_die = jobs.dies("all", "recovery.restore", SMALL, when_epoch=2, nodes=[0, 1, 3])
    jobs.run_program(tmp_path / "old", job.program, [FIRST, all_die], settings=ELASTIC)
    resume = ("--resume", str(tmp_path / "old"))
    outcome = jobs.run_program(tmp_path / "new", job.program, settings=ELASTIC, arguments=resume)
    assert outcome.status == 0, outcome.story()
    _, second = job.legs([(4, 4), (4, 12)], tmp_path)
    compare(outcome, job, second, 4, 12)

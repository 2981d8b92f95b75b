"""The batch scripts under a real Slurm: real jobs, real losses of nodes."""

import dataclasses
import re
import shlex
from collections.abc import Iterator

import pytest

from deadpool_megatron.cli.compare import compare_results
from deadpool_megatron.cli.run_result import read_result
from deadpool_megatron.events import Kind
from tests.common.programs import stand_in
from tests.elastic.harness.runs import hold, trainer_job
from tests.faults.harness.jobs import Layout, Outcome, reference, trainer
from tests.faults.harness.layouts import DISTRIBUTED
from tests.megatron_lm.harness.arguments import small
from tests.megatron_lm.harness.checkout import LOADS, checkout, needs_megatron_lm
from tests.slurm.jobs import SCRIPTS

ROOT = SCRIPTS.parents[1]

pytestmark = pytest.mark.slurm
# Members with torch take longer to start.
TRAINS = ("--deadpool-set", "hash-interval=1", "--deadpool-start-seconds", "80")


def test_nodes_take_id_and_domain_from_slurm(cluster, jobs):
    job = jobs.submit()
    job.wait_iteration(3)
    job.finish()
    ended = job.wait_end("COMPLETED")
    assert ended["ExitCode"] == "0:0"
    assert "status of the run: 0 (of srun: 0)" in cluster.output(job.number)
    nodes = job.first_record().nodes
    hosts = cluster.nodes_of(job.number)
    assert [nodes[n].host for n in range(5)] == [cluster.host(host).address for host in hosts]
    assert [nodes[n].domain for n in range(5)] == [cluster.rack(host) for host in hosts]


def printed(page: str) -> Iterator[str]:
    """Yield the blocks of shell of a page's section "Your command"."""
    section = (ROOT / "docs" / page).read_text().partition("## Your command")[2]
    yield from re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


def test_own_command_survives_a_lost_node_as_printed(cluster, jobs, tmp_path):
    """The job of docs/slurm.md, with the counting member and a folder for /shared."""
    _, after, *_ = printed("slurm.md")
    for old, new in (
        ("--nodes=17", "--nodes=5"),
        ("--gpus-per-node=8 ", ""),
        ("/shared/runs", str(jobs.directory)),
        ("--nproc-per-node 8", f"--nproc-per-node 1 {shlex.join(jobs.settings)}"),
        ("pretrain_gpt.py", jobs.training[0]),
    ):
        assert old in after
        after = after.replace(old, new)
    script = tmp_path / "own.sbatch"
    arguments = f"ARGS=({shlex.join(jobs.training[1:])})"
    script.write_text("#!/bin/bash\n" + after.replace("srun", f"{arguments}\nsrun", 1))
    jobs.directory.mkdir()
    job = jobs.job(cluster.submit(str(script), **jobs.environment()))
    job.wait_iteration(3)
    cluster.lose(job.host(1))
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    job.finish()


def test_own_command_and_its_arguments_follow_the_batch_script(cluster, jobs):
    *_, submit = printed("slurm.md")
    assert submit.splitlines()[0].startswith("sbatch --nodes=17 scripts/slurm/train.sbatch ")
    variables = {"COMMUNICATOR": "gloo", "GPUS_PER_NODE": "1", "SLURM_GPUS_PER_NODE": ""}
    job = dataclasses.replace(jobs, variables=variables).submit(script="train.sbatch")
    job.wait_iteration(3)
    cluster.lose(job.host(1))
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    job.finish()


def test_node_that_slurm_drains_gives_its_roles_away(cluster, jobs):
    job = jobs.submit()
    job.wait_iteration(3)
    drained = job.host(1)
    cluster.control("scontrol", "update", f"nodename={drained}", "state=drain", "reason=test")
    follow = cluster.begin("deadpool", "follow-slurm", "--every", "1", str(job.run.path))
    try:
        job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
        final = job.finish()
        assert follow.wait(30) == 0, "it ends with the run"
    finally:
        follow.kill()
        follow.wait()
    (recovery,) = final["recoveries"]
    assert (recovery["kind"], recovery["steps_recomputed"]) == ("planned", 0)
    assert recovery["seats_changed"]["1"][0][0] == 1
    job.wait_end("COMPLETED")


def test_run_survives_the_loss_of_the_batch_host(cluster, jobs):
    """Without the batch script, the survivors end the job."""
    job = jobs.submit()
    job.wait_iteration(5)
    batch_host = cluster.job(job.number)["BatchHost"]
    assert batch_host == job.host(0)
    cluster.lose(batch_host)
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    job.finish()
    job.wait_end("COMPLETING", "CANCELLED")
    assert "the run is over, this node ends the job" in job.logs()
    # The script that would prepare the next job of a chain is lost as well.
    assert "ended with status 0" in (jobs.directory / "OVER").read_text()


def test_run_survives_the_loss_of_the_coordinators_node_and_another(cluster, jobs):
    job = dataclasses.replace(jobs, nodes=3, spares=2).submit()
    job.wait_iteration(5)
    first = job.coordinator()
    assert first in (job.host(3), job.host(4)), "spares coordinate before nodes that train"
    cluster.lose(first, job.host(2))
    job.wait_for("another coordinator", lambda: job.coordinator() != first)
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    final = job.finish()
    assert len(final["recoveries"]) == 1, "the coordinator's death stops nobody"
    job.wait_end("COMPLETED")


def test_cut_node_ends_its_members_although_slurm_does_not_know(cluster, jobs):
    job = jobs.submit()
    job.wait_iteration(5)
    cut = job.host(2)
    assert cluster.members(cut)
    cluster.host(cut).cut()
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    # Its roles were given away, so it must have stopped before. Slurm would not have killed it.
    assert not cluster.members(cut)
    assert cluster.job(job.number)["NumNodes"] == "5"
    cluster.wait_for("Slurm to find out", lambda: cluster.job(job.number)["NumNodes"] == "4")
    cluster.mend(cut)
    final = job.finish()
    assert len(final["recoveries"]) == 1
    job.wait_end("COMPLETED")


def test_spare_of_a_second_job_takes_over(cluster, jobs):
    job = dataclasses.replace(jobs, nodes=3, spares=0).submit()
    job.wait_iteration(3)
    run = {"RUN": str(job.run.path), **jobs.environment()}
    pool = cluster.submit("--array=1-1", str(SCRIPTS / "spare_pool.sbatch"), **run)
    job.wait_for("a warm spare", lambda: [e for e in job.events(Kind.MEMBER_WARM) if e.node == 3])
    cluster.lose(job.host(1))
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    final = job.finish()
    assert final["recoveries"][0]["seats_changed"]["1"][1][0] == 3
    job.wait_end("COMPLETED")
    cluster.wait_job(pool, "COMPLETED")


def test_small_run_grows_with_a_node_of_a_second_job(cluster, jobs, tmp_path):
    """Real training: a node is lost, without a spare. Each size trains as stock does."""
    elastic = trainer_job(DISTRIBUTED, replicas=3, iterations=24, nodes=3, every=9)
    command = (word.replace("{run}", f"{tmp_path}/run") for word in elastic.program.command)
    settings = (*TRAINS, "--deadpool-set", "settle-seconds=1")
    wanted = dataclasses.replace(jobs, nodes=3, spares=0, settings=settings)
    job = dataclasses.replace(wanted, training=tuple(command)).submit()
    job.wait_iteration(3)
    cluster.lose(job.host(1))
    job.wait_for("two replicas", lambda: job.events(Kind.SIZE))
    pool = {"RUN": str(job.run.path), **wanted.environment()}
    cluster.submit("--array=1-1", str(SCRIPTS / "spare_pool.sbatch"), **pool)
    job.wait_for("three replicas", lambda: len(job.events(Kind.SIZE)) > 1)
    (tmp_path / "run.grown").touch()
    final = job.wait_over()
    outcome = Outcome(tmp_path / "run", 0, job.story(), final, job.events(*Kind))
    assert hold(outcome, elastic) == [3, 2, 3]
    job.wait_end("COMPLETED")


def test_array_of_nodes_replaces_a_lost_node(cluster, jobs):
    wanted = dataclasses.replace(jobs, nodes=2)
    command = (str(SCRIPTS / "array_of_nodes.sbatch"), *wanted.training)
    number = cluster.submit("--array=0-2", *command, **wanted.environment())
    job = dataclasses.replace(wanted.job(number), roles=2)
    job.wait_iteration(3)
    element = cluster.job_of_element(number, 1)
    cluster.lose(element["NodeList"])
    job.wait_for("a recovery", lambda: job.events(Kind.RECOVERED))
    # Slurm starts the lost element again on another node: a number that is new to the run.
    job.wait_for("another spare", lambda: [e for e in job.events(Kind.MEMBER_WARM) if e.node == 3])
    job.finish()
    cluster.wait_for("all elements", lambda: cluster.ended(number))


def test_time_limit_saves_the_state_for_the_next_job(cluster, jobs):
    first, second = jobs.chain(2)
    first.wait_iteration(5)
    # As Slurm does when --signal=B:USR1@120 is due.
    cluster.control("scancel", "--batch", "--signal=USR1", str(first.number))
    assert first.wait_over()["exit_status"] == 75
    assert first.wait_end("FAILED")["ExitCode"] == "75:0"
    second.wait_iteration(first.final_iteration() + 5)
    second.finish()
    second.wait_end("COMPLETED")
    assert f"continues from {first.run.path}" in cluster.output(second.number)
    third = jobs.submit()
    third.wait_end("COMPLETED")
    assert "nothing to do" in cluster.output(third.number)


def test_next_job_excludes_a_quarantined_node(cluster, jobs, tmp_path):
    """Its own list of excluded nodes stays."""
    sick = cluster.nodes[1]
    stand_in(tmp_path, check=f"test $(hostname) != {sick} || {{ echo bad row; exit 2; }}")
    settings = (*jobs.settings, "--deadpool-health-command", str(tmp_path / "check"))
    first, second = dataclasses.replace(jobs, nodes=3, spares=1, settings=settings).chain(2)
    first.wait_iteration(3)
    assert sick in cluster.nodes_of(first.number)
    cluster.wait_for(
        "the next job's list", lambda: cluster.job(second.number)["ExcNodeList"] == sick
    )
    cluster.control("scancel", "--batch", "--signal=USR1", str(first.number))
    assert first.wait_over()["exit_status"] == 75
    second.wait_iteration(first.final_iteration() + 3)
    assert sick not in cluster.nodes_of(second.number)
    second.finish()
    second.wait_end("COMPLETED")


def test_nodes_save_in_time_without_a_notice(cluster, jobs):
    """The notice reaches the batch script only; here it never comes, and the limit is real."""
    variables = {"NOTICE_SECONDS": "50"}
    job = dataclasses.replace(jobs, variables=variables).submit("--time=1", "--signal=B:USR1@1")
    job.wait_iteration(3)
    cluster.lose(job.host(0))
    assert job.wait_over()["exit_status"] == 75
    job.wait_end("COMPLETING", "CANCELLED")
    assert job.run.latest.exists()


def test_chained_jobs_equal_a_single_run_bit_for_bit(cluster, jobs):
    """Real training: a node is lost in the first job, and its time limit comes."""
    layout = Layout("dp2", "--use-distributed-optimizer", nodes=2, members_per_node=1)
    program = trainer(layout, iterations=30)
    wanted = dataclasses.replace(jobs, nodes=2, settings=TRAINS, training=program.command)
    first, second = wanted.chain(2)
    first.wait_iteration(4)
    cluster.lose(first.host(1))
    first.wait_for("a recovery", lambda: first.events(Kind.RECOVERED))
    cluster.control("scancel", "--batch", "--signal=USR1", str(first.number))
    assert first.wait_over()["exit_status"] == 75
    whole = reference(layout, 30)
    assert second.wait_over()["exit_status"] == 0, second.story()
    found = read_result(second.run.path)
    (dumped,) = first.events(Kind.DUMPED)
    assert found.resumed_after == dumped.data["generation"][1]
    assert found.resumed_after == first.final_iteration(), "what was finished is saved"
    comparison = compare_results(read_result(whole.directory), found)
    assert comparison.identical, "\n".join(map(str, comparison.differences))


@pytest.mark.full
@needs_megatron_lm
@LOADS
def test_chain_that_has_lost_more_nodes_than_spares_continues_with_the_others(cluster, jobs):
    """The next job has another data-parallel size: Megatron reshards the checkpoint."""
    flags = small(
        save_interval=100, train_iters=50, global_batch_size=6, use_distributed_optimizer=True
    )
    exports = str(jobs.directory / "exports")
    wanted = dataclasses.replace(
        jobs,
        nodes=3,
        settings=(
            *("--deadpool-persist-directory", exports, "--deadpool-spare-timeout", "3"),
            *("--deadpool-elastic", "off", "--deadpool-start-seconds", "80"),
        ),
        training=(f"{checkout()}/pretrain_gpt.py", *flags),
        variables={"SMALLER": "2"},
    )
    first, second = wanted.chain(2, f"--exclude={','.join(cluster.nodes[4:])}")
    first.wait_iteration(2)
    _, *others = cluster.nodes_of(first.number)  # without the batch host
    lost = next(name for name in others if name != first.host(3))
    cluster.lose(lost)
    first.wait_for("a recovery", lambda: first.events(Kind.RECOVERED))
    cluster.lose(next(name for name in others if name != lost))
    final = first.wait_over()
    assert final["exit_status"] == 75, first.story()
    assert "no spare" in final["reason"]
    second.wait_iteration(8)
    assert second.wait_over()["exit_status"] == 0, second.story()
    assert len(cluster.nodes_of(second.number)) == 2
    assert "continues with 2 roles instead of 3 from the checkpoint" in second.logs()
    before, after = (
        {step["iteration"]: float.fromhex(step["loss"]) for step in results["steps"]}
        for results in (final, second.wait_over())
    )
    (dumped,) = first.events(Kind.DUMPED)
    assert min(after) == dumped.data["generation"][1] + 1
    assert min(after) >= max(before), "one iteration at most is computed again"
    assert max(after) == 50
    assert abs(after[min(after)] - before[max(before)]) < 0.1, "the loss continues"
    assert after[50] < min(before.values())

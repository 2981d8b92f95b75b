"""What job and nodes do under Slurm beside the run, with stand-ins for Slurm and the clock."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.common.programs import run_among, stand_in

SLURM = Path(__file__).parents[2] / "scripts" / "slurm"
NOTICE = 300
# The agent lives until its node has slept, or given an order.
_TELL = 'echo "${{0##*/}} $*" >{told}'
_AGENT = "read -r word <{told}; echo $word"


def first_act(tmp_path: Path, end: int, squeue: str) -> list[str]:
    """Which command the node runs first, and its arguments, with the clock at 1000. ``end``: of the
    job, as its environment has it from its start."""
    told, programs = tmp_path / "told", tmp_path / "bin"
    os.mkfifo(told)
    held = os.open(told, os.O_RDWR)  # what is told before the agent listens is not lost
    clock = 'case $1 in +%s) echo 1000 ;; -d) [ "$2" = far ] && echo 999999 ;; esac'
    tell = _TELL.format(told=told)
    stand_in(programs, date=clock, squeue=squeue, sleep=tell, deadpool=tell)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_JOB_END_TIME": str(end)}
    agent = ("bash", "-c", _AGENT.format(told=told))
    done = run_among(programs, SLURM / "node.sh", tmp_path / "run", str(NOTICE), *agent, **slurm)
    assert done.returncode == 0, done.stderr
    os.close(held)  # everybody has ended who could hold its output
    return done.stdout.split()


@pytest.mark.parametrize("squeue", ["exit 1", "true", "echo N/A"])
def test_the_state_is_saved_in_time_where_slurm_says_nothing_new(tmp_path, squeue):
    found = first_act(tmp_path, 1200, squeue)
    run = str(tmp_path / "run")
    assert found == ["deadpool", "stop", "--dump", "--within", "200", "--wait", "200", run]


def test_a_limit_that_was_extended_ends_no_run(tmp_path):
    """The environment tells the end that the job had when it started."""
    until_notice = 999999 - NOTICE + 5 - 1000
    assert first_act(tmp_path, 1200, "echo far") == ["sleep", str(until_notice)]


def sourced(
    tmp_path: Path, call: str, programs: dict[str, str] | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a function of job.sh, with these programs in front of those of the machine."""
    folder = stand_in(tmp_path / "bin", **(programs or {}))
    return run_among(folder, "bash", "-c", f'. "$0" && {call}', SLURM / "job.sh", **variables)


SIZE = {"NODES": "2", "SPARES": "1", "GPUS_PER_NODE": "1", "NOTICE_SECONDS": "60"}


@pytest.mark.parametrize(
    ("status", "ends"),
    [(0, True), (1, True), (2, True), (3, True), (4, True), (75, False), (76, True), (130, False)],
)
def test_a_chain_ends_where_its_next_job_would_only_come_to_the_same(tmp_path, status, ends):
    """The loss is as little a number, and the room as small, in a job with the same settings."""
    verdict = f"echo 'over, exit status {status}; 5 iterations'\nexit {status}"
    done = sourced(tmp_path, f"judge {tmp_path}/7", {"deadpool": verdict})
    assert done.returncode == status
    assert (tmp_path / "OVER").exists() == ends


@pytest.mark.parametrize(
    ("over", "status"),
    [("run 7 ended with status 0", 0), ("run 7 ended with status 76", 76), ("by hand", 0)],
)
def test_the_rest_of_a_chain_ends_as_the_run_did(tmp_path, over, status):
    """What depends on the last job of the chain would take a failed training for a complete one."""
    (tmp_path / "OVER").write_text(f"{over}\n")
    done = sourced(tmp_path, "run_training", RUNS=str(tmp_path), SLURM_JOB_ID="8")
    assert done.returncode == status
    assert f"nothing to do: {over} (remove {tmp_path}/OVER" in done.stdout


def test_a_name_that_slurm_does_not_know_costs_itself_only(tmp_path):
    """Runs of the host where jobs are submitted may lie beside those of the cluster."""
    asked, runs = tmp_path / "asked", tmp_path / "runs"
    (runs / "7.logs").mkdir(parents=True)
    (runs / "bad-nodes.json").touch()
    programs = {
        "deadpool": "echo login1,node3.cluster,node4",
        "squeue": "[ $2 != -j ] || exec echo 'node[1-9]'; "
        "echo '8|afterany:7(unfulfilled)|node[1-2]'; echo '9|afterany:8(unfulfilled)|'",
        "scontrol": "case $2$3 in hostnames*) printf 'node%s\\n' 1 2 3 4 5 6 7 8 9 ;;"
        f' *login1*) exit 1 ;; *) shift; echo "$*" >>{asked} ;; esac',
    }
    size = {"SLURM_JOB_ID": "7", "NODES": "8", "SPARES": "2", "SMALLER": "6 4"}
    assert sourced(tmp_path, f"prepare_next_job {runs}/7", programs, **size).returncode == 0
    *_, excluded, fewer = asked.read_text().splitlines()
    assert excluded == "JobId=8 ExcNodeList=node[1-2],node3,node4"
    assert fewer == "JobId=8 NumNodes=7 NumTasks=7"


@pytest.mark.parametrize(
    ("squeue", "are_there"),
    [("echo 7.batch; echo 7.0", True), ("echo 7.batch", False), ("true", False), ("exit 1", True)],
)
def test_agents_outlive_srun_though_slurm_does_not_answer(tmp_path, squeue, are_there):
    """The end of the batch script is theirs, too."""
    done = sourced(tmp_path, "nodes_are_there", {"squeue": squeue}, SLURM_JOB_ID="7")
    assert (done.returncode == 0) == are_there


def test_a_node_that_hangs_does_not_keep_the_job_after_the_run(tmp_path):
    """Slurm takes it for well, and srun waits for its task, which nobody can end."""
    programs = {
        "srun": f"mkdir {tmp_path}/7; touch {tmp_path}/7/final.json; exec tail -f /dev/null",
        "deadpool": "echo 'over, exit status 0; 5 iterations'",
        "sleep": "true",
    }
    limits = {"SLURM_JOB_ID": "7", "RUNS": str(tmp_path), "DEADPOOL_STEP_SECONDS": "0"}
    done = sourced(tmp_path, "run_training", programs, **SIZE, **limits)
    assert done.returncode == 0
    assert "some node does not end: the job does" in done.stdout
    assert "status of the run: 0 (of srun: 137)" in done.stdout


def test_what_others_have_put_beside_the_runs_is_neither_believed_nor_written_to(tmp_path):
    """Names there follow from the number of the job."""
    (tmp_path / "keys").write_text("mine")
    (tmp_path / "OVER").symlink_to(tmp_path / "keys")
    (tmp_path / "8.logs").symlink_to(tmp_path)
    programs = {"deadpool": "echo 'over, exit status 1; 5 iterations'; exit 1"}
    where = {"RUNS": str(tmp_path), "SLURM_JOB_ID": "8"}
    done = sourced(tmp_path, "run_training", programs, **SIZE, **where)
    assert done.returncode == 2
    assert f"{tmp_path}/8.logs is not of this user" in done.stdout
    sourced(tmp_path, f"judge {tmp_path}/7", programs)
    assert (tmp_path / "OVER").read_text() == "run 7 ended with status 1\n"
    assert (tmp_path / "keys").read_text() == "mine"


@pytest.mark.parametrize("left", ["nothing", "a state that is refused"])
def test_a_chain_that_has_nothing_to_go_on_from_stops(tmp_path, left):
    runs = tmp_path / "runs"
    (runs / "7").mkdir(parents=True)
    (runs / "7" / "events-2.jsonl").write_text('{"kind": "step", "iteration": 3}\n')
    if left != "nothing":
        (runs / "7" / "latest.json").touch()
    srun = "exit 0" if left == "nothing" else "exit 2"
    programs = {"srun": srun, "deadpool": "exit 2", "squeue": "exit 0"}
    arrays = "SETTINGS=() TRAINING=() SRUN_OPTIONS=() CHECKOUT="
    where = {"RUNS": str(runs), "SLURM_JOB_ID": "8"}
    done = sourced(tmp_path, f"{arrays} && run_training", programs, **SIZE, **where)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the chain stops: " in done.stdout
    assert (runs / "OVER").read_text().endswith(": status 2\n")

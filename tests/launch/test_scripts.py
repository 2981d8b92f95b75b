"""The scripts that start a run without `deadpool run`: what they hold, and the ssh one for real."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, read_json, segment_root
from tests.cluster.counting_member import expected_sha256
from tests.cluster.runs import FAST, MEMBER, environment
from tests.common.programs import run_among, stand_in
from tests.common.wait import wait_for

SCRIPTS = Path(__file__).parents[2] / "scripts"
SSH = SCRIPTS / "launch" / "ssh.sh"
BATCH = sorted((SCRIPTS / "slurm").glob("*.sbatch"))
# From an environment of its own: its schemas are 108 MB.
VALIDATE = shutil.which("kubernetes-validate")
SHELL = [*sorted(SCRIPTS.rglob("*.sh")), *BATCH]


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shell_is_sound(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if shutil.which("shellcheck"):
        done = subprocess.run(
            ["shellcheck", "-x", str(script)], capture_output=True, text=True, cwd=SCRIPTS.parent
        )
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", BATCH, ids=lambda path: path.name)
def test_one_agent_serves_a_whole_node(script):
    options = set(re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE))
    assert "--ntasks-per-node=1" in options
    assert "--exclusive" in options


@pytest.mark.parametrize("name", ["pretrain_65b", "pretrain_7b", "small_test"])
def test_a_lost_node_ends_neither_job_nor_step(name):
    batch = (SCRIPTS / "slurm" / f"{name}.sbatch").read_text()
    assert "--no-kill" in re.findall(r"^#SBATCH (\S+)", batch, re.MULTILINE)
    srun = (SCRIPTS / "slurm" / "job.sh").read_text()
    assert "srun --no-kill --kill-on-bad-exit=0 --wait=0 " in srun


@pytest.mark.parametrize("model", ["65b", "7b"])
def test_a_batch_script_says_once_what_its_plan_says(model, tmp_path):
    """The commands of the nodes, with stand-ins: the size is that of its own #SBATCH lines."""
    told = with_stand_in(tmp_path, coordinates=False)
    stand_in(tmp_path, srun='while [[ $1 == --* ]]; do shift; done\nexec "$@"', squeue="")
    plan = yaml.safe_load((SCRIPTS.parent / "configs" / f"{model}.yaml").read_text())["cluster"]
    nodes, spares, gpus = plan["nodes"], plan["spares"], plan["gpus_per_node"]
    variables = {"CHECKOUT": str(SCRIPTS.parent), "SLURM_SUBMIT_DIR": str(tmp_path)}
    variables |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(nodes + spares)}
    batch = SCRIPTS / "slurm" / f"pretrain_{model}.sbatch"
    done = run_among(tmp_path, "bash", batch, **variables)
    assert told.exists(), done.stdout + done.stderr
    words = told.read_text().split()
    size = words[words.index("--nodes") :][:6]
    assert size == f"--nodes {nodes} --spares {spares} --nproc-per-node {gpus}".split()
    assert words[words.index("--plan") + 1].endswith(f"configs/{model}.yaml")
    own = (SCRIPTS.parent / "configs" / "megatron-lm" / f"gpt-{model}.args").read_text().split()
    assert words[words.index("--") + 1 :][1 : 1 + len(own)] == own
    assert f"{tmp_path}/runs/pretrain-{model}/checkpoints" in words


@pytest.mark.parametrize(("model", "per_node"), [("65b", 1), ("7b", 4)])
def test_the_batch_can_be_spread_over_each_number_of_nodes_it_goes_on_with(model, per_node):
    """Of 65B a replica is 8 nodes, and its micro-batches a multiple of 8, the pipeline being
    interleaved; test_pretrain_65b.py asks Megatron."""
    batch = (SCRIPTS / "slurm" / f"pretrain_{model}.sbatch").read_text()
    smaller = re.findall(r"SMALLER=\S+?-([\d ]+)\}", batch)[0].split()
    arguments = (SCRIPTS.parent / "configs" / "megatron-lm" / f"gpt-{model}.args").read_text()
    samples = int(arguments.split("--global-batch-size ")[1].split()[0])
    assert {samples % (int(nodes) * per_node) for nodes in smaller} == {0}


def documents() -> dict[str, dict[str, Any]]:
    text = (SCRIPTS / "launch" / "kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.skipif(VALIDATE is None, reason="no kubernetes-validate on the PATH (docs/slurm.md)")
def test_kubernetes_knows_every_field_of_the_manifest(tmp_path):
    """By its own schemas; a field of another name, which it would leave out, is refused."""
    manifest = SCRIPTS / "launch" / "kubernetes.yaml"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(manifest.read_text().replace("completionMode:", "completionModus:"))
    for file, status in ((manifest, 0), (wrong, 1)):
        command = [str(VALIDATE), "--strict", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr


def test_kubernetes_has_a_pod_for_each_node_and_replaces_lost_ones():
    job = documents()["Job"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    shell = container["args"][0]
    sizes = [int(re.search(rf"--{n} (\d+)", shell)[1]) for n in ("nodes", "spares")]  # type: ignore[index]
    assert job["completions"] == job["parallelism"] == sum(sizes)
    assert job["completionMode"] == "Indexed"
    assert job["backoffLimit"] >= 1000
    assert pod["restartPolicy"] == "OnFailure"
    assert "--node-id" in shell
    assert "--attach" in shell
    leave = re.search(r"--leave-seconds (\d+)", shell)
    assert leave is not None
    assert int(leave[1]) + 30 <= pod["terminationGracePeriodSeconds"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"--nproc-per-node {gpus} " in shell


def test_kubernetes_spreads_pods_and_gives_them_memory_and_a_shared_disk():
    found = documents()
    pod = found["Job"]["spec"]["template"]["spec"]
    labels = found["Job"]["spec"]["template"]["metadata"]["labels"]
    (spread,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert spread["labelSelector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    assert found["Service"]["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == found["Service"]["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {m["mountPath"]: m["name"] for m in pod["containers"][0]["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert "persistentVolumeClaim" in volumes[mounts["/runs"]]
    (run,) = [one["value"] for one in pod["containers"][0]["env"] if one["name"] == "RUN"]
    folder = Path(run).parent
    assert folder.parent == Path("/runs"), "what it notes of hosts is of names that all runs have"


def test_kubernetes_lets_only_its_own_pods_in_and_gives_them_no_more_than_they_need():
    found = documents()
    pod = found["Job"]["spec"]["template"]
    policy = found["NetworkPolicy"]["spec"]
    assert policy["podSelector"]["matchLabels"] == pod["metadata"]["labels"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


@pytest.mark.parametrize(
    ("seen", "coordinates", "who"),
    [
        (False, False, "--node-id 3"),
        (True, True, "--attach"),
        (True, False, "--node-id 3"),  # all pods have come again: nobody would take it up
    ],
)
def test_kubernetes_pod_of_an_index_that_was_there_before_attaches(
    tmp_path, seen, coordinates, who
):
    """Its entry shell, with a stand-in for the command that tells its arguments."""
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    told = with_stand_in(tmp_path, coordinates=coordinates)
    run = tmp_path / "run"
    if seen:
        (tmp_path / "run.pods" / "3").mkdir(parents=True)
    variables = {"RUN": str(run), "JOB_COMPLETION_INDEX": "3", "POD_IP": "10.0.0.3"}
    command = (*container["command"], container["args"][0])
    done = run_among(tmp_path, *command, cwd=SCRIPTS.parent, **variables)
    assert done.returncode == 0, done.stderr
    assert told.read_text().startswith(f"agent {who} --host 10.0.0.3 --run-dir {run} ")


@pytest.mark.parametrize(
    ("restarts", "coordinates", "who"),
    [("0", False, "--node-id 2"), ("1", True, "--attach"), ("1", False, "--node-id 2")],
)
def test_element_that_slurm_has_started_again_attaches(tmp_path, restarts, coordinates, who):
    """The batch script, with stand-ins: one tells the arguments of the agent."""
    told = with_stand_in(tmp_path, coordinates=coordinates)
    stand_in(tmp_path, srun='exec "$@"')
    task = {"ID": "2", "MIN": "0", "COUNT": "5"}
    variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in task.items()}
    variables |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_RESTART_COUNT": restarts}
    variables |= {"CHECKOUT": str(tmp_path), "RUNS": str(tmp_path / "runs")}
    batch = SCRIPTS / "slurm" / "array_of_nodes.sbatch"
    done = run_among(tmp_path, "bash", batch, **variables)
    assert done.returncode == 0, done.stderr
    assert told.read_text().startswith(f"agent --from-slurm {who} --run-dir {tmp_path}/runs/9 ")


def with_stand_in(tmp_path: Path, *, coordinates: bool) -> Path:
    """For ``deadpool``, which writes its arguments to the file that is returned; ``coordinates``:
    whether somebody answers "status"."""
    told = tmp_path / "told"
    answer = "exit 0" if coordinates else "exit 2"
    stand_in(tmp_path, deadpool=f'[ "$1" != status ] || {answer}\necho "$@" > {told}')
    return told


def ssh(
    tmp_path: Path, *arguments: str, before: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The script, with a stand-in for ssh that reaches only this host. ``before``: where its
    commands are looked for first."""
    reach = stand_in(tmp_path, reach='shift\nexec bash -c "$*"') / "reach"
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    path = here if before is None else f"{before}:{here}"
    return run_among(tmp_path, SSH, *arguments, **environment({"SSH": str(reach), "PATH": path}))


@pytest.mark.slow
def test_ssh_starts_and_awaits_a_run(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# one line per node\nfirst 127.0.0.1\nsecond 127.0.0.1\n")
    run = RunDirectory(tmp_path / "run")
    size = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "", *FAST)
    started = ssh(
        tmp_path, "start", str(hosts), str(run.path), *size, "--", MEMBER, "--iterations", "10"
    )
    assert started.returncode == 0, started.stderr
    assert started.stdout.splitlines() == [
        "node 0 on first (127.0.0.1)",
        "node 1 on second (127.0.0.1)",
    ]
    done = ssh(tmp_path, "wait", str(hosts), str(run.path))
    assert done.returncode == 0, done.stderr
    assert read_json(run.final)["roles"]["1"]["sha256"] == expected_sha256(1, 10)
    again = ssh(tmp_path, "start", str(hosts), str(run.path), *size, "--", MEMBER)
    assert again.returncode == 2
    assert "choose another RUN_DIR" in again.stderr
    ssh(tmp_path, "stop", str(hosts), str(run.path))
    assert not segment_root(run.read_run().run_id).exists()


@pytest.mark.slow
def test_ssh_stops_a_run(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("only 127.0.0.1\nspare 127.0.0.1\n")
    run = RunDirectory(tmp_path / "run")
    size = ("--nodes", "1", "--spares", "1", "--nproc-per-node", "1", "--preload", "", *FAST)
    assert ssh(tmp_path, "start", str(hosts), str(run.path), *size, "--", MEMBER).returncode == 0
    wait_for("a coordinator", run.coordinator.exists)
    stopped = ssh(tmp_path, "stop", str(hosts), str(run.path))
    assert json.loads(run.final.read_text())["exit_status"] == 130, stopped.stderr
    assert not segment_root(run.read_run().run_id).exists()


@pytest.mark.slow
def test_ssh_does_not_await_a_run_whose_agents_have_all_failed(tmp_path):
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("first 127.0.0.1\nsecond 127.0.0.1")  # as some editors end a file
    size = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "")
    started = ssh(tmp_path, "start", str(hosts), str(run), *size, "--", "nosuch.py")
    assert started.returncode == 0, started.stderr
    assert "node 1 on second (127.0.0.1)" in started.stdout
    done = ssh(tmp_path, "wait", str(hosts), str(run))
    why = "exit status 2: deadpool agent: command not found: there is no script 'nosuch.py'"
    assert done.stderr.splitlines() == [f"node 0 on first: {why}", f"node 1 on second: {why}"]
    assert done.returncode == 2


def test_ssh_awaits_the_result_that_an_agent_has_seen(tmp_path):
    """On a shared file system the result may be seen later than how the agents have ended."""
    hosts, run, agents = tmp_path / "hosts", tmp_path / "run", tmp_path / "run.agents"
    hosts.write_text("first\nsecond\n")
    agents.mkdir()
    for node, status in enumerate((69, 0)):
        (agents / f"{node}.log").touch()
        (agents / f"{node}.status").write_text(f"{status}\n")
    pause = f"mkdir {run} && touch {run}/final.json"  # while it waits, the result is seen
    stand_in(tmp_path, sleep=pause, deadpool='echo "$@"')
    done = ssh(tmp_path, "wait", str(hosts), str(run), before=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"status --verdict {run}\n"), done.stderr


def test_ssh_says_what_is_wrong(tmp_path):
    absent = ssh(tmp_path, "start", str(tmp_path / "none"), "/run", "--nodes", "1")
    assert absent.returncode == 2
    assert "no file of hosts" in absent.stderr
    assert ssh(tmp_path, "start").returncode == 2

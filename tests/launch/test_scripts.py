"""The scripts that start a run without `deadpool run`: their contents, and real runs by ssh.sh."""

import json
import os
import re
import shlex
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
def test_batch_script_has_one_agent_for_each_node(script):
    options = set(re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE))
    assert "--ntasks-per-node=1" in options
    assert "--exclusive" in options


@pytest.mark.parametrize("name", ["pretrain_65b", "train", "small_test"])
def test_batch_script_survives_a_lost_node(name):
    batch = (SCRIPTS / "slurm" / f"{name}.sbatch").read_text()
    assert "--no-kill" in re.findall(r"^#SBATCH (\S+)", batch, re.MULTILINE)
    srun = (SCRIPTS / "slurm" / "job.sh").read_text()
    assert "srun --no-kill --kill-on-bad-exit=0 --wait=0 " in srun


@pytest.mark.parametrize("model", ["65b", "7b"])
def test_batch_script_agrees_with_its_plan(model, tmp_path):
    """The commands of the nodes, with stand-ins: the size is that of its own #SBATCH lines. That
    of 7B gets its command."""
    arguments = with_stand_in(tmp_path, coordinates=False)
    stand_in(tmp_path, srun='while [[ $1 == --* ]]; do shift; done\nexec "$@"', squeue="")
    plan = yaml.safe_load((SCRIPTS.parent / "configs" / f"{model}.yaml").read_text())["cluster"]
    nodes, spares, gpus = plan["nodes"], plan["spares"], plan["gpus_per_node"]
    variables = {"CHECKOUT": str(SCRIPTS.parent), "SLURM_SUBMIT_DIR": str(tmp_path)}
    variables |= {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(nodes + spares)}
    own = (SCRIPTS.parent / "configs" / "megatron-lm" / f"gpt-{model}.args").read_text().split()
    batch, command = SCRIPTS / "slurm" / "pretrain_65b.sbatch", list[str]()
    if model == "7b":
        batch, command = batch.with_name("train.sbatch"), ["pretrain_gpt.py", *own]
        variables |= {"PLAN": f"{SCRIPTS.parent}/configs/7b.yaml", "SLURM_JOB_NAME": "pretrain-7b"}
    done = run_among(tmp_path, "bash", batch, *command, **variables)
    assert arguments.exists(), done.stdout + done.stderr
    found = arguments.read_text().split()
    size = found[found.index("--nodes") :][:6]
    assert size == f"--nodes {nodes} --spares {spares} --nproc-per-node {gpus}".split()
    assert found[found.index("--plan") + 1].endswith(f"configs/{model}.yaml")
    assert found[found.index("--") + 1 :][1 : 1 + len(own)] == own
    assert f"{tmp_path}/runs/pretrain-{model}/exports" in found


def test_batch_size_fits_each_number_of_nodes_of_the_script():
    """A replica of 65B has 8 nodes, and its micro-batches are a multiple of 8, as the pipeline is
    interleaved; test_pretrain_65b.py asks Megatron."""
    batch = (SCRIPTS / "slurm" / "pretrain_65b.sbatch").read_text()
    smaller = re.findall(r"SMALLER=\S+?-([\d ]+)\}", batch)[0].split()
    arguments = (SCRIPTS.parent / "configs" / "megatron-lm" / "gpt-65b.args").read_text()
    samples = int(arguments.split("--global-batch-size ")[1].split()[0])
    assert {samples % int(nodes) for nodes in smaller} == {0}


def documents() -> dict[str, dict[str, Any]]:
    text = (SCRIPTS / "launch" / "kubernetes.yaml").read_text()
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.mark.skipif(VALIDATE is None, reason="no kubernetes-validate on the PATH (docs/slurm.md)")
def test_manifest_has_only_fields_that_kubernetes_knows(tmp_path):
    """By its own schemas, which refuse a field of another name."""
    manifest = SCRIPTS / "launch" / "kubernetes.yaml"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(manifest.read_text().replace("completionMode:", "completionModus:"))
    for file, status in ((manifest, 0), (wrong, 1)):
        command = [str(VALIDATE), "--strict", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr


def test_manifest_has_a_pod_for_each_node_and_replaces_lost_pods():
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


def test_manifest_spreads_pods_and_gives_them_memory_and_a_shared_disk():
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
    (run,) = [entry["value"] for entry in pod["containers"][0]["env"] if entry["name"] == "RUN"]
    folder = Path(run).parent
    assert folder.parent == Path("/runs"), "what it notes of hosts is of names that all runs have"


def test_manifest_isolates_its_pods_and_drops_their_capabilities():
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
    ("seen", "coordinates", "flag"),
    [
        (False, False, "--node-id 3"),
        (True, True, "--attach"),
        (True, False, "--node-id 3"),  # all pods were restarted: there is no coordinator
    ],
)
def test_kubernetes_pod_of_a_known_index_attaches(tmp_path, seen, coordinates, flag):
    """Its entry shell, with a stand-in for the command that writes its arguments."""
    (container,) = documents()["Job"]["spec"]["template"]["spec"]["containers"]
    arguments = with_stand_in(tmp_path, coordinates=coordinates)
    run = tmp_path / "run"
    if seen:
        (tmp_path / "run.pods" / "3").mkdir(parents=True)
    variables = {"RUN": str(run), "JOB_COMPLETION_INDEX": "3", "POD_IP": "10.0.0.3"}
    command = (*container["command"], container["args"][0])
    done = run_among(tmp_path, *command, cwd=SCRIPTS.parent, **variables)
    assert done.returncode == 0, done.stderr
    assert arguments.read_text().startswith(f"agent {flag} --host 10.0.0.3 --run-dir {run} ")


@pytest.mark.parametrize(
    ("restarts", "coordinates", "flag"),
    [("0", False, "--node-id 2"), ("1", True, "--attach"), ("1", False, "--node-id 2")],
)
def test_restarted_element_of_a_job_array_attaches(tmp_path, restarts, coordinates, flag):
    """The batch script, with stand-ins: that of the agent writes its arguments."""
    arguments = with_stand_in(tmp_path, coordinates=coordinates)
    stand_in(tmp_path, srun='exec "$@"')
    task = {"ID": "2", "MIN": "0", "COUNT": "5"}
    variables = {f"SLURM_ARRAY_TASK_{name}": value for name, value in task.items()}
    variables |= {"SLURM_ARRAY_JOB_ID": "9", "SLURM_RESTART_COUNT": restarts}
    variables |= {"CHECKOUT": str(tmp_path), "RUNS": str(tmp_path / "runs")}
    batch = SCRIPTS / "slurm" / "array_of_nodes.sbatch"
    done = run_among(tmp_path, "bash", batch, **variables)
    assert done.returncode == 0, done.stderr
    start = f"agent --from-slurm {flag} --run-dir {tmp_path}/runs/9 "
    assert arguments.read_text().startswith(start)


def with_stand_in(tmp_path: Path, *, coordinates: bool) -> Path:
    """Replace ``deadpool`` by a program that writes its arguments to the returned file;
    ``coordinates``: whether "status" finds a coordinator."""
    arguments = tmp_path / "arguments"
    answer = "exit 0" if coordinates else "exit 2"
    stand_in(tmp_path, deadpool=f'[ "$1" != status ] || {answer}\necho "$@" > {arguments}')
    return arguments


def ssh(
    tmp_path: Path, *arguments: str, before: Path | None = None, program: str = str(SSH)
) -> subprocess.CompletedProcess[str]:
    """Run the script, with a stand-in for ssh that reaches only this host. ``before``: the first
    folder of its PATH. ``program``: a shell that calls the script, in place of it."""
    reach = stand_in(tmp_path, reach='shift\nexec bash -c "$*"') / "reach"
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    path = here if before is None else f"{before}:{here}"
    variables = environment({"SSH": str(reach), "PATH": path})
    return run_among(tmp_path, program, *arguments, cwd=tmp_path, **variables)


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
def test_ssh_runs_as_printed(tmp_path):
    """The commands of docs/launchers.md, on three "hosts" of this machine."""
    section = (SCRIPTS.parent / "docs" / "launchers.md").read_text().partition("## ssh")[2]
    block = section.partition("\n```\n")[2].partition("\n```\n")[2].partition("\n```\n")[0]
    for old, new in (
        ("gpu01 gpu02 gpu03", "localhost localhost localhost"),
        ("scripts/launch/ssh.sh", str(SSH)),
        ("/shared/run1", str(tmp_path / "run")),
        ("--nproc-per-node 8", f"--nproc-per-node 1 --preload= {shlex.join(FAST)}"),
        ("train.py", f"{MEMBER} --iterations 10"),
    ):
        assert old in block
        block = block.replace(old, new)
    done = ssh(tmp_path, "-ec", block, program="bash")
    assert done.returncode == 0, done.stdout + done.stderr
    final = read_json(tmp_path / "run" / "final.json")
    assert final["roles"]["1"]["sha256"] == expected_sha256(1, 10)
    ssh(tmp_path, "stop", "hosts", str(tmp_path / "run"))


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
def test_ssh_wait_ends_when_all_agents_have_failed(tmp_path):
    hosts, run = tmp_path / "hosts", tmp_path / "run"
    hosts.write_text("first 127.0.0.1\nsecond 127.0.0.1")  # as some editors end a file
    size = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "")
    started = ssh(tmp_path, "start", str(hosts), str(run), *size, "--", "nosuch.py")
    assert started.returncode == 0, started.stderr
    assert "node 1 on second (127.0.0.1)" in started.stdout
    done = ssh(tmp_path, "wait", str(hosts), str(run))
    text = "exit status 2: deadpool agent: command not found: there is no script 'nosuch.py'"
    assert done.stderr.splitlines() == [f"node 0 on first: {text}", f"node 1 on second: {text}"]
    assert done.returncode == 2


def test_ssh_wait_awaits_a_result_that_comes_after_the_agents_end(tmp_path):
    """On a shared file system the result may become visible later than the agents' statuses."""
    hosts, run, agents = tmp_path / "hosts", tmp_path / "run", tmp_path / "run.agents"
    hosts.write_text("first\nsecond\n")
    agents.mkdir()
    for node, status in enumerate((69, 0)):
        (agents / f"{node}.log").touch()
        (agents / f"{node}.status").write_text(f"{status}\n")
    pause = f"mkdir {run} && touch {run}/final.json"  # the result becomes visible meanwhile
    stand_in(tmp_path, sleep=pause, deadpool='echo "$@"')
    done = ssh(tmp_path, "wait", str(hosts), str(run), before=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"status --verdict {run}\n"), done.stderr


def test_ssh_names_bad_arguments(tmp_path):
    absent = ssh(tmp_path, "start", str(tmp_path / "none"), "/run", "--nodes", "1")
    assert absent.returncode == 2
    assert "no file of hosts" in absent.stderr
    assert ssh(tmp_path, "start").returncode == 2

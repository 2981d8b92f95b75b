"""The environments of the members of a run, each in a process of its own."""

import json
import os
from pathlib import Path

import pytest

from deadpool_megatron.support.environment import VARIABLES
from tests.cluster.runs import deadpool

pytestmark = pytest.mark.slow

#: Writes its environment down, and ends the run with an error as soon as all others have, too.
SHOW = """
import json, os, pathlib, sys, time
run = pathlib.Path(os.environ["DEADPOOL_RUN_DIR"])
place = json.loads(os.environ["DEADPOOL_MEMBER"])
who = f"{place['node']}-{place['local_rank']}"
partial = run / ("partial-" + who)
partial.write_text(json.dumps(dict(os.environ)))
partial.rename(run / ("environment-" + who))
limit = time.monotonic() + 60
while len(list(run.glob("environment-*"))) < int(sys.argv[1]) and time.monotonic() < limit:
    time.sleep(0.02)
sys.exit(1)
"""
#: Takes its device as a member does, on a host where torch finds eight GPUs.
TAKE = """
import os, torch
torch.cuda.init = lambda: None
torch.cuda.set_device = lambda number: None
torch.cuda.nccl.version = lambda: (2, 28, 9)
from deadpool_megatron.member.member_device import select_device
select_device("nccl", int(os.environ["LOCAL_RANK"]))
"""


@pytest.fixture(autouse=True)
def a_user_has_set_none(monkeypatch):
    """Another test may have imported the trainer here, which sets some as Megatron-LM asks."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def environments(
    folder: Path, *options: str, nodes: int = 2, spares: int = 0, nproc: int = 1, **extra: str
) -> dict[str, dict[str, str]]:
    """Of each member of a run, by "node-slot"."""
    script, run = folder / "show.py", folder / "run"
    script.write_text(SHOW)
    size = ("--nodes", str(nodes), "--spares", str(spares), "--nproc-per-node", str(nproc))
    done = deadpool(
        *("run", *size, "--run-dir", str(run), "--preload", "", "--quiet", *options),
        *("--", str(script), str((nodes + spares) * nproc)),
        **extra,
    )
    found = {
        path.name.removeprefix("environment-"): json.loads(path.read_text())
        for path in run.glob("environment-*")
    }
    assert len(found) == (nodes + spares) * nproc, (done.stdout, done.stderr)
    return found


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_environment_has_the_needs_of_nccl_and_keeps_settings_of_the_user(tmp_path, method):
    early = tmp_path / "early"
    early.mkdir()
    options = ("--deadpool-set", f"start-method={method}", "--preload", "tests.cluster.early_look")
    extra = {"EARLY_LOOKS": str(early), "NCCL_NVLS_ENABLE": "1"}
    found = environments(tmp_path, *options, **extra)["1-0"]
    expected = {v.name: v.value for v in VARIABLES} | {"NCCL_NVLS_ENABLE": "1"}
    assert {name: found.get(name) for name in expected} == expected
    assert found["LOCAL_RANK"] == "0"
    assert not (early / "torn down").exists()
    if method == "exec":  # a parked process imports before it knows its member
        looks = [json.loads(path.read_text()) for path in early.iterdir()]
        assert looks
        assert all(expected.items() <= look.items() for look in looks)


@pytest.mark.full
def test_processes_of_one_node_share_its_cores(tmp_path):
    found = environments(tmp_path, nproc=2)
    assert {each["OMP_NUM_THREADS"] for each in found.values()} == {"1"}
    (tmp_path / "other").mkdir()
    found = environments(tmp_path / "other", nproc=2, OMP_NUM_THREADS="3")
    assert {each["OMP_NUM_THREADS"] for each in found.values()} == {"3"}


@pytest.mark.full
def test_environment_for_gloo_has_no_variable(tmp_path):
    found = environments(tmp_path, "--deadpool-communicator", "gloo")["0-0"]
    assert {variable.name for variable in VARIABLES}.isdisjoint(found)


def smi(folder: Path, gpus: int) -> dict[str, str]:
    """Return an environment in which ``nvidia-smi`` lists these GPUs."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    lines = "".join(f"echo 'GPU {n}: NVIDIA H100 (UUID: GPU-{n})'\n" for n in range(gpus))
    program.write_text(f"#!/bin/sh\n{lines}")
    program.chmod(0o755)
    return {"PATH": f"{program.parent}:{os.environ['PATH']}"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("visible", "first", "method"), [("0,1,2,3,4,5", 0, "exec"), ("GPU-7,6,5,4,GPU-3,2", 7, "fork")]
)
def test_nodes_of_a_host_share_its_gpus_and_each_member_sees_its_own(
    tmp_path, visible, first, method
):
    """By its UUID, also before a parked process knows its member; and as number 0, which a script
    may take."""
    (early := tmp_path / "early").mkdir()
    where = {**smi(tmp_path, 8), "CUDA_VISIBLE_DEVICES": visible, "EARLY_LOOKS": str(early)}
    options = ("--deadpool-communicator", "gloo", "--deadpool-set", f"start-method={method}")
    options = (*options, "--preload", "tests.cluster.early_look")
    found = environments(tmp_path, *options, nodes=2, spares=1, nproc=2, **where)
    own = {
        f"{node}-{slot}": f"GPU-{abs(first - 2 * node - slot)}"
        for node in range(3)
        for slot in range(2)
    }
    assert {member: each["CUDA_VISIBLE_DEVICES"] for member, each in found.items()} == own
    assert {each["LOCAL_RANK"] for each in found.values()} == {"0"}
    looks = [json.loads(path.read_text())["CUDA_VISIBLE_DEVICES"] for path in early.iterdir()]
    assert method == "fork" or set(looks) == set(own.values())


@pytest.mark.parametrize(
    "command", [("run", "--spares", "1"), ("agent", "--node-id", "0", "--host", "127.0.0.1")]
)
def test_gpus_that_torch_was_not_built_for_are_no_reason_to_train_on_cpus(tmp_path, command):
    run, where = tmp_path / "run", smi(tmp_path, 8)
    where["CUDA_VISIBLE_DEVICES"] = "0,1,2,3,4,5,6,7"
    size = ("--nodes", "2", "--nproc-per-node", "2", "--run-dir", str(run))
    done = deadpool(*command, *size, "--", "-m", "deadpool_megatron.trainer", **where)
    assert done.returncode == 2, (done.stdout, done.stderr)
    [line] = done.stderr.splitlines()
    assert "8 GPUs are visible, and torch cannot use" in line
    assert (
        "AssertionError: Torch not compiled with CUDA enabled; './scripts/setup.sh --gpu'" in line
    )
    assert not run.exists()


@pytest.mark.full
def test_a_contrary_value_ends_the_run_with_a_line_that_names_it(tmp_path):
    script, run = tmp_path / "take.py", tmp_path / "run"
    script.write_text(TAKE)
    size = ("--nodes", "2", "--nproc-per-node", "1")
    done = deadpool(
        *("run", *size, "--run-dir", str(run), "--preload", "", "--quiet", "--", str(script)),
        TORCH_NCCL_USE_COMM_NONBLOCKING="1",
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    [line] = [line for line in done.stderr.splitlines() if "COMM_NONBLOCKING" in line]
    assert "TORCH_NCCL_USE_COMM_NONBLOCKING=1 cannot be protected with NCCL" in line
    assert "unset it, or set it to 0" in line

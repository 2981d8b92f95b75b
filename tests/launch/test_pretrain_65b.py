"""The 65B job as it is, up to Megatron's own validation of its arguments.

The batch script runs in the shell, the first node's task in its turn; stand-ins for Slurm and for
the agent write down what reaches a node. The command line then goes through the agent's own
reading, and what members would run goes to Megatron's parser and validation, for the GPUs that the
script is meant for. Nothing that a user would have to set is set here.
"""

import dataclasses
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deadpool_megatron import cli
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import preconditions
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from tests.common.programs import stand_in
from tests.common.wait import MAX_WAIT_SECONDS
from tests.megatron_lm.harness.checkout import checkout, needs_megatron_lm
from tests.megatron_lm.harness.parsing import Question, ask

pytestmark = [pytest.mark.full, pytest.mark.megatron_lm, needs_megatron_lm]

ROOT = Path(__file__).parents[2]
BATCH = ROOT / "scripts" / "slurm" / "pretrain_65b.sbatch"
ARGUMENTS = ROOT / "configs" / "megatron-lm"
A100, H100, BLACKWELL = 8, 9, 10
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
MODELS = ("7b", "65b", "175b")

# One node of the step; the options of srun end where the command begins.
_SRUN = """\
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_STEP_NUM_NODES=66 SLURM_STEP_TASKS_PER_NODE="1(x66)"
exec "$@"
"""
_DEADPOOL = """\
[ "$1" = agent ] || exit 3
printf '%s\\0' "$@" >{output}/arguments
env -0 >{output}/environment
"""


@dataclass(frozen=True)
class Task:
    """The task of a node: the arguments of ``deadpool``, and its environment."""

    arguments: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The first node's, from the batch script as it stands."""
    folder = tmp_path_factory.mktemp("job")
    output = folder / "output"
    output.mkdir()
    deadpool = _DEADPOOL.format(output=output)
    programs = stand_in(folder / "bin", srun=_SRUN, deadpool=deadpool, squeue="")
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "HOME": str(folder),
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NUM_NODES": "66",
        "SLURM_SUBMIT_DIR": str(folder),
        # The site block asks for these.
        "CHECKOUT": str(ROOT),
        "MEGATRON": str(checkout()),
    }
    done = subprocess.run(
        ["bash", str(BATCH)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=MAX_WAIT_SECONDS,
        check=False,
    )
    assert (output / "environment").exists(), done.stdout + done.stderr
    environment = (output / "environment").read_text().split("\0")[:-1]
    return Task(
        (output / "arguments").read_text().split("\0")[:-1],
        dict(line.split("=", 1) for line in environment),
    )


@pytest.fixture
def info(task, monkeypatch):
    """The run of the first agent, with checks of memory and GPUs disabled."""

    def stop(*_: object) -> None:
        raise CommandError("as far as the test goes")

    monkeypatch.setattr(preconditions, "check_shared_memory", stop)
    monkeypatch.setattr(preconditions, "choose_communicator", lambda communicator, *_: communicator)
    monkeypatch.setattr(preconditions, "check_communicator", lambda *_: None)
    for name, value in task.environment.items():
        if name.startswith("SLURM_"):
            monkeypatch.setenv(name, value)
    assert cli.main(task.arguments) == 2
    run = task.arguments[task.arguments.index("--run-dir") + 1]
    return RunDirectory(Path(run)).read_run()


def model(name: str) -> list[str]:
    return (ARGUMENTS / f"gpt-{name}.args").read_text().split()


def plan(name: str) -> dict[str, int]:
    """Return the cluster of the plan for the argument file."""
    cluster: dict[str, int] = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())[
        "cluster"
    ]
    return cluster


@pytest.fixture
def questions(task, info):
    """For each size of model: members' command line and environment.

    The script is that of the 65B model; the other models differ in size and flags.
    """
    assert list(info.command[:2]) == ["-m", "deadpool_megatron.megatron_lm"]
    assert info.command[2] == f"{checkout()}/pretrain_gpt.py"
    own, others = model("65b"), list(info.command[3:])
    assert others[: len(own)] == own
    show = ("world_size", "data_parallel_size", "virtual_pipeline_model_parallel_size", "deadpool")
    return {
        name: Question(
            [*model(name), *others[len(own) :]],
            plan(name)["nodes"] * plan(name)["gpus_per_node"],
            show=show,
            environment=task.environment,
            gpu_generation=H100,
        )
        for name in MODELS
    }


def test_agent_accepts_the_command(info):
    cluster = plan("65b")
    assert (info.nodes, info.nproc_per_node) == (cluster["nodes"], cluster["gpus_per_node"])
    assert info.spares == cluster["spares"]
    assert "--deadpool" in info.command
    assert info.settings.communicator == "nccl"


def test_megatron_accepts_each_number_of_nodes_of_the_script(task, info, questions):
    """A replica's share of the batch has to be a multiple of the pipeline: it is interleaved."""
    large, nodes = questions["65b"], [64, 56, 48, 32]
    assert list(map(int, task.environment["SMALLER"].split())) == nodes[1:]
    assert (info.settings.persist_interval, info.settings.persist_directory) == (
        "auto",
        f"{task.environment['HOME']}/runs/pretrain-65b/exports",
    )
    show = ("data_parallel_size", "global_batch_size", "micro_batch_size")
    answers = ask(
        [dataclasses.replace(large, world_size=n * info.nproc_per_node, show=show) for n in nodes]
    )
    assert [(a.error, a.refused) for a in answers] == [("", "")] * len(nodes)
    for answer, count in zip(answers, nodes, strict=True):
        replicas, batch, micro = map(int, answer.shown.values())
        assert replicas == count / 8
        assert batch % (replicas * micro * 8) == 0


def test_megatron_accepts_the_command_of_members(questions):
    """On the GPUs that the scripts are for; without the script's variable it would not."""
    wanted = list(questions.values())
    large = questions["65b"]
    assert large.environment is not None
    bare = {name: value for name, value in large.environment.items() if name != VARIABLE}
    asked = [
        *wanted,
        *(dataclasses.replace(large, gpu_generation=other) for other in (A100, BLACKWELL)),
        *(dataclasses.replace(question, environment=bare) for question in wanted),
    ]
    answers = ask(asked)
    good, refused = answers[: len(wanted) + 2], answers[len(wanted) + 2 :]
    assert [(a.error, a.refused) for a in good] == [("", "")] * len(good)
    shapes = [tuple(answer.shown.values()) for answer in good]
    assert shapes == [
        ("64", "32", "None", "True"),
        ("512", "8", "2", "True"),
        ("1024", "8", "2", "True"),
        *[("512", "8", "2", "True")] * 2,
    ]
    # That this test sees what a user would: Megatron's own check is in force.
    for answer in refused:
        assert re.search(rf"AssertionError.*{VARIABLE} to 1", answer.error), answer

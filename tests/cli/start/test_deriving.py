"""A run of which its user names the script alone: size, directory, protection, memory, address."""

import argparse
import re
import shlex
import socket
from pathlib import Path

import pytest

from deadpool_megatron import cli, file_systems
from deadpool_megatron.cli.common import nccl_address
from deadpool_megatron.cli.slurm import step_size
from deadpool_megatron.cli.start import checks, launch, scripts
from deadpool_megatron.cli.start.deriving import Size, choose
from deadpool_megatron.preflight import host
from tests.cli.start.refused import old_run
from tests.cli.told import CarryOut, Complain

ROOT = Path(__file__).parents[3]
TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
BATCH = "--global-batch-size 64 --micro-batch-size 2"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GPUs of the host, eight at first, which the torch that is asked can use."""
    there = [f"GPU-{number}" for number in range(8)]
    monkeypatch.setattr(host, "listed_gpus", lambda: tuple(there))
    monkeypatch.delenv(host.VISIBLE, raising=False)
    checks._problem_of_torch.cache_clear()
    monkeypatch.setattr(
        checks, "_PROBE", "import os; print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
    )
    return there


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of Megatron-LM, in its checkout, which is the working directory."""
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    path = tmp_path / "pretrain_gpt.py"
    path.write_text("pretrain(model)\n")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize(
    ("gpus", "command", "given", "found"),
    [
        (8, "", {}, (7, 1, 1)),
        (8, f"{TENSOR} 2", {}, (6, 1, 1)),
        (8, f"{TENSOR} 2 {BATCH}", {}, (4, 1, 1)),  # three replicas have no equal share of 32
        (8, f"{TENSOR} 2", {"nodes": 3}, (3, 0, 2)),
        (8, f"{TENSOR} 2", {"nodes": 3, "spares": 1}, (3, 1, 2)),
        (8, "", {"processes": 2}, (3, 1, 2)),
        (8, f"{TENSOR} 8", {}, None),
        (8, f"{TENSOR} 8", {"spares": 0}, (8, 0, 1)),
        (8, f"{TENSOR} 2 --expert-model-parallel-size 2", {}, (4, 1, 1)),
        (1, "", {}, None),
        (0, "", {}, (2, 1, 1)),
        (0, f"{TENSOR} 2 {PIPELINE}=2", {}, (4, 1, 1)),
        (0, f"{TENSOR} two", {}, (2, 1, 1)),  # Megatron's parser says what is wrong with it
        (0, f"{TENSOR} 2", {"nodes": 3}, (3, 0, 2)),
        (0, f"{BATCH}", {"nodes": 3}, None),
    ],
)
def test_size(
    gpus: int, command: str, given: dict[str, int], found: tuple[int, int, int] | None
) -> None:
    expected = None if found is None else Size(*found)
    assert choose(gpus, ["x.py", *command.split()], **given) == expected


def test_size_follows_a_file_of_arguments(tmp_path: Path) -> None:
    (tmp_path / "a.args").write_text(f"{PIPELINE} 4\n")
    assert choose(0, ["-m", "x", f"@{tmp_path}/a.args"]) == Size(4, 1, 1)


def drop_in() -> list[str]:
    """The line of the documents that takes the place of torchrun's."""
    text = (ROOT / "docs" / "megatron-lm.md").read_text()
    found = re.search(r"^torchrun .*\n(deadpool run .*)$", text, re.MULTILINE)
    assert found is not None
    return shlex.split(found[1])


def test_the_documented_drop_in_for_torchrun_on_eight_gpus(
    gpus: list[str], script: Path, started: list[launch.Launcher], carry_out: CarryOut
) -> None:
    words = drop_in()[1:]
    arguments = [TENSOR, "2", "--global-batch-size", "48", "--micro-batch-size", "2"]
    words[words.index("ARGS") : words.index("ARGS") + 1] = arguments
    status, out, errors = carry_out(*words)
    assert (status, errors) == (0, "")
    (launcher,) = started
    info = launcher.info
    assert (info.nodes, info.spares, info.nproc_per_node) == (6, 1, 1)
    assert (info.settings.communicator, launcher.gpus) == ("nccl", tuple(gpus))
    assert info.command == ("-m", scripts.MODULE, "pretrain_gpt.py", *arguments, "--deadpool")
    assert launcher.directory.path.parent == script.parent / "runs"
    # What it prints can be given as it stands, and is the same run.
    first, chosen = out.splitlines()[:2]
    assert str(launcher.directory.path) in first
    again = shlex.split(chosen)
    assert cli.main(again[1:]) == 0
    other = started[1].info
    assert (other.nodes, other.spares, other.command) == (info.nodes, info.spares, info.command)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("size", ["--nodes 1 --spares 1", "--nodes 8 --spares 1"])
def test_too_few_gpus_are_refused_with_the_command_that_fits(
    size: str, script: Path, complain: Complain
) -> None:
    line = complain("run", *size.split(), "--nproc-per-node", "8", "--", script)
    assert "8 visible GPUs" in line
    assert "--nodes 7 --spares 1 --nproc-per-node 1" in line
    assert "CUDA_VISIBLE_DEVICES=" in line


@pytest.mark.usefixtures("gpus")
def test_where_a_replica_takes_all_gpus_it_is_said_what_goes_without_a_spare(
    script: Path, complain: Complain
) -> None:
    line = complain("run", "--", script, TENSOR, "8")
    assert "--nodes 8 --spares 0 --nproc-per-node 1" in line
    assert "without --nodes" in complain(
        "run", "--nodes", "1", "--nproc-per-node", "8", "--", script
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("--deadpool", ""), ("", "--deadpool"), ("--deadpool", "--deadpool")],
)
def test_protection_goes_without_saying_and_may_be_said_on_either_side(
    before: str, after: str, script: Path, started: list[launch.Launcher]
) -> None:
    words = ["run", "--nodes", "2", "--nproc-per-node", "1", *before.split(), "--quiet"]
    assert cli.main([*words, "--", str(script), *after.split()]) == 0
    assert started[0].info.command[-1] == "--deadpool"
    assert started[0].info.command[:2] == ("-m", scripts.MODULE)


def test_what_is_allowed_may_be_said_before_the_script(
    script: Path, started: list[launch.Launcher]
) -> None:
    allowed = ["--deadpool-allow", "log-straggler", "--deadpool-allow-unreviewed", "of-tomorrow"]
    command = ["--", str(script), "--log-straggler", "--of-tomorrow"]
    assert cli.main(["run", *allowed, "--quiet", *command]) == 0
    assert started[0].info.command[-4:] == tuple(allowed)


@pytest.mark.parametrize("text", ["pretrain_gpt(model)\n", "print()\n"])
def test_a_script_that_is_not_megatrons_is_left_alone(
    text: str, script: Path, started: list[launch.Launcher]
) -> None:
    script.write_text(text)
    assert cli.main(["run", "--quiet", "--", str(script)]) == 0
    assert started[0].info.command == (str(script),)


def test_a_run_that_is_continued_keeps_its_size(
    tmp_path: Path, started: list[launch.Launcher], script: Path
) -> None:
    old = old_run(tmp_path / "old", world_size=3)
    assert cli.main(["run", "--quiet", "--run-dir", str(old.path), "--", str(script)]) == 0
    assert (started[0].info.nodes, started[0].info.spares) == (3, 0)


def test_memory_by_a_plan(script: Path, started: list[launch.Launcher]) -> None:
    plan = ["--plan", str(ROOT / "configs" / "65b.yaml"), "--quiet"]
    assert cli.main(["run", *plan, "--", str(script)]) == 0
    own = ["--deadpool-shm-gb", "7"]
    assert cli.main(["run", *plan, *own, "--", str(script)]) == 0
    assert [round(one.info.settings.shm_gb) for one in started] == [50, 7]


@pytest.mark.parametrize(
    ("given", "variables", "found"),
    [
        ((None, None, None), {"SLURM_STEP_NUM_NODES": "66"}, (65, 1, None)),
        ((64, None, None), {"SLURM_STEP_NUM_NODES": "66"}, (64, 2, None)),
        ((None, 2, None), {"SLURM_STEP_NUM_NODES": "66"}, (64, 2, None)),
        ((4, 1, 1), {"SLURM_STEP_NUM_NODES": "1", "SLURM_GPUS_PER_NODE": "8"}, (4, 1, 1)),
        ((None, None, None), {"SLURM_GPUS_PER_NODE": "h100:8"}, (None, 0, 8)),
        ((None, None, None), {"SLURM_STEP_NUM_NODES": "1"}, (1, 0, None)),
    ],
)
def test_size_of_a_step(
    given: tuple[int | None, ...], variables: dict[str, str], found: tuple[int | None, ...]
) -> None:
    names = ("nodes", "spares", "nproc_per_node")
    args = argparse.Namespace(**dict(zip(names, given, strict=True)))
    step_size(args, variables)
    assert tuple(getattr(args, name) for name in names) == found


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("lo", "127.0.0.1"),
        ("=lo", "127.0.0.1"),
        ("nosuch,l", "127.0.0.1"),
        ("=l", None),
        ("^eth", None),
        ("", None),
    ],
)
def test_address_by_the_interface_of_nccl(
    named: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "nosuch0"), (2, "lo")])
    assert nccl_address({"NCCL_SOCKET_IFNAME": named}) == found


@pytest.mark.parametrize(
    ("save", "kind", "given", "interval"),
    [
        ("", "ext4", "", "off"),
        ("--save /checkpoints", "ext4", "", "auto"),
        ("", "nfs4", "", "auto"),
        ("--save /checkpoints", "nfs4", "off", "off"),
        ("", "ext4", "7", "7"),
    ],
)
def test_checkpoints_in_the_background(
    save: str,
    kind: str,
    given: str,
    interval: str,
    script: Path,
    started: list[launch.Launcher],
    carry_out: CarryOut,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(file_systems, "_kinds", lambda: {Path("/"): "ext4", script.parent: kind})
    own = ["--deadpool-persist-interval", given] if given else []
    status, out, _ = carry_out("run", *own, "--", script, *save.split())
    assert status == 0
    assert started[0].info.settings.persist_interval == interval
    assert ("checkpoints in the background are off" in out) == (interval == "off")

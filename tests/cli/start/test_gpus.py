"""The effect of a host's GPUs on a run, refusals, and the GPU of each process."""

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import checks, launch
from deadpool_megatron.cli.start.checks import check_agreed, decided, gpus_to_share
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.preflight import host as gpus
from deadpool_megatron.settings import Settings

NODES, NPROC = 3, 2


def info(communicator: str) -> RunInfo:
    settings = replace(Settings(), communicator=communicator)
    return RunInfo("00000000", 4, 2, 1, NPROC, ("x.py",), settings)


FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
#: Plays torch in the process that asks it: what it prints and how it ends.
WORKS = "import os; print(len(os.environ['CUDA_VISIBLE_DEVICES'].split(',')))"
BUILT_WITHOUT = "raise AssertionError('Torch not compiled with CUDA enabled')"
OLD_DRIVER = "raise RuntimeError('The NVIDIA driver is too old (found version 1)\\nand more')"


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "listed_gpus", lambda: FOUR)
    checks._problem_of_torch.cache_clear()
    monkeypatch.setattr(checks, "_PROBE", WORKS)


@pytest.mark.parametrize("communicator", ["auto", "nccl"])
def test_where_gpus_are_seen_a_run_has_nccl_for_all_of_its_processes(communicator: str) -> None:
    assert decided(communicator, 2, 2, {}) == "nccl"
    assert (gpus_to_share(info("nccl"), 2, {}), gpus_to_share(info("gloo"), 3, {})) == (FOUR, ())
    check_agreed(info("nccl"), {})


@pytest.mark.parametrize(
    ("communicator", "environment"),
    [("gloo", {}), ("auto", {"CUDA_VISIBLE_DEVICES": ""}), ("gloo", {"CUDA_VISIBLE_DEVICES": "0"})],
)
def test_what_was_chosen_is_not_refused(communicator: str, environment: dict[str, str]) -> None:
    assert decided(communicator, NODES, NPROC, environment) == communicator
    check_agreed(info(communicator), environment)


@pytest.mark.parametrize("communicator", ["auto", "nccl"])
@pytest.mark.parametrize(
    ("size", "environment", "said"),
    [
        ((3, 2), {}, "3 nodes x 2 processes here (spares count), and 4 visible GPUs: start fewer"),
        ((2, 8), {}, "as with --nproc-per-node 2; '"),
        (
            (1, 8),
            {"CUDA_VISIBLE_DEVICES": "2"},
            "1 node x 8 processes here (spares count), and 1 v",
        ),
        ((5, 1), {}, "4 visible GPUs: '"),
    ],
)
def test_too_few_are_refused_with_what_fits(
    communicator: str, size: tuple[int, int], environment: dict[str, str], said: str
) -> None:
    with pytest.raises(CommandError) as refused:
        decided(communicator, *size, environment)
    assert said in str(refused.value)


@pytest.mark.parametrize("communicator", ["auto", "nccl"])
@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (BUILT_WITHOUT, "AssertionError: Torch not compiled with CUDA enabled; "),
        (OLD_DRIVER, "RuntimeError: The NVIDIA driver is too old (found version 1)"),
        ("print(1)", "it finds 1; './scripts/setup.sh --gpu' installs a torch with CUDA"),
    ],
)
def test_gpus_that_torch_cannot_use_are_refused_in_its_own_words(
    monkeypatch: pytest.MonkeyPatch, communicator: str, torch: str, said: str
) -> None:
    monkeypatch.setattr(checks, "_PROBE", torch)
    with pytest.raises(CommandError) as refused:
        decided(communicator, 2, 1, {})
    assert f"4 GPUs are visible, and torch cannot use 2 of them: {said}" in str(refused.value)
    with pytest.raises(CommandError):
        check_agreed(info("nccl"), {})


def test_of_mig_devices_a_process_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "listed_gpus", lambda: ("MIG-a", "MIG-b"))
    monkeypatch.setattr(checks, "_PROBE", "print(1)")
    assert decided("auto", 2, 1, {}) == "nccl"


def test_a_node_with_gpus_has_no_part_in_a_run_that_was_made_where_none_was_seen() -> None:
    """Without it, one bad node that comes first has them all train on CPUs."""
    with pytest.raises(CommandError, match="the node that made it saw no GPU, and this one sees 4"):
        check_agreed(info("auto"), {})


def test_a_new_node_gets_the_gpus_of_the_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made = RunDirectory(tmp_path), info("auto")
    launcher = launch.Launcher(
        run, made, (), 2, print, lambda: None, numbers=(0, 1, 2), gpus=tuple("abcdef")
    )
    seen = {}

    def serve(options: AgentOptions, **_: object) -> int:
        seen[options.node] = launch.os.environ["CUDA_VISIBLE_DEVICES"]
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    monkeypatch.setattr(launch.auth, "load_secret", lambda _: b"")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")

    def start(node: int) -> None:
        launcher._shares.setdefault(node, launcher._free_share())
        launcher._agents[node] = (0, 0)
        launcher._serve(node, 0, None)

    for node in (2, 1, 0):
        start(node)
    del launcher._agents[1]
    start(3)
    del launcher._agents[3]
    del launcher._agents[0]
    start(4)
    start(5)
    assert seen == {0: "a,b", 1: "c,d", 2: "e,f", 3: "c,d", 4: "a,b", 5: "c,d"}

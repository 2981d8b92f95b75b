"""Which GPUs ``deadpool run`` shares out, and what it says when there are too few."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import launch
from deadpool_megatron.cli.start.gpus import gpus_to_share
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.preflight import gpus
from deadpool_megatron.settings import Settings

NODES, NPROC = 3, 2


def info(communicator: str) -> RunInfo:
    settings = replace(Settings(), communicator=communicator)
    return RunInfo("00000000", 4, 2, 1, NPROC, ("x.py",), settings, "/dev/shm/x")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 4)


@pytest.mark.parametrize("communicator", ["auto", "nccl", "gloo"])
def test_enough_are_shared_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], communicator: str
) -> None:
    monkeypatch.setattr(gpus, "count_gpus", lambda: 6)
    environment: dict[str, str] = {}
    assert gpus_to_share(info(communicator), NODES, environment) == ("0", "1", "2", "3", "4", "5")
    assert environment == {}
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("four_gpus")
def test_too_few_for_nccl_are_refused() -> None:
    with pytest.raises(CommandError) as refused:
        gpus_to_share(info("nccl"), NODES, {})
    line = str(refused.value)
    assert "3 nodes x 2 processes (spares count), and 4 visible GPUs: start fewer" in line
    with pytest.raises(CommandError, match="and 1 visible GPU: "):
        gpus_to_share(info("nccl"), NODES, {"CUDA_VISIBLE_DEVICES": "2"})


@pytest.mark.usefixtures("four_gpus")
def test_too_few_with_an_open_choice_are_hidden_with_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment: dict[str, str] = {}
    assert gpus_to_share(info("auto"), NODES, environment) == ()
    assert environment == {"CUDA_VISIBLE_DEVICES": ""}
    [line] = capsys.readouterr().err.splitlines()
    assert "4 visible GPUs: trains on CPUs, with gloo" in line


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("communicator", "environment"),
    [("gloo", {}), ("auto", {"CUDA_VISIBLE_DEVICES": ""}), ("gloo", {"CUDA_VISIBLE_DEVICES": "0"})],
)
def test_without_nccl_nothing_is_said(
    capsys: pytest.CaptureFixture[str], communicator: str, environment: dict[str, str]
) -> None:
    before = dict(environment)
    assert gpus_to_share(info(communicator), NODES, environment) == ()
    assert environment == before
    assert capsys.readouterr().err == ""


def test_a_new_node_gets_the_gpus_of_the_one_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made = RunDirectory(tmp_path), info("auto")
    options = launch.LaunchOptions(
        run, made, 0, (), 2, print, lambda: None, numbers=(0, 1, 2), gpus=tuple("abcdef")
    )
    launcher = launch.Launcher(options)
    seen = {}

    def serve(_run: object, _info: object, place: launch.Place, *_: object, **__: object) -> int:
        seen[place.node] = launch.os.environ["CUDA_VISIBLE_DEVICES"]
        return 0

    monkeypatch.setattr(launch, "serve", serve)
    monkeypatch.setattr(launch.auth, "load_secret", lambda _: b"")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "all")

    def start(node: int) -> None:
        launcher._shares.setdefault(node, launcher._free_share())
        launcher._agents[node] = (0, 0)
        launcher._serve(node, 0, 0)

    for node in (2, 1, 0):
        start(node)
    del launcher._agents[1]
    start(3)
    del launcher._agents[3]
    del launcher._agents[0]
    start(4)
    start(5)
    assert seen == {0: "a,b", 1: "c,d", 2: "e,f", 3: "c,d", 4: "a,b", 5: "c,d"}

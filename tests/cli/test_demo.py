"""``deadpool demo`` against a made-up ``deadpool run``: what it shows, decides and leaves."""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli import demo
from deadpool_megatron.cli.watch import Display, RunFailedError, watch_run
from tests.cli.told import Complain
from tests.common import synthetic_run

SYNTHETIC = Path(synthetic_run.__file__)
launch_command = demo.launch_command
seen_by_runs: list[demo.Shape] = []


@pytest.fixture(autouse=True)
def _synthetic_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def command(directory: Path, iterations: int, shape: demo.Shape = demo.ON_CPUS) -> list[str]:
        seen_by_runs.append(shape)
        return [
            *(sys.executable, str(SYNTHETIC)),
            *("--run-dir", str(directory), "--train-iters", str(iterations)),
        ]

    seen_by_runs.clear()
    monkeypatch.setattr(demo, "launch_command", command)
    monkeypatch.setattr(demo, "CONFIG", SYNTHETIC)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))


def run_demo(*argv: str) -> int:
    return cli.main(["demo", "--iterations", "12", *argv])


@pytest.mark.slow
def test_an_identical_run_ends_with_the_verdict_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts_file, picture = tmp_path / "facts.json", tmp_path / "picture.png"
    assert run_demo("--json", str(facts_file), "--plot", str(picture)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("bit-identical: yes")
    facts = json.loads(facts_file.read_text())
    assert [facts[name] for name in ("bit_identical", "killed_in_iteration")] == [True, 7]
    assert facts["steps_recomputed"] == 1
    assert facts["kill_to_next_step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "picture.png"]


@pytest.mark.parametrize(
    ("trouble", "name", "said"),
    [("diverge", "struck", "iteration 7: loss"), ("fail", "undisturbed", "the last thing it said")],
)
def test_a_run_that_went_wrong_is_said_and_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trouble: str,
    name: str,
    said: str,
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", trouble)
    base = tmp_path / "both"
    assert run_demo("--run-dir", str(base)) == 1
    assert said in "".join(capsys.readouterr())
    assert (base / name / "events.jsonl").exists()


@pytest.mark.slow
def test_a_silent_run_is_interrupted_and_may_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "hang")
    directory = tmp_path / "run"
    command = demo.launch_command(directory, 12)
    with pytest.raises(RunFailedError):
        watch_run(command, os.environ, directory, Display(), silence_seconds=3.0)
    assert (directory / "interrupted").exists()


@pytest.mark.parametrize(
    "argv",
    [
        ("--iterations", "7"),
        ("--json", "/no/such/folder/x.json"),
        ("--run-dir", str(SYNTHETIC.parent)),
    ],
)
def test_bad_arguments_are_one_line(argv: tuple[str, ...], complain: Complain) -> None:
    assert argv[1] in complain("demo", "--iterations", "12", *argv)


def options_of(command: list[str]) -> dict[str, str]:
    """Each flag before the trainer's own, and behind it, with its value."""
    return {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}


@pytest.mark.parametrize(
    ("flags", "shape", "communicator", "visible"),
    [((), demo.ON_CPUS, "gloo", ""), (("--gpu",), demo.ON_GPUS, "nccl", "3,4,5,6,7")],
)
def test_it_is_on_cpus_and_gloo_unless_it_is_told_to_take_gpus(
    flags: tuple[str, ...],
    shape: demo.Shape,
    communicator: str,
    visible: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then with one for each process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    assert run_demo(*flags, "--run-dir", str(tmp_path / "runs")) == 0
    assert seen_by_runs == [shape, shape]
    for name in ("undisturbed", "struck"):
        facts = json.loads((tmp_path / "runs" / name / "visible.json").read_text())
        assert facts == visible
    options = options_of(launch_command(tmp_path, 12, shape))
    assert options["--deadpool-communicator"] == communicator
    nodes = int(options["--nodes"]) + int(options["--spares"])
    assert not flags or nodes * int(options["--nproc-per-node"]) == 5

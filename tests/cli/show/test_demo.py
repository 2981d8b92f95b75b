"""``deadpool demo`` against a made-up ``deadpool run``: what it shows, decides and leaves."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
import synthetic_run

from deadpool_megatron.cli.show import demo
from deadpool_megatron.cli.show.live import PlainDisplay, RunFailedError, watch_run

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
    parser = argparse.ArgumentParser()
    demo.add_parser(parser.add_subparsers())
    return demo.run(parser.parse_args(["demo", "--iterations", "12", *argv]))


@pytest.mark.slow
def test_an_identical_run_ends_with_the_verdict_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts_file, picture = tmp_path / "facts.json", tmp_path / "picture.png"
    assert run_demo("--json", str(facts_file), "--plot", str(picture)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("bit-identical: yes")
    assert lines[-2] == "steps recomputed: 1"
    facts = json.loads(facts_file.read_text())
    assert facts["bit_identical"] is True
    assert facts["killed_in_iteration"] == 7
    assert facts["steps_recomputed"] == 1
    assert facts["kill_to_next_step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "picture.png"]


def test_other_numbers_are_said_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "diverge")
    base = tmp_path / "both"
    assert run_demo("--run-dir", str(base)) == 1
    text = capsys.readouterr().out
    assert "bit-identical: no" in text
    assert "first difference: iteration 7: loss" in text
    assert (base / "struck" / "final.json").exists()


def test_a_failed_run_shows_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "fail")
    assert run_demo("--run-dir", str(tmp_path / "both")) == 1
    error = capsys.readouterr().err
    assert "undisturbed run: the run ended with exit status 1" in error
    assert "| the last thing it said" in error


@pytest.mark.slow
def test_a_silent_run_is_interrupted_and_may_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SYNTHETIC_TROUBLE", "hang")
    directory = tmp_path / "run"
    command = demo.launch_command(directory, 12)
    with pytest.raises(RunFailedError, match="no news from the run for"):
        watch_run(command, os.environ, directory, PlainDisplay(), silence_seconds=3.0)
    assert (directory / "interrupted").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--iterations", "7"), "--iterations must be at least 8, got 7"),
        (("--json", "/no/such/folder/x.json"), "the folder of /no/such/folder/x.json"),
        (("--run-dir", str(SYNTHETIC.parent)), "is not empty; choose another --run-dir"),
    ],
)
def test_bad_arguments_are_one_line(
    argv: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(*argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def options_of(command: list[str]) -> dict[str, str]:
    """Each flag before the trainer's own, and behind it, with its value."""
    return {flag: value for flag, value in itertools.pairwise(command) if flag.startswith("--")}


def test_it_is_on_cpus_and_gloo_by_its_own_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert run_demo("--run-dir", str(tmp_path / "runs")) == 0
    assert seen_by_runs == [demo.ON_CPUS, demo.ON_CPUS]
    for name in ("undisturbed", "struck"):
        facts = json.loads((tmp_path / "runs" / name / "visible.json").read_text())
        assert facts == ""
    options = options_of(launch_command(tmp_path, 12))
    assert options["--deadpool-communicator"] == "gloo"


def test_gpu_asks_for_nccl_with_a_gpu_for_each_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    assert run_demo("--gpu", "--run-dir", str(tmp_path / "runs")) == 0
    assert seen_by_runs == [demo.ON_GPUS, demo.ON_GPUS]
    facts = json.loads((tmp_path / "runs" / "struck" / "visible.json").read_text())
    assert facts == "3,4,5,6,7"
    options = options_of(launch_command(tmp_path, 12, demo.ON_GPUS))
    assert options["--deadpool-communicator"] == "nccl"
    processes = (int(options["--nodes"]) + int(options["--spares"])) * int(
        options["--nproc-per-node"]
    )
    assert processes == 5

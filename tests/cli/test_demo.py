"""``deadpool demo`` with made-up runs: what it shows, decides and leaves."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli import demo, plot
from deadpool_megatron.cli.run_result import read_story
from tests.common.synthetic_run import write_run


@pytest.fixture(autouse=True)
def _folder_for_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(demo.tempfile, "tempdir", str(tmp_path))


class Runs:
    """In place of the launcher."""

    def __init__(self, shift: float = 0.0) -> None:
        self.shift, self.seen = shift, list[str | None]()

    def __call__(self, command: list[str], environment: dict[str, str], *_: Any) -> int:
        self.seen.append(environment.get("CUDA_VISIBLE_DEVICES"))
        plan, strike = environment.get(demo.FAULTS_VARIABLE), None
        if plan is not None:
            (fault,) = json.loads(Path(plan).read_text())
            strike = fault["match"]["iteration"]
            fired = Path(plan + ".fired") / fault["id"]
            fired.parent.mkdir()
            fired.touch()
            os.utime(fired, (1000.0, 1000.0))
        told = dict(itertools.pairwise(command))
        iterations, directory = int(told["--train-iters"]), Path(told["--run-dir"])
        write_run(directory, iterations=iterations, fault_at=strike, shift=self.shift)
        return 0


def test_demo_of_identical_runs_leaves_nothing(tmp_path, carry_out, monkeypatch):
    monkeypatch.setattr(demo, "train", Runs())
    facts_file, picture = tmp_path / "facts.json", tmp_path / "picture.png"
    status, told, _ = carry_out("demo", "--iterations", 12, "--json", facts_file, "--plot", picture)
    verdict, _, sentence = told.splitlines()[-3:]
    assert (status, verdict[:18]) == (0, "bit-identical: yes")
    assert " 12 losses " in sentence
    facts = json.loads(facts_file.read_text())
    assert [facts[name] for name in ("bit_identical", "killed_in_iteration")] == [True, 7]
    assert facts["steps_recomputed"] == 1
    assert facts["kill_to_next_step_seconds"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "picture.png"]


def test_picture_has_equal_curves_for_equal_runs(tmp_path):
    """By iteration: by the clock the struck run is behind from its failure on."""
    made = (write_run(tmp_path / "calm"), write_run(tmp_path / "struck", fault_at=6))
    calm, struck = (plot.curve_of(read_story(each)) for each in made)
    assert calm == struck


def test_demo_reports_and_keeps_different_numbers(tmp_path, carry_out, monkeypatch):
    monkeypatch.setattr(demo, "train", Runs(shift=1e-9))
    status, told, _ = carry_out("demo", "--run-dir", tmp_path / "both")
    assert status == 1
    assert "first difference: iteration 16: loss" in told
    assert (tmp_path / "both" / "struck" / "final.json").exists()


def test_demo_keeps_a_run_that_fails(tmp_path, carry_out, monkeypatch):
    monkeypatch.setattr(demo, "launch_command", lambda *_: ["sh", "-c", "exit 3"])
    status, _, told = carry_out("demo")
    assert (status, "undisturbed run has exit status 3" in told) == (1, True)
    assert str(tmp_path) in told


@pytest.mark.parametrize(
    ("flags", "size", "visible"), [((), demo.ON_CPUS, ""), (("--gpu",), demo.ON_GPUS, "3,4,5,6,7")]
)
def test_demo_uses_gpus_on_request_only(flags, size, visible, tmp_path, monkeypatch):
    """Then with one for each process."""
    runs = Runs()
    monkeypatch.setattr(demo, "train", runs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    monkeypatch.setattr(demo, "visible_gpus", lambda _: "34567")
    assert cli.main(["demo", "--iterations", "12", *flags]) == 0
    assert runs.seen == [visible, visible]
    told = dict(itertools.pairwise(demo.launch_command(tmp_path, 12, size)))
    assert told["--deadpool-communicator"] == ("nccl" if flags else "gloo")
    nodes = int(told["--nodes"]) + int(told["--spares"])
    assert not flags or nodes * int(told["--nproc-per-node"]) == 5


def test_elastic_demo_needs_both_changes(tmp_path, carry_out, monkeypatch):
    monkeypatch.setattr(demo, "train", Runs())
    status, _, told = carry_out("demo", "--elastic", "--run-dir", tmp_path / "runs")
    assert (status, "trained with [3] nodes in turn, in 1 recoveries: give more" in told) == (
        1,
        True,
    )


@pytest.mark.slow
def test_elastic_demo_trains_as_stock_at_each_size(tmp_path, carry_out):
    facts_file, picture = tmp_path / "facts.json", tmp_path / "picture.png"
    status, told, _ = carry_out("demo", "--elastic", "--json", facts_file, "--plot", picture)
    assert (status, told.count("bit-identical: yes")) == (0, 2), told
    shrink, growth = json.loads(facts_file.read_text())["changes"]
    assert [part["compared"]["roles"] for part in (shrink, growth)] == [2, 3]
    assert shrink["compared"]["steps"] + growth["compared"]["steps"] == 30
    assert all(part["bit_identical"] and part["phases"]["restore"] for part in (shrink, growth))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["facts.json", "picture.png"]

"""``deadpool check`` with real processes: verdicts, who speaks, losses in the middle, statuses."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path

import pytest
from deadpool_megatron.preflight.assignment import LeftOut, assignment
from deadpool_megatron.preflight.board import Announcement, Board, State

from deadpool_megatron import cli
from deadpool_megatron.cli import check as command
from deadpool_megatron.cli import check_table
from tests.preflight.made_up_node import MadeUp
from tests.preflight.nodes import Check, Ended

GOOD, SPARE, LEFT_OUT = "good", "spare", "left out"


@pytest.mark.slow
def test_good_nodes_keep_their_numbers_and_one_of_them_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Check(tmp_path, "--json", spares=1) as check:
        check.start(2, 1, 0)
        ended = check.end()
    assert json.loads(ended[0].output) == check.verdict()
    assert ended[0].status == 0
    assert ended[1] == ended[2] == Ended(0, "", "")
    assert check.standings() == [GOOD] * 3
    assert check.ids() == [0, 1, 2]
    for entry in check.verdict()["nodes"]:
        assert entry["facts"]["address"] == f"127.0.0.{entry['node'] + 1}"
        assert abs(entry["clock"]["offset_seconds"]) <= entry["clock"]["error_seconds"] + 0.1
        assert entry["unreached"] == {}
        assert entry["rates"][0]["round_trip_seconds"] > 0
    assert oct((check.directory / "secret").stat().st_mode)[-3:] == "600"
    # Whoever looks for nodes of a later check there finds none that still seems to wait.
    assert Board(check.directory / "check", "").read() == {}

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    check_table.show(check.verdict())
    said = re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert said[0].split()[:3] == ["node", "host", "rack"]
    assert said[1].split()[:2] == ["0", "host0"]
    assert said[-1] == "ok: 2 nodes to train on, 1 spare, 0 left out"


@pytest.mark.slow
def test_each_kind_of_bad_node_is_found_and_named(tmp_path: Path) -> None:
    made_up = {
        1: {"facts": {"versions": {"torch": "2.12.1"}}},
        2: {"rate": 3e8},
        3: {"facts": {"shm_free_bytes": 2 * 10**9}},
    }
    options = ("--shm-gb", "50", "--domain", "rack0")
    with Check(tmp_path, *options, nodes=3, spares=5, made_up=made_up) as check:
        check.start(1, 2, 3, 4, 5)
        check.start(6, secret="the secret of another run")
        check.wait_there(1, 2, 3, 4, 5, 6)
        check.start(0, wait_seconds=0.5)  # node 7 never comes
        ended = check.end_of(0, 1, 2, 3, 4, 5)
    assert {end.status for end in ended.values()} == {0}
    assert check.standings() == [GOOD, LEFT_OUT, SPARE, LEFT_OUT, GOOD, GOOD, LEFT_OUT, LEFT_OUT]
    assert check.ids() == [0, None, 3, None, 1, 2, None, None]
    assert "torch is 2.12.1, on most nodes it is" in check.reasons(1)
    assert "its link carries 0.30 GB/s, the median is 1.00 GB/s" in check.reasons(2)
    assert "/dev/shm has 2.0 GB free, 50.0 GB are needed" in check.reasons(3)
    assert "it has another run secret" in check.reasons(6)
    assert check.reasons(7) == "it did not come within 0.5 s"
    lines = ended[0].output.splitlines()
    assert lines[2].split()[:3] == ["0", "host0", "rack0"]
    assert lines[2].split()[-2:] == ["good", "0"]
    assert "node 1: left out: torch is" in ended[0].output
    assert lines[-1] == "ok: 3 nodes to train on, 1 spare, 4 left out"
    assert assignment(check.verdict(), "host4", 4) == 1
    assert isinstance(assignment(check.verdict(), "host3", 3), LeftOut)


@pytest.mark.slow
def test_too_few_good_nodes(tmp_path: Path) -> None:
    made_up = {1: {"facts": {"shm_bytes": 64 << 20}}}
    with Check(tmp_path, spares=0, made_up=made_up) as check:
        check.start(0, 1)
        ended = check.end()
    assert {end.status for end in ended.values()} == {1}
    assert check.verdict()["ok"] is False
    said = ended[0].output.splitlines()
    assert said[-2].startswith("node 1: left out: /dev/shm has 64 MiB, as containers get")
    assert said[-1].startswith("not enough: 1 good nodes, --nodes is 2: mend what is named")
    assert "sbatch --exclude=host1)" in said[-1]


@pytest.mark.slow
def test_a_node_killed_in_the_middle_is_left_out(tmp_path: Path) -> None:
    fault = {"id": "middle", "point": "check.measure", "match": {"node": 1}}
    with Check(tmp_path, nodes=4, spares=0, faults=[fault]) as check:
        check.start(0, 1, 2, 3)
        ended = check.end()
    assert [ended[node].status for node in range(4)] == [1, -9, 1, 1]
    assert check.standings() == [GOOD, LEFT_OUT, GOOD, GOOD]
    assert check.ids() == [0, None, 1, 2]
    assert check.reasons(1) == "it ended in the middle (connection closed)"
    # Node 3 was to be measured with it, and was measured with another one.
    assert len(check.verdict()["nodes"][3]["rates"]) == 1


@pytest.mark.slow
def test_when_the_conductor_is_killed_the_next_one_begins_anew(tmp_path: Path) -> None:
    with Check(tmp_path, spares=1, faults=[{"id": "judge", "point": "check.judge"}]) as check:
        check.start(0, 1, 2)
        ended = check.end()
    assert [ended[node].status for node in range(3)] == [-9, 0, 0]
    assert check.standings() == [LEFT_OUT, GOOD, GOOD]
    assert check.reasons(0) == "its process has ended"
    assert ended[1].output.splitlines()[-1] == "ok: 2 nodes to train on, 0 spares, 1 left out"
    assert ended[2].output == ""


@pytest.mark.slow
def test_without_node_0_the_lowest_conducts(tmp_path: Path) -> None:
    with Check(tmp_path, spares=1) as check:
        # What a killed process of an earlier check has left behind disturbs nobody.
        stale = Announcement(0, "gone", "127.0.0.1", 1, "dead", "", State.CONDUCTS, {})
        Board(check.directory / "check", "").post(stale)
        check.start(2)
        check.wait_there(2)
        check.start(1, wait_seconds=0.5)
        ended = check.end()
    assert {end.status for end in ended.values()} == {0}
    assert check.reasons(0) == "its process has ended"
    assert "ok: 2 nodes" in ended[1].output
    assert ended[2].output == ""


@pytest.mark.slow
def test_a_node_with_another_secret_gives_no_verdict(tmp_path: Path) -> None:
    with Check(tmp_path, spares=0) as check:
        check.start(0)
        check.wait_there(0)
        check.start(1, secret="the secret of another run", wait_seconds=0.1)
        ended = check.end_of(1)
        assert not (check.directory / "check.json").exists()
    assert (ended[1].status, ended[1].output) == (2, "")
    assert "1 of 2 nodes cannot be reached from here, one is node 0 (it has an" in ended[1].errors
    assert len(ended[1].errors.splitlines()) == 1


@pytest.mark.slow
def test_a_node_that_comes_too_late_leaves_the_verdict_alone(tmp_path: Path) -> None:
    with Check(tmp_path) as check:
        check.directory.mkdir()
        (check.directory / "check.json").write_text("{}")
        check.start(3, wait_seconds=0.1)
        ended = check.end()
    assert (ended[3].status, ended[3].output) == (2, "")
    assert "only 1 of 4 nodes came, and" in ended[3].errors
    assert check.verdict() == {}


@pytest.mark.slow
def test_slurm_says_which_node_and_which_rack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_TOPOLOGY_ADDR": "core.rack3.node1",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }.items():
        monkeypatch.setenv(name, value)
    size = ("--nodes", "1", "--spares", "1", "--nproc-per-node", "1", "--wait-seconds", "0.1")
    place = ("--from-slurm", "--host", "127.0.0.1", "--run-dir", str(tmp_path))
    cli.main(["check", *place, *size, "--json"])
    missing, this = json.loads(capsys.readouterr().out)["nodes"]
    assert missing["reasons"] == ["it did not come within 0.1 s"]
    assert (this["node"], this["facts"]["domain"]) == (1, "rack3")
    announced = json.loads((tmp_path / "check" / "node-1.json").read_text())
    assert announced["attempt"].startswith("7.0")


def complain(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["check", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    return said.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--node-id", "0"), "--run-dir is missing"),
        (("--run-dir", "DIR", "--node-id", "0"), "--nodes is missing"),
        (("--run-dir", "DIR", "--nodes", "2"), "--nproc-per-node is missing"),
        (("--run-dir", "DIR", "--nodes", "2", "--nproc-per-node", "0"), "must be at least 1"),
        (("--run-dir", "DIR", "--nodes", "2", "--nproc-per-node", "1"), "--node-id I or"),
        (
            ("--run-dir", "DIR", "--nodes", "2", "--nproc-per-node", "1", "--node-id", "2"),
            "there is no node 2: with --nodes 2 --spares 0 they are 0 to 1",
        ),
        (
            ("--run-dir", "DIR", "--nodes", "2", "--nproc-per-node", "1", "--from-slurm"),
            "--from-slurm: this is no Slurm job",
        ),
        (("--shm-gb", "-1"), "--shm-gb must not be negative"),
        (("--plan", "/nonexistent.yaml"), "--plan /nonexistent.yaml: No such file"),
        (
            (
                *("--run-dir", "DIR", "--nodes", "2", "--nproc-per-node", "1", "--node-id", "0"),
                *("--host", "203.0.113.7"),
            ),
            "cannot listen on 203.0.113.7",
        ),
        (
            (
                *("--run-dir", "DIR", "--nodes", "2", "--nproc-per-node", "1", "--node-id", "0"),
                *("--host", "127.0.0.1", "--domains", "/nonexistent"),
            ),
            "--domains /nonexistent: No such file",
        ),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    given = [str(tmp_path / "run") if word == "DIR" else word for word in arguments]
    assert said in complain(capsys, *given)


def test_a_plan_for_another_cluster_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Path(__file__).parents[2] / "configs" / "65b.yaml"
    size = ("--nodes", "2", "--nproc-per-node", "8", "--node-id", "0")
    said = complain(capsys, "--run-dir", str(tmp_path / "run"), *size, "--plan", str(plan))
    assert "is for 64 nodes of 8 GPUs, not for --nodes 2 --nproc-per-node 8" in said


def test_a_plan_says_how_much_memory_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    plan = Path(__file__).parents[2] / "configs" / "65b.yaml"
    args = parser.parse_args(["check", "--plan", str(plan)])
    assert command.check(args, MadeUp(0, {"0": {"facts": {"shm_free_bytes": 40 * 10**9}}})) == 1
    said = capsys.readouterr().out
    assert "problem: /dev/shm has 40.0 GB free, 50.3 GB are needed" in said
    assert command.check(args, MadeUp(0, {})) == 0


def test_one_machine_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--shm-gb", "1e9", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["facts"]["versions"]["python"].startswith("3.")
    assert "1000000000.0 GB are needed" in found["problems"][0]

    cli.main(["check"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "host"
    assert any(line.startswith("/dev/shm") for line in lines)

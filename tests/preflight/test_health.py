"""The word of the site and of the kernel log on a node: what each end or record means."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.cli.prepare.gpu_health import run as gpu_health
from deadpool_megatron.preflight import health
from deadpool_megatron.preflight.health import Answer, Health, ask
from deadpool_megatron.preflight.host import read_facts
from deadpool_megatron.preflight.judge import HostFacts, Needs, Standing, problems
from tests.common.programs import run_among, stand_in
from tests.common.waiting import PATIENCE_SECONDS, wait_for

WRAPPERS = Path(__file__).parents[2] / "configs" / "health"
_PROGRAM = "NVRM: Xid (PCI:0000:65:00): 31, pid=812, name=python, Ch 00000008, intr 10000000"
_DEVICE = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("echo fine", Answer(Health.GOOD, "fine")),
        ("echo first; echo 'slow link'; exit 1", Answer(Health.SPARE_ONLY, "slow link")),
        ("echo ECC >&2; exit 2", Answer(Health.OUT, "ECC")),
        ("exit 2", Answer(Health.OUT, "no output")),
        ("exit 3", Answer(Health.UNKNOWN, "no output")),
        ("exit 4", Answer(Health.UNKNOWN, "ended with status 4: no output")),
        ("kill -9 $$", Answer(Health.UNKNOWN, "ended with status -9: no output")),
        (r"printf 'a\033[31mb\n'; exit 1", Answer(Health.SPARE_ONLY, "a?[31mb")),
    ],
)
def test_each_end_has_a_meaning(command: str, answer: Answer) -> None:
    assert ask(command, PATIENCE_SECONDS) == answer


def test_a_command_that_is_not_there_is_no_reason() -> None:
    answer = ask("/nowhere/check_node", PATIENCE_SECONDS)
    assert answer.health is Health.GOOD
    assert "not found" in answer.text


def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    answer = ask(f"sleep 1000 & echo $! > {pid}; wait", 0.5)
    assert answer == Answer(Health.UNKNOWN, "no answer within 0.5 s")
    child = Path(f"/proc/{pid.read_text().strip()}")
    wait_for("the child to be killed", lambda: not child.exists() or is_dead(child))


def is_dead(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("status", "standing"), [(1, Standing.WEAK), (2, Standing.LEFT_OUT), (0, None)]
)
def test_a_node_is_judged_by_it(status: int, standing: Standing | None) -> None:
    facts = read_facts("", f"echo said; exit {status}", PATIENCE_SECONDS)
    assert HostFacts.from_dict(facts.to_dict()) == facts
    told = [one for one in problems(facts, Needs(1)) if "health command" in one.text]
    assert [one.standing for one in told] == ([] if standing is None else [standing])


@pytest.mark.parametrize(
    ("wrapper", "program", "ends"),
    [
        ("nhc.sh", "nhc", {0: 0, 1: 2}),
        ("dcgm.sh", "dcgmi", {0: 0, 226: 2, 205: 2, 235: 3, 1: 3}),
        ("gpucm.sh", "health_checks", {0: 0, 1: 1, 2: 2, 3: 3}),
    ],
)
def test_wrappers_translate(
    wrapper: str, program: str, ends: dict[int, int], tmp_path: Path
) -> None:
    """With a stand-in for the program, and without it."""
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert run_among(tmp_path, WRAPPERS / wrapper, **path).returncode == 0
    for given, expected in ends.items():
        stand_in(tmp_path, **{program: f"exit {given}"})
        assert run_among(tmp_path, WRAPPERS / wrapper, **path).returncode == expected, given


@pytest.mark.parametrize("number", [13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 999])
def test_only_a_fault_of_the_device_takes_its_node_out(number: int) -> None:
    found = health.newest_bad([record(1.0, f"NVRM: Xid (0000:03:00): {number}, it says")], 0.0)
    assert (found is not None) == (number in {48, 63, 64, 74, 79, 94, 95})


def record(seconds: float, text: str) -> bytes:
    return f"4,7,{seconds * 1e6:.0f},-;{text}\n SUBSYSTEM=pci\n".encode()


def test_the_command_answers_as_a_health_command_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "boot_seconds", lambda: 10_000.0)
    log = [record(9_000.0, _DEVICE), record(9_990.0, _PROGRAM), record(9_999.0, "Xid 79"), b"none"]
    assert gpu_health(argparse.Namespace(hours=1.0), lambda: log) == 2
    assert capsys.readouterr().out == "Xid 79 of GPU 0000:c1:00, 1000 s ago\n"
    assert gpu_health(argparse.Namespace(hours=0.1), lambda: log) == 0

    def closed() -> Iterator[bytes]:
        raise PermissionError("Operation not permitted")
        yield

    assert gpu_health(argparse.Namespace(hours=1.0), closed) == 0
    assert "kernel log not asked: Operation" in capsys.readouterr().out

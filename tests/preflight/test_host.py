"""What a host says of itself, ``deadpool check`` of it, and the word of site and kernel log."""

import argparse
import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.prepare.gpu_health import run as gpu_health
from deadpool_megatron.preflight import health, host
from deadpool_megatron.preflight.eligibility import HostFacts
from deadpool_megatron.preflight.health import Health, HealthResult, check_health
from tests.common.programs import run_among, stand_in
from tests.common.wait import wait_for

LARGE = {"memory_bytes": 10**12, "shm_bytes": 10**12, "shm_free_bytes": 10**12, "open_files": 4096}


def test_facts_survive_json():
    facts = host.read_facts("127.0.0.1")
    assert HostFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert facts.interface == "lo"
    assert facts.interface_up
    assert facts.memory_bytes > 0
    assert {"python", "torch", "megatron-core", "deadpool-megatron"} <= facts.versions.keys()


def test_variables_of_the_run_replace_those_of_the_host(monkeypatch):
    monkeypatch.setattr(os, "environ", {"NVTE_X": "1", "NCCL_ALGO": "Ring", "PYTHONHASHSEED": "3"})
    assert host.adopt_variables({"NVTE_Y": "2", "NCCL_ALGO": "Tree"}) == [
        "NCCL_ALGO is Tree, as in the run (it was Ring here)",
        "NVTE_X is not set, as in the run (it was 1 here)",
        "NVTE_Y is 2, as in the run (it was not set here)",
    ]
    expected = {"NVTE_Y": "2", "NCCL_ALGO": "Tree", "PYTHONHASHSEED": "3"}
    assert os.environ == expected, "Python has read its seed already"
    assert not host.adopt_variables({"NVTE_Y": "2", "NCCL_ALGO": "Tree"})


def test_check_takes_the_needed_memory_from_a_plan(monkeypatch, capsys):
    plan = Path(__file__).parents[2] / "configs" / "65b.yaml"
    large = dataclasses.replace(host.read_facts(""), **LARGE)
    monkeypatch.setattr(host, "read_facts", lambda *_: large)
    assert cli.main(["check", "--plan", str(plan)]) == 0
    small = dataclasses.replace(large, shm_free_bytes=40 * 10**9)
    monkeypatch.setattr(host, "read_facts", lambda *_: small)
    assert cli.main(["check", "--plan", str(plan)]) == 1
    assert "problem: /dev/shm has 40.0 GB free, 49.5 GB are needed" in capsys.readouterr().out


def test_check_describes_this_host(capsys):
    cli.main(["check", "--json"])
    assert json.loads(capsys.readouterr().out)["facts"]["versions"]["python"].startswith("3.")
    cli.main(["check"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "host"
    assert any(line.startswith("/dev/shm") for line in lines)
    capsys.readouterr()
    assert cli.main(["check", "--json", "--health-command", "/no/such"]) == 1
    assert "/no/such" in json.loads(capsys.readouterr().out)["problems"][-1]


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize(
    "command",
    [
        ["check"],
        ["run", "--nodes", "1", "--nproc-per-node", "1", "--run-dir", "X", "--", "-m", "json"],
        ["agent", "--node-id", "0", "--run-dir", "X"],
    ],
)
def test_commands_refuse_a_host_without_pidfd_open(command, number, monkeypatch, capsys):
    """Old kernels, and containers on new ones: the call is what is missing."""

    def refused(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert cli.main(command) == 2
    told = capsys.readouterr().err
    assert all(word in told for word in ("pidfd_open", "5.3", "seccomp", os.strerror(number)))


WRAPPERS = Path(__file__).parents[2] / "configs" / "health"
_PROGRAM = "NVRM: Xid (PCI:0000:65:00): 31, pid=812, name=python, Ch 00000008, intr 10000000"
_DEVICE = "NVRM: Xid (PCI:0000:c1:00): 79, pid='<unknown>', GPU has fallen off the bus."


def test_a_command_that_hangs_is_ended_with_all_that_it_has_started(tmp_path):
    pid = tmp_path / "pid"
    answer = check_health(f"sleep 1000 & echo $! > {pid}; wait", 0.5)
    assert answer == HealthResult(Health.UNKNOWN, "no answer within 0.5 s")
    child = Path(f"/proc/{pid.read_text().strip()}")
    wait_for("the child to be killed", lambda: not child.exists() or is_dead(child))


def is_dead(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("wrapper", "program", "ends"),
    [
        ("nhc.sh", "nhc", {0: 0, 1: 2}),
        ("dcgm.sh", "dcgmi", {0: 0, 226: 2, 205: 2, 235: 3, 1: 3}),
        ("gpucm.sh", "health_checks", {0: 0, 1: 1, 2: 2, 3: 3}),
    ],
)
def test_wrappers_translate(wrapper, program, ends, tmp_path):
    """With a stand-in for the program, and without it."""
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    assert run_among(tmp_path, WRAPPERS / wrapper, **path).returncode == 0
    for given, expected in ends.items():
        stand_in(tmp_path, **{program: f"exit {given}"})
        assert run_among(tmp_path, WRAPPERS / wrapper, **path).returncode == expected, given


def record(seconds: float, text: str) -> bytes:
    return f"4,7,{seconds * 1e6:.0f},-;{text}\n SUBSYSTEM=pci\n".encode()


def test_the_command_answers_as_a_health_command_does(capsys, monkeypatch):
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

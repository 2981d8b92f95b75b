"""What a host says of itself, ``deadpool check`` of it, and the word of site and kernel log."""

import argparse
import dataclasses
import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.prepare.gpu_health import run as gpu_health
from deadpool_megatron.preflight import health, host, host as gpus
from deadpool_megatron.preflight.health import Answer, Health, ask
from deadpool_megatron.preflight.host import read_facts
from deadpool_megatron.preflight.judge import HostFacts, Needs, Standing, problems
from tests.common.programs import run_among, stand_in
from tests.common.waiting import PATIENCE_SECONDS, wait_for

ROOMY = {"memory_bytes": 10**12, "shm_bytes": 10**12, "shm_free_bytes": 10**12, "open_files": 4096}


def test_facts_survive_json() -> None:
    facts = host.read_facts("127.0.0.1")
    assert HostFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert facts.interface == "lo"
    assert facts.interface_up
    assert facts.memory_bytes > 0
    assert {"python", "torch", "megatron-core", "deadpool-megatron"} <= facts.versions.keys()


#: The second GPU is split.
LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
  MIG 3g.40gb     Device  0: (UUID: MIG-5)
  MIG 4g.40gb     Device  1: (UUID: MIG-6)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-3)
"""


def test_gpus_are_those_that_nvidia_smi_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    stand_in(tmp_path, **{"nvidia-smi": f"cat <<'END'\n{LISTED}END"})
    assert gpus.listed_gpus() == ("GPU-1", "MIG-5", "MIG-6", "GPU-3")

    def hangs(*_: object, **options: float) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", options["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert gpus.listed_gpus() == ()


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        (None, ("GPU-a1", "GPU-b2", "GPU-c3", "GPU-d4")),
        ("", ()),
        (" ", ()),
        ("2,3", ("GPU-c3", "GPU-d4")),
        ("3, 0", ("GPU-d4", "GPU-a1")),
        ("GPU-d4,GPU-b", ("GPU-d4", "GPU-b2")),
        ("GPU-d4,GPU-gone,GPU-a1", ("GPU-d4",)),
        ("1,4,2", ("GPU-b2",)),
        ("0,-1,2", ("GPU-a1",)),
        ("0,,2", ("GPU-a1",)),
        ("-1", ()),
    ],
)
def test_visible_gpus_are_those_that_the_driver_would_show(
    named: str | None, seen: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "listed_gpus", lambda: ("GPU-a1", "GPU-b2", "GPU-c3", "GPU-d4"))
    assert gpus.visible_gpus({} if named is None else {gpus.VISIBLE: named}) == seen


@pytest.mark.parametrize(
    ("seen", "slot", "may_share", "shown"),
    [
        (("a", "b"), 1, False, ("0", "b")),
        (("a", "b"), 2, False, ("0", "")),
        ((), 0, False, ("0", "")),
        (("a", "b"), 3, True, ("0", "b")),
        ((), 3, True, ("3", None)),
    ],
)
def test_a_member_is_shown_its_own_gpu(
    seen: tuple[str, ...], slot: int, may_share: bool, shown: tuple[str, str | None]
) -> None:
    found = gpus.of_member(seen, slot, may_share=may_share)
    assert (found["LOCAL_RANK"], found.get(gpus.VISIBLE)) == shown


def test_a_plan_says_how_much_memory_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Path(__file__).parents[2] / "configs" / "65b.yaml"
    roomy = dataclasses.replace(host.read_facts(""), **ROOMY)
    monkeypatch.setattr(host, "read_facts", lambda *_: roomy)
    assert cli.main(["check", "--plan", str(plan)]) == 0
    small = dataclasses.replace(roomy, shm_free_bytes=40 * 10**9)
    monkeypatch.setattr(host, "read_facts", lambda *_: small)
    assert cli.main(["check", "--plan", str(plan)]) == 1
    assert "problem: /dev/shm has 40.0 GB free, 49.5 GB are needed" in capsys.readouterr().out


def test_this_host(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["check", "--json"])
    assert json.loads(capsys.readouterr().out)["facts"]["versions"]["python"].startswith("3.")
    cli.main(["check"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "host"
    assert any(line.startswith("/dev/shm") for line in lines)
    capsys.readouterr()
    assert cli.main(["check", "--json", "--health-command", "/no/such"]) == 1
    assert "/no/such" in json.loads(capsys.readouterr().out)["problems"][-1]


LINGER, LOGIND, BESIDE = (
    "var/lib/systemd/linger",
    "etc/systemd/logind.conf",
    "etc/systemd/logind.conf.d",
)


@pytest.mark.parametrize(
    ("user", "files", "told"),
    [
        (os.getuid() + 1000, {}, True),  # what upstream has it be
        (0, {}, False),
        (54321, {LOGIND: "[Login]\n#RemoveIPC=no\n"}, True),
        (54321, {LOGIND: "[Login]\nRemoveIPC=no\n"}, False),
        (54321, {LOGIND: "RemoveIPC=no\n", f"{BESIDE}/9.conf": " RemoveIPC = yes\n"}, True),
        (54321, {f"{LINGER}/54321": ""}, False),
    ],
)
def test_memory_that_logind_removes_is_told(
    tmp_path: Path, user: int, files: dict[str, str], told: bool
) -> None:
    assert not host.memory_may_go(user, tmp_path), "there is no systemd"
    for name, text in {"run/systemd/system/x": "", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert ("enable-linger" in host.memory_may_go(user, tmp_path)) is told


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize(
    "command",
    [
        ["check"],
        ["run", "--nodes", "1", "--nproc-per-node", "1", "--run-dir", "X", "--", "-m", "json"],
        ["agent", "--node-id", "0", "--run-dir", "X"],
    ],
)
def test_a_host_without_pidfd_open_is_told(
    command: list[str],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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

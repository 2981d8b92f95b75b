"""What a host says about itself, and ``deadpool check`` of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from deadpool_megatron import cli
from deadpool_megatron.preflight import host
from deadpool_megatron.preflight import host as gpus
from deadpool_megatron.preflight.judge import HostFacts
from tests.common.programs import stand_in

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

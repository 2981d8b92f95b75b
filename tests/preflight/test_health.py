"""The site's own word on a node: what each end of its command means."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deadpool_megatron.preflight.facts import HostFacts, Needs
from deadpool_megatron.preflight.health import Answer, Health, ask
from deadpool_megatron.preflight.host import read_facts
from deadpool_megatron.preflight.judge import Standing, problems
from tests.common.waiting import PATIENCE_SECONDS, wait_for

WRAPPERS = Path(__file__).parents[2] / "configs" / "health"
# On the PATH from an environment of its own: it wants other releases of what we use.
GPUCM = shutil.which("health_checks")


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("echo fine", Answer(Health.GOOD, "fine")),
        ("echo first; echo 'slow link'; exit 1", Answer(Health.SPARE_ONLY, "slow link")),
        ("echo ECC >&2; exit 2", Answer(Health.OUT, "ECC")),
        ("exit 2", Answer(Health.OUT, "it printed nothing")),
        ("exit 3", Answer(Health.SPARE_ONLY, "ended with status 3: it printed nothing")),
        ("kill -9 $$", Answer(Health.SPARE_ONLY, "ended with status -9: it printed nothing")),
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
    assert answer == Answer(Health.SPARE_ONLY, "no answer within 0.5 s")
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
        ("dcgm.sh", "dcgmi", {0: 0, 226: 2, 205: 2, 235: 1, 1: 1}),
        ("gpucm.sh", "health_checks", {0: 0, 1: 1, 2: 2, 3: 1}),
    ],
)
def test_wrappers_translate(
    wrapper: str, program: str, ends: dict[int, int], tmp_path: Path
) -> None:
    """With a stand-in for the program, and without it."""
    path = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    script = [str(WRAPPERS / wrapper)]
    assert subprocess.run(script, env=path).returncode == 0
    for given, expected in ends.items():
        fake = tmp_path / program
        fake.write_text(f"#!/bin/sh\nexit {given}\n")
        fake.chmod(0o755)
        assert subprocess.run(script, env=path).returncode == expected, given


def test_checks_that_a_release_of_gpucm_does_not_know_take_no_node_out(tmp_path: Path) -> None:
    """What reads the arguments ends with the status that means critical in a check."""
    fake = tmp_path / "health_checks"
    fake.write_text('#!/bin/sh\n[ "$1" = good ] && echo OK && exit 0\necho "$*"\nexit 2\n')
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:/usr/bin:/bin"}
    for asked, status in (("Usage: health_checks", 1), ("CRITICAL row", 2)):
        checks = {"CHECKS": f"good\n{asked}\ngood"}
        command = [str(WRAPPERS / "gpucm.sh")]
        done = subprocess.run(command, env=environment | checks, capture_output=True, text=True)
        assert done.returncode == status, asked
        assert done.stdout.splitlines()[-1] == asked, "the reason that is shown"


@pytest.mark.skipif(GPUCM is None, reason="no gpucm on the PATH (docs/health.md)")
def test_gpucm_itself_knows_the_checks() -> None:
    """Without GPUs it warns that it cannot ask: no word on the node, and no usage told."""
    script = [str(WRAPPERS / "gpucm.sh")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert "Usage:" not in done.stdout
    assert "nvidia smi" in done.stdout
    assert "xid errors" in done.stdout
    assert done.returncode in (0, 1)
    checks = "check-ib check-ibstat here app\ncheck-dmesg"
    asked = {**os.environ, "CHECKS": checks}
    done = subprocess.run(script, env=asked, capture_output=True, text=True)
    assert "check ibstat" in done.stdout
    assert "Usage:" in done.stdout
    assert done.returncode == 1

"""scripts/compat.sh with an interpreter of the user's: what it would run, without its packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compat.sh"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A stand-in for an interpreter that has its packages; it writes down what it is to run."""
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\n[ "$1" != -c ] || {{ echo 3.99.0; exit; }}\necho "$@" >>{tmp_path}/ran\n'
    )
    program.chmod(0o755)
    programs = tmp_path / "base" / "python3.99.0" / "venv-torch2.14-megatron0.19" / "bin"
    programs.mkdir(parents=True)
    (programs.parent / "ready").touch()
    (programs / "python").symlink_to(program)
    return program


def compat(python: Path, *words: str) -> subprocess.CompletedProcess[str]:
    base = python.parent / "base"
    options = ["--torch", "2.14", "--python", str(python), "--root", str(base)]
    return subprocess.run([SCRIPT, *options, *words], capture_output=True, text=True)


def test_an_interpreter_of_the_user_runs_all_parts(python: Path) -> None:
    done = compat(python)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert parts == ["groups:", "fast:", "demo:", "megatron:", "faults:"]
    ran = (python.parent / "ran").read_text().splitlines()
    assert len(ran) == len(parts)
    assert " tests/megatron_lm --full --deselect tests/megatron_lm/test_tags.py" in ran[3]


def test_a_command_runs_in_the_checkout(python: Path) -> None:
    done = compat(python, "--", "bash", "-c", "pwd; command -v python; echo $PYTHONPATH")
    where, found, path = done.stdout.splitlines()[-3:]
    assert (where, path) == (str(ROOT), str(ROOT))
    assert found.startswith(f"{python.parent}/base/python3.99.0/")


def test_what_is_no_interpreter_is_told(python: Path) -> None:
    done = compat(python.parent / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1] == f"compat: {python.parent}/none is no Python that runs"

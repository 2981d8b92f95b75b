"""Who goes on with what a dead agent held: launcher and coordinator come to the same answer."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deadpool_megatron.cluster.process import posix
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.cluster.run_directory.slots import is_followed
from deadpool_megatron.layout.schemes import Kind
from deadpool_megatron.settings import Settings

LOCAL = Settings(protection=Kind.LOCAL)


@pytest.fixture
def vault() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def _listed(path: Path, node: int, pid: int) -> RunDirectory:
    run = RunDirectory(path)
    (path / "nodes").mkdir(exist_ok=True)
    listing = {
        "hostname": socket.gethostname(),
        "vault": pid,
        "started": {str(pid): posix.start_time(pid)},
    }
    run.node(node).write_text(json.dumps(listing))
    return run


def test_what_a_living_vault_shows_stays_said(
    tmp_path: Path, vault: subprocess.Popen[bytes]
) -> None:
    """The launcher ends the vault, and the coordinator may look only after that."""
    run = _listed(tmp_path, 1, vault.pid)
    assert not is_followed(Settings(), run, 1), "others have copies"
    assert is_followed(LOCAL, run, 1)
    vault.kill()
    vault.wait()
    assert is_followed(LOCAL, run, 1)


def test_a_vault_that_is_about_to_die_went_with_its_host(
    tmp_path: Path, vault: subprocess.Popen[bytes]
) -> None:
    run = _listed(tmp_path, 1, vault.pid)
    vault.send_signal(signal.SIGKILL)
    assert not is_followed(LOCAL, run, 1), "a zombie, or not even that yet"
    vault.wait()
    assert not is_followed(LOCAL, run, 1)
    run.forget_followed()
    assert not is_followed(LOCAL, run, 1), "there is no such process"


def test_who_looked_first_is_right(tmp_path: Path, vault: subprocess.Popen[bytes]) -> None:
    """Between two looks a vault may die; a next start of the run looks anew."""
    run = _listed(tmp_path, 1, vault.pid)
    assert not run.settle_followed(1, follows=False)
    assert not is_followed(LOCAL, run, 1)
    run.forget_followed()
    assert is_followed(LOCAL, run, 1)
    assert run.settle_followed(1, follows=False)


def test_agents_that_end_again_and_again_are_not_followed_for_ever(
    tmp_path: Path, vault: subprocess.Popen[bytes]
) -> None:
    answers = [is_followed(LOCAL, _listed(tmp_path, node, vault.pid), node) for node in range(7)]
    assert answers == [True] * 5 + [False] * 2


def test_a_process_is_doomed_once_killed_not_when_stopped(vault: subprocess.Popen[bytes]) -> None:
    assert not posix.is_doomed(vault.pid)
    vault.send_signal(signal.SIGSTOP)
    os.waitpid(vault.pid, os.WUNTRACED)
    assert not posix.is_doomed(vault.pid)
    vault.send_signal(signal.SIGKILL)
    assert posix.is_doomed(vault.pid)
    vault.wait()
    assert posix.is_doomed(vault.pid), "there is no such process any more"

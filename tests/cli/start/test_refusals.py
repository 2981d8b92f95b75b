"""Refusals that depend on what else goes on: a full disk, a second start, a dead coordinator."""

import errno
import os
import shutil
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from deadpool_megatron import cli
from deadpool_megatron.cli.start import checks, launch, restarting, resuming
from deadpool_megatron.cluster.run_directory import cleanup, directory
from deadpool_megatron.layout.records import Generation, Restore
from deadpool_megatron.vault.errors import VaultError
from deadpool_megatron.wire import auth
from tests.cli.start.refused import RUN_ID, agent_arguments, old_run, run_arguments
from tests.cli.told import Complain

LAUNCH = launch.Launcher.run
pytestmark = pytest.mark.usefixtures("nothing_starts")


def test_run_directory_that_is_taken(tmp_path: Path, complain: Complain) -> None:
    old = old_run(tmp_path / "old")
    old.final.write_text("{}")
    parent = os.getppid()
    directory.write_json(old.node(0), {"agent": parent, "started": {str(parent): None, "1": 1}})
    assert "holds an earlier run" in complain(*run_arguments(old.path))
    started = Path(f"/proc/{parent}/stat").read_text().rsplit(")", 1)[1].split()[19]
    listing = {"agent": parent, "started": {str(parent): int(started)}}
    directory.write_json(old.node(0), {**listing, "hostname": "elsewhere"})
    assert "holds an earlier run" in complain(*run_arguments(old.path))
    directory.write_json(old.node(0), listing)
    assert "which is alive" in complain(*run_arguments(old.path))
    old.final.unlink()
    assert "which is alive" in complain(*run_arguments(old.path))
    directory.write_json(old.node(0), {})
    other = complain(*run_arguments(old.path, "--resume", str(tmp_path)))
    assert "leave --resume out" in other


def test_a_start_that_came_to_nothing_makes_room(tmp_path: Path) -> None:
    run = old_run(tmp_path / "r")
    directory.write_json(run.final, {"exit_status": 2, "reason": "", "iterations": 0})
    checks.check_run_directory(run)
    assert not run.path.exists()
    assert (tmp_path / "r.failed-1" / "final.json").exists()


@pytest.mark.parametrize("arguments_of", [run_arguments, agent_arguments])
def test_a_full_disk_is_one_line_and_its_directory_can_be_used_again(
    arguments_of: Callable[[Path], list[str]],
    tmp_path: Path,
    complain: Complain,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "r"
    monkeypatch.setattr(launch.Launcher, "run", LAUNCH)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        line = complain(*arguments_of(path))
    first = "secret" if arguments_of is agent_arguments else "run.json"
    assert line.endswith(f": {path}/{first}: No space left on device")
    checks.check_run_directory(directory.RunDirectory(path))
    (path / "logs").mkdir(exist_ok=True)
    (path / "logs" / "node0-agent.log").touch()
    assert "is not empty" in complain(*run_arguments(path))


def test_resume_points_that_cannot_be_used(tmp_path: Path, complain: Complain) -> None:
    old = old_run(tmp_path / "old")

    def resume() -> str:
        return complain(*run_arguments(tmp_path / "r", "--resume", str(old.path)))

    for text in ("{", "[" * 100_000):
        old.latest.write_text(text)
        assert "damaged" in resume()
    old.latest.unlink()
    old.latest.mkdir()
    assert f"{old.latest}: Is a directory" in resume()
    old.latest.rmdir()
    restore = Restore("durable", Generation(1, 5), path=str(tmp_path / "gone"))
    other = old_run(tmp_path / "other", world_size=4)
    directory.write_json(other.latest, restore.to_dict())
    arguments = run_arguments(tmp_path / "r", "--resume", str(other.path))
    assert "has 4 roles, this one 2, and there is no checkpoint" in complain(*arguments)


def test_resume_does_not_leave_behind_what_cannot_be_written(
    tmp_path: Path, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be newer than the checkpoint, which would be gone on from without a word."""
    old = old_run(tmp_path / "old")
    directory.write_json(
        old.latest, Restore("durable", Generation(1, 5), path=str(tmp_path)).to_dict()
    )

    def full(*_: object) -> list[str]:
        raise VaultError("no space")

    monkeypatch.setattr(resuming, "dump_orphans", full)
    line = complain(*run_arguments(tmp_path / "r", "--resume", str(old.path)))
    assert "cannot be written: no space; make room" in line


def test_too_little_shared_memory(
    tmp_path: Path, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(64, 64, 0))
    assert "0 MiB free" in complain(*run_arguments(tmp_path / "r"))
    monkeypatch.setattr(checks, "SEGMENT_ROOT", tmp_path / "no-shm")
    assert "missing or not writable" in complain(*run_arguments(tmp_path / "r"))


def test_run_whose_coordinator_is_dead_or_has_another_secret(
    tmp_path: Path, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = old_run(tmp_path / "old")
    assert "no coordinator yet" in complain("status", str(run.path))
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    directory.write_json(run.coordinator, {"host": "127.0.0.1", "port": port, "pid": 1})
    kill = ("kill", "--node", "1")
    for command in (("status",), ("stop",), ("drain", "--node", "1"), kill):
        line = complain(command[0], str(run.path), *command[1:])
        assert f"no coordinator at 127.0.0.1:{port}" in line
    with monkeypatch.context() as patched:
        patched.setattr(auth, "connect", Mock(side_effect=auth.AuthenticationError("no")))
        line = complain("status", str(run.path))
    assert ("DEADPOOL_SECRET" in line, "clean" in line) == (True, False)
    join = ("agent", "--run-dir", str(run.path), "--node-id", "0")
    wrong = (*join, "--coordinator", f"127.0.0.1:{port}")
    assert f"no coordinator at 127.0.0.1:{port}" in complain(*wrong)
    assert "is not HOST:PORT" in complain(*join, "--coordinator", "nowhere")
    assert f"belongs to run {RUN_ID}" in complain(*join, "--run-id", "new")
    (run.path / "secret").chmod(0o644)
    assert "chmod 600" in complain("status", str(run.path))


def test_two_launchers_of_one_directory(
    tmp_path: Path, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has found nobody alive, as the first one has not started anything yet."""
    held = []

    def first_was_faster(_info: directory.RunInfo) -> None:
        held.append(restarting.hold(directory.RunDirectory(tmp_path / "r")))

    monkeypatch.setattr(checks, "check_sizes", first_was_faster)
    assert "in use by another 'deadpool run'" in complain(*run_arguments(tmp_path / "r"))
    os.close(held.pop())
    monkeypatch.undo()
    checks.check_run_directory(directory.RunDirectory(tmp_path / "r"))


def test_a_second_launcher_neither_waits_for_the_first_nor_begins_its_run_again(
    tmp_path: Path, complain: Complain, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = old_run(tmp_path / "r")
    lock = restarting.hold(run)
    assert "in use by another 'deadpool run'" in complain(*run_arguments(run.path))
    os.close(lock)

    def it_comes_to_its_end(*_: object) -> None:
        directory.write_json(run.final, {"exit_status": 0, "reason": ""})

    monkeypatch.setattr(restarting, "_await_end", it_comes_to_its_end)
    assert "holds an earlier run" in complain(*run_arguments(run.path))


def test_clean_of_a_run_whose_agent_is_just_coming_back(tmp_path: Path, complain: Complain) -> None:
    """Between two numbers of its node it is in no listing, and its environment names no run."""
    run = old_run(tmp_path / "old")
    run_id = run.read_run().run_id
    held = cleanup.claim_segments(run, run_id)
    try:
        assert "is alive" in complain("clean", str(run.path))
        assert directory.segment_root(run_id).exists()
    finally:
        os.close(held)
    assert cli.main(["clean", str(run.path)]) == 0
    assert not directory.segment_root(run_id).exists()


@pytest.mark.usefixtures("imports_nothing")
def test_the_port_of_an_agent_may_be_taken_by_its_own_run_alone(
    tmp_path: Path, complain: Complain
) -> None:
    run = old_run(tmp_path / "old")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        where = ("--run-dir", str(run.path), "--host", "127.0.0.1", "--coordinator-port", str(port))
        arguments = ("agent", "--node-id", "0", "--preload", "", *where)
        line = complain(*arguments)
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in line
        directory.write_json(run.coordinator, {"host": "127.0.0.1", "port": port})
        assert "so far it is good" in complain(*arguments)
    assert not directory.segment_root(run.read_run().run_id).exists()


def test_help_of_every_command_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ([], *([name] for name in cli.COMMANDS)):
        with pytest.raises(SystemExit) as stop:
            cli.main([*command, "--help"])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        assert "usage: deadpool" in shown
        assert command or all(f"  {topic}:\n" in shown for topic in cli.TOPICS)

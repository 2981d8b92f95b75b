"""What a launcher leaves behind when it cannot start a run."""

import errno
import os
import shutil
import signal
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadpool_megatron.cli import main
from deadpool_megatron.cli.common import CommandError
from deadpool_megatron.cli.start import launch
from deadpool_megatron.cluster.agent import agent as service
from deadpool_megatron.cluster.agent.options import AgentOptions
from deadpool_megatron.cluster.journal.journal import Journal
from deadpool_megatron.cluster.run_directory import directory as run_files
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.failures import ExitStatus
from deadpool_megatron.settings import Settings
from tests.security.users import common_directory


@pytest.fixture
def slots():
    """A slot that is in memory from before."""
    run_id = uuid.uuid4().hex[:8]
    path = run_files.segment_root(run_id) / "node0" / "own-0-0.0.0.seg"
    run_files.segment_root(run_id).mkdir(mode=0o700)
    path.parent.mkdir()
    path.touch()
    yield path
    shutil.rmtree(run_files.segment_root(run_id), ignore_errors=True)


def launcher_in(directory: Path, run_id: str = "", **more: Any) -> launch.Launcher:
    """For a run of one node."""
    facts = {"settings": Settings(), **more}
    info = RunInfo(run_id or uuid.uuid4().hex[:8], 1, 1, 0, 1, ("x.py",), **facts)
    run = RunDirectory(directory)
    return launch.Launcher(run, info, (), 0, print, lambda: None, numbers=(0,))


def launcher_of(slots: Path, directory: Path, **more: Any) -> launch.Launcher:
    launcher = launcher_in(directory, slots.parents[1].name.removeprefix("deadpool-"), **more)
    launcher.directory.create(launcher.info)
    return launcher


@pytest.mark.parametrize("ended_epoch", [1, 0])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_decides_whether_slots_stay(slots, tmp_path, monkeypatch, number, ended_epoch):
    """A run that has not trained yet, as one that is started again with a slip in its command,
    leaves what was there before it. One that has is stopped with all that it holds where it was
    told to end, not where its user or the terminal went."""
    launcher = launcher_of(slots, tmp_path, ended_epoch=ended_epoch)
    Journal(launcher.directory.journal).write("epoch", 1, {})
    monkeypatch.setattr(launch, "preload_modules", lambda *_: os.kill(os.getpid(), number))
    assert launcher.run() == ExitStatus.STOPPED
    assert slots.exists() == (ended_epoch == 1 or number != signal.SIGTERM)


@pytest.mark.parametrize("began", [True, False])
def test_launcher_keeps_the_state_in_memory_when_a_start_fails(slots, tmp_path, monkeypatch, began):
    """As with a package that is missing in the environment in which a run is started again."""
    launcher = launcher_of(slots, tmp_path)
    if began:
        Journal(launcher.directory.journal).write("epoch", 1, {})

    def missing(*_: object) -> None:
        raise CommandError("no module named megatron")

    monkeypatch.setattr(launch, "preload_modules", missing)
    with pytest.raises(CommandError):
        launcher.run()
    assert slots.exists() == began


@pytest.mark.slow
def test_launcher_ends_with_the_reason_why_no_coordinator_came(tmp_path, monkeypatch, capfd):
    settings = Settings(connect_seconds=5, spare_timeout_seconds=10)
    launcher = launcher_in(tmp_path, settings=settings)
    # After the checks, as a file system that fails when the run has begun.
    junk = launcher.directory.journal / "junk"
    monkeypatch.setattr(launch, "preload_modules", lambda *_: junk.touch())
    monkeypatch.setattr(service, "_TROUBLE_SECONDS", 0.5)
    with capfd.disabled():  # an agent keeps no descriptors but its own
        assert launcher.run() == 2
    reason = f"{junk} does not belong in a journal"
    assert launcher.failure == f"agent of node 0 ends: no coordinator for 5 s: {reason}"


def test_launcher_under_nohup_outlives_its_terminal_and_heeds_an_interrupt(tmp_path, monkeypatch):
    """A shell has jobs in its background ignore interrupts, and nohup the end of the session."""
    launcher = launcher_in(tmp_path)
    numbers = (signal.SIGHUP, signal.SIGINT)
    minded: list[bool] = []

    def stop(*_: object) -> None:
        minded.extend(signal.getsignal(number) is not signal.SIG_IGN for number in numbers)
        raise CommandError("seen enough")

    monkeypatch.setattr(launch, "preload_modules", stop)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        with pytest.raises(CommandError):
            launcher.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert minded == [False, True]


def test_run_warns_of_a_directory_that_others_could_replace(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("deadpool_megatron.cli.start.run.keep_single_threaded", lambda: None)
    monkeypatch.setattr(launch.Launcher, "run", lambda _: 0)
    script = tmp_path / "x.py"
    script.touch()
    size = ("--nodes", "2", "--nproc-per-node", "1", "--preload", "json")
    for mode, lines in ((0o2775, 2), (0o3775, 0)):
        with common_directory() as common:
            (common / "team").mkdir()
            (common / "team").chmod(mode)
            place = ("--run-dir", str(common / "team" / "run"))
            saves = ("--save", str(common / "team" / "saves"))
            assert main(["run", *size, *place, "--quiet", "--", str(script), *saves]) == 0
        assert capsys.readouterr().err.count("can put another directory in place of") == lines


Start = Callable[..., tuple[int, list[str]]]
SECONDS = 30.0


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Launch agents that are real processes: that of node 1 ends at once, others with their
    launcher. ``look(run)`` says whether the run is over."""
    info = RunInfo(uuid.uuid4().hex[:8], 2, 2, 0, 1, ("x.py",), Settings())
    run, reports, limit = RunDirectory(tmp_path / "run"), list[str](), time.monotonic() + SECONDS

    def serve(options: AgentOptions, **_: Any) -> int:
        while options.node != 1 and os.read(options.launcher_fd or 0, 1):
            pass
        return 0

    def begin(look: Callable[[RunDirectory], bool], refill: int = 0) -> tuple[int, list[str]]:
        def watched() -> None:
            if look(run) or time.monotonic() > limit:
                run_files.write_json(run.final, {"exit_status": 0, "reason": "", "iterations": 1})

        launcher = launch.Launcher(run, info, (), refill, reports.append, watched, (0, 1))
        return launcher.run(), reports

    monkeypatch.setattr(launch, "preload_modules", lambda *_: None)
    monkeypatch.setattr(launch, "serve", serve)
    yield begin
    shutil.rmtree(run_files.segment_root(info.run_id), ignore_errors=True)


@pytest.mark.slow
def test_launcher_outlives_a_run_directory_that_is_briefly_away(start, monkeypatch):
    """As with a file handle that has become stale: nothing of the run itself waits for it."""
    away = OSError(errno.ESTALE, "Stale file handle")
    exists, unlink, refused = Path.exists, Path.unlink, {"final.json": 5, "1.json": 1}

    def fails(path: Path) -> None:
        if refused.get(path.name, 0) > 0:
            refused[path.name] -= 1
            raise away

    monkeypatch.setattr(Path, "exists", lambda path: (fails(path), exists(path))[1])
    monkeypatch.setattr(Path, "unlink", lambda path, **how: (fails(path), unlink(path, **how))[1])
    status, reports = start(lambda _: not any(refused.values()))
    assert refused == {"final.json": 0, "1.json": 0}
    assert status == 0, reports

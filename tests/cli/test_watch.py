"""The events of a run as lines, on a terminal and elsewhere."""

import contextlib
import errno
import os
import pty
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import Mock

from deadpool_megatron.cli import watch
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cli.watch import Follower
from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Event, Kind, date, to_line
from deadpool_megatron.settings import Settings
from tests.common.synthetic_run import NOTHING_WAITS, status_of, write_run

_FULL = os.strerror(errno.ENOSPC)


class Recorder(Display):
    """Lines that stay, without their times, and statuses."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.statuses, self.days = list[str](), list[str](), list[str]()

    def line(self, text: str, style: str = "") -> None:
        if text.startswith("report: "):
            return
        at, gap, line = text.partition("  ")
        self.lines += [line] if gap else []
        self.days += [] if gap else [at]

    def status(self, text: str, part: float | None = None) -> None:
        self.statuses.append(text.split("  ", 1)[1])


def followed(directory: Path, events: Iterable[Event]) -> Recorder:
    (directory / "events.jsonl").write_bytes(b"".join(map(to_line, events)))
    shown = Recorder()
    Follower(RunDirectory(directory), shown).close()
    return shown


def test_follower_shows_repeated_events_once_and_none_after_the_end(tmp_path):
    events = [
        Event(Kind.EPOCH_OPENED, epoch=1),
        Event(Kind.EPOCH_OPENED, epoch=1),
        Event(Kind.EPOCH_OPENED, epoch=2),
        Event(Kind.RUN_ENDED, epoch=2),
        Event(Kind.NODE_LOST, epoch=2, node=0, data={"cause": "it left", "kind": "node-lost"}),
    ]
    lines = followed(tmp_path, events).lines
    assert [line.split()[0] for line in lines] == ["epoch", "epoch", "done:"]


def test_follower_shows_the_date_once_a_day(tmp_path):
    days = [3600.0 * hour for hour in (0, 1, 48)]
    events = [Event(Kind.EVALUATION, 1, iteration=1, wall_seconds=1e9 + at) for at in days]
    shown = followed(tmp_path, events)
    assert [day[:10] for day in shown.days] == [
        date(events[0].wall_seconds)[:10],
        date(events[2].wall_seconds)[:10],
    ]
    assert len(shown.lines) == 3


def test_watch_shows_a_run_from_its_newest_lines_to_its_end(tmp_path, carry_out, monkeypatch):
    run = write_run(tmp_path / "run", fault_at=6)
    (run / "run.json").unlink()
    info = RunInfo("0123abcd", 2, 2, 0, 1, ("x.py",), Settings())
    RunDirectory(run).create(info)
    status, text, _ = carry_out("watch", "--lines", "2", run)
    _, *lines, report = text.splitlines()
    assert (status, len(lines), lines[-1].split()[1]) == (0, 2, "done:")
    assert str(run) in report
    monkeypatch.setattr(watch, "_POLL_SECONDS", 0.0)
    for events in run.glob("events*"):
        events.unlink()
    assert carry_out("watch", run)[0] == 0, "its events are lost"


def test_follower_shows_events_once_they_can_be_read(tmp_path):
    """Who follows a run, as ``deadpool run`` does its own, ends it when it fails itself."""
    run, shown = RunDirectory(tmp_path), Recorder()
    follower, second = Follower(run, shown), tmp_path / "events-0002.jsonl"
    run.events.symlink_to(run.events.name)  # a real failure of the system, for root as well
    assert not follower.poll()
    run.events.unlink()
    run.events.write_bytes(to_line(Event(Kind.EPOCH_OPENED, epoch=1)))
    second.symlink_to(tmp_path / "away")
    assert [follower.poll(), follower.poll()] == [True, False]
    (tmp_path / "away").write_bytes(to_line(Event(Kind.EPOCH_OPENED, epoch=2)))
    assert follower.poll()
    assert len(shown.lines) == 2


def test_display_prints_lines_above_the_status():
    program = (
        "from deadpool_megatron.cli.display import Display\n"
        "display = Display()\n"
        "for run in (1, 2):\n"
        "    display.status(f'step {run}' + 200 * '.', run / 4)\n"
        "    display.line('a line', 'bold red')\n"
        "    display.close()\n"
        "    display.line('behind it')\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    with contextlib.suppress(OSError):  # Linux answers EIO when the other side is closed
        while found := os.read(terminal, 4096):
            shown += found
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    lines = shown.decode().replace("\r\n", "\n").split("\n")
    seen = [line.rpartition("\x1b[K")[2] for line in lines]
    red = "\x1b[1;31"
    bars = [f"[{'#' * full:.<20}] step {run}" for full, run in ((5, 1), (10, 2))]
    expected = [red, bars[0], "behind", red, bars[1], "behind", ""]
    assert [line[: len(begin)] for line, begin in zip(seen, expected, strict=True)] == expected
    assert max(map(len, seen)) < 80, "a status is one line, or it could not be taken back"


def test_follower_shows_the_coordinators_view_of_a_silence(tmp_path, monkeypatch):
    """At once, and once, where events cannot be written; else after a minute."""
    shown, full = Recorder(), {**NOTHING_WAITS, "waiting": 3, "trouble": "x", "why": _FULL}
    follower = Follower(RunDirectory(tmp_path), shown)
    monkeypatch.setattr(watch, "_ASK_SECONDS", -1.0)
    for events, patience, expected in (
        (NOTHING_WAITS, 60.0, []),
        (full, 60.0, ["is full since"]),
        (full, 60.0, []),
        (NOTHING_WAITS, -1.0, ["Running; iteration 7"]),
    ):
        monkeypatch.setattr(watch, "_SILENCE_SECONDS", patience)
        status = {**status_of(2, 4), "events": events, "iteration": 7, "fewer_copies": []}
        monkeypatch.setattr(watch.StatusPoller, "status", Mock(return_value=status))
        shown.lines.clear()
        assert not follower.poll()
        assert len(shown.lines) == len(expected)
        assert all(part in line for part, line in zip(expected, shown.lines, strict=True))

"""What whoever watches a run is told of its events, on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from synthetic_run import PHASES, events_of

from deadpool_megatron.cli.show.live import Display, Follower, PlainDisplay
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, EventLog, Kind, to_line


class Heard(Display):
    """Lines that stay, without their times, and statuses."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.statuses: list[str] = []

    def line(self, text: str, style: str = "") -> None:
        self.lines.append(text.split(" s  ", 1)[1])

    def status(self, text: str) -> None:
        self.statuses.append(text.split(" s  ", 1)[1])

    def close(self) -> None:
        pass


def followed(directory: Path, events: Iterable[Event]) -> Heard:
    log = EventLog(directory / "events.jsonl")
    for event in events:
        log.append(to_line(event))
    log.close()
    heard = Heard()
    Follower(RunDirectory(directory), heard).close()
    return heard


def test_a_failure_is_told_in_ten_lines_with_cause_phases_and_seconds(tmp_path: Path) -> None:
    heard = followed(tmp_path, events_of(10, 6, 0.0, began=1000.0))
    *told, evaluation = heard.lines
    assert evaluation == "evaluation at step 10  loss 2.5"
    assert len(told) <= 10
    assert told[:3] == [
        "lost connection of its agent closed",
        "epoch 1 closed: a node was lost: node 0: connection closed",
        "epoch 2 goes on from iteration 5 (1)",
    ]
    assert told[-1].startswith("recovered in 0.90 s (detect 0.01, close 0.08, ")
    for phase, seconds in PHASES.items():
        assert seconds < 0.005 or f"{phase} {seconds:.2f}" in told[-1]
    assert told[-1].endswith("; 1 iteration computed again")
    assert heard.statuses[-1].startswith("step 10  loss ")


def test_what_several_say_is_told_once_and_nothing_after_the_end(tmp_path: Path) -> None:
    found = {"matched": False, "difference": "main"}
    events = [
        Event(Kind.EPOCH_OPENED, epoch=1),
        Event(Kind.EPOCH_OPENED, epoch=1),
        Event(Kind.REHEARSED, epoch=1, role=0, data=found),
        Event(Kind.REHEARSED, epoch=1, role=1, data=found),
        Event(Kind.EPOCH_OPENED, epoch=2),
        Event(Kind.RUN_ENDED, epoch=2),
        Event(Kind.NODE_LOST, epoch=2, node=0, data={"cause": "it left"}),
    ]
    heard = followed(tmp_path, events)
    assert [line.split()[0] for line in heard.lines] == ["epoch", "an", "epoch"]


def test_events_that_cannot_be_read_now_are_told_later(tmp_path: Path) -> None:
    """Who follows a run ends it when it fails itself."""
    run, heard = RunDirectory(tmp_path), Heard()
    follower = Follower(run, heard)
    run.events.symlink_to(run.events.name)  # a real failure of the system, for root as well
    assert not follower.look()
    run.events.unlink()
    followed(tmp_path, events_of(10, 6, 0.0, began=1000.0))
    assert follower.look()
    assert "epoch 2 goes on from iteration 5 (1)" in heard.lines


@pytest.mark.parametrize(
    "bad",
    [
        Event(Kind.RECOVERED, data={"seconds": "x"}),
        Event(Kind.STEP, iteration=1, data={"loss": "0x1p+5000"}),
    ],
)
def test_an_event_of_another_form_ends_nothing(tmp_path: Path, bad: Event) -> None:
    heard = followed(tmp_path, [bad, Event(Kind.EPOCH_OPENED, epoch=1)])
    assert f"event {bad.kind} cannot be shown" in heard.lines[0]
    assert heard.lines[1:] == ["epoch 1 open"]


def test_a_plain_display_says_the_newest_status_before_a_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = PlainDisplay()
    for step in range(1, 9):
        display.status(f"step {step}")
    display.line("lost")
    display.status("step 9")
    display.close()
    assert capsys.readouterr().out.splitlines() == ["step 1", "step 8", "lost", "step 9"]


def test_a_terminal_has_lines_above_one_status() -> None:
    program = (
        "from deadpool_megatron.cli.show.live import make_display\n"
        "display = make_display()\n"
        "for run in (1, 2):\n"
        "    display.status(f'step {run}')\n"
        "    display.line('a line')\n"
        "    display.close()\n"
        "    display.line('behind it')\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(sys.executable, [sys.executable, "-c", program])
    shown = b""
    while True:
        try:
            found = os.read(terminal, 4096)
        except OSError:  # Linux answers EIO when the other side is closed
            break
        if not found:
            break
        shown += found
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0
    text = shown.decode()
    for part in ("step 1", "step 2", "a line", "behind it"):
        assert part in text
    assert text.count("behind it") == 2


def test_a_file_that_cannot_be_read_for_a_moment_ends_nothing(tmp_path: Path) -> None:
    """``deadpool run`` tells its own events: the run must not end with them."""
    first, second = tmp_path / "events.jsonl", tmp_path / "events-0002.jsonl"
    first.write_bytes(to_line(Event(Kind.EPOCH_OPENED, epoch=1)))
    second.symlink_to(tmp_path / "away")
    heard = Heard()
    follower = Follower(RunDirectory(tmp_path), heard)
    assert follower.look()
    assert not follower.look()
    (tmp_path / "away").write_bytes(to_line(Event(Kind.EPOCH_OPENED, epoch=2)))
    assert follower.look()
    assert heard.lines == ["epoch 1 open", "epoch 2 open"]

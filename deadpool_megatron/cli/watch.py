"""Follows a run from any host that sees its run directory: prints the lines of `deadpool run`, on a
terminal or as plain text, until the run is over. The run does not wait for it.

exit status: 0 the run is over, 2 no such run, 130 interrupted
"""

from __future__ import annotations

import argparse
import time
from collections import deque

from deadpool_megatron.cli.common import StatusPoller, add_run_directory, number
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, Event, EventTail, Kind, date
from deadpool_megatron.observe.narration import Line, Narrator, describe_progress
from deadpool_megatron.observe.story import RECENT_STEPS, Story

_POLL_SECONDS = 0.5
_LAST_POLLS = 10
# After _ASK_SECONDS without an event, ask the coordinator, which may be unable to write events. If
# so, show its status at once; else after _SILENCE_SECONDS, and again after the same time.
_ASK_SECONDS = 5.0
_SILENCE_SECONDS = 60.0
# Bytes of older events that are read to show the newest lines.
_RECENT_BYTES = 4 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_run_directory(parser)
    text = "begin with the N newest lines (default: %(default)s)"
    parser.add_argument("--lines", type=number(int, 0), default=20, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool watch``. Raises RunDirectoryError."""
    directory = RunDirectory(args.run_dir)
    directory.read_run(only_to_show=True)
    follower = Follower(directory, Display())
    follower.skip(args.lines)
    polls = 0
    # The last event may arrive after the result of the run, or never: then stop after some polls.
    while not follower.is_over and not (polls > _LAST_POLLS and directory.final.exists()):
        polls = 0 if follower.poll() else polls + 1
        time.sleep(_POLL_SECONDS if polls else 0.0)
    follower.close_with_report()
    return 0


class Follower:
    """Shows the events of a run on a display, those that are new at each ``poll``."""

    def __init__(self, run: RunDirectory, display: Display) -> None:
        self._run, self._tail, self._display = run, EventTail(run.events), display
        self._story = Story(RECENT_STEPS + 1)
        self._narrator = Narrator(self._story)
        self._day, self._poller = "", StatusPoller(run)
        self._polled_at = self._shown_at = time.monotonic()
        self._is_shown = False

    def skip(self, all_but_lines: int = 0) -> None:
        """Skip the present events: they are old, or an earlier start of the run has shown them.
        Show only the newest ``all_but_lines`` lines. Raises OSError."""
        self._tail.skip_all_but(_RECENT_BYTES)
        kept = deque[tuple[Event, Line]](maxlen=all_but_lines)
        while events := self._tail.poll():
            for event in events:
                kept.extend((event, line) for line in self._lines(event) if not line.passes)
        for event, line in kept:
            self._show(event, line)

    @property
    def is_over(self) -> bool:
        """Return whether the run has reported its end."""
        return self._story.ended is not None

    def poll(self) -> bool:
        """Show new events; return whether there were any."""
        try:
            events = self._tail.poll()
        except OSError:  # an unreadable directory must not end the run
            return False
        for event in events:
            for line in self._lines(event):
                self._show(event, line)
        now = time.monotonic()
        if events:
            self._polled_at = self._shown_at = now
            self._is_shown = False
        elif now - self._polled_at > _ASK_SECONDS and not self.is_over:
            self._polled_at = now
            self._poll_status(is_long_silence=now - self._shown_at > _SILENCE_SECONDS)
        return bool(events)

    def _poll_status(self, *, is_long_silence: bool) -> None:
        """Show the coordinator's status after a long silence, or once if events wait there."""
        view = self._poller.view(self._story)
        if is_long_silence or (view.events_waiting and not self._is_shown):
            self._is_shown, self._shown_at = True, time.monotonic()
            at, todo = date(view.now)[11:19], f". To do: {view.to_do}" if view.to_do else ""
            text = f"{view.title}; iteration {view.iteration}{todo}"
            self._display.line(f"{at}  {text}", "yellow")

    def close(self) -> None:
        """Show the remaining events."""
        self.poll()
        self._display.close()

    def close_with_report(self) -> None:
        """Show the remaining events, and the command for a report."""
        self.poll()
        if self.is_over:
            self._display.line(f"report: deadpool report {self._run.path}")
        self.close()

    def _lines(self, event: Event) -> list[Line]:
        try:
            return self._narrator.take(event)
        except DAMAGE as error:
            # A malformed event must not end 'deadpool run', which shows its events here.
            return [Line(f"event {event.kind} cannot be shown: {error!r}", "red")]

    def _show(self, event: Event, line: Line) -> None:
        at = date(event.wall_seconds)
        if at[:10] != self._day:
            self._day = at[:10]
            self._display.line(f"{self._day}, UTC{at[23:]}")
        text = line.text.replace("--run-dir DIR", f"--run-dir {self._run.path}")
        text = f"{at[11:19]}  {text}"
        story, part = self._story, None
        is_step = event.kind is Kind.STEP and line.passes  # after the lines of failures
        if is_step and (progress := describe_progress(story, event.wall_seconds)):
            text += f"  ({progress})"
            part = story.iterations and story.last_iteration / story.iterations
        if line.passes:
            self._display.status(text, part)
        else:
            self._display.line(text, line.style)

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
_LAST_LOOKS = 10
# After so long without an event the coordinator is asked: perhaps events cannot be written. What
# that says is shown at once if they cannot, else and again after a longer time.
_ASK_SECONDS = 5.0
_SILENCE_SECONDS = 60.0
# Of what is there already so much is read, for its newest lines.
_RECENT_BYTES = 4 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_run_directory(parser)
    text = "begin with the N newest lines (default: %(default)s)"
    parser.add_argument("--lines", type=number(int, 0), default=20, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool watch``. Raises RunDirectoryError."""
    directory = RunDirectory(args.run_dir)
    directory.read_run(only_to_show=True)
    follower = Follower(directory, Display())
    follower.skip(args.lines)
    looks = 0
    # Of a run that has its result, the event of its end is on its way, or lost.
    while not follower.is_over and not (looks > _LAST_LOOKS and directory.final.exists()):
        looks = 0 if follower.look() else looks + 1
        time.sleep(_POLL_SECONDS if looks else 0.0)
    follower.close_with_report()
    return 0


class Follower:
    """Tells a display what the events of a run say. ``look`` may be called at any time."""

    def __init__(self, run: RunDirectory, display: Display) -> None:
        self._run, self._tail, self._display = run, EventTail(run.events), display
        self._story = Story(RECENT_STEPS + 1)
        self._narrator = Narrator(self._story)
        self._day, self._poller = "", StatusPoller(run)
        self._asked_at = self._told_at = time.monotonic()
        self._is_told = False

    def skip(self, all_but_lines: int = 0) -> None:
        """Leave out what has been told so far, but for so many newest lines: it was shown by an
        earlier start of the run, or is old. Raises OSError."""
        self._tail.leave_out(_RECENT_BYTES)
        kept = deque[tuple[Event, Line]](maxlen=all_but_lines)
        while events := self._tail.poll():
            for event in events:
                kept.extend((event, line) for line in self._lines(event) if not line.passes)
        for event, line in kept:
            self._show(event, line)

    @property
    def is_over(self) -> bool:
        """Return whether the run has told its end."""
        return self._story.ended is not None

    def look(self) -> bool:
        """Tell what is new; return whether there was anything."""
        try:
            events = self._tail.poll()
        except OSError:  # a run must not end because nobody can be told of it for a moment
            return False
        for event in events:
            for line in self._lines(event):
                self._show(event, line)
        now = time.monotonic()
        if events:
            self._asked_at = self._told_at = now
            self._is_told = False
        elif now - self._asked_at > _ASK_SECONDS and not self.is_over:
            self._asked_at = now
            self._ask(is_long=now - self._told_at > _SILENCE_SECONDS)
        return bool(events)

    def _ask(self, *, is_long: bool) -> None:
        """Show what the coordinator says where no events come."""
        seen = self._poller.view(self._story)
        if is_long or (seen.events_waiting and not self._is_told):
            self._is_told, self._told_at = True, time.monotonic()
            at, todo = date(seen.now)[11:19], f". To do: {seen.to_do}" if seen.to_do else ""
            text = f"{seen.title}; iteration {seen.iteration}{todo}"
            self._display.line(f"{at}  {text}", "yellow")

    def close(self) -> None:
        """Tell the rest."""
        self.look()
        self._display.close()

    def close_with_report(self) -> None:
        """Tell the rest, and the command that shows all of it."""
        self.look()
        if self.is_over:
            self._display.line(f"report: deadpool report {self._run.path}")
        self.close()

    def _lines(self, event: Event) -> list[Line]:
        try:
            return self._narrator.take(event)
        except DAMAGE as error:
            # Of an agent that has lost its mind; whoever watches must not end the run.
            return [Line(f"event {event.kind} cannot be shown: {error!r}", "red")]

    def _show(self, event: Event, line: Line) -> None:
        at = date(event.wall_seconds)
        if at[:10] != self._day:
            self._day = at[:10]
            self._display.line(f"{self._day}, UTC{at[23:]}")
        told = line.text.replace("--run-dir DIR", f"--run-dir {self._run.path}")
        text = f"{at[11:19]}  {told}"
        story, part = self._story, None
        is_step = event.kind is Kind.STEP and line.passes  # losses are told before it
        if is_step and (far := describe_progress(story, event.wall_seconds)):
            text += f"  ({far})"
            part = story.iterations and story.last_iteration / story.iterations
        if line.passes:
            self._display.status(text, part)
        else:
            self._display.line(text, line.style)

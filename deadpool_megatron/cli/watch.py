"""Follows a run from any host that sees its run directory: the lines that `deadpool run` prints, on
a terminal or as plain text, until the run is over. No part of the run waits for it.

exit status: 0 the run is over, 2 no such run, 130 interrupted
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadpool_megatron.cli.common import CommandError, add_run_directory
from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, Event, EventTail, Kind, date
from deadpool_megatron.observe.narration import Line, Narrator, describe_progress
from deadpool_megatron.observe.story import RECENT_STEPS, Story

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 0.5
# Of what is there already so much is read, for its newest lines.
_RECENT_BYTES = 4 << 20
_STOP_SECONDS = 20.0


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``watch`` to the commands."""
    text = "the lines of a run, from any host"
    parser = subparsers.add_parser("watch", help=text, description=__doc__)
    add_run_directory(parser)
    text = "begin with so many newest lines (default: %(default)s)"
    parser.add_argument("--lines", type=int, default=20, metavar="N", help=text)


def run(args: argparse.Namespace) -> int:
    """Carry out ``deadpool watch``. Raises CommandError or RunDirectoryError."""
    if args.lines < 0:
        raise CommandError(f"--lines must be at least 0, got {args.lines}")
    directory = RunDirectory(args.run_dir)
    directory.read_run(only_to_show=True)
    follower = Follower(directory, Display())
    follower.skip(args.lines)
    while not follower.is_over:
        if not follower.look():
            time.sleep(_LOOK_SECONDS)
    follower.close_with_report()
    return 0


class Follower:
    """Tells a display what the events of a run say. ``look`` may be called at any time."""

    def __init__(self, run: RunDirectory, display: Display) -> None:
        self._run, self._tail, self._display = run, EventTail(run.events), display
        self._story = Story(RECENT_STEPS + 1)
        self._narrator = Narrator(self._story)
        self._day = ""

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
        return bool(events)

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
        text = f"{at[11:19]}  {line.text}"
        story, part = self._story, None
        if event.kind is Kind.STEP and (far := describe_progress(story, event.wall_seconds)):
            text += f"  ({far})"
            part = story.iterations and story.last_iteration / story.iterations
        if line.passes:
            self._display.status(text, part)
        else:
            self._display.line(text, line.style)


class RunFailedError(Exception):
    """The child ended badly or fell silent. ``status``: its exit status, None if it was stopped."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text)
        self.status = status


def watch_run(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    display: Display,
    *,
    silence_seconds: float,
) -> None:
    """Run ``command`` to its end. ``directory``: its run directory.

    Its output goes to ``<directory>.log``. Raises RunFailedError when it ends with another status
    than 0, or when no event comes for ``silence_seconds``. Interrupted, it stops the child first.
    """
    log = directory.with_name(directory.name + ".log")
    follower = Follower(RunDirectory(directory), display)
    display.status("starting: loading torch and Megatron")
    with open(log, "wb") as output:
        child = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # Ctrl-C in the terminal comes to us; we pass it on once.
            start_new_session=True,
        )
        try:
            _follow(child, follower, silence_seconds)
        finally:
            _stop(child)
            follower.close()
    if child.returncode != 0:
        raise RunFailedError(
            f"the run ended with exit status {child.returncode}; the end of {log}:\n"
            + _last_lines(log),
            child.returncode,
        )


def _follow(child: subprocess.Popen[bytes], follower: Follower, silence_seconds: float) -> None:
    deadline = time.monotonic() + silence_seconds
    while child.poll() is None:
        if follower.look():
            deadline = time.monotonic() + silence_seconds
        elif time.monotonic() > deadline:
            raise RunFailedError(f"no news from the run for {silence_seconds:.0f} s", None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_POLL_SECONDS)
    while follower.look():
        continue


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs: by a word first, so that it can clean up."""
    if child.poll() is not None:
        return
    os.kill(child.pid, signal.SIGTERM)
    try:
        child.wait(_STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _last_lines(path: Path, count: int = 12) -> str:
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return "\n".join(f"  | {line}" for line in lines)

"""Following a run while it continues: its new events, told on a terminal or as plain lines.

``deadpool run`` follows the run that it is; the demo and benches follow one that they start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from deadpool_megatron.cli.common import shown
from deadpool_megatron.cli.show.narration import Line, tell
from deadpool_megatron.cli.show.progress import Progress
from deadpool_megatron.cli.show.story import Story
from deadpool_megatron.cli.show.tail import EventTail
from deadpool_megatron.cluster.coordinator.reporting.accounting import Account
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, Event, Kind

_STATUS_SECONDS = 1.0
_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0


class Display(ABC):
    """The place where lines go."""

    @abstractmethod
    def line(self, text: str, style: str = "") -> None:
        """Print a line that stays."""

    @abstractmethod
    def status(self, text: str) -> None:
        """Show what happens right now, in place of the last status."""

    @abstractmethod
    def close(self) -> None:
        """Leave the last status as a line. Lines can be printed afterwards, too."""


class PlainDisplay(Display):
    """Lines on a stream; a status becomes a line at most once a second."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._pending = ""
        self._printed = 0.0

    def line(self, text: str, style: str = "") -> None:
        self.close()
        print(shown(text), file=self._stream, flush=True)

    def status(self, text: str) -> None:
        self._pending = text
        now = time.monotonic()
        if now - self._printed >= _STATUS_SECONDS:
            self._printed = now
            self.close()

    def close(self) -> None:
        if self._pending:
            print(shown(self._pending), file=self._stream, flush=True)
            self._pending = ""


class RichDisplay(Display):
    """A terminal: coloured lines, and one line at the bottom for the status. Needs rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._live: Any = None
        self._last = ""

    def line(self, text: str, style: str = "") -> None:
        self._console.print(shown(text), style=style, markup=False)

    def status(self, text: str) -> None:
        from rich.live import Live

        self._last = text = shown(text)
        if self._live is None:
            # Without auto_refresh there is no thread: this process forks.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._live.update(text, refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            self.line(self._last)


class NoDisplay(Display):
    """For ``--quiet``."""

    def line(self, text: str, style: str = "") -> None:
        pass

    def status(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


def make_display(*, quiet: bool = False) -> Display:
    """Return the best one for where standard output goes."""
    if quiet:
        return NoDisplay()
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            return RichDisplay()
    return PlainDisplay()


class Follower:
    """Tells a display what the events of a run say. ``look`` may be called at any time."""

    def __init__(self, run: RunDirectory, display: Display, story: Story | None = None) -> None:
        """``story``: is fed with every event."""
        self._tail = EventTail(run.events)
        self._display = display
        self._story = story
        self._account = Account() if story is None else story.account
        self._progress = Progress(self._account)
        self._began = time.time()
        self._is_over = False
        self._told: set[tuple[Kind, int]] = set()

    def skip(self) -> None:
        """Leave out what has been told so far: it was shown by an earlier start of the run."""
        while self._tail.poll():
            continue

    def look(self) -> bool:
        """Tell what is new; return whether there was anything."""
        try:
            events = self._tail.poll()
        except OSError:  # a run must not end because nobody can be told of it for a moment
            return False
        for event in events:
            if self._story is not None:
                self._story.add(event)
            self._count(event)
            # Agents that leave are no losses any more.
            self._is_over |= event.kind is Kind.RUN_ENDED
            if not self._is_over:
                self._show(event)
        return bool(events)

    def close(self) -> None:
        """Tell the rest."""
        self.look()
        self._display.close()

    def _show(self, event: Event) -> None:
        try:
            line = tell(event)
        except DAMAGE as error:
            # Of an agent that has lost its mind; whoever watches must not end the run.
            line = Line(f"event {event.kind} cannot be shown: {error!r}", "red")
        if line is None or self._is_known(event):
            return
        text = f"{max(0.0, event.wall_seconds - self._began):8.2f} s  {line.text}"
        if event.kind is Kind.STEP and (far := self._progress.words(event.wall_seconds)):
            text += f"  ({far})"
        if line.passes:
            self._display.status(text)
        else:
            self._display.line(text, line.style)

    def _count(self, event: Event) -> None:
        # A damaged event costs itself alone.
        with contextlib.suppress(*DAMAGE):
            if self._story is None:
                self._account.add(event)
            self._progress.add(event)

    def _is_known(self, event: Event) -> bool:
        """Return whether another one has said the same: a coordinator that took over says again
        which epoch is open, and what one role finds out about its updates others do, too."""
        keys = {Kind.EPOCH_OPENED: event.epoch, Kind.REHEARSED: 0}
        if event.kind not in keys:
            return False
        key = (event.kind, keys[event.kind])
        known = key in self._told
        self._told.add(key)
        return known


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
) -> Story:
    """Run ``command`` to its end and return its story. ``directory``: its run directory.

    Its output goes to ``<directory>.log``. Raises RunFailedError when it ends with another status
    than 0, or when no event comes for ``silence_seconds``. Interrupted, it stops the child first.
    """
    log = directory.with_name(directory.name + ".log")
    story = Story()
    follower = Follower(RunDirectory(directory), display, story)
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
    return story


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

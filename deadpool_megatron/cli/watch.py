"""Following a run while it continues: its new events, told on a terminal or as plain lines.

``deadpool run`` follows the run that it is; the demo and benches follow one that they start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadpool_megatron.cli.display import Display
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import DAMAGE, Event, EventTail, Kind, date
from deadpool_megatron.observe.narration import Line, tell
from deadpool_megatron.observe.story import RECENT_STEPS, Story

_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0


class Follower:
    """Tells a display what the events of a run say. ``look`` may be called at any time."""

    def __init__(self, run: RunDirectory, display: Display) -> None:
        self._tail, self._display = EventTail(run.events), display
        self._story = Story(RECENT_STEPS + 1)
        self._day = ""
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
            with contextlib.suppress(*DAMAGE):  # it costs itself alone
                self._story.take(event)
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
        at = date(event.wall_seconds)
        if at[:10] != self._day:
            self._day = at[:10]
            self._display.line(f"{self._day}, UTC{at[23:]}")
        text = f"{at[11:19]}  {line.text}"
        story, part = self._story, None
        if event.kind is Kind.STEP and (far := describe_progress(story, event.wall_seconds)):
            text += f"  ({far})"
            part = story.iterations and story.last_iteration / story.iterations
        if event.kind is Kind.NODE_JOINED:
            text += f" ({len(story.account.stays)} of {sum(story.wanted)})"
        if line.passes:
            self._display.status(text, part)
        else:
            self._display.line(text, line.style)

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


def describe_progress(story: Story, now: float) -> str:
    """``of 100, 12.4 samples/s, 793 tokens/s, goodput 97.1 %, 4.2 min left``, as far as it is known
    at this time (wall clock, seconds)."""
    found = story.progress()
    goodput = story.account.goodput(now)
    parts = {
        "of {}": found["iterations"],
        "{} samples/s": _short(found["samples_per_second"]),
        "{} tokens/s": _short(found["tokens_per_second"]),
        "goodput {:.1f} %": None if goodput is None else 100 * goodput,
        "{} left": _duration(found["seconds_left"]),
    }
    return ", ".join(text.format(value) for text, value in parts.items() if value is not None)


def _duration(value: float | None) -> str | None:
    if value is None:
        return None
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 90 else f"{value:.0f} s"


def _short(number: float | None) -> str | None:
    if number is None:
        return None
    for unit in ("", "k", "M"):
        if number < 999.5:  # what is more has four digits
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}G"


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

"""Running ``deadpool run`` as a child and telling a screen, live, what its events say."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from deadpool_megatron.cli.results import PHASES, decimal, ordered_phases
from deadpool_megatron.cli.screen import Screen
from deadpool_megatron.cli.story import Story, describe_loss
from deadpool_megatron.cli.tables import count
from deadpool_megatron.cli.tail import EventTail
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind

_POLL_SECONDS = 0.05
_STOP_SECONDS = 20.0


class RunFailedError(Exception):
    """The child ended badly or fell silent. ``status``: its exit status, None if it was stopped."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text)
        self.status = status


def watch_run(
    command: Sequence[str],
    environment: Mapping[str, str],
    directory: Path,
    narrator: Narrator,
    *,
    silence_seconds: float,
) -> Story:
    """Run ``command`` to its end and narrate; answers the story. ``directory``: its run directory.

    Its output goes to ``<directory>.log``. Raises RunFailedError when it ends with another status
    than 0, or when no event comes for ``silence_seconds``. Interrupted, it stops the child first.
    """
    log = directory.with_name(directory.name + ".log")
    tail = EventTail(RunDirectory(directory).events)
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
            _follow(child, tail, narrator, silence_seconds)
        finally:
            _stop(child)
    if child.returncode != 0:
        raise RunFailedError(
            f"the run ended with exit status {child.returncode}; the end of {log}:\n"
            + _last_lines(log),
            child.returncode,
        )
    return narrator.story


def _follow(
    child: subprocess.Popen[bytes], tail: EventTail, narrator: Narrator, silence_seconds: float
) -> None:
    deadline = time.monotonic() + silence_seconds
    over = False
    while not over:
        # Look at the child first: what it wrote before it ended is then read below.
        over = child.poll() is not None
        events = tail.poll()
        for event in events:
            narrator.tell(event)
        if events:
            deadline = time.monotonic() + silence_seconds
        elif time.monotonic() > deadline:
            raise RunFailedError(f"no news from the run for {silence_seconds:.0f} s", None)
        if not over:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_SECONDS)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child that still runs: an interrupt first, so that it can clean up."""
    if child.poll() is not None:
        return
    os.kill(child.pid, signal.SIGINT)
    try:
        child.wait(_STOP_SECONDS)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _last_lines(path: Path, count: int = 12) -> str:
    lines = path.read_text(errors="replace").splitlines()[-count:]
    return "\n".join(f"  | {line}" for line in lines)


class Narrator:
    """Feeds a story and tells a screen about it: start, steps, each phase of a recovery."""

    def __init__(self, screen: Screen, fired: Path | None = None) -> None:
        """``fired``: file that appears the moment the planned fault strikes, if there is one."""
        self.story = Story()
        self._screen = screen
        self._fired = fired
        self._struck_at: float | None = None
        self._strike_told = False
        self._phases_told: set[str] = set()
        self._closed_at: float | None = None
        self._joined = 0
        self._warm = 0

    @property
    def struck_at(self) -> float | None:
        """When the planned fault struck: wall clock, seconds; None as long as it has not."""
        if self._struck_at is None and self._fired is not None:
            with contextlib.suppress(FileNotFoundError):
                self._struck_at = self._fired.stat().st_mtime
        return self._struck_at

    def tell(self, event: Event) -> None:
        """Take in one event and show what it means."""
        if event.kind is Kind.STEP:
            self._tell_step(event)
            return
        self._tell_strike()
        self.story.add(event)
        match event.kind:
            case Kind.NODE_JOINED:
                self._joined += 1
                self._screen.status(f"starting: {count(self._joined, 'node')} joined")
            case Kind.MEMBER_WARM if not self.story.steps:
                self._warm += 1
                self._screen.status(f"starting: {self._warm} of the spare processes warm")
            case Kind.NODE_LOST | Kind.MEMBER_LOST if self.story.ended is None:
                self._line(event.wall_seconds, "lost", describe_loss(event))
            case Kind.EPOCH_CLOSED:
                self._screen.status("recovering")
                self._tell_phases(event)
            case Kind.EPOCH_DECIDED | Kind.EPOCH_OPENED | Kind.RECOVERED:
                self._tell_phases(event)
            case Kind.STALE_DIVERGENCE:
                self._screen.alarm("   a replayed step gave other numbers than the first time")
            case _:
                pass

    def _tell_step(self, event: Event) -> None:
        before = self.story.last_iteration
        self.story.add(event)
        if self.story.last_iteration > before:
            step = self.story.steps[-1].step
            self._screen.step(step.iteration, decimal(step.loss))

    def _tell_strike(self) -> None:
        if not self._strike_told and self.struck_at is not None:
            self._strike_told = True
            self._screen.alarm("    +0.000 s  SIGKILL to every process of the node")

    def _tell_phases(self, event: Event) -> None:
        """A line for each phase that is over and not told yet, and for what was decided."""
        if not self.story.failures:
            return  # the first epoch is opened in the same way
        for phase, seconds in self._phases_known(event).items():
            if phase not in self._phases_told:
                self._phases_told.add(phase)
                self._line(event.wall_seconds, phase, f"{seconds:6.3f} s  {PHASES.get(phase, '')}")
        failure = self.story.current
        if event.kind is Kind.EPOCH_DECIDED and failure is not None and failure.generation:
            text = f"everybody goes on from the state of iteration {failure.generation[1]}"
            self._line(event.wall_seconds, "decided", text)
        if event.kind is Kind.RECOVERED:
            self._phases_told.clear()
            steps = event.data.get("steps_recomputed")
            self._line(event.wall_seconds, "training", f"goes on; steps recomputed: {steps}")

    def _phases_known(self, event: Event) -> dict[str, float]:
        """The phases that ``event`` tells of. The first ones are told before anybody adds them up,
        from the times of the events themselves."""
        if event.kind is Kind.EPOCH_CLOSED:
            self._closed_at = event.wall_seconds
            if self._struck_at is not None and self.story.current is not None:
                return {"detect": event.wall_seconds - self._struck_at}
        if event.kind is Kind.EPOCH_DECIDED and self._closed_at is not None:
            deciding = float(event.data.get("seconds", 0.0))
            closing = event.wall_seconds - self._closed_at - deciding
            return {"close": max(0.0, closing), "decide": deciding}
        return ordered_phases(event.data.get("phases", {}))

    def _line(self, wall_seconds: float, title: str, text: str) -> None:
        since = wall_seconds - (self.struck_at or wall_seconds)
        self._screen.say(f"   {since:+7.3f} s  {title:<10} {text}")

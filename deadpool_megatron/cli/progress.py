"""What ``deadpool run`` shows while it runs, from ``events.jsonl``; no threads.

Lines for what matters (joins, losses, the phases of each recovery, checkpoints, the end); of the
steps a line now and then, or on a terminal with rich one line that is kept up to date.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

from deadpool_megatron.cli.story import (
    describe_coordinator,
    describe_protection,
    describe_slowness,
)
from deadpool_megatron.cli.tail import EventTail
from deadpool_megatron.cluster.failures import in_words
from deadpool_megatron.cluster.run_directory.directory import RunDirectory
from deadpool_megatron.events import Event, Kind

_STEP_LINE_SECONDS = 1.0


class Display(Protocol):
    """Where lines go."""

    def line(self, text: str, style: str = "") -> None:
        """Print a line that stays."""

    def status(self, text: str) -> None:
        """Show what is going on right now."""

    def close(self) -> None:
        """Nothing more comes."""


class PlainDisplay:
    """Lines on a stream; a status becomes a line at most once a second."""

    def __init__(self) -> None:
        self._pending = ""
        self._printed = 0.0

    def line(self, text: str, style: str = "") -> None:
        """Print it, after the newest status."""
        del style
        self._flush()
        print(text, flush=True)

    def status(self, text: str) -> None:
        """Print it, unless the last one is too recent."""
        self._pending = text
        now = time.monotonic()
        if now - self._printed >= _STEP_LINE_SECONDS:
            self._printed = now
            self._flush()

    def close(self) -> None:
        """The last status is always shown."""
        self._flush()

    def _flush(self) -> None:
        if self._pending:
            print(self._pending, flush=True)
            self._pending = ""


class RichDisplay:
    """A terminal: coloured lines, and one line at the bottom for the status."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        # Without auto_refresh there is no thread: this process forks.
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        self._last = ""

    def line(self, text: str, style: str = "") -> None:
        """Print above the status."""
        self._console.print(text, style=style, markup=False)

    def status(self, text: str) -> None:
        """Replace the status."""
        self._last = text
        self._live.update(text, refresh=True)

    def close(self) -> None:
        """Leave the last status as a line."""
        self._live.stop()
        if self._last:
            self._console.print(self._last, markup=False)


class NoDisplay:
    """For ``--quiet``."""

    def line(self, text: str, style: str = "") -> None:
        """Nothing."""

    def status(self, text: str) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def make_display(quiet: bool) -> Display:
    """The best one for where standard output goes."""
    if quiet:
        return NoDisplay()
    if sys.stdout.isatty():
        try:
            return RichDisplay()
        except ImportError:
            return PlainDisplay()
    return PlainDisplay()


class Progress:
    """Follows the event file of a run and shows it. ``look`` may be called at any time."""

    def __init__(self, run: RunDirectory, display: Display) -> None:
        self._tail = EventTail(run.events)
        self._display = display
        self._began = time.time()
        self._over = False
        self._said_whole = False
        self._opened = 0

    def skip(self) -> None:
        """Leave out what has been told so far: it was shown by an earlier start of the run."""
        while self._tail.poll():
            continue

    def look(self) -> None:
        """Show what is new."""
        for event in self._tail.poll():
            try:
                self._show(event)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                # Of an agent that has lost its mind; whoever watches must not end the run.
                self._line(event, f"event {event.kind} cannot be shown: {error!r}", "red")

    def close(self) -> None:
        """Show the rest."""
        self.look()
        self._display.close()

    def _show(self, event: Event) -> None:
        data = event.data
        if self._over:
            return  # agents that leave are no losses any more
        match event.kind:
            case Kind.STEP:
                self._display.status(self._at(event, f"step {event.iteration}{_numbers(data)}"))
            case Kind.EVALUATION:
                self._line(event, f"evaluation at step {event.iteration}{_numbers(data)}")
            case Kind.NODE_LOST:
                self._line(event, f"lost {data.get('cause', '')}", "bold red")
            case Kind.MEMBER_LOST:
                self._line(event, f"lost {data.get('cause', '')}", "bold red")
            case Kind.VAULT_LOST:
                self._line(event, f"vault of node {event.node} lost: {data.get('cause')}", "red")
            case Kind.EPOCH_CLOSED:
                why = [in_words(str(data.get("kind", ""))), str(data.get("cause"))]
                text = f"epoch {event.epoch} closed: {': '.join(filter(None, why))}"
                self._line(event, text, "yellow")
            case Kind.COORDINATOR if int(data.get("term", 1)) > 1:
                self._line(event, f"coordinator: {describe_coordinator(event)}", "yellow")
            case Kind.NODE_ASIDE:
                self._line(event, str(data.get("cause")), "bold red")
            case Kind.SLOW_NODE:
                self._line(event, describe_slowness(event), "yellow")
            case Kind.PROTECTION if data.get("old"):
                self._line(event, f"protection: {describe_protection(event)}", "yellow")
            case Kind.NONFINITE:
                text = f"the loss of iteration {event.iteration} is {data.get('loss')}"
                self._line(event, f"{text}: {data.get('policy')}", "bold red")
            case Kind.EPOCH_DECIDED if event.epoch > 1:
                lineage, iteration = data.get("generation", (0, 0))
                text = f"epoch {event.epoch} goes on from iteration {iteration} ({lineage})"
                self._line(event, text, "yellow")
            case Kind.EPOCH_OPENED if event.epoch > self._opened:
                self._opened = event.epoch  # a coordinator that took over says it again
                phases = _phases(data.get("phases", {}))
                self._line(event, f"epoch {event.epoch} open{phases}", "green")
            case Kind.RECOVERED:
                text = f"recovered in {float(data['seconds']):.2f} s{_phases(data['phases'])}"
                again = f"; {data['steps_recomputed']} iterations computed again"
                self._line(event, text + again, "bold green")
            case Kind.GATE_WAIT if not data.get("over"):
                waited = f"role {event.role} waits for the commit of iteration {event.iteration}"
                self._line(event, f"{waited} since {float(data['seconds']):.0f} s", "yellow")
            case Kind.CORRUPTION:
                self._line(event, f"damaged bytes found and not used: {dict(data)}", "bold red")
            case Kind.DECODED:
                text = f"{data.get('part')} of role {event.role} computed from parity"
                self._line(event, f"{text} in {float(data['seconds']):.2f} s", "green")
            case Kind.REPLAYED:
                again = f"recomputed over {data.get('steps')} updates"
                seconds = f"in {float(data['seconds']):.2f} s"
                self._line(event, f"role {event.role}: state {again} {seconds}", "yellow")
            case Kind.REHEARSED if not data.get("matched") and not self._said_whole:
                self._said_whole = True  # what one role finds out others do, too
                found = f"an update of role {event.role}, computed again, gave other bytes"
                text = f"{found} ({data.get('difference')}): whole copies instead of gradients"
                self._line(event, text, "bold red")
            case Kind.DURABLE | Kind.DUMPED:
                self._line(event, f"{event.kind}: {data.get('path')}")
            case Kind.STALE_DIVERGENCE:
                self._line(event, "A REPLAYED ITERATION GAVE OTHER NUMBERS", "bold red")
            case Kind.LOG if data.get("level") == "info":
                pass  # for the report of the run, not for who watches it
            case Kind.LOG | Kind.DRAIN:
                self._line(event, str(data.get("text", f"{event.kind} of node {event.node}")))
            case Kind.RUN_ENDED:
                self._over = True
            case _:
                pass

    def _at(self, event: Event, text: str) -> str:
        return f"{max(0.0, event.wall_seconds - self._began):8.2f} s  {text}"

    def _line(self, event: Event, text: str, style: str = "") -> None:
        self._display.line(self._at(event, text), style)


def _numbers(data: Mapping[str, Any]) -> str:
    text = ""
    if "loss" in data:
        text += f"  loss {_decimal(data['loss']):.6g}"
    if "grad_norm" in data:
        text += f"  grad norm {_decimal(data['grad_norm']):.4g}"
    return text + ("  (update skipped)" if data.get("skipped") else "")


def _decimal(value: Any) -> float:
    return (
        float.fromhex(value) if isinstance(value, str) else float("nan" if value is None else value)
    )


def _phases(phases: Mapping[str, float]) -> str:
    """The phases that took time, in order."""
    spent = [f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005]
    return f" ({', '.join(spent)})" if spent else ""

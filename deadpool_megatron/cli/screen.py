"""What the demo shows while it runs: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, TextIO


class Screen(ABC):
    """One run at a time: :meth:`begin`, then any of the others, then :meth:`end`."""

    @abstractmethod
    def say(self, text: str) -> None:
        """A line that stays."""

    @abstractmethod
    def alarm(self, text: str) -> None:
        """A line that stays and is hard to miss."""

    @abstractmethod
    def begin(self, total: int) -> None:
        """A run of ``total`` steps starts."""

    @abstractmethod
    def status(self, text: str) -> None:
        """What the run is doing; replaces the last one."""

    @abstractmethod
    def step(self, iteration: int, loss: float | None) -> None:
        """A step is finished."""

    @abstractmethod
    def end(self) -> None:
        """The run is over."""

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end()


class PlainScreen(Screen):
    """Lines only: for files, pipes, CI and terminals without rich."""

    # About so many lines of progress per run.
    _LINES = 8

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._total = 0
        self._began = 0.0

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def alarm(self, text: str) -> None:
        self.say(text)

    def begin(self, total: int) -> None:
        self._total, self._began = total, time.monotonic()

    def status(self, text: str) -> None:
        pass

    def step(self, iteration: int, loss: float | None) -> None:
        if iteration in (1, self._total) or iteration % max(1, self._total // self._LINES) == 0:
            elapsed = time.monotonic() - self._began
            shown = "" if loss is None else f"   loss {loss:.4f}"
            self.say(f"   {elapsed:6.1f} s   step {iteration:>4}/{self._total}{shown}")

    def end(self) -> None:
        pass


class RichScreen(Screen):
    """A progress bar that stays at the bottom while lines appear above it. Needs rich."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)
        self._progress: Any = None
        self._task: Any = None

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def alarm(self, text: str) -> None:
        self._console.print(text, markup=False, style="bold red")

    def begin(self, total: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
        from rich.progress import TimeElapsedColumn as Elapsed

        columns = (
            TextColumn("  "),
            BarColumn(bar_width=40),
            MofNCompleteColumn(),
            Elapsed(),
            TextColumn("{task.description}"),
        )
        self._progress = Progress(*columns, console=self._console)
        self._task = self._progress.add_task("", total=total)
        self._progress.start()

    def status(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, description=text)

    def step(self, iteration: int, loss: float | None) -> None:
        self._progress.update(self._task, completed=iteration)
        if loss is not None:
            self.status(f"loss {loss:.4f}")

    def end(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def make_screen() -> Screen:
    """A progress bar where there is a terminal and rich, else plain lines."""
    if sys.stdout.isatty():
        try:
            return RichScreen()
        except ImportError:
            pass
    return PlainScreen()

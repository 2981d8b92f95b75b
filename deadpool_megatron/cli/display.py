"""Prints the output of a command on a terminal or in a log: lines, and a status."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

from deadpool_megatron.observe.narration import printable

_STATUS_SECONDS = 1.0
_BAR_CHARACTERS = 20
_STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


class Display:
    """Prints lines, and the status of the present activity.

    On a terminal, lines have colours, and the status stays at the bottom. Elsewhere a changed
    status is printed as a line, at most once a second. ``stream``: None for standard output;
    ``quiet``: print nothing.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream, self._quiet = stream, quiet
        target = sys.stdout if stream is None else stream
        self._on_terminal = target.isatty() and os.environ.get("TERM") != "dumb"
        self._status = self._last = ""
        self._printed = -_STATUS_SECONDS

    def line(self, text: str, style: str = "") -> None:
        """Print a line above the status."""
        status, text = self._status, printable(text)
        if not self._on_terminal:
            self.close()
        elif style and "NO_COLOR" not in os.environ:
            text = f"\x1b[{';'.join(_STYLES[word] for word in style.split())}m{text}\x1b[0m"
        self._print(f"\r\x1b[K{text}\n" if self._on_terminal and status else f"{text}\n")
        if self._on_terminal and status:
            self.status(status)

    def status(self, text: str, part: float | None = None) -> None:
        """Replace the status. ``part``: the completed share of the work (0 to 1), if known; a
        terminal shows it as a bar.
        """
        text, now = printable(text), time.monotonic()
        if self._on_terminal:
            self._status = text if part is None else f"{_bar(part)} {text}"
            self._print(f"\r\x1b[K{self._status[: shutil.get_terminal_size().columns - 1]}")
            return
        self._status = text if text != self._last else ""
        if now - self._printed >= _STATUS_SECONDS:
            self._printed = now
            self.close()

    def close(self) -> None:
        """Print the status as a line that stays. The display can still be used."""
        if self._status:
            self._print("\n" if self._on_terminal else f"{self._status}\n")
            self._last = self._status
        self._status = ""

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", file=self._stream, flush=True)


def _bar(part: float) -> str:
    """Return a bar like ``[#####...............]``, in characters that every terminal has."""
    full = round(_BAR_CHARACTERS * min(1.0, max(0.0, part)))
    return f"[{'#' * full:.<{_BAR_CHARACTERS}}]"

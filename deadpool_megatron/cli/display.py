"""The place on a terminal, or in a log, where a command says what happens."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

from deadpool_megatron.observe.narration import shown

_STATUS_SECONDS = 1.0
_BAR_CHARACTERS = 20
_STYLES = {"bold": "1", "red": "31", "green": "32", "yellow": "33"}


class Display:
    """The place where lines and a status go, which says what happens right now.

    On a terminal lines have colours and the status is one line at the bottom; elsewhere it becomes
    a line at most once a second, if it is another one. ``stream``: None for standard output;
    ``quiet``: nothing is shown.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream, self._quiet = stream, quiet
        there = sys.stdout if stream is None else stream
        self._on_terminal = there.isatty() and os.environ.get("TERM") != "dumb"
        self._status = self._last = ""
        self._printed = -_STATUS_SECONDS

    def line(self, text: str, style: str = "") -> None:
        """Print a line that stays."""
        status, text = self._status, shown(text)
        if not self._on_terminal:
            self.close()
        elif style and "NO_COLOR" not in os.environ:
            text = f"\x1b[{';'.join(_STYLES[word] for word in style.split())}m{text}\x1b[0m"
        self._print(f"\r\x1b[K{text}\n" if self._on_terminal and status else f"{text}\n")
        if self._on_terminal and status:
            self.status(status)

    def status(self, text: str, part: float | None = None) -> None:
        """Show what happens right now, in place of the last status. ``part``: of all there is to
        do so much is done (0 to 1), where the end is known; a terminal shows it as a bar.
        """
        text, now = shown(text), time.monotonic()
        if self._on_terminal:
            self._status = text if part is None else f"{_bar(part)} {text}"
            self._print(f"\r\x1b[K{self._status[: shutil.get_terminal_size().columns - 1]}")
            return
        self._status = text if text != self._last else ""
        if now - self._printed >= _STATUS_SECONDS:
            self._printed = now
            self.close()

    def close(self) -> None:
        """Leave the last status as a line. Lines can be printed afterwards, too."""
        if self._status:
            self._print("\n" if self._on_terminal else f"{self._status}\n")
            self._last = self._status
        self._status = ""

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, end="", file=self._stream, flush=True)


def _bar(part: float) -> str:
    """``[#####...............]``, in characters that each terminal has."""
    full = round(_BAR_CHARACTERS * min(1.0, max(0.0, part)))
    return f"[{'#' * full:.<{_BAR_CHARACTERS}}]"

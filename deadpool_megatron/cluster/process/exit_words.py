"""What the end of a process's log says about its end. Pure."""

from __future__ import annotations

_LINE_CHARACTERS = 400
# An exception that was caught and logged long before the end is not the cause of it.
_TRACEBACK_LINES = 120
_TRACEBACK = "Traceback (most recent call last):"


def last_words(text: str) -> str:
    """What the end of a log says about the end of its process, in one line.

    That is :func:`fatal_words`, else the last line that is not blank. Empty when there is none.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return fatal_words(text) or (lines[-1][:_LINE_CHARACTERS] if lines else "")


def fatal_words(text: str) -> str:
    """The exception of the last traceback, or the fatal error of Python or of C++, at the end of a
    log. Empty when there is none.
    """
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    for number in range(len(lines) - 1, -1, -1):
        line = lines[number].strip()
        if line.startswith("what():"):
            return line.removeprefix("what():").strip()[:_LINE_CHARACTERS]
        if line.startswith("Fatal Python error:"):
            return line[:_LINE_CHARACTERS]
        if line.endswith(_TRACEBACK) and len(lines) - number <= _TRACEBACK_LINES:
            found = _exception(lines[number + 1 :])
            if found:
                return found[:_LINE_CHARACTERS]
    return ""


def _exception(lines: list[str]) -> str:
    """The first line after the frames of a traceback, which are indented."""
    return next((line for line in lines if not line.startswith((" ", "\t", "|"))), "")

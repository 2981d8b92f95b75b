"""Standard input, output and error of a command that must outlive who reads them.

A terminal goes away, ``tee`` is killed, the disk behind ``> run.log`` is full: none of it may end a
run, nor change the exit status with which a command answers. Nor may a reader hold one up that does
not read: a terminal after Ctrl-S, ``less``. And a descriptor that was closed at
the start would be given to the next socket.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from io import TextIOWrapper
from typing import Any, TextIO, cast

# There may be room again later; everything else stays as it is.
_PASSING = {errno.ENOSPC, errno.EDQUOT, errno.EAGAIN, errno.ENOMEM}
_PATIENCE_SECONDS = 1.0
# In any encoding less than what a pipe has room for when it says that it has some.
_PIECE_CHARACTERS = 1000
_MISSING = "\n[nobody read: lines are missing here]\n"


def open_missing() -> None:
    """Have descriptors 0 to 2 and their streams lead nowhere where they were closed, and write
    letters that a terminal does not have in others."""
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def outlive_readers() -> None:
    """From now on, what cannot be printed is lost, and the process continues."""
    sys.stdout = cast(TextIO, _Steady(sys.stdout, _PASSING, _PATIENCE_SECONDS))
    sys.stderr = cast(TextIO, _Steady(sys.stderr, _PASSING, _PATIENCE_SECONDS))


@contextmanager
def answering() -> Iterator[None]:
    """Text printed meanwhile is lost when its reader (``head``, ``less``) has seen enough.

    Raises OSError at the end when something else kept it from being written, as a full disk does.
    """
    streams = sys.stdout, sys.stderr
    output, errors = _Steady(sys.stdout, set()), _Steady(sys.stderr, set())
    sys.stdout, sys.stderr = cast(TextIO, output), cast(TextIO, errors)
    try:
        yield
    finally:
        output.flush()
        errors.flush()
        sys.stdout, sys.stderr = streams
    if output.failed is not None and output.failed.errno != errno.EPIPE:
        raise output.failed


class _Steady:
    """``passing``: errors after which the stream is tried again. ``patience_seconds``: for a reader
    that does not read; what it has not taken by then is lost. None: for as long as it takes.
    """

    def __init__(
        self, stream: TextIO, passing: Collection[int], patience_seconds: float | None = None
    ) -> None:
        self._stream = stream
        self._passing = passing
        self._patience_seconds = patience_seconds
        self._is_missed = False
        self.failed: OSError | None = None

    def write(self, text: str) -> int:
        if self._patience_seconds is None or not self._has_reader():
            self._try(partial(self._stream.write, text))
            return len(text)
        poller = select.poll()
        poller.register(self._stream.fileno(), select.POLLOUT)
        for at in range(0, len(text), _PIECE_CHARACTERS):
            # The patience is for once each time that it stops to read.
            if not poller.poll(0 if self._is_missed else self._patience_seconds * 1000):
                self._is_missed = True
                continue
            piece = _MISSING * self._is_missed + text[at : at + _PIECE_CHARACTERS]
            self._is_missed = False
            self._try(partial(self._stream.write, piece))
            self.flush()  # nothing stays in the stream, which would wait for the reader at its end
        return len(text)

    def _has_reader(self) -> bool:
        """Return whether it may have to be waited for; no file has one."""
        try:
            return not stat.S_ISREG(os.fstat(self._stream.fileno()).st_mode)
        except (OSError, ValueError):
            return False

    def flush(self) -> None:
        self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, action: Callable[[], object]) -> None:
        try:
            action()
        except OSError as error:
            if error.errno not in self._passing:
                self.failed = error
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)

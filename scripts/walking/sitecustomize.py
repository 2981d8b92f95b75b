"""Loaded by each interpreter of a run that scripts/walk.py watches; notes what is entered.

One file for each process, mapped into memory, so that what it holds survives a SIGKILL.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from inspect import CO_OPTIMIZED
from itertools import count
from types import CodeType, FrameType

RECORD_BYTES = 128
_RECORDS = 1 << 20  # the file is sparse
# A file that is entered again within this time is not noted again.
_QUIET_SECONDS = 0.001
_FOLDER = os.environ.get("DEADPOOL_WALK", "")
_PACKAGE = os.environ.get("DEADPOOL_WALK_PACKAGE", "") + os.sep
_ENTRY = tuple(os.environ.get("DEADPOOL_WALK_ENTRY", "").split(":"))


class _Names(dict[str, str]):
    """Code's file -> its name in the package; empty for one outside it."""

    def __missing__(self, path: str) -> str:
        self[path] = path[len(_PACKAGE) :] if path.startswith(_PACKAGE) else ""
        return self[path]


_names = _Names()
_last: dict[str, float] = {}
# Thread -> the frame of the entry, and what it has called so far.
_inside: dict[int, tuple[FrameType, set[CodeType]]] = {}


def _open() -> None:
    global _notes, _places
    with open(f"{_FOLDER}/{os.getpid()}.{time.time_ns()}", "w+b") as file:
        file.truncate(RECORD_BYTES * _RECORDS)
        _notes, _places = mmap.mmap(file.fileno(), 0), count()
    _last.clear()


def _note(kind: str, now: float, name: str) -> None:
    at = next(_places) * RECORD_BYTES
    line = f"{kind} {now:.6f} {threading.get_ident()} {name}".encode()
    _notes[at : at + len(line)] = line  # raises, and ends the process, when the file is full


def _hook(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event == "call" and code.co_flags & CO_OPTIMIZED and (name := _names[code.co_filename]):
        now, thread = time.time(), threading.get_ident()
        if now - _last.get(name, 0.0) >= _QUIET_SECONDS:
            _last[name] = now
            _note("entered", now, name)
        if (name, code.co_name) == _ENTRY:
            _inside.setdefault(thread, (frame, set()))
        if thread in _inside and code not in _inside[thread][1]:
            _inside[thread][1].add(code)
            _note("called", now, name)
    elif event == "return" and _inside:
        thread = threading.get_ident()
        if thread in _inside and _inside[thread][0] is frame:
            del _inside[thread]
            _note("left", time.time(), _ENTRY[0])


def _set_with_hook(added: Callable[[FrameType, str, object], None]) -> None:
    """Stand in for threading.setprofile: the package names new threads by such a hook."""

    def first(frame: FrameType, event: str, argument: object) -> None:
        added(frame, event, argument)
        sys.setprofile(_hook)
        _hook(frame, event, argument)

    _set_for_threads(first)


if _FOLDER:
    _open()
    os.register_at_fork(after_in_child=_open)
    _set_for_threads, threading.setprofile = threading.setprofile, _set_with_hook
    _set_for_threads(_hook)
    sys.setprofile(_hook)

"""Recorder of functions, loaded by each interpreter while scripts/mutate.py --map runs the tests.

Each process appends a line for each function that it enters during a test, at once, so that the
record survives a SIGKILL. The current test is a number in a file that all of them map. To pytest
this module is a plugin, which writes that number.
"""

import mmap
import os
import sys
import threading
from itertools import count
from types import CodeType, FrameType
from typing import Any

_FOLDER = os.environ.get("DEADPOOL_MAP", "")
_PACKAGE = os.environ.get("DEADPOOL_MAP_PACKAGE", "") + os.sep

_seen: dict[int, CodeType] = {}
_shown = b""
_records = -1
_tests = count(1)
_reports: list[Any] = []


def _enter(frame: FrameType, *_: object) -> None:
    """Record a function once for each test. Returns no tracer of lines."""
    global _shown, _records
    if _shown != _current[:]:
        _shown = _current[:]
        _seen.clear()
    code = frame.f_code
    if id(code) in _seen:
        return
    _seen[id(code)] = code
    if code.co_filename.startswith(_PACKAGE) and int(_shown):
        name = f"{code.co_filename[len(_PACKAGE) :]}:{code.co_qualname.split('.<')[0]}"
        try:
            if _records < 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                _records = os.open(f"{_FOLDER}/{os.getpid()}.records", flags, 0o600)
            os.write(_records, f"{int(_shown)} {name}\n".encode())
        except OSError:  # it has closed all that it had open, or is another user's
            _records = -1


def _begin() -> None:
    """Give a forked process a record of its own."""
    global _records
    _records = -1
    _seen.clear()


def pytest_runtest_logstart() -> None:
    _reports.clear()
    _current[:] = b"%08d" % next(_tests)
    sys.settrace(_enter)  # the test before may have had a tracer of its own


def pytest_runtest_logreport(report: Any) -> None:
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    number, _current[:] = int(_current[:]), b"%08d" % 0
    if all(report.passed for report in _reports):
        with open(f"{_FOLDER}/passed", "a") as file:
            file.write(f"{number} {sum(r.duration for r in _reports):.3f} {nodeid}\n")


# A process without standard files would write into ours, which took their numbers.
if _FOLDER and all(os.access(f"/proc/self/fd/{number}", os.F_OK) for number in (0, 1, 2)):
    with open(f"{_FOLDER}/current", "r+b") as shared:
        _current = mmap.mmap(shared.fileno(), 0)
    os.register_at_fork(after_in_child=_begin)
    threading.settrace(_enter)
    sys.settrace(_enter)

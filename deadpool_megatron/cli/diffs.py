"""Unified diffs, applied strictly: every line where the diff says it is, or not at all.

``patch`` and ``git apply`` look for a hunk's lines elsewhere when they are not in their place. Here
a file is known byte for byte, so a hunk that does not fit means that something else is wrong.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


class DiffError(Exception):
    """The diff is damaged, or does not fit."""


@dataclass(frozen=True)
class Hunk:
    """Lines that take the place of others; both starts count from 0."""

    old_start: int
    old: tuple[bytes, ...]
    new_start: int
    new: tuple[bytes, ...]


def parse(diff: bytes) -> tuple[Hunk, ...]:
    """The hunks of a diff of one file; text before the first is for people."""
    lines = _lines(diff)
    hunks: list[Hunk] = []
    at = 0
    while at < len(lines):
        header = _HUNK.match(lines[at])
        at += 1
        if header is None:
            if hunks:
                raise DiffError(f"line {at} belongs to no hunk")
            continue
        old_start, old_count, new_start, new_count = (int(n or 1) for n in header.groups())
        old: list[bytes] = []
        new: list[bytes] = []
        while len(old) < old_count or len(new) < new_count:
            kind, text = (lines[at][:1], lines[at][1:]) if at < len(lines) else (b"", b"")
            at += 1
            if kind not in (b" ", b"-", b"+"):
                raise DiffError(f"line {at} is not a line of a hunk")
            if kind != b"+":
                old.append(text)
            if kind != b"-":
                new.append(text)
        if len(old) != old_count or len(new) != new_count:
            raise DiffError(f"the hunk that ends in line {at} has not the length it states")
        hunks.append(Hunk(old_start - 1, tuple(old), new_start - 1, tuple(new)))
    if not hunks:
        raise DiffError("no hunk")
    return tuple(hunks)


def apply(hunks: tuple[Hunk, ...], content: bytes, *, reverse: bool = False) -> bytes:
    """``content`` with all hunks applied, or taken back."""
    lines = _lines(content)
    result: list[bytes] = []
    at = 0
    for hunk in hunks:
        start, gone, come = hunk.old_start, hunk.old, hunk.new
        if reverse:
            start, gone, come = hunk.new_start, hunk.new, hunk.old
        end = start + len(gone)
        if start < at or tuple(lines[start:end]) != gone:
            raise DiffError(f"the hunk for line {start + 1} does not fit")
        result += [*lines[at:start], *come]
        at = end
    return b"".join([*result, *lines[at:]])


def _lines(content: bytes) -> list[bytes]:
    """Split behind newlines only: bytes.splitlines would take a carriage return for one, too."""
    return io.BytesIO(content).readlines()

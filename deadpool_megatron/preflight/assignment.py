"""What an agent does with the verdict of a check: take another node id, or not start. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LeftOut:
    """The node shall not take part, and why; one line."""

    reason: str


def assignment(check: Mapping[str, Any], hostname: str, node: int) -> int | LeftOut:
    """The node id that this host takes in the run, from the content of ``check.json``.

    ``node`` is the number that the host came with, which is the one of the check where both were
    started the same way. Where the numbers have moved since (another launcher, another allocation)
    the host name decides. Raises KeyError or TypeError for what is not the content of a check.
    """
    entries = [entry for entry in check["nodes"] if entry["hostname"] == hostname]
    same = [entry for entry in entries if entry["node"] == node]
    if not same and len(entries) != 1:
        return LeftOut(
            f"host {hostname} took no part in the check: check again, or start it with --attach"
        )
    entry = (same or entries)[0]
    if entry["id"] is None:
        return LeftOut("; ".join(entry["reasons"]))
    return int(entry["id"])

"""Where the nodes of a check find each other: one small file per node in a shared directory."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.run_directory.directory import read_json, write_json


class State(enum.StrEnum):
    """What a node of the check does."""

    WAITS = "waits"
    CONDUCTS = "conducts"
    OVER = "over"


@dataclass(frozen=True)
class Announcement:
    """``instance`` names the process, ``attempt`` the attempt that it belongs to."""

    node: int
    hostname: str
    host: str
    port: int
    instance: str
    attempt: str
    state: State
    facts: Mapping[str, Any]

    @property
    def address(self) -> tuple[str, int]:
        """Where the node listens."""
        return self.host, self.port


class Board:
    """The directory. A file of an earlier attempt can be left over: nobody listens there any more.

    Thread-safe: holds no state besides the path.
    """

    def __init__(self, directory: Path, attempt: str) -> None:
        self._directory = directory
        self._attempt = attempt

    def post(self, announcement: Announcement) -> None:
        """Replace the node's file. Raises OSError."""
        self._directory.mkdir(parents=True, exist_ok=True)
        write_json(
            self._directory / f"node-{announcement.node}.json", dataclasses.asdict(announcement)
        )

    def read(self) -> dict[int, Announcement]:
        """All nodes of this attempt that are there, by ascending number.

        The directory is listed each time, since an NFS client asks its server then. Skips what
        cannot be read: it is no node of this attempt.
        """
        found = {}
        for path in self._directory.glob("node-*.json"):
            try:
                values = read_json(path)
                announcement = Announcement(**{**values, "state": State(values["state"])})
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if announcement.attempt == self._attempt and announcement.state is not State.OVER:
                found[announcement.node] = announcement
        return dict(sorted(found.items()))

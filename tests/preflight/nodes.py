"""A check of several nodes, each a real process with an address of its own on the loopback."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_megatron.preflight.board import Board

from tests.cluster.running import PATIENCE_SECONDS, environment

PROGRAM = "tests.preflight.made_up_node"


@dataclass(frozen=True)
class Ended:
    """How the process of a node ended."""

    status: int
    output: str
    errors: str


class Check:
    """Processes that are there at once. Use as a context manager: nothing outlives it."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        nodes: int = 2,
        spares: int = 2,
        made_up: Mapping[int, Any] | None = None,
        faults: Collection[dict[str, Any]] = (),
    ) -> None:
        self.directory = directory / "run"
        self._made_up = directory / "made-up.json"
        self._made_up.write_text(json.dumps(made_up or {}))
        self._faults = directory / "faults.json"
        self._faults.write_text(json.dumps(list(faults)))
        self._options = [
            *("--run-dir", str(self.directory), "--nodes", str(nodes), "--spares", str(spares)),
            *("--nproc-per-node", "1", *options),
        ]
        self._processes: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> Check:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.communicate()

    def start(self, *nodes: int, secret: str = "", wait_seconds: float = PATIENCE_SECONDS) -> None:
        """Start nodes, with the patience that they have for those that have not come."""
        extra = {"DEADPOOL_FAULTS": str(self._faults)}
        if secret:
            extra["DEADPOOL_SECRET"] = secret
        for node in nodes:
            place = ("--node-id", str(node), "--host", f"127.0.0.{node + 1}")
            wait = ("--wait-seconds", str(wait_seconds))
            self._processes[node] = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(self._made_up), *self._options, *place, *wait],
                env=environment(extra),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def wait_there(self, *nodes: int) -> None:
        """Until these nodes have announced themselves."""
        limit = time.monotonic() + PATIENCE_SECONDS
        while set(nodes) - Board(self.directory / "check", "").read().keys():
            assert time.monotonic() < limit, f"not all of nodes {nodes} came"
            time.sleep(0.02)

    def end_of(self, *nodes: int) -> dict[int, Ended]:
        """Wait for these; the others are killed at the end of the test."""
        ended = {}
        for node in nodes:
            output, errors = self._processes[node].communicate(timeout=PATIENCE_SECONDS)
            ended[node] = Ended(self._processes[node].returncode, output, errors)
        return ended

    def end(self) -> dict[int, Ended]:
        """Wait for all of them."""
        return self.end_of(*self._processes)

    def verdict(self) -> dict[str, Any]:
        """The content of check.json."""
        found: dict[str, Any] = json.loads((self.directory / "check.json").read_text())
        return found

    def standings(self) -> list[str]:
        """Of all nodes, by number."""
        return [entry["standing"] for entry in self.verdict()["nodes"]]

    def ids(self) -> list[int | None]:
        """The node ids to take in the run, by number in the check."""
        return [entry["id"] for entry in self.verdict()["nodes"]]

    def reasons(self, node: int) -> str:
        """What is wrong with a node."""
        return "; ".join(self.verdict()["nodes"][node]["reasons"])

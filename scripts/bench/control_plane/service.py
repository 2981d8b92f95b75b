"""The real coordinator of a run directory with its warm standby, and their visible effects."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.machine import ROOT, cpu_seconds_of

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Event, Kind, event_files, parse_line
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import create_secret

_LIMIT_SECONDS = 60.0
_ALL_BACK = b"all agents are back"


@dataclass(frozen=True)
class Block:
    """The longest time that the coordinator's loop was blocked: by one callback, with its stack,
    innermost last; or in all, by the callbacks that were ready at the same time."""

    callback_milliseconds: float
    late_milliseconds: float
    where: tuple[str, ...]


class Service:
    """The coordinator process of a run directory, with another standby that waits for its end."""

    def __init__(
        self, directory: Path, nodes: int, spares: int, nproc: int, settings: Settings
    ) -> None:
        self.run = RunDirectory(directory)
        self.run.create(
            RunInfo(
                run_id=secrets.token_hex(4),
                world_size=nodes * nproc,
                nodes=nodes,
                spares=spares,
                nproc_per_node=nproc,
                command=("-m", "deadpool_megatron.trainer"),
                settings=settings,
            )
        )
        create_secret(directory)
        self._blocks = directory.with_suffix(".blocks")
        # The standby of the last spare, without its agent.
        self._command = (
            *(sys.executable, str(Path(__file__).with_name("watched.py")), str(self._blocks)),
            *("standby", "--run-dir", str(directory), "--node-id", str(nodes + spares - 1)),
            *("--host", "127.0.0.1", "--port", "0", "--report-fd", "1"),
        )
        self._process: subprocess.Popen[bytes] | None = None
        self._next: subprocess.Popen[bytes] | None = None
        self._offsets: dict[Path, int] = {}
        self._times: dict[tuple[Kind, int], float] = {}
        self.all_back_at: list[float] = []

    def start(self) -> None:
        """Start a coordinator."""
        self._process = self._standby()
        # As from its agent, which had contact with the coordinator before it.
        self._send(self._process, "found\nlost\n")

    def await_next(self) -> None:
        """Start the next standby, whose agent has contact with the coordinator."""
        self._next = self._standby()
        self._send(self._next, "found\n")

    def _standby(self) -> subprocess.Popen[bytes]:
        with open(self.run.path.with_suffix(".log"), "ab") as log:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,  # its end would be that of the agent
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd=ROOT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @staticmethod
    def _send(process: subprocess.Popen[bytes], lines: str) -> None:
        assert process.stdin is not None
        process.stdin.write(lines.encode())
        process.stdin.flush()

    def end(self) -> float:
        """Kill the coordinator, and notify the next standby, if any. Returns the time."""
        at = time.time()
        if self._process is not None:
            self._process.kill()
            if self._next is not None:
                self._send(self._next, "lost\n")
            self._process.wait(_LIMIT_SECONDS)
        self._process, self._next = self._next, None
        return at

    def close(self) -> None:
        """End all processes."""
        self.end()
        self.end()

    def send(self, number: signal.Signals) -> None:
        """Signal the coordinator."""
        assert self._process is not None
        self._process.send_signal(number)

    def check(self) -> None:
        """Raise RuntimeError when the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            text = self.run.path.with_suffix(".log").read_text()
            raise RuntimeError(f"the coordinator ended ({self._process.returncode}):\n{text}")

    def cpu_seconds(self) -> float:
        """Return user and system time of the process so far."""
        return cpu_seconds_of(self._folder())

    def memory_peak_bytes(self) -> int:
        """Return the peak of the resident memory."""
        lines = (self._folder() / "status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024

    def _folder(self) -> Path:
        self.check()
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}")

    def block(self, since: float, until: float | None = None) -> Block:
        """Return the longest between these times of the wall clock."""
        longest: dict[str, dict[str, Any]] = {}
        lines = self._blocks.read_text().splitlines() if self._blocks.exists() else []
        for line in lines:
            entry = json.loads(line)
            if since <= entry["at"] <= (until or time.time()):
                known = longest.get(entry["what"])
                if known is None or known["seconds"] < entry["seconds"]:
                    longest[entry["what"]] = entry
        callback, late = longest.get("callback", {}), longest.get("late", {})
        return Block(
            1000 * callback.get("seconds", 0.0),
            1000 * late.get("seconds", 0.0),
            tuple(callback.get("where", ())),
        )

    def event_bytes(self) -> int:
        """Return the size of the files of events."""
        return sum(path.stat().st_size for path in event_files(self.run.events))

    def at(self, kind: Kind, epoch: int) -> float | None:
        """Return when the first event of a kind was made, by the wall clock; None: not yet."""
        for path in event_files(self.run.events):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                lines = file.read().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            self._offsets[path] = self._offsets.get(path, 0) + sum(map(len, whole))
            for line in whole:
                if b'"kind":"epoch-' in line or _ALL_BACK in line:
                    self._note(parse_line(line))
        return self._times.get((kind, epoch))

    def _note(self, event: Event) -> None:
        self._times.setdefault((event.kind, event.epoch), event.wall_seconds)
        if event.kind is Kind.LOG:
            self.all_back_at.append(event.wall_seconds)

    def pass_over(self, path: Path) -> None:
        """Skip what is in this file."""
        self._offsets[path] = path.stat().st_size

    def is_decided(self, epoch: int) -> bool:
        """Return whether the record is in the journal."""
        return self._record(epoch).exists()

    def decided_at(self, epoch: int) -> float:
        """Return when the record was linked to its name, by the wall clock."""
        return self._record(epoch).stat().st_ctime

    def _record(self, epoch: int) -> Path:
        return self.run.journal / f"epoch-{epoch:08d}.json"

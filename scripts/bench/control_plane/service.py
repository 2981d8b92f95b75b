"""The real coordinator of a run directory with its warm standby, and their visible effects."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import time
from pathlib import Path

from common.frame import BenchError
from common.machine import ROOT, cpu_seconds_of

from deadpool_megatron.cluster.run_directory.directory import RunDirectory, RunInfo
from deadpool_megatron.events import Event, Kind, event_files, parse_line
from deadpool_megatron.settings import Settings
from deadpool_megatron.wire.auth import create_secret
from deadpool_megatron.wire.framing import encode

_LIMIT_SECONDS = 60.0
# A standby, and the connection that its agent would have.
Process = tuple[subprocess.Popen[bytes], socket.socket]
_NOTED = re.compile(rb'"kind":"(epoch-|step")|all agents are back')


class Service:
    """The coordinator process of a run directory, with another standby that waits for its end."""

    def __init__(
        self, directory: Path, nodes: int, spares: int, nproc: int, settings: Settings
    ) -> None:
        self.run = RunDirectory(directory)
        shape = {"nodes": nodes, "spares": spares, "nproc_per_node": nproc}
        command, run_id = ("-m", "deadpool_megatron.trainer"), secrets.token_hex(4)
        about = {"run_id": run_id, "command": command, "settings": settings}
        self.run.create(RunInfo(world_size=nodes * nproc, **shape, **about))
        create_secret(directory)
        # The standby of the last spare, without its agent.
        self._command = (
            *(sys.executable, "-m", "deadpool_megatron", "standby", "--run-dir", str(directory)),
            *("--node-id", str(nodes + spares - 1)),
            *("--host", "127.0.0.1", "--port", "0"),
        )
        self._process: Process | None = None
        self._next: Process | None = None
        self._offsets: dict[Path, int] = {}
        self._times: dict[tuple[Kind, int], float] = {}
        self.all_back_at: list[float] = []
        self.newest_step = 0  # as of the last call of :meth:`at`

    def start(self) -> None:
        """Start a coordinator."""
        self._process = self._standby()
        # As from its agent, which had contact with the coordinator before it.
        self._send(self._process, in_touch=False)

    def await_next(self) -> None:
        """Start the next standby, whose agent has contact with the coordinator."""
        self._next = self._standby()

    def _standby(self) -> Process:
        own_end, child_end = socket.socketpair()
        with child_end, open(self.run.path.with_suffix(".log"), "ab") as log:
            files = {"stdin": child_end, "stdout": subprocess.DEVNULL, "stderr": log}
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            process = subprocess.Popen(
                self._command, cwd=ROOT, start_new_session=True, env=environment, **files
            )
        self._send(started := (process, own_end), in_touch=True)
        return started

    @staticmethod
    def _send(process: Process, **order: bool) -> None:
        process[1].sendall(encode(order))

    def end(self) -> float:
        """Kill the coordinator, and notify the next standby, if any. Returns the time."""
        at = time.time()
        if self._process is not None:
            self._process[0].kill()
            if self._next is not None:
                self._send(self._next, in_touch=False)
            self._process[0].wait(_LIMIT_SECONDS)
            self._process[1].close()
        self._process, self._next = self._next, None
        return at

    def close(self) -> None:
        """End all processes."""
        self.end()
        self.end()

    def check(self) -> None:
        """Raise BenchError when the process has ended by itself."""
        if self._process is not None and (status := self._process[0].poll()) is not None:
            text = self.run.path.with_suffix(".log").read_text()
            raise BenchError(f"the coordinator ended ({status}):\n{text}")

    def cpu_seconds(self) -> float:
        """Return user and system time of the process so far."""
        self.check()
        assert self._process is not None
        return cpu_seconds_of(self._process[0].pid)

    def memory_peak_bytes(self) -> int:
        """Return the peak of the resident memory."""
        assert self._process is not None
        text = Path(f"/proc/{self._process[0].pid}/status").read_text()
        return int(text.partition("VmHWM:")[2].split()[0]) * 1024

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
                if _NOTED.search(line):
                    self._note(parse_line(line))
        return self._times.get((kind, epoch))

    def _note(self, event: Event) -> None:
        self._times.setdefault((event.kind, event.epoch), event.wall_seconds)
        self.newest_step = max(self.newest_step, event.iteration or 0)
        if event.kind is Kind.LOG:
            self.all_back_at.append(event.wall_seconds)

    def is_decided(self, epoch: int) -> bool:
        """Return whether the record is in the journal."""
        return self._record(epoch).exists()

    def decided_at(self, epoch: int) -> float:
        """Return when the record was linked to its name, by the wall clock."""
        return self._record(epoch).stat().st_ctime

    def _record(self, epoch: int) -> Path:
        return self.run.journal / f"epoch-{epoch:08d}.json"

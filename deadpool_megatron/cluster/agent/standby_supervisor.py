"""The supervisor of a node's standby coordinator: its process, its reports and its orders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.process.children import (
    ChildWatch,
    ProcessEnd,
    socket_pair,
    start_child,
)

_RESTART_SECONDS = 1.0
_END_SECONDS = 5.0
_MAX_PAUSE_SECONDS = 30.0
_LINE_BYTES = 1 << 16
Address = tuple[str, int]


class StandbySupervisor:
    """Supervision that keeps one standby alive. A standby that has claimed a term continues as the
    coordinator, and ends with this process at the latest. Used from the agent's loop only.

    ``command`` starts a standby, without ``--report-fd``. ``on_look(term, beat, at)`` reports a
    read of the journal that began at monotonic time ``at``; ``on_over(kept)`` reports that the run
    is over, and whether its slots in memory stay.
    """

    def __init__(
        self,
        command: tuple[str, ...],
        log: Path,
        on_look: Callable[[int, str, float], None],
        on_over: Callable[[bool], None],
    ) -> None:
        self._command = command
        # Opened once: the run directory may be out of reach when the next standby starts.
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._on_look = on_look
        self._on_over = on_over
        self._watcher: ChildWatch | None = None
        self._coordinators: list[ChildWatch] = []
        self._line: socket.socket | None = None  # carries orders out and reports in
        self._unread = b""
        self.address: Address | None = None  # the newest coordinator's
        self._contact = False
        self._order: Callable[[int | None], int] | None = None
        self._coordinator: int | None = None
        self._place: int | None = None
        self._was_in_touch = False
        self._closing = False
        self.trouble = ""  # why the newest read of the journal failed
        self._pause = _RESTART_SECONDS

    def begin(self, launcher_fd: int | None, on_launcher_gone: Callable[[], None]) -> None:
        """Start a standby, under a launcher as soon as its pipe has a byte; at the end of the pipe
        call ``on_launcher_gone()``."""
        if launcher_fd is None:
            self.start()
            return
        loop = asyncio.get_running_loop()

        def on_launcher() -> None:
            if os.read(launcher_fd, 1):
                self.start()
            else:
                loop.remove_reader(launcher_fd)
                on_launcher_gone()

        loop.add_reader(launcher_fd, on_launcher)

    def start(self) -> None:
        """Start a standby, now or as soon as that is possible."""
        if self._closing:
            return
        loop = asyncio.get_running_loop()
        try:
            with socket_pair(socket.SOCK_STREAM) as (own_end, child_end):
                command, stdin = [*self._command, "--report-fd", "0"], child_end.fileno()
                self._watcher = start_child(
                    command, self._ended, log=self._log, stdin=stdin, dies_with_us=True
                )
        except OSError as error:
            print(f"no standby yet: {error}", file=sys.stderr, flush=True)
            loop.call_later(self._pause, self.start)
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
            return
        self._pause = _RESTART_SECONDS
        self._line, self._unread = own_end, b""
        own_end.setblocking(False)
        loop.add_reader(own_end.fileno(), self._readable)
        if self._place is not None:
            self._send(f"place {self._place}")
        if self._was_in_touch:  # a standby that has just been started may have to take over too
            self._send("found")
            if not self._contact:
                self._send("lost")

    def place(self, order: Callable[[int | None], int]) -> None:
        """Set the order of succession: by the newest record, ``order(coordinator)`` standbys may
        claim before this standby if the coordinator on that node is lost."""
        self._order = order
        self._send_place()

    def _send_place(self) -> None:
        place = None if self._order is None else self._order(self._coordinator)
        if place is not None and place != self._place:
            self._place = place
            self._send(f"place {place}")

    def contact(self, there_is: bool) -> None:
        """Inform the standby whether the coordinator answers this agent: while it does not, the
        standby reads the journal more often."""
        if there_is != self._contact:
            self._contact = there_is
            self._was_in_touch = self._was_in_touch or there_is
            self._send("found" if there_is else "lost")

    async def close(self, grace_seconds: float) -> None:
        """End the standby; a coordinator gets time to finish with the other agents."""
        self._closing = True
        if self._watcher is not None:
            await self._watcher.end(_END_SECONDS)
        for coordinator in self._coordinators:
            try:
                await asyncio.wait_for(coordinator.ended.wait(), grace_seconds)
            except TimeoutError:
                await coordinator.end(_END_SECONDS)
        os.close(self._log)

    def _readable(self) -> None:
        assert self._line is not None
        try:
            piece = self._line.recv(_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:  # the standby has ended with orders unread
            piece = b""
        if not piece:
            self._disconnect()
            return
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, line: Mapping[str, Any]) -> None:
        self.trouble = str(line.get("trouble", ""))
        if self.trouble:
            return
        if "over" in line:
            self._on_over(bool(line["kept"]))
        elif "claimed" in line:
            assert self._watcher is not None
            self._coordinators.append(self._watcher)
            self._watcher = None
            self._disconnect()
            # The next standby takes time to start, and the fence does not wait for it.
            self._look(line, int(line["claimed"]), "claimed")
            self.start()
        else:
            self._look(line, int(line["term"]), str(line["beat"]))

    def _look(self, line: Mapping[str, Any], term: int, beat: str) -> None:
        self._coordinator, address = line["node"], line["address"]
        self._send_place()
        if address is not None:
            self.address = (str(address[0]), int(address[1]))
        self._on_look(term, beat, float(line["at"]))

    def _disconnect(self) -> None:
        assert self._line is not None
        asyncio.get_running_loop().remove_reader(self._line.fileno())
        self._line.close()
        self._line = None

    def _ended(self, ending: ProcessEnd) -> None:
        if self._watcher is not None and self._watcher.ending is not None:
            self._watcher = None
            if self._line is not None:
                self._readable()  # its last reports
            if self._line is not None:
                self._disconnect()
            if not self._closing:
                asyncio.get_running_loop().call_later(_RESTART_SECONDS, self.start)

    def _send(self, line: str) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has ended; the next standby gets this at start
                self._line.send(f"{line}\n".encode())

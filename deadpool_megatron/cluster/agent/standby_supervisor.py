"""The supervisor of a node's standby coordinator: its process, its reports and its orders."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.agent.members import FramePipe
from deadpool_megatron.cluster.process.children import (
    ChildWatch,
    ProcessEnd,
    socket_pair,
    start_child,
)

_RESTART_SECONDS = 1.0
_END_SECONDS = 5.0
_MAX_PAUSE_SECONDS = 30.0
Address = tuple[str, int]


class StandbySupervisor:
    """Supervision that keeps one standby alive. A standby that has claimed a term continues as the
    coordinator, and the next standby is started. All of them end with this process at the latest.
    Used from the agent's loop only.

    ``command`` starts a standby. ``on_look(term, beat, at)`` reports a read of the journal that
    began at monotonic time ``at``; ``on_over(keeps_slots)`` reports that the run is over, and
    whether its slots stay in memory.
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
        self._pipe: FramePipe | None = None  # carries orders out and reports in
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
        """Start a standby; under a launcher only when a byte comes from the launcher's pipe. At the
        end of the pipe call ``on_launcher_gone()``."""
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
                self._watcher = start_child(
                    self._command,
                    self._ended,
                    log=self._log,
                    stdin=child_end.fileno(),
                    dies_with_us=True,
                )
        except OSError as error:
            print(f"no standby yet: {error}", file=sys.stderr, flush=True)
            loop.call_later(self._pause, self.start)
            self._pause = min(2 * self._pause, _MAX_PAUSE_SECONDS)
            return
        self._pause = _RESTART_SECONDS
        self._pipe = FramePipe(own_end, self._take, lambda reason: None)
        if self._place is not None:
            self._send({"place": self._place})
        if self._was_in_touch:  # repeat this news, as the new standby may have to take over
            self._send({"in_touch": True})
            if not self._contact:
                self._send({"in_touch": False})

    def place(self, order: Callable[[int | None], int]) -> None:
        """Set the order of succession of the newest record. ``order(coordinator)`` returns how many
        standbys may claim before this standby if the coordinator on that node is lost."""
        self._order = order
        self._send_place()

    def _send_place(self) -> None:
        place = None if self._order is None else self._order(self._coordinator)
        if place is not None and place != self._place:
            self._place = place
            self._send({"place": place})

    def contact(self, in_touch: bool) -> None:
        """Inform the standby whether the coordinator answers this agent. While it does not, the
        standby reads the journal more often."""
        if in_touch != self._contact:
            self._contact = in_touch
            self._was_in_touch = self._was_in_touch or in_touch
            self._send({"in_touch": in_touch})

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

    def _take(self, report: Mapping[str, Any]) -> None:
        self.trouble = str(report.get("trouble", ""))
        if self.trouble:
            return
        if "over" in report:
            self._on_over(bool(report["kept"]))
        elif "claimed" in report:
            assert self._watcher is not None
            assert self._pipe is not None
            self._coordinators.append(self._watcher)
            self._watcher = None
            self._pipe.close()
            # The fence needs this look now, and the next standby takes time to start.
            self._look(report, int(report["claimed"]), "claimed")
            self.start()
        else:
            self._look(report, int(report["term"]), str(report["beat"]))

    def _look(self, report: Mapping[str, Any], term: int, beat: str) -> None:
        self._coordinator, address = report["node"], report["address"]
        self._send_place()
        if address is not None:
            self.address = (str(address[0]), int(address[1]))
        self._on_look(term, beat, float(report["at"]))

    def _ended(self, ending: ProcessEnd) -> None:
        watcher, pipe = self._watcher, self._pipe
        if watcher is None or watcher.ending is None or pipe is None:
            return
        pipe.read_rest()  # the last reports of the standby
        pipe.close()
        if self._watcher is watcher:
            self._watcher = None
            if not self._closing:
                asyncio.get_running_loop().call_later(_RESTART_SECONDS, self.start)

    def _send(self, order: Mapping[str, Any]) -> None:
        if self._pipe is not None:
            self._pipe.send(order)  # dropped at the end; the next standby gets this at its start

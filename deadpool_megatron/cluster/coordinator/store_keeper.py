"""The coordinator's side of the store process: start it, notice its end, replace it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.process.liveness import ChildWatch, Ending

# A store forgets nothing by itself: keys of 50 epochs are enough before a fresh one takes over.
EPOCHS_PER_STORE = 50
_START_SECONDS = 120.0
_PAUSE_SECONDS = 0.5


class StoreKeeper:
    """Keeps one store process alive; ``on_ready(port)`` is called for each one that serves.

    ``spawn`` runs a task whose failure is the coordinator's.
    """

    def __init__(
        self,
        host: str,
        log: Path,
        on_ready: Callable[[int], None],
        on_end: Callable[[Ending], None],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._host = host
        self._log = log
        self._on_ready = on_ready
        self._on_end = on_end
        self._spawn = spawn
        self._epochs = 0
        self._current: ChildWatch | None = None
        self._pipes: dict[int, int] = {}
        self._closing = False

    def start(self) -> None:
        """Start a store process in the background; the old one serves until the new one is up."""
        self._spawn(self._start())

    def count_epoch(self) -> None:
        """An epoch was opened in the current store."""
        self._epochs += 1
        if self._epochs >= EPOCHS_PER_STORE:
            self._epochs = 0
            self.start()

    def close(self) -> None:
        """End the store process."""
        self._closing = True
        if self._current is not None:
            self._current.kill()
        for handle in self._pipes.values():
            os.close(handle)
        self._pipes.clear()

    async def _start(self) -> None:
        while not self._closing:
            port, watch = await self._try_start()
            if port:
                old, self._current = self._current, watch
                if old is not None:
                    self._retire(old)
                self._on_ready(port)
                return
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _try_start(self) -> tuple[int, ChildWatch]:
        """The port, or 0 when the process ended or was silent for too long."""
        keep_open, life = os.pipe()
        announce, told = os.pipe()
        os.set_blocking(announce, False)
        command = [sys.executable, "-W", "ignore", "-m"]
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                [*command, "deadpool_megatron.cluster.coordinator.store_server", self._host],
                stdin=keep_open,
                stdout=told,
                stderr=log,
                process_group=0,
            )
        os.close(keep_open)
        os.close(told)
        self._pipes[process.pid] = life
        watch = ChildWatch(process.pid, lambda ending: self._ended(process.pid, ending))
        # Reaped by its pid: this object must not try to as well.
        process.returncode = 0
        try:
            line = await asyncio.wait_for(_read_line(announce), _START_SECONDS)
        except TimeoutError:
            line = ""
        finally:
            os.close(announce)
        if not line.startswith("PORT "):
            watch.kill()
            return 0, watch
        return int(line.split()[1]), watch

    def _ended(self, pid: int, ending: Ending) -> None:
        handle = self._pipes.pop(pid, None)
        if handle is not None:
            os.close(handle)
        if self._current is not None and self._current.pid == pid and not self._closing:
            self._current = None
            self._on_end(ending)
            self.start()

    def _retire(self, watch: ChildWatch) -> None:
        """Members that are still connecting in the old one finish first: it ends a minute later."""
        asyncio.get_running_loop().call_later(60.0, watch.kill)


async def _read_line(handle: int) -> str:
    """One line from a non-blocking pipe; empty at end of file."""
    loop = asyncio.get_running_loop()
    text = b""
    readable = asyncio.Event()
    loop.add_reader(handle, readable.set)
    try:
        while not text.endswith(b"\n"):
            readable.clear()
            await readable.wait()
            try:
                piece = os.read(handle, 256)
            except BlockingIOError:
                continue  # readiness is only a hint
            if not piece:
                return ""
            text += piece
    finally:
        loop.remove_reader(handle)
    return text.decode()

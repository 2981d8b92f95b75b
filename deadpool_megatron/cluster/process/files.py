"""File operations on the run directory, which may hang for as long as a network file system does.

An agent that hung with them could neither beat nor fence its node, and with a second thread it
could not fork members. So a process beside it does them, one after the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deadpool_megatron.cluster.process import file_worker
from deadpool_megatron.cluster.process.liveness import ChildWatch, Ending

_PIECE_BYTES = 1 << 16


class FileWorker:
    """Has a process do it, which also copies what is printed to ``logs`` to ``target``. One request
    is under way at a time; what is to be read goes first. What fails is said on standard error.
    For one loop.
    """

    def __init__(self, logs: Path, target: Path) -> None:
        self._directories = (str(logs), str(target))
        self._readings: deque[tuple[dict[str, Any], asyncio.Future[str]]] = deque()
        self._writings: dict[Path, str | None] = {}
        self._current: asyncio.Future[str] | None = None
        self._watch: ChildWatch | None = None
        self._requests = self._answers = -1
        self._unread = b""
        self._idle = asyncio.Event()
        self._idle.set()

    async def read(self, path: Path, start: int, nbytes: int, limit_seconds: float) -> str:
        """Returns what a file holds from ``start`` on (negative: so far from its end), at most
        ``nbytes``; empty without a file. Raises TimeoutError.
        """
        request = {"do": "read", "path": str(path), "start": start, "nbytes": nbytes}
        return await self._reading(request, limit_seconds)

    async def _reading(self, request: dict[str, Any], limit_seconds: float) -> str:
        text = asyncio.get_running_loop().create_future()
        self._readings.append((request, text))
        self._next()
        return await asyncio.wait_for(text, limit_seconds)

    async def copy_logs(self, limit_seconds: float) -> None:
        """Wait until what was printed so far is in ``target``, or until the limit is over."""
        with contextlib.suppress(TimeoutError):
            await self._reading({"do": "copy"}, limit_seconds)

    def log_is_over(self, log: Path) -> None:
        """Nobody prints to it any more: have its memory given back once it is in ``target``."""
        request = {"do": "over", "path": str(log)}
        self._readings.append((request, asyncio.get_running_loop().create_future()))
        self._next()

    def replace(self, path: Path, text: str | None) -> None:
        """Have a file hold this text, or (None) be gone, as soon as that is possible. Of several
        texts for one path the newest counts.
        """
        self._writings[path] = text
        self._next()

    async def close(self, limit_seconds: float) -> None:
        """Wait until everything is done, or until the limit is over, and end the process, which may
        hang in what it is doing.
        """
        try:
            await asyncio.wait_for(self._idle.wait(), limit_seconds)
        except TimeoutError:
            names = ", ".join(str(path) for path in self._writings) or "what is under way"
            print(f"not written within {limit_seconds:g} s: {names}", file=sys.stderr)
        self._readings.clear()
        self._writings.clear()
        if self._watch is not None:
            await self._watch.end(limit_seconds)

    def _next(self) -> None:
        """Begin with the next request, unless one is under way."""
        while self._current is None and (self._readings or self._writings):
            if self._readings:
                request, done = self._readings.popleft()
                if done.done():
                    continue  # nobody waits for it any more
            else:
                path = next(iter(self._writings))
                text = self._writings.pop(path)
                request = {"do": "replace", "path": str(path), "text": text}
                done = asyncio.get_running_loop().create_future()
            self._current = done
            self._idle.clear()
            try:
                self._ask(request)
            except OSError as error:
                self._answered("", str(error))
        if self._current is None:
            self._idle.set()

    def _ask(self, request: Mapping[str, Any]) -> None:
        if self._watch is None:
            self._start()
        # It reads, as nothing is under way: this does not block.
        os.write(self._requests, json.dumps(request).encode() + b"\n")

    def _start(self) -> None:
        pipes: list[int] = []
        try:
            pipes += os.pipe()
            pipes += os.pipe()
            # At the end of this process it copies what has been printed, and goes.
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", file_worker.__file__, *self._directories],
                stdin=pipes[0],
                stdout=pipes[3],
                process_group=0,
            )
            process.returncode = 0  # reaped by its pid: this object must not try to as well
            self._watch = ChildWatch(process.pid, self._ended)
        except OSError:
            for handle in pipes:
                os.close(handle)
            raise
        os.close(pipes[0])
        os.close(pipes[3])
        self._requests, self._answers, self._unread = pipes[1], pipes[2], b""
        os.set_blocking(self._answers, False)
        asyncio.get_running_loop().add_reader(self._answers, self._readable)

    def _readable(self) -> None:
        try:
            piece = os.read(self._answers, _PIECE_BYTES)
        except BlockingIOError:
            return
        if not piece:
            asyncio.get_running_loop().remove_reader(self._answers)
            return  # the process has ended, of which its watch tells
        *lines, self._unread = (self._unread + piece).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            self._answered(str(answer["text"]), str(answer["error"]))
            self._next()

    def _answered(self, text: str, error: str) -> None:
        done, self._current = self._current, None
        if error:
            print(f"not done: {error}", file=sys.stderr)
        if done is not None and not done.done():
            done.set_result(text)

    def _ended(self, ending: Ending) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._answers)
        os.close(self._requests)
        os.close(self._answers)
        self._watch = None
        if self._current is not None:
            self._answered("", f"the process that does file operations {ending}")
        self._next()

"""NCCL's own word on a job that hangs: evidence for people; nothing is decided from it.

From 2.24 on each process that uses NCCL has a thread (RAS) that knows what the processes of the job
are in, and tells it on a socket of its host. Read in ``src/ras/client_support.cc`` of 2.24.3,
2.26.2 and 2.28.9: a line ``timeout SECONDS``, for how long it waits for other processes, is
answered ``OK``; ``verbose status`` is answered with a text and the end of the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from deadpool_megatron.cluster.process.local_logs import LocalLogs
from deadpool_megatron.events import Event, Kind

MOST_BYTES = 16 << 10
LIMIT_SECONDS = 2.0
_COMMANDS = b"timeout 1\nverbose status\n"
_ACCEPTED = b"OK\n"
_VARIABLE, _DEFAULT = "NCCL_RAS_ADDR", "localhost:28028"
_LOCALHOST = ("127.0.0.1", "::1")


class NcclReport:
    """Used from the agent's loop. ``report`` takes a message for the coordinator, ``ask`` answers
    what NCCL says, or nothing.
    """

    def __init__(
        self,
        node: int,
        communicator: str,
        logs: LocalLogs,
        report: Callable[[Mapping[str, Any]], None],
        ask: Callable[[], Awaitable[bytes]] | None = None,
    ) -> None:
        self._node = node
        self._logs = logs
        self._report = report
        self._ask = ask or ask_nccl
        self._is_used = communicator == "nccl"

    async def take(self, epoch: int) -> None:
        """Ask, keep the answer among the logs, and tell where it is. Without an answer nothing is
        told: NCCL may be older, or its RAS turned off."""
        try:
            said = _readable(await self._ask()) if self._is_used else ""
        except Exception as error:  # evidence for people: it must not cost a node
            print(f"NCCL could not be asked: {error!r}", file=sys.stderr)
            return
        if not said:
            return
        log = self._logs.log(f"node{self._node}-nccl-{epoch}")
        try:
            log.write_text(said)
        except OSError as error:
            print(f"what NCCL says cannot be kept: {error}", file=sys.stderr)
            return
        event = Event(Kind.NCCL_REPORT, epoch, self._node, data={"log": log.name})
        self._report({"t": "event", "event": event.to_dict()})


async def ask_nccl(limit_seconds: float = LIMIT_SECONDS) -> bytes:
    """Returns what a process of this host says within the limit, at most so much."""
    said = bytearray()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_seconds):
            for address in addresses(os.environ.get(_VARIABLE) or _DEFAULT):
                with contextlib.suppress(OSError):
                    await _hear(address, said)
                if said:
                    break
    return bytes(said.removeprefix(_ACCEPTED))


def addresses(text: str) -> list[tuple[str, int]]:
    """Return where NCCL listens, as its variable says it: a number or localhost, and a port; none
    for another name, as to resolve it may take long, and this process has one thread. Pure.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    try:
        hosts = _LOCALHOST if host == "localhost" else (str(ipaddress.ip_address(host)),)
        number = int(port)
    except ValueError:
        return []
    return [(one, number) for one in hosts] if 0 < number < 1 << 16 else []


async def _hear(address: tuple[str, int], said: bytearray) -> None:
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, address)
        await loop.sock_sendall(connection, _COMMANDS)
        while room := MOST_BYTES - len(said):
            piece = await loop.sock_recv(connection, room)
            if not piece:
                return
            said += piece


def _readable(said: bytes) -> str:
    """Whoever listens there need not be NCCL: nothing of it may play with a terminal."""
    text = said.decode(errors="replace")
    return "".join(one if one.isprintable() or one in "\n\t" else "?" for one in text)
